//! Writes values in the syntax of QEMU's command line. In a VM description, tokens stand for the
//! paths of files, because the files may be moved. This module replaces the tokens by the paths.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

#[derive(Default)]
pub(super) struct Line(pub(super) Vec<OsString>);

impl Line {
    pub(super) fn flag(&mut self, option: &str) -> &mut Self {
        self.0.push(option.into());
        self
    }

    pub(super) fn add(&mut self, option: &str, value: impl Into<OsString>) -> &mut Self {
        self.0.push(option.into());
        self.0.push(value.into());
        self
    }

    pub(super) fn with_path(&mut self, option: &str, before: &str, path: &Path) -> &mut Self {
        let mut value = OsString::from(before);
        value.push(escape(path.as_os_str()));
        self.add(option, value)
    }
}

/// Escapes a value for QEMU's option syntax: doubles each comma.
pub(super) fn escape(value: &OsStr) -> OsString {
    let parts: Vec<&[u8]> = value.as_bytes().split(|byte| *byte == b',').collect();
    OsString::from_vec(parts.join(&b",,"[..]))
}

/// Escapes a text as [`escape`] does. Otherwise QEMU would take what follows a comma for another
/// option, such as `driver=file` or `path=/etc/shadow`.
pub(super) fn escape_text(text: &str) -> String {
    text.replace(',', ",,")
}

/// Returns the value of `-qmp` for a Unix socket.
pub(super) fn monitor_argument(socket: &Path) -> OsString {
    let mut argument = OsString::from("unix:");
    argument.push(escape(socket.as_os_str()));
    argument.push(",server=on,wait=off");
    argument
}

pub(super) const fn on_or_off(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}

/// Returns the token for file `number`. Numbers have leading zeroes, so that no token is a prefix
/// of another.
pub(super) fn token(kind: &str, number: usize) -> String {
    format!("{kind}{number:03}")
}

/// Replaces the tokens of one kind in a word by file paths.
pub(super) fn put_in(kind: &str, word: &str, files: &[PathBuf]) -> OsString {
    let mut words = word.to_owned();
    for (number, file) in files.iter().enumerate() {
        let token = token(kind, number);
        if words == token {
            return file.clone().into();
        }
        let file = file.to_string_lossy();
        let is_json = words.starts_with('{');
        let file = if is_json {
            file.into_owned()
        } else {
            file.replace(',', ",,")
        };
        words = words.replace(&token, &file);
    }
    words.into()
}
