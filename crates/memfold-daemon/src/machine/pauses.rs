//! Measures how long a VM was paused, from the times of QEMU's events STOP and RESUME. It does not
//! matter who paused the VM.
//!
//! After a pause the guest's wall clock is behind, so memfold sets it to the host's clock. Pauses
//! that a snapshot's save causes are ignored here, because the save itself sets the clock if
//! necessary.

use std::time::Duration;

use serde_json::Value;

use crate::run_state::RunState;

/// Shortest pause after which the guest's clock is set. A clock's normal error is larger than a
/// shorter pause.
pub(crate) const LONG: Duration = Duration::from_millis(100);

/// Pauses of a VM that QEMU has reported so far. Times count from 1970, as in QEMU's events.
#[derive(Debug, Default)]
pub(crate) struct Pauses {
    stopped: Option<Duration>,
    /// Whether the VM was seen stopped, and the event STOP came before this daemon's time.
    stood: bool,
    /// Begin and end of the VM's last save, as times since 1970; `None`: no save since the daemon's
    /// start.
    pub saved: Option<(Duration, Duration)>,
}

impl Pauses {
    /// Takes note of a state that the VM was in.
    pub fn see(&mut self, state: &RunState) {
        let waits = ["prelaunch", "inmigrate"].contains(&&*state.name);
        self.stood |= !state.is_running() && !waits && self.stopped.is_none();
    }

    /// Returns the length of the longest pause that ended in these events, except pauses of a save.
    /// If the VM was seen stopped, a RESUME without a STOP counts as a pause of unknown length
    /// ([`Duration::MAX`]).
    pub fn hear(&mut self, events: &[Value]) -> Option<Duration> {
        let mut longest = None;
        for event in events {
            let Some(at) = time_of(event) else { continue };
            if event["event"] == "STOP" {
                self.stopped = Some(at);
                self.stood = false;
                continue;
            }
            let (since, stood) = (self.stopped.take(), std::mem::take(&mut self.stood));
            let is_of_save = self
                .saved
                .is_some_and(|(began, ended)| (began..=ended).contains(&at));
            let length = match since {
                _ if is_of_save => continue,
                Some(stopped) => at.saturating_sub(stopped),
                // The VM was stopped before this daemon received events.
                None if stood => Duration::MAX,
                None => continue,
            };
            longest = longest.max(Some(length));
        }
        longest
    }
}

fn time_of(event: &Value) -> Option<Duration> {
    let time = &event["timestamp"];
    let microseconds = Duration::from_micros(time["microseconds"].as_u64()?);
    Some(Duration::from_secs(time["seconds"].as_u64()?) + microseconds)
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_vm_pause_by_another_program_is_reported_and_a_pause_by_a_save_is_not_reported() {
        let event = |name: &str, ms: u64| json!({ "event": name, "timestamp": { "seconds": ms / 1000, "microseconds": ms % 1000 * 1000 } });
        let state = |name: &str| RunState {
            name: name.into(),
            cause: None,
            fix: None,
            full: Vec::new(),
        };
        let mut pauses = Pauses::default();
        let (stop, resume) = (event("STOP", 5_200), event("RESUME", 7_900));
        // STOP and RESUME arrive in two calls.
        assert_eq!(pauses.hear(from_ref(&stop)), None);
        let length = pauses.hear(from_ref(&resume));
        assert_eq!(length, Some(Duration::from_millis(2_700)));
        let short = [event("STOP", 8_000), event("RESUME", 8_002)];
        assert_eq!(pauses.hear(&short), Some(Duration::from_millis(2)));
        let both = [stop, resume.clone(), short[0].clone(), short[1].clone()];
        assert_eq!(pauses.hear(&both), Some(Duration::from_millis(2_700)));
        // A RESUME without a stop is the VM's start.
        pauses.see(&state("prelaunch"));
        assert_eq!(pauses.hear(from_ref(&resume)), None);
        // The VM was stopped before this daemon started, and its state is read before the event.
        pauses.see(&state("paused"));
        pauses.see(&state("running"));
        assert_eq!(pauses.hear(from_ref(&resume)), Some(Duration::MAX));
        assert_eq!(pauses.hear(from_ref(&resume)), None);
        // The state is read before the event of this daemon's own pause.
        pauses.see(&state("paused"));
        let length = pauses.hear(&both[..2]);
        assert_eq!(length, Some(Duration::from_millis(2_700)));
        pauses.saved = Some((Duration::from_secs(5), Duration::from_secs(8)));
        assert_eq!(pauses.hear(&both[..2]), None);
    }
}
