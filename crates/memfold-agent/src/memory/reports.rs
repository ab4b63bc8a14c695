//! Reports the guest's memory figures at the interval that the daemon asks for.

use std::path::Path;
use std::time::{Duration, Instant};

use memfold_wire::agent::FromAgent;

use super::reader::MemoryReader;

/// The reports that the daemon asked for; none in the beginning.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    wanted: Option<Wanted>,
}

#[derive(Debug)]
struct Wanted {
    reader: MemoryReader,
    interval: Duration,
    due: Instant,
}

impl Reports {
    /// Sets the interval of the reports, in milliseconds; 0 ends them. The first is due at once.
    pub(crate) fn set_interval(&mut self, interval_ms: u32) {
        self.wanted = (interval_ms > 0).then(|| Wanted {
            reader: MemoryReader::new(Path::new("/")),
            interval: Duration::from_millis(interval_ms.into()),
            due: Instant::now(),
        });
    }

    /// Returns when the next report is due; `None` if the daemon wants none.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.wanted.as_ref().map(|wanted| wanted.due)
    }

    /// Returns a report if one is due now.
    pub(crate) fn next(&mut self) -> Option<FromAgent> {
        let now = Instant::now();
        let wanted = self.wanted.as_mut().filter(|wanted| wanted.due <= now)?;
        wanted.due = now + wanted.interval;
        Some(FromAgent::Memory(Box::new(wanted.reader.read())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_figures_are_reported_only_while_the_daemon_wants_them() {
        let mut reports = Reports::default();
        assert!(reports.due().is_none() && reports.next().is_none());
        reports.set_interval(7_200_000);
        assert!(matches!(reports.next(), Some(FromAgent::Memory(_))));
        assert!(reports.next().is_none(), "the next is due in two hours");
        assert!(reports.due().unwrap() > Instant::now() + Duration::from_secs(3_599));
        reports.set_interval(0);
        assert!(reports.due().is_none() && reports.next().is_none());
    }
}
