//! Writes values in QEMU's command-line syntax.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

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

    pub(super) fn with_path(
        &mut self,
        option: &str,
        before: &str,
        path: &Path,
        after: &str,
    ) -> &mut Self {
        let mut value = OsString::from(before);
        value.push(escape(path.as_os_str()));
        value.push(after);
        self.add(option, value)
    }
}

/// QEMU's option syntax: a comma in a value is written twice.
pub(super) fn escape(value: &OsStr) -> OsString {
    let mut bytes = Vec::with_capacity(value.len());
    for byte in value.as_bytes() {
        bytes.push(*byte);
        if *byte == b',' {
            bytes.push(b',');
        }
    }
    OsStr::from_bytes(&bytes).to_owned()
}

/// What `-qmp` is given for a socket.
pub(super) fn monitor_argument(socket: &Path) -> OsString {
    let mut argument = OsString::from("unix:");
    argument.push(escape(socket.as_os_str()));
    argument.push(",server=on,wait=off");
    argument
}

/// QEMU's word for yes or no.
pub(super) const fn on_or_off(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}
