//! Lends RAM to other hosts by iSCSI instead of NBD (`lend --transport iscsi`), for initiators that
//! support nothing else. A published study of lending used iSCSI, too.
//!
//! ```text
//!   lender                                                   borrower
//!   daemon --pipe--> `target` process                        daemon --starts--> `bridge` process
//!                      | holds the locked memory                                  | watches the session
//!                      v                                                          v
//!                    tgtd, one a lease <------- iSCSI ------- qemu-nbd --NBD--> relay --NBD--> QEMU of the VM
//! ```
//! memfold adds a helper process on both sides (`memfold iscsi-process`):
//! - On the lender's host, `target` creates an unnamed file whose pages are allocated and locked,
//!   because tgtd can only serve files. It ends tgtd when tgtd's first session ends.
//! - On the borrower's host, `bridge` runs QEMU's `iscsi` driver in a process of its own
//!   (qemu-nbd), which it kills when the first session ends. The relay's NBD client then gets an
//!   error at once, as with a lender that exports by NBD. Without the bridge, a VM would wait for
//!   as long as its lender is dead: libiscsi reconnects forever, and QEMU's monitor has no command
//!   to give up pending requests.
//!
//! iSCSI authenticates by CHAP and encrypts nothing. Anyone on the network path can read what a
//! guest has swapped out; the relay detects changes.

pub mod bridge;
pub mod target;
pub mod tgt;

use std::io;
use std::process::Command;
use std::time::Duration;

use memfold_host::own_program;

use super::child;
use super::endpoint::Key;

/// Prefix of the names of targets and initiators (RFC 3720, 3.2.6.3.1). Its domain is reserved (RFC
/// 2606), so nobody owns it.
const NAMES: &str = "iqn.2026-11.invalid.memfold";

/// Number of the only target of a tgtd.
const TARGET: i32 = 1;
/// Number of the iSCSI logical unit that holds a lease's bytes, at every tgtd.
pub const LUN: u64 = 1;

/// Longest time between two polls of the helper processes.
const LOOK: Duration = Duration::from_millis(200);

/// Returns the iSCSI name of the target that serves the lease with this key.
#[must_use]
pub fn target_name(key: &Key) -> String {
    format!("{NAMES}:{}", key.identity)
}

/// Returns the iSCSI initiator name with which a borrower logs in to the target of the lease with
/// this key.
#[must_use]
pub fn initiator_name(key: &Key) -> String {
    format!("{NAMES}:borrower-of-{}", key.identity)
}

/// Returns the command that starts a helper process of this program.
fn process(name: &str) -> io::Result<Command> {
    let mut command = child::command(own_program()?);
    command.args(["iscsi-process", name]);
    Ok(command)
}

/// Returns a command whose process ends with the thread that starts it. qemu-nbd and tgtd do not
/// reset this setting.
fn ends_with_us(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", program]);
    command
}

/// Returns a function that prefixes an error with `what`, the thing that failed.
fn at(what: &str) -> impl FnOnce(io::Error) -> io::Error + '_ {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iscsi_key_file_reads_back_equal_and_the_iscsi_target_is_named_after_the_lease() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("k");
        let key = Key {
            identity: "lease-7".into(),
            hex: "0f".repeat(32),
        };
        key.write(&path).unwrap();
        assert_eq!(Key::read(&path).unwrap(), key);
        std::fs::write(&path, "nothing").unwrap();
        Key::read(&path).unwrap_err();
        assert!(target_name(&key).ends_with(":lease-7"));
        assert_ne!(target_name(&key), initiator_name(&key));
    }
}
