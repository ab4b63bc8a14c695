//! Schedules the search for pages of a VM that equal the RAM image of the VM's snapshot again (a
//! fold-back pass), and holds the state of the search.

use std::time::{Duration, Instant};

use super::image::{Image, Part};

/// If a pass folds back fewer than one in [`WORTH`] pages, the time until the next pass doubles.
const WORTH: u64 = 50;

/// Longest time between two passes, as a multiple of the shortest time.
const LONGEST: u32 = 16;

/// State of a VM's fold-back pass, a search for pages that equal the image of the VM's snapshot
/// again.
#[derive(Debug)]
pub(super) struct BackPass {
    pub image: Option<Image>,
    /// Numbers of earlier images, which memfold's library in QEMU may still have open.
    pub old_images: Vec<u32>,
    pub views: Vec<Part>,
    /// Whether this VM is the only one that runs from its snapshot's image, and the image is on a
    /// disk. The image's pages in memory then serve this VM alone, and the host can drop them.
    pub alone: bool,
    pub due: Instant,
    shortest: Duration,
    interval: Duration,
    pub rest: Vec<Part>,
    pub looked: u64,
    pub found: u64,
    /// CPU time of the present pass so far, in nanoseconds.
    pub cost_ns: u64,
}

impl BackPass {
    /// Creates the state before the VM's first pass, which is due `interval` after `now`. Later
    /// passes are at least as far apart.
    pub fn new(now: Instant, interval: Duration) -> Self {
        Self {
            image: None,
            old_images: Vec::new(),
            views: Vec::new(),
            alone: false,
            due: now + interval,
            shortest: interval,
            interval,
            rest: Vec::new(),
            looked: 0,
            found: 0,
            cost_ns: 0,
        }
    }

    /// Drops the snapshot's image, the list of its mappings in the VM, and the rest of the present
    /// pass.
    pub fn forget(&mut self) {
        self.rest.clear();
        self.views.clear();
        let old = self.image.take().map(|image| image.number);
        let old = old.filter(|old| !self.old_images.contains(old));
        self.old_images.extend(old);
    }

    /// Ends a pass and sets the time of the next one, so that passes use at most a tenth of the CPU
    /// budget.
    pub fn end(&mut self, now: Instant, cpu_share: f64) {
        self.rest.clear();
        self.interval = if self.found * WORTH >= self.looked.max(1) {
            self.shortest
        } else {
            (self.interval * 2).min(self.shortest * LONGEST)
        };
        let share = (cpu_share / 10.0).max(1e-4);
        let least = Duration::from_secs_f64((self.cost_ns as f64 / 1e9 / share).min(3600.0));
        self.due = now + self.interval.max(least);
        (self.looked, self.found, self.cost_ns) = (0, 0, 0);
    }
}
