//! A VM's sizes at the last looks, for reports that are older than its present size.
//!
//! ```text
//!   look         report made         look                 now
//!   |--- size of the last look before ---|--- later sizes ---|
//! ```
//! QEMU is asked at each look; the guest reports in between, and the same report may be seen at
//! several looks. While a balloon moves, or memory is plugged, a report is about another size than
//! QEMU's answer. Its free memory has then changed by the difference. The size when it was made
//! lies between those of the looks before and after.

use std::collections::VecDeque;
use std::time::Duration;

use memfold_units::ByteSize;

use crate::input::Signals;

/// Most looks that are remembered: more than are made before a report is too old to count.
const MOST: usize = 32;

#[derive(Clone, Copy, Debug)]
struct Look {
    at: Duration,
    size: u64,
    installed: u64,
}

/// The sizes of one VM at the last looks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sizes {
    /// From the last look but one before the report was made, to the present.
    looks: VecDeque<Look>,
}

/// By how many bytes a VM has grown since its report was made; negative: it has shrunk.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Growth {
    pub(crate) least: i128,
    pub(crate) most: i128,
}

impl Sizes {
    /// Notes what QEMU says at the time `now` of the caller's clock.
    pub(crate) fn note(&mut self, now: Duration, signals: &Signals) {
        if self.looks.back().is_some_and(|last| now < last.at) {
            self.looks.clear();
        }
        self.looks.push_back(Look {
            at: now,
            size: signals.size().0,
            installed: signals.installed().0,
        });
        let is_before = |look: &Look| look.at <= signals.at;
        while self.looks.len() > MOST || self.looks.get(2).is_some_and(is_before) {
            self.looks.pop_front();
        }
    }

    /// Returns the most memory that the VM had since shortly before its report was made. A guest
    /// learns later than QEMU that memory was unplugged.
    pub(crate) fn most_installed(&self) -> ByteSize {
        let installed = self.looks.iter().map(|look| look.installed);
        ByteSize(installed.max().unwrap_or(0))
    }

    /// Returns by how much the VM has grown since a report was made at the time `at`.
    pub(crate) fn growth_since(&self, at: Duration) -> Growth {
        let looks = &self.looks;
        let before = looks.iter().rfind(|look| look.at <= at).or(looks.front());
        let after = looks.iter().find(|look| look.at >= at).or(looks.back());
        let (Some(before), Some(after), Some(now)) = (before, after, looks.back()) else {
            return Growth::default();
        };
        let since = |then: &Look| i128::from(now.size) - i128::from(then.size);
        let (since_before, since_after) = (since(before), since(after));
        Growth {
            least: since_before.min(since_after),
            most: since_before.max(since_after),
        }
    }
}

impl Growth {
    /// Returns the bytes that lie between the least and the most.
    pub(crate) fn uncertainty(self) -> u64 {
        u64::try_from(self.most - self.least).unwrap_or(u64::MAX)
    }

    /// Returns what `bytes` of the report have become, at the least.
    pub(crate) fn at_least(self, bytes: u64) -> u64 {
        let now = i128::from(bytes).saturating_add(self.least).max(0);
        u64::try_from(now).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::{Balloon, Source};

    /// Looks at a VM of 8 GiB at the given seconds, whose balloon holds so many MiB, and whose
    /// report was made at second `report`.
    fn growth(looks: &[(u64, u64)], report: u64) -> (i128, i128) {
        let at = Duration::from_secs(report);
        let mut sizes = Sizes::default();
        for (now, held) in looks {
            let signals = Signals {
                at,
                ram: ByteSize::mib(8192),
                balloon: Some(Balloon {
                    held: ByteSize::mib(*held),
                    deflate_on_oom: true,
                }),
                virtio_mem: None,
                keeps_freed_ram: false,
                reports_free_pages: true,
                folded_cache: ByteSize(0),
                source: Source::BalloonStats,
                guest: None,
            };
            sizes.note(Duration::from_secs(*now), &signals);
        }
        let growth = sizes.growth_since(at);
        (growth.least >> 20, growth.most >> 20)
    }

    #[test]
    fn a_report_is_about_a_size_between_the_looks_before_and_after_it() {
        let looks = [(2, 0), (4, 1000), (6, 2500), (8, 2500)];
        assert_eq!(growth(&looks, 5), (-1500, 0));
        assert_eq!(growth(&looks[..3], 5), (-1500, 0));
        assert_eq!(growth(&looks, 3), (-2500, -1500));
        assert_eq!(growth(&looks, 4), (-1500, -1500));
        assert_eq!(growth(&looks, 8), (0, 0));
        // The balloon gives memory back.
        assert_eq!(growth(&[(2, 2000), (4, 500)], 3), (0, 1500));
        // The clock was set back.
        assert_eq!(growth(&[(9, 0), (4, 1000)], 9), (0, 0));
        assert_eq!(growth(&[], 3), (0, 0));
    }
}
