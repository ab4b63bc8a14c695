//! Tells systemd about the daemon's state, for example that the daemon is ready (`sd_notify(3)`).
//! If systemd did not start the daemon, nothing is sent.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sd_notify::NotifyState;
use tracing::warn;

use memfold_daemon::Daemon;

fn tell(states: &[NotifyState<'_>]) {
    // The environment variables stay set, because unsetting them is not safe while threads run. The
    // daemon's child processes do not get them.
    if let Err(error) = sd_notify::notify(false, states) {
        warn!(%error, "cannot report the daemon's state to systemd; check systemd");
    }
}

/// Notifies systemd that the daemon serves requests and has adopted running VMs.
pub(super) fn ready(daemon: &Daemon) {
    let vms = daemon.vms().list().len();
    let status = format!("serving; {vms} VMs adopted");
    tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// Notifies systemd that the daemon ends; VMs keep running.
pub(super) fn stopping() {
    tell(&[
        NotifyState::Stopping,
        NotifyState::Status("ending; VMs go on"),
    ]);
}

/// Notifies systemd's watchdog as long as the daemon works: a request can be executed, and the fold
/// engine answers. Starts a thread of its own: requests can occupy all threads that carry out
/// requests, and sending waits while systemd does not read.
pub(super) fn watch(daemon: &Arc<Daemon>) -> io::Result<()> {
    let mut limit_us = 0;
    if !sd_notify::watchdog_enabled(false, &mut limit_us) {
        return Ok(());
    }
    let pause = Duration::from_micros(limit_us) / 3;
    let daemon = Arc::downgrade(daemon);
    let work = move || {
        while let Some(daemon) = daemon.upgrade() {
            // Without a notification, systemd kills this daemon and starts another. A panic ends
            // this thread, and is in the log.
            if daemon.is_alive() {
                tell(&[NotifyState::Watchdog]);
            }
            drop(daemon);
            thread::sleep(pause);
        }
    };
    thread::Builder::new().name("watchdog".into()).spawn(work)?;
    Ok(())
}
