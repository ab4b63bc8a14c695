//! What the daemon tells systemd, where that has started it (`sd_notify(3)`); elsewhere nothing
//! happens.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use tracing::warn;

use memfold_daemon::Daemon;

fn tell(states: &[NotifyState<'_>]) {
    // The variables stay: unsetting them isn't safe while threads run. Programs that the daemon
    // starts don't get them.
    if let Err(error) = sd_notify::notify(false, states) {
        warn!(%error, "cannot notify systemd; check systemd");
    }
}

/// The daemon serves, and VMs that ran are taken over.
pub(super) fn ready(daemon: &Daemon) {
    let vms = daemon.vms().list().len();
    let status = format!("serving; {vms} VMs adopted");
    tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// It ends; VMs go on.
pub(super) fn stopping() {
    tell(&[
        NotifyState::Stopping,
        NotifyState::Status("ending; VMs go on"),
    ]);
}

/// Tells systemd's watchdog that the daemon works, as long as it does: that a request is carried
/// out, and that the engine answers. Ends only where there is no watchdog.
pub(super) async fn watch(daemon: Arc<Daemon>) {
    let mut limit_us = 0;
    if !sd_notify::watchdog_enabled(false, &mut limit_us) {
        return;
    }
    let pause = Duration::from_micros(limit_us) / 3;
    loop {
        let asked = daemon.clone();
        let alive = tokio::task::spawn_blocking(move || asked.is_alive()).await;
        // If nothing is said, systemd ends this daemon and starts another one.
        if matches!(alive, Ok(true)) {
            tell(&[NotifyState::Watchdog]);
        }
        tokio::time::sleep(pause).await;
    }
}
