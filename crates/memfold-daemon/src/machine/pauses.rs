//! How long a VM stood still, whoever stopped it: QEMU tells every client of STOP and RESUME.
//!
//! A guest that stood still has the wall clock of before, so it gets the host's. The pauses of a save are the save's own matter, which knows
//! whether the clock is to be kept.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use memfold_vm::Qmp;
use serde_json::Value;
use tracing::info;

use super::Machine;
use crate::clock;
use crate::run_state::RunState;

/// There while a guest keeps the clock of its snapshot.
const KEEPS_CLOCK: &str = "keeps-clock";

/// What is known of pauses. Times are those since 1970, as QEMU's events have them.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    stopped: Option<Duration>,
    /// Begin and end of the last save.
    saved: Option<(Duration, Duration)>,
}

impl Pauses {
    /// How long the VM stood still, if these events say that it has, for others than a save. `stood`: it was seen standing still before.
    fn hear(&mut self, events: &[Value], stood: bool) -> Option<Duration> {
        let mut longest = None;
        for event in events {
            let Some(at) = time_of(event) else { continue };
            if event["event"] == "STOP" {
                self.stopped = Some(at);
                continue;
            }
            let since = self.stopped.take();
            let is_of_save = self
                .saved
                .is_some_and(|(began, ended)| (began..=ended).contains(&at));
            let length = match since {
                _ if is_of_save => continue,
                Some(stopped) => at.saturating_sub(stopped),
                // Nobody of this daemon has heard it stop.
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

fn now() -> Duration {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default()
}

impl Machine {
    /// Hears what QEMU has told of pauses so far. `before`: what the VM did when it was looked at last.
    pub(super) fn hear_pauses(self: &Arc<Self>, qmp: &mut Qmp, before: &RunState) {
        let events = qmp.take_events_named(&["STOP", "RESUME"]);
        let is_known = !before.is_running() && !["prelaunch", "inmigrate"].contains(&&*before.name);
        let length = {
            let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
            pauses.hear(&events, is_known)
        };
        let is_long = length.is_some_and(|length| length >= clock::LONG);
        if is_long && self.had_agent.load(Ordering::Relaxed) && !self.keeps_clock() {
            info!(
                vm = self.name,
                "VM stood still and goes on: its guest's clock is set"
            );
            self.set_clock_soon();
        }
    }

    /// Whether its guest is to keep the clock of its snapshot.
    fn keeps_clock(&self) -> bool {
        let directory = self.vm.directory();
        directory.is_some_and(|directory| directory.path().join(KEEPS_CLOCK).exists())
    }

    /// Notes that its guest is to keep its clock, for every daemon that is to come.
    pub(super) fn keep_clock(&self) {
        let noted = self
            .vm
            .directory()
            .map(|directory| std::fs::write(directory.path().join(KEEPS_CLOCK), ""));
        if let Some(Err(error)) = noted {
            tracing::warn!(
                vm = self.name,
                %error,
                "cannot note that this guest keeps its clock: the next pause sets it"
            );
        }
    }

    /// Notes that it stands still for its snapshot, as long as this is kept.
    pub fn note_saving(&self) -> impl Drop + '_ {
        self.being_saved.store(true, Ordering::Relaxed);
        BeingSaved(self, now())
    }
}

struct BeingSaved<'a>(&'a Machine, Duration);

impl Drop for BeingSaved<'_> {
    fn drop(&mut self) {
        let mut pauses = self.0.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        pauses.saved = Some((self.1, now()));
        self.0.being_saved.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use serde_json::json;

    use super::*;

    #[test]
    fn pauses_of_others_are_heard_and_those_of_a_save_are_not() {
        let event = |name: &str, ms: u64| json!({ "event": name, "timestamp": { "seconds": ms / 1000, "microseconds": ms % 1000 * 1000 } });
        let mut pauses = Pauses::default();
        let (stop, resume) = (event("STOP", 5_200), event("RESUME", 7_900));
        // In two looks.
        assert_eq!(pauses.hear(from_ref(&stop), false), None);
        let length = pauses.hear(from_ref(&resume), false);
        assert_eq!(length, Some(Duration::from_millis(2_700)));
        let short = [event("STOP", 8_000), event("RESUME", 8_002)];
        assert_eq!(pauses.hear(&short, false), Some(Duration::from_millis(2)));
        let both = [stop, resume.clone(), short[0].clone(), short[1].clone()];
        assert_eq!(
            pauses.hear(&both, false),
            Some(Duration::from_millis(2_700))
        );
        // Stopped before this daemon came.
        assert_eq!(pauses.hear(from_ref(&resume), true), Some(Duration::MAX));
        // A start.
        assert_eq!(pauses.hear(from_ref(&resume), false), None);
        pauses.saved = Some((Duration::from_secs(5), Duration::from_secs(8)));
        assert_eq!(pauses.hear(&both[..2], true), None);
    }
}
