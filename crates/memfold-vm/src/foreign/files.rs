//! Finds and copies the files that a QEMU's command line names, such as kernel, firmware and ROMs.
//! The snapshot of a VM that memfold did not start contains copies of these files.
//!
//! memfold reads the files with the rights of QEMU's user, so a manipulated command line cannot
//! expose files that this user cannot read.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;

use super::options;
use super::value::Value;
use super::view::{self, View};
use crate::qemu_line;

/// Prefix of the tokens that stand for files in a command line; a file's number follows.
const TOKEN: &str = "/memfold/file";

/// Device files that any user may read, and that are therefore not copied.
const DEVICES: [&str; 3] = ["/dev/urandom", "/dev/random", "/dev/hwrng"];

/// Largest file that is copied, in bytes.
const MOST_BYTES: u64 = 1 << 30;

/// Largest `-readconfig` file that is read, in bytes.
const MOST_OPTIONS: u64 = 1 << 20;

/// Options whose whole value is the path of a file.
const WHOLE: [&str; 5] = ["bios", "dtb", "initrd", "kernel", "shim"];

/// Keys of other options whose value is the path of a file. A value's first word has the option's
/// name as its key.
const KEYS: [(&str, &str); 11] = [
    ("acpitable", "data"),
    ("acpitable", "file"),
    ("boot", "splash"),
    ("device", "romfile"),
    ("fw_cfg", "file"),
    ("machine", "dtb"),
    ("machine", "firmware"),
    ("machine", "initrd"),
    ("machine", "kernel"),
    ("smbios", "file"),
    ("smbios", "path"),
];

/// Makes the file paths in an option's value absolute, relative to QEMU's working directory. Files
/// that do not exist there are QEMU's own data files and remain as they are.
pub(super) fn name_whole(option: &str, value: &str, view: &View) -> String {
    let whole = |word: &str| {
        let path = view.whole(word);
        let is_there = !word.is_empty() && !word.starts_with('/') && view.is_file(&path);
        is_there.then(|| path.to_string_lossy().into_owned())
    };
    if WHOLE.contains(&option) {
        return whole(value).unwrap_or_else(|| value.to_owned());
    }
    let is_first = option == "option-rom";
    let is_file =
        |key: &str| KEYS.contains(&(option, key)) || is_first && ["", "romfile"].contains(&key);
    let change = |key: &str, word: &str| {
        Ok::<_, Infallible>(Some(word).filter(|_| is_file(key)).and_then(whole))
    };
    let mut parsed = Value::parse("", value);
    let changed = parsed.as_mut().map(|parsed| parsed.change_strings(change));
    let parsed = parsed.filter(|_| changed == Some(Ok(true)));
    parsed.map_or_else(|| value.to_owned(), |parsed| parsed.render())
}

/// Replaces all file paths by tokens. Returns the paths, in the order of the tokens' numbers.
pub(super) fn take_out(words: &mut [String], view: &View) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    let mut at = 0;
    while at + 1 < words.len() {
        let option = words[at].trim_start_matches('-').to_owned();
        if options::known(&option).is_some_and(|(has_value, _)| !has_value) {
            at += 1;
            continue;
        }
        let value = &mut words[at + 1];
        at += 2;
        if WHOLE.contains(&option.as_str()) {
            if value.starts_with('/') {
                *value = token(value, view, &mut found)?;
            } else if value.contains('/') || option != "bios" {
                return Err(format!("'-{option} {value}' names no file"));
            }
            continue;
        }
        if option == "append" {
            continue;
        }
        let Some(mut parsed) = Value::parse("", value) else {
            continue;
        };
        let is_changed = parsed.change_strings(|key, word| {
            if Path::new(word)
                .components()
                .any(|part| part.as_os_str() == "..")
            {
                return Err(format!(
                    "'-{option} {key}={word}' names a file by a path with '..'"
                ));
            }
            let is_file = word.starts_with('/') && !DEVICES.contains(&word);
            is_file.then(|| token(word, view, &mut found)).transpose()
        })?;
        if is_changed {
            *value = parsed.render();
        }
    }
    Ok(found)
}

fn token(path: &str, view: &View, found: &mut Vec<PathBuf>) -> Result<String, String> {
    let facts = view.metadata(Path::new(path));
    let facts = facts.map_err(|error| format!("it names {path}: {error}"))?;
    if !facts.is_file() || facts.len() > MOST_BYTES {
        return Err(format!(
            "the option names {path}, which is not a regular file of at most 1 GiB"
        ));
    }
    let known = found.iter().position(|file| file == Path::new(path));
    let number = known.unwrap_or_else(|| {
        found.push(path.into());
        found.len() - 1
    });
    Ok(qemu_line::token(TOKEN, number))
}

/// Returns the words with file paths in place of tokens.
pub(super) fn put_in(words: &[String], files: &[PathBuf]) -> Vec<String> {
    let words = words
        .iter()
        .map(|word| qemu_line::put_in(TOKEN, word, files));
    words
        .map(|word| word.to_string_lossy().into_owned())
        .collect()
}

/// Copies the file `from`, which a QEMU's command line names, to `to`, with the rights of QEMU's
/// user (`None`: root). `view`: the file system as that QEMU sees it. The copy ends after 1 GiB.
pub fn copy_file(from: &Path, view: &View, to: &File, user: Option<&str>) -> io::Result<()> {
    let ids = user.map(view::user_ids).transpose()?;
    let file = view.open_as(from, ids).map_err(|error| {
        let name = user.unwrap_or("root");
        let why = format!("as user {name}: {}: {error}", from.display());
        io::Error::new(error.kind(), why)
    })?;
    if !file.metadata()?.is_file() {
        let why = format!("{} is not a regular file", from.display());
        return Err(io::Error::other(why));
    }
    // A separate process can be killed at a deadline, even if the file system hangs.
    let mut command = Command::new("head");
    command.args(["-c", &MOST_BYTES.to_string()]);
    let child = command
        .process_group(0)
        .stderr(Stdio::piped())
        .current_dir("/")
        .stdin(file)
        .stdout(to.try_clone()?)
        .spawn()?;
    let done = helper::output_of(child, Duration::from_secs(60))?;
    if done.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&done.stderr);
    let why = format!("{}: {} ({})", from.display(), words.trim(), done.status);
    Err(io::Error::other(why))
}

/// Reads a text file that the command line of a QEMU names, with the rights of that QEMU's user.
pub(super) fn read_as(path: &Path, view: &View, user: Option<&str>) -> io::Result<String> {
    let mut copy = tempfile::tempfile()?;
    copy_file(path, view, &copy, user)?;
    copy.rewind()?;
    let mut text = String::new();
    copy.take(MOST_OPTIONS).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn file_names_in_a_saved_qemu_command_line_become_placeholders_and_are_put_back() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = place.path().join(name);
            fs::write(&path, name).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let (kernel, rom) = (file("k,1"), file("r,2"));
        let before = words(&format!(
            "-nodefaults -kernel {kernel} -device e1000,romfile={} -device {{\"driver\":\"x\",\"f\":\"{rom}\"}} -object rng-random,filename=/dev/urandom -append root=/dev/vda -bios bios.bin",
            rom.replace(',', ",,")
        ));
        let mut after = before.clone();
        let found = take_out(&mut after, &View::default()).unwrap();
        assert_eq!(found, [PathBuf::from(&kernel), PathBuf::from(&rom)]);
        assert_eq!(after[2], "/memfold/file000");
        assert!(after[4].ends_with("romfile=/memfold/file001"), "{after:?}");
        assert_eq!(put_in(&after, &found), before);
        for bad in [
            "-kernel etc/shadow",
            "-bios ../shadow",
            "-device x,romfile=../../etc/shadow",
            "-device x,path=/dev/null",
            "-fw_cfg name=opt/x,file=/nowhere/at/all",
        ] {
            assert!(
                take_out(&mut words(bad), &View::default()).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_save_does_not_copy_a_file_that_the_user_of_qemu_may_not_read() {
        use std::os::unix::fs::PermissionsExt;
        if !rustix::process::getuid().is_root() {
            memfold_testkit::skip!("only root can become another user");
        }
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        fs::write(&from, "text").unwrap();
        let user = Some("nobody");
        let copied = || copy_file(&from, &View::default(), &File::create(&to).unwrap(), user);
        copied().unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"text");
        fs::set_permissions(&from, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(copied().unwrap_err().to_string().contains("nobody"));
    }
}
