//! Tells systemd about the daemon's state, for example that the daemon is ready (`sd_notify(3)`).
//! If systemd did not start the daemon, nothing is sent.

use std::sync::Arc;
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
/// engine answers. Returns only if systemd has set no watchdog.
pub(super) async fn watch(daemon: Arc<Daemon>) {
    let mut limit_us = 0;
    if !sd_notify::watchdog_enabled(false, &mut limit_us) {
        return;
    }
    let pause = Duration::from_micros(limit_us) / 3;
    loop {
        let asked = daemon.clone();
        // Not in the threads that answer requests: sending waits while systemd does not read.
        let turn = tokio::task::spawn_blocking(move || {
            // Without a notification, systemd kills this daemon and starts another.
            if asked.is_alive() {
                tell(&[NotifyState::Watchdog]);
            }
        });
        // A panic in it is no sign of life, and is in the log.
        let _ = turn.await;
        tokio::time::sleep(pause).await;
    }
}
