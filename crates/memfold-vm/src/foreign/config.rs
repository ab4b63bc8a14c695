//! Expands `-readconfig` files on the command line of a QEMU that memfold did not start. Such a
//! file is replaced by the options that it stands for, as in this example:
//!
//! ```text
//!   [device "ehci"]               -device id=ehci,driver=ich9-usb-ehci1,addr=1d.7
//!     driver = "ich9-usb-ehci1"
//!     addr = "1d.7"
//! ```
//! Source: `qemu_config_parse` in QEMU's `util/qemu-config.c`. Proxmox VE keeps the devices of its
//! q35 machines in such a file.

use std::fmt::Display;
use std::io;
use std::path::Path;

use super::options::{self, Named};
use super::value::Value;
use crate::qemu_line::escape_text;

/// Key of a value's first word, if the word has no key.
const IMPLIED: &str = "";

/// Groups of `-readconfig` files whose command-line option has another name (`qemu_find_opts`,
/// `qemu_parse_config_group`).
const OTHER_NAMES: [(&str, &str); 4] = [
    ("memory", "m"),
    ("smp-opts", "smp"),
    ("boot-opts", "boot"),
    ("acpi", "acpitable"),
];

/// Replaces `-readconfig` and `-set` by the options that they stand for. `read` returns the
/// contents of a file, read with the rights of QEMU's user.
pub(super) fn expand(
    options: Vec<Named>,
    read: impl Fn(&Path) -> io::Result<String>,
) -> Result<Vec<Named>, String> {
    let mut expanded: Vec<Named> = Vec::new();
    for (name, value) in options {
        match (name.as_str(), value) {
            ("readconfig", Some(path)) => {
                let wrong = |why: &dyn Display| format!("'-readconfig {path}': {why}");
                let text = read(Path::new(&path)).map_err(|error| wrong(&error))?;
                let found = groups(&text)
                    .map_err(|line| wrong(&format_args!("cannot parse line '{line}'")))?;
                for (group, value) in found {
                    let other = OTHER_NAMES.iter().find(|(name, _)| *name == group);
                    let name = other.map_or(group.as_str(), |(_, name)| name);
                    if !options::known(name).is_some_and(|(has_value, _)| has_value) {
                        let why = format!("memfold does not know the group [{group}]");
                        return Err(wrong(&why));
                    }
                    expanded.push((name.to_owned(), Some(value)));
                }
            }
            ("set", Some(value)) => set(&mut expanded, &value)
                .ok_or_else(|| format!("'-set {value}' refers to no option before it"))?,
            (_, value) => expanded.push((name, value)),
        }
    }
    Ok(expanded)
}

/// Carries out the option `-set GROUP.ID.KEY=VALUE`.
fn set(options: &mut [Named], text: &str) -> Option<()> {
    let (place, value) = text.split_once('=')?;
    let (group, place) = place.split_once('.')?;
    let (id, key) = place.split_once('.')?;
    let found = options.iter_mut().filter(|(name, _)| name == group);
    let (mut changed, text) = found
        .filter_map(|(_, text)| Some((Value::parse(IMPLIED, text.as_deref()?)?, text)))
        .find(|(value, _)| value.get("id") == Some(id))?;
    changed.set(key, value);
    *text = Some(changed.render());
    Some(())
}

/// Parses a `-readconfig` file into options and their values. The error is the line that cannot be
/// parsed.
fn groups(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut options: Vec<(String, Vec<String>)> = Vec::new();
    for line in text.lines().map(str::trim) {
        let bad = || line.to_owned();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(head) = line.strip_prefix('[') {
            let head = head.strip_suffix(']').ok_or_else(bad)?.trim();
            let (name, id) = head.split_once(char::is_whitespace).unzip();
            let id = id.map(|id| quoted(id).ok_or_else(bad)).transpose()?;
            let pairs = id.map(|id| pair("id", id)).into_iter().collect();
            options.push((name.unwrap_or(head).to_owned(), pairs));
            continue;
        }
        let (key, value) = line.split_once('=').ok_or_else(bad)?;
        let value = quoted(value).ok_or_else(bad)?;
        let (_, pairs) = options.last_mut().ok_or_else(bad)?;
        pairs.push(pair(key.trim(), value));
    }
    let joined = options
        .into_iter()
        .map(|(name, pairs)| (name, pairs.join(",")));
    Ok(joined.collect())
}

fn quoted(text: &str) -> Option<&str> {
    let text = text.trim().strip_prefix('"')?;
    text.strip_suffix('"').filter(|text| !text.contains('"'))
}

fn pair(key: &str, value: &str) -> String {
    format!("{key}={}", escape_text(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        # Of Proxmox' kind.
        [device "ehci"]
          driver = "ich9-usb-ehci1"
          addr = "1d.7"

        [smbios]
          type = "1"
          serial = "a,b"

        [memory]
          size = "1G"
          maxmem = "2G"
        [smp-opts]
          cpus = "2"
        [boot-opts]
          menu = "on"
    "#;

    fn line(text: &str) -> Vec<Named> {
        let words = std::iter::once("qemu").chain(text.split_whitespace());
        options::read(&words.map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_file_named_by_qemus_option_readconfig_is_expanded_to_command_line_options() {
        let read = |path: &Path| {
            assert_eq!(path, Path::new("q35.cfg"));
            Ok(FILE.to_owned())
        };
        let found = expand(line("-m 512 -readconfig q35.cfg -S"), read).unwrap();
        let wanted = "-m 512 -device id=ehci,driver=ich9-usb-ehci1,addr=1d.7 -smbios type=1,serial=a,,b -m size=1G,maxmem=2G -smp cpus=2 -boot menu=on -S";
        assert_eq!(found, line(wanted));
    }

    #[test]
    fn arguments_of_qemus_option_set_are_merged_into_the_options_of_their_device() {
        let text = "-device e1000,id=n -drive if=none,id=d,file=a -set device.n.addr=7 -set drive.d.file=b -readconfig device.n -m 1";
        let wanted = "-device e1000,addr=7,id=n -drive file=b,id=d,if=none -m 1";
        let found = expand(line(text), |_| Ok(String::new())).unwrap();
        assert_eq!(found, line(wanted));
        for bad in ["device.x.addr=7", "device.n", "machine=1"] {
            let text = format!("-device e1000,id=n -set {bad}");
            let why = expand(line(&text), |_| Ok(String::new())).unwrap_err();
            assert!(why.contains(bad), "{why}");
        }
    }

    #[test]
    fn a_malformed_readconfig_file_is_refused_and_the_error_names_the_line() {
        let expand = |read: fn(&Path) -> io::Result<String>| expand(line("-readconfig /x"), read);
        for (text, last) in [
            ("driver = \"a\"", "driver = \"a\""),
            ("[device \"a]", "[device \"a]"),
            ("[device]\ndriver = a", "driver = a"),
            ("[device]\nword", "word"),
            ("[", "["),
            ("[brand-new]\na = \"b\"", "[brand-new]"),
        ] {
            let read = |_: &Path| Ok(text.to_owned());
            let why = super::expand(line("-readconfig /x"), read).unwrap_err();
            assert!(why.contains("/x") && why.contains(last), "{why}");
        }
        let why = expand(|_| Err(io::ErrorKind::NotFound.into())).unwrap_err();
        assert!(why.contains("-readconfig /x"), "{why}");
    }
}
