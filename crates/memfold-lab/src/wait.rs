//! Helpers for tests and studies: wait, with a time limit, for something that a guest, a daemon or
//! the kernel does.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use memfold_vm::{Qmp, VmDirectory, log_tail};
use serde_json::json;

/// Bytes of console output shown if a guest does not boot.
const LAST_WORDS: usize = 2000;

/// Calls `look` repeatedly, with a pause between two calls, until it returns a value.
///
/// # Errors
/// An error of `look` is returned. After the time limit, the error is `what` with the limit, such
/// as "the guest did not boot within 60 s".
pub fn wait_for<T>(
    what: impl std::fmt::Display,
    (limit, pause): (Duration, Duration),
    mut look: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        ensure!(Instant::now() < end, "{what} within {} s", limit.as_secs());
        std::thread::sleep(pause);
    }
}

/// Saves a VM's state to `file` (QMP command `migrate`), or loads it from `file`
/// (`migrate-incoming`), and waits until that is done. QEMU gets the open file, because it may run
/// as a user who cannot open it.
///
/// # Errors
///
/// The migration fails, or does not end within `limit`.
pub fn migrate(qmp: &mut Qmp, command: &str, file: &Path, limit: Duration) -> anyhow::Result<()> {
    let opened = match command {
        "migrate" => File::create(file),
        _ => File::open(file),
    };
    let opened = opened.with_context(|| format!("cannot open {}", file.display()))?;
    let lent = qmp.lend(opened.as_fd())?;
    let uri = format!("file:{}", lent.path());
    let done = qmp
        .execute(command, json!({ "uri": uri }))
        .map_err(anyhow::Error::from)
        .and_then(|_| wait_for_migration(qmp, limit));
    qmp.take_back(&lent)?;
    done
}

/// Waits until the migration has finished that was begun on QEMU's monitor.
///
/// # Errors
///
/// The migration fails, or does not end within `limit`.
pub fn wait_for_migration(qmp: &mut Qmp, limit: Duration) -> anyhow::Result<()> {
    let limits = (limit, Duration::from_millis(2));
    wait_for("QEMU's migration did not finish", limits, || {
        let now = qmp.query("query-migrate")?;
        match now["status"].as_str() {
            Some("completed") => Ok(Some(())),
            Some("failed" | "cancelled") => bail!("QEMU's migration failed: {now}"),
            _ => Ok(None),
        }
    })
}

/// Returns the last output of a guest's console and of QEMU.
pub(crate) fn last_words(vm: &VmDirectory) -> String {
    let console = std::fs::read(vm.console_log()).unwrap_or_default();
    let tail = &console[console.len().saturating_sub(LAST_WORDS)..];
    let mut tail = String::from_utf8_lossy(tail).into_owned();
    tail.retain(|c| c == '\n' || !c.is_control());
    format!("{tail}\nQEMU: {}", log_tail(vm))
}
