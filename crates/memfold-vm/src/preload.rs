//! Preloads memfold's library into a QEMU that memfold starts.

use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use memfold_sys::session;
use memfold_wire::library::{MONITOR_VARIABLE, SOCKET_VARIABLE};

use super::directory::VmDirectory;

/// Makes QEMU load the library, which listens on a socket in the VM's directory and gets its own
/// QMP monitor.
pub(super) fn add(
    command: &mut Command,
    library: &Path,
    directory: &VmDirectory,
) -> io::Result<()> {
    command
        .env("LD_PRELOAD", list(library))
        .env(SOCKET_VARIABLE, directory.library());
    add_monitor(command)
}

/// Adds a QMP monitor for the library over a socket pair: QEMU has one end, and the library in the
/// same process has the other. A socket with a path would be out of reach for a QEMU without root's
/// rights.
fn add_monitor(command: &mut Command) -> io::Result<()> {
    let (qemus, librarys) = UnixStream::pair()?;
    let qemus = session::pass(command, qemus.into());
    let librarys = session::pass(command, librarys.into());
    command
        .args(["-chardev", &format!("socket,id=library,fd={qemus}")])
        .args(["-mon", "chardev=library,mode=control"])
        .env(MONITOR_VARIABLE, librarys.to_string());
    Ok(())
}

/// Returns the value of `LD_PRELOAD`: the library, followed by the entries of this process's own
/// `LD_PRELOAD`.
fn list(library: &Path) -> OsString {
    let mut value = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
        value.push(":");
        value.push(others);
    }
    value
}
