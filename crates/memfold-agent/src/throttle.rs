//! Limits the CPU use of the agent's background thread, so that it does not slow down the guest's
//! programs.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time that the thread works between two pauses.
const SLICE: Duration = Duration::from_millis(5);

/// Makes the calling thread sleep after every 5 ms of work. The sleep takes four times as long as
/// the work, or half as long as the work if the guest is mostly idle.
#[derive(Debug)]
pub struct Throttle {
    slice_start: Duration,
    calls: u32,
    idle: (u64, u64),
    mostly_idle: bool,
    slices: u32,
}

fn cpu(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}

/// Returns the CPU time that the whole agent process has used since its start.
pub fn process_cpu() -> Duration {
    cpu(ClockId::ProcessCPUTime)
}

impl Throttle {
    /// Creates a throttle for the calling thread, and sets that thread to nice value 19.
    pub fn of_this_thread() -> Self {
        // On Linux, this sets the nice value of one thread, unlike POSIX (setpriority(2), "C
        // library/kernel differences").
        let _ = rustix::process::setpriority_process(None, 19);
        Self {
            slice_start: cpu(ClockId::ThreadCPUTime),
            calls: 0,
            idle: idle_and_total(),
            mostly_idle: false,
            slices: 0,
        }
    }

    /// Sleeps if the thread has worked for 5 ms since the last sleep. Call this after every small
    /// step of the work.
    pub fn step(&mut self) {
        self.calls += 1;
        if self.calls % 8 != 0 {
            return;
        }
        let used = cpu(ClockId::ThreadCPUTime).saturating_sub(self.slice_start);
        if used < SLICE {
            return;
        }
        let pause = if self.mostly_idle { used / 2 } else { used * 4 };
        std::thread::sleep(pause.min(Duration::from_millis(500)));
        self.slices += 1;
        if self.slices % 8 == 0 {
            let (idle, total) = idle_and_total();
            let share = (
                idle.saturating_sub(self.idle.0),
                total.saturating_sub(self.idle.1),
            );
            self.mostly_idle = share.0 * 2 > share.1;
            self.idle = (idle, total);
        }
        self.slice_start = cpu(ClockId::ThreadCPUTime);
    }
}

/// Returns the idle time (waiting for disks included) and the total time of all CPUs, in clock
/// ticks, from `/proc/stat`. Niced time counts as idle: otherwise, an idle guest would look busy
/// while the agent works.
fn idle_and_total() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    parse_stat(&text)
}

fn parse_stat(text: &str) -> (u64, u64) {
    let line = text.lines().next().unwrap_or_default();
    let fields: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .take(8)
        .map_while(|f| f.parse().ok())
        .collect();
    // Order of the fields: user nice system idle iowait irq softirq steal.
    let at = |i: usize| fields.get(i).copied().unwrap_or(0);
    (at(1) + at(3) + at(4), fields.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_iowait_and_nice_time_count_as_idle_cpu_time() {
        assert_eq!(
            parse_stat("cpu  10 2 20 300 5 1 1 1 0 0\ncpu0 1"),
            (307, 340)
        );
        assert_eq!(parse_stat("nonsense"), (0, 0));
    }

    #[test]
    fn the_cpu_throttle_of_the_agent_slows_down_a_busy_loop() {
        let wall = std::time::Instant::now();
        let mut throttle = Throttle::of_this_thread();
        let start = cpu(ClockId::ThreadCPUTime);
        while cpu(ClockId::ThreadCPUTime) < start + Duration::from_millis(60) {
            throttle.step();
        }
        assert!(wall.elapsed() > Duration::from_millis(85));
    }
}
