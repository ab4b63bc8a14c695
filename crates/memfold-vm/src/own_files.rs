//! Gives each VM its own copies of files, other than disks, that QEMU writes: firmware variables,
//! logs and others that QEMU's additional arguments name. A VM that starts from a snapshot has the
//! copies in the state directory.
//!
//! In the arguments of a VM description, tokens stand for the paths of these files. So the
//! description does not depend on where the VM's directory is.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::directory::VmDirectory;
use super::foreign::value::Value;
use super::qemu_line::{self, put_in};
use super::qemu_user::{self, QemuUser};
use super::spec::VmSpec;

/// Prefix of the tokens that stand for files; a file's number follows.
const TOKEN: &str = "/memfold/own";

/// Returns the token that stands for the path of file `number` in a QEMU argument.
#[must_use]
pub fn token(number: usize) -> String {
    qemu_line::token(TOKEN, number)
}

/// Replaces a path in a QEMU argument by `name`, if `is_it` returns true for the path; `None` if
/// the argument contains no such path.
pub fn rename(argument: &str, is_it: &dyn Fn(&Path) -> bool, name: &str) -> Option<String> {
    if argument.starts_with('/') && is_it(Path::new(argument)) {
        return Some(name.to_owned());
    }
    if argument.starts_with('{') {
        let mut value = Value::parse("", argument)?;
        let is_it = |word: &str| word.starts_with('/') && is_it(Path::new(word));
        let rename = |_: &str, word: &str| Ok::<_, ()>(is_it(word).then(|| name.to_owned()));
        return (value.change_strings(rename) == Ok(true)).then(|| value.render());
    }
    let mut found = false;
    // QEMU's options write a comma in a value twice.
    let whole = argument.replace(",,", "\0");
    let parts = whole.split(',').map(|part| {
        let part = part.replace('\0', ",");
        // A path may follow `=` or `:`, as in "file=PATH", "file:PATH", "path=file:PATH".
        let starts = part.match_indices('/').map(|(at, _)| at);
        let at = starts.filter(|&at| at > 0 && matches!(part.as_bytes()[at - 1], b'=' | b':'));
        let at = at.into_iter().find(|&at| is_it(Path::new(&part[at..])));
        found |= at.is_some();
        let part = at.map_or(part.clone(), |at| format!("{}{name}", &part[..at]));
        part.replace(',', ",,")
    });
    let renamed = parts.collect::<Vec<_>>().join(",");
    found.then_some(renamed)
}

/// Copies the files for a VM that is about to start.
pub(super) fn make(
    directory: &VmDirectory,
    spec: &VmSpec,
    user: Option<QemuUser>,
) -> io::Result<()> {
    for (number, from) in spec.files.iter().enumerate() {
        let own = directory.own_file(number);
        if let Some(place) = own.parent() {
            fs::create_dir_all(place)?;
            fs::set_permissions(place, Permissions::from_mode(0o711))?;
        }
        fs::copy(from, &own)?;
        fs::set_permissions(&own, Permissions::from_mode(0o600))?;
        qemu_user::give(&own, user)?;
    }
    Ok(())
}

impl VmSpec {
    /// Returns the VM's additional QEMU arguments. Paths of files in `directory` replace the
    /// tokens.
    #[must_use]
    pub fn more_arguments(&self, directory: &VmDirectory) -> Vec<OsString> {
        let own = (0..self.files.len()).map(|number| directory.own_file(number));
        let own: Vec<PathBuf> = own.collect();
        let arguments = self.qemu_args.iter();
        arguments
            .map(|argument| put_in(TOKEN, argument, &own))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_file_is_found_in_every_form_of_qemu_argument() {
        let is_it = |path: &Path| path == Path::new("/v,1");
        for (argument, renamed) in [
            ("/v,1", "T"),
            (
                "if=pflash,unit=1,file=/v,,1,format=raw",
                "if=pflash,unit=1,file=T,format=raw",
            ),
            ("file:/v,,1", "file:T"),
            ("file,id=a:b,path=/v,,1", "file,id=a:b,path=T"),
            ("if=pflash,file=file:/v,,1", "if=pflash,file=file:T"),
            (
                "driver=qcow2,x=,,,file.filename=/v,,1",
                "driver=qcow2,x=,,,file.filename=T",
            ),
        ] {
            assert_eq!(
                rename(argument, &is_it, "T").as_deref(),
                Some(renamed),
                "{argument}"
            );
        }
        let json = r#"{"driver":"raw","file":{"filename":"/v,1"},"list":["/v,1"]}"#;
        let renamed = rename(json, &is_it, "T").unwrap();
        assert_eq!(renamed, json.replace("/v,1", "T"));
        for other in [
            "-drive",
            "file=/v",
            "file=/v,1",
            "name=a/v,,1",
            "{",
            "{\"a\":\"/v,,1\"}",
        ] {
            assert_eq!(rename(other, &is_it, "T"), None, "{other}");
        }
    }

    #[test]
    fn placeholders_in_qemu_arguments_are_replaced_by_file_names() {
        let files = [PathBuf::from("/a,b"), PathBuf::from("/c")];
        for (argument, wanted) in [
            (token(0), "/a,b"),
            (
                format!("file={},x={}", token(0), token(1)),
                "file=/a,,b,x=/c",
            ),
            (
                format!("{{\"file\":\"{}\"}}", token(0)),
                "{\"file\":\"/a,b\"}",
            ),
            ("-serial".to_owned(), "-serial"),
        ] {
            assert_eq!(put_in(TOKEN, &argument, &files), wanted);
        }
    }
}
