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

/// Escapes a value for QEMU's option syntax: doubles each comma.
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

/// Returns the value of `-qmp` for a Unix socket.
pub(super) fn monitor_argument(socket: &Path) -> OsString {
    let mut argument = OsString::from("unix:");
    argument.push(escape(socket.as_os_str()));
    argument.push(",server=on,wait=off");
    argument
}

/// Returns `on` or `off`.
pub(super) const fn on_or_off(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}
