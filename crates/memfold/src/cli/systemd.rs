//! Sends notifications of the daemon to systemd (`sd_notify(3)`). Nothing happens if the daemon was
//! not started by systemd.

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

/// Reports that the daemon serves requests and has adopted running VMs.
pub(super) fn ready(daemon: &Daemon) {
    let vms = daemon.vms().list().len();
    let status = format!("serving; {vms} VMs adopted");
    tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// Reports that the daemon ends; VMs keep running.
pub(super) fn stopping() {
    tell(&[
        NotifyState::Stopping,
        NotifyState::Status("ending; VMs go on"),
    ]);
}

/// Notifies systemd's watchdog as long as the daemon works, that is, a request can be executed and
/// the engine answers. Returns only if there is no watchdog.
pub(super) async fn watch(daemon: Arc<Daemon>) {
    let mut limit_us = 0;
    if !sd_notify::watchdog_enabled(false, &mut limit_us) {
        return;
    }
    let pause = Duration::from_micros(limit_us) / 3;
    loop {
        let asked = daemon.clone();
        let alive = tokio::task::spawn_blocking(move || asked.is_alive()).await;
        // Without a notification, systemd kills this daemon and starts another.
        if matches!(alive, Ok(true)) {
            tell(&[NotifyState::Watchdog]);
        }
        tokio::time::sleep(pause).await;
    }
}
