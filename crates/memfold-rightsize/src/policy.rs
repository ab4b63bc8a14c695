//! The controller's settings. Their defaults are meant for every host; studies and tests vary them.

use std::time::Duration;

use memfold_units::ByteSize;

/// Settings of a [`Controller`](crate::Controller). Shares are parts of one.
///
/// The defaults of `pressure_target` and of the small first step follow Meta's Senpai, which holds
/// a pressure of 0.1 % and takes at most 1 % of a container at once every 6 s
/// (`facebookincubator/senpai`, and "TMO", ASPLOS 2022). What differs: steps grow while nothing is
/// missed, because a VM must reach its size within five minutes, and shrink to the smallest at the
/// first miss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// A report that is older does not count.
    pub report_timeout: Duration,
    /// A guest that contradicted itself is believed again after this time without a contradiction.
    pub distrust: Duration,
    /// Time after a guest's first report in which nothing is trimmed, unless the host is short: the
    /// guest may still boot, and reads files that it will need.
    pub young: Duration,
    /// Share of time in which tasks wait for memory, above which nothing is taken.
    pub pressure_target: f64,
    /// The same, above which a VM gets memory at once.
    pub pressure_give: f64,
    /// Files that a guest reads again, in bytes a second, above which trimming has gone too far. An
    /// eighth of it suffices if the pressure is above `pressure_target`.
    pub miss_rate: ByteSize,
    /// First and smallest trim, and the largest, as shares of the memory in use.
    pub first_step: f64,
    /// Largest trim.
    pub largest_step: f64,
    /// Largest trim while the host is short.
    pub largest_step_short: f64,
    /// No trim is smaller than this.
    pub smallest_trim: ByteSize,
    /// Time between two takes while the size of a VM moves to its target.
    pub take_interval: Duration,
    /// Time between two trims of page cache that grew back.
    pub regrown_interval: Duration,
    /// Time without probes after a miss. Each further miss that follows a probe doubles it, up to
    /// `longest_wait`.
    pub miss_wait: Duration,
    /// Longest time without probes after misses.
    pub longest_wait: Duration,
    /// Time without takes by balloon or unplug after a VM was given memory. Doubled at each further
    /// give that follows such a take.
    pub settle: Duration,
    /// Takes that one VM may get in an hour. As many as a half of them may follow each other at
    /// once.
    pub takes_an_hour: u32,
    /// Largest change of a balloon in one take, as a share of the size.
    pub balloon_step: f64,
    /// Time that plugged memory must have been idle before it is unplugged.
    pub idle: Duration,
    /// Memory that stays free beyond the buffer when memory is unplugged, for spikes: plugging
    /// takes longer than a program needs to allocate.
    pub unplug_leaves_free: ByteSize,
    /// Time in which the host must have had room before balloons are deflated without need.
    pub give_back_after: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            report_timeout: Duration::from_secs(15),
            distrust: Duration::from_secs(300),
            young: Duration::from_secs(60),
            pressure_target: 0.001,
            pressure_give: 0.01,
            miss_rate: ByteSize::kib(512),
            first_step: 0.0025,
            largest_step: 0.06,
            largest_step_short: 0.12,
            smallest_trim: ByteSize::mib(8),
            take_interval: Duration::from_secs(10),
            regrown_interval: Duration::from_secs(60),
            miss_wait: Duration::from_secs(120),
            longest_wait: Duration::from_secs(240),
            settle: Duration::from_secs(300),
            takes_an_hour: 90,
            balloon_step: 0.05,
            idle: Duration::from_secs(600),
            unplug_leaves_free: ByteSize::mib(512),
            give_back_after: Duration::from_secs(600),
        }
    }
}
