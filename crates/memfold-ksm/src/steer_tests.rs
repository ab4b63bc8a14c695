use super::*;

/// Simulation of ksmd as in `mm/ksm.c`, in simulated time: batches, pauses, and passes that end a
/// batch early.
struct Ksmd {
    at: f64,
    cpu: f64,
    scanned: u64,
    full_scans: u64,
    cursor: u64,
    pages: u64,
    /// Number of pages that have a match, at the front of the list. `merged` is the number of
    /// merged ones.
    alike: u64,
    visited_twice: u64,
    merged: u64,
    cost: f64,
    arrivals: u64,
    pressure: Pressure,
}

impl Ksmd {
    fn new(pages: u64, alike: u64) -> Self {
        Self {
            at: 0.0,
            cpu: 0.0,
            scanned: 0,
            full_scans: 0,
            cursor: 0,
            pages,
            alike,
            visited_twice: 0,
            merged: 0,
            cost: 4e-6,
            arrivals: 1,
            pressure: Pressure::default(),
        }
    }

    fn sample(&self) -> Sample {
        Sample {
            at: Duration::from_secs_f64(self.at),
            cpu: Duration::from_secs_f64(self.cpu),
            scanned: Some(self.scanned),
            full_scans: self.full_scans,
            merged_pages: self.merged,
            mergeable_pages: self.pages,
            arrivals: self.arrivals,
            pressure: self.pressure,
        }
    }

    fn run(&mut self, decision: &Decision, seconds: f64) {
        let end = self.at + seconds;
        while self.at < end {
            let batch = decision.pages_to_scan.min(self.pages - self.cursor);
            self.cursor += batch;
            self.scanned += batch;
            let took = batch as f64 * self.cost;
            self.cpu += took;
            self.at += took + decision.sleep_millisecs as f64 / 1e3;
            // A page merges when ksmd sees it for the second time.
            if self.full_scans >= self.visited_twice {
                self.merged = self.merged.max(self.cursor.min(self.alike));
            }
            if self.cursor == self.pages {
                self.cursor = 0;
                self.full_scans += 1;
            }
        }
    }

    /// Steers for some seconds with one step per second. Returns the decisions.
    fn steer(&mut self, steer: &mut Steer, seconds: u64) -> Vec<Decision> {
        (0..seconds)
            .map(|_| {
                let decision = steer.step(&self.sample());
                self.run(&decision, 1.0);
                decision
            })
            .collect()
    }
}

fn goal(cpu_percent: f64, target_s: u64) -> Goal {
    Goal {
        cpu_share: cpu_percent / 100.0,
        target: Duration::from_secs(target_s),
    }
}

const GIB_PAGES: u64 = 1 << 18;

#[test]
fn after_a_start_ksmd_uses_its_whole_cpu_budget_until_two_full_scans_are_done() {
    let mut ksmd = Ksmd::new(GIB_PAGES, GIB_PAGES / 2);
    ksmd.visited_twice = 1;
    let mut steer = Steer::new(goal(20.0, 600));
    // 262,144 pages at 4 µs each and 20 % of a CPU take 5.2 s per pass.
    let begun = ksmd.steer(&mut steer, 9);
    assert!(begun.iter().all(|d| d.mode == Mode::Boost), "{begun:?}");
    let share = ksmd.cpu / ksmd.at;
    assert!((0.17..0.21).contains(&share), "{share}");
    ksmd.steer(&mut steer, 6);
    assert_eq!(ksmd.merged, GIB_PAGES / 2);
    let after = ksmd.steer(&mut steer, 1);
    assert_eq!(after[0].mode, Mode::Steady, "{}", after[0].why);
    assert!(after[0].why.contains("every 600 s"), "{}", after[0].why);
}

#[test]
fn if_the_cpu_budget_suffices_a_full_scan_of_ksmd_takes_the_target_time() {
    let mut ksmd = Ksmd::new(GIB_PAGES, 0);
    let mut steer = Steer::new(goal(20.0, 60));
    ksmd.steer(&mut steer, 20);
    // ksmd must not idle here: in each pass, some pages merge or unmerge.
    let before = (ksmd.full_scans, ksmd.at);
    while ksmd.full_scans < before.0 + 3 {
        ksmd.merged = if ksmd.full_scans.is_multiple_of(2) {
            0
        } else {
            4096
        };
        ksmd.steer(&mut steer, 1);
    }
    let pass = (ksmd.at - before.1) / 3.0;
    assert!((50.0..70.0).contains(&pass), "{pass} s a pass");
}

#[test]
fn if_the_cpu_budget_is_too_small_for_the_scan_target_the_reported_reason_says_so() {
    let mut ksmd = Ksmd::new(64 * GIB_PAGES, 0);
    let mut steer = Steer::new(goal(5.0, 10));
    let decisions = ksmd.steer(&mut steer, 60);
    // 16.8 million pages at 4 µs each and 5 % of a CPU take 1342 s per pass.
    assert_eq!(decisions[59].mode, Mode::Boost);
    let share = ksmd.cpu / ksmd.at;
    assert!((0.04..0.0525).contains(&share), "{share}");
    steer.boost_until = None;
    let why = steer.step(&ksmd.sample()).why;
    assert!(why.contains("allows a full scan only every 13"), "{why}");
}

#[test]
fn after_two_full_scans_without_merges_ksmd_slows_down_until_a_new_vm_starts() {
    let mut ksmd = Ksmd::new(GIB_PAGES, 0);
    let mut steer = Steer::new(goal(20.0, 20));
    let decisions = ksmd.steer(&mut steer, 90);
    let modes: Vec<Mode> = decisions.iter().map(|d| d.mode).collect();
    assert_eq!(modes[0], Mode::Boost);
    assert!(modes.contains(&Mode::Steady), "{modes:?}");
    assert_eq!(modes[89], Mode::Idle);
    let (idle, steady) = (decisions[89].pages_per_second, GIB_PAGES as f64 / 20.0);
    assert!((idle / steady - 0.1).abs() < 0.01, "{idle} of {steady}");
    ksmd.arrivals += 1;
    ksmd.pages += GIB_PAGES;
    assert_eq!(ksmd.steer(&mut steer, 1)[0].mode, Mode::Boost);
}

#[test]
fn if_the_number_of_merged_pages_changes_ksmd_scans_at_the_normal_rate_again() {
    for merged in [0, 20_000] {
        let mut ksmd = Ksmd::new(GIB_PAGES, 0);
        ksmd.merged = 10_000;
        let mut steer = Steer::new(goal(20.0, 20));
        assert_eq!(ksmd.steer(&mut steer, 90)[89].mode, Mode::Idle);
        ksmd.merged = merged;
        assert_eq!(ksmd.steer(&mut steer, 1)[0].mode, Mode::Steady, "{merged}");
    }
}

#[test]
fn if_mergeable_memory_grows_by_a_tenth_ksmd_scans_at_its_full_cpu_budget_again() {
    let mut ksmd = Ksmd::new(GIB_PAGES, 0);
    let mut steer = Steer::new(goal(20.0, 20));
    assert_eq!(ksmd.steer(&mut steer, 90)[89].mode, Mode::Idle);
    ksmd.pages += GIB_PAGES / 20;
    assert_eq!(ksmd.steer(&mut steer, 1)[0].mode, Mode::Idle);
    ksmd.pages += GIB_PAGES / 10;
    assert_eq!(ksmd.steer(&mut steer, 1)[0].mode, Mode::Boost);
}

#[test]
fn under_host_pressure_ksmd_scans_at_a_tenth_of_its_rate_and_afterwards_at_the_full_rate() {
    let mut ksmd = Ksmd::new(GIB_PAGES, 0);
    let mut steer = Steer::new(goal(20.0, 20));
    let free = ksmd.steer(&mut steer, 3)[2].pages_per_second;
    for (cpu, memory, left, word) in [
        (Some(50.0), Some(10.0), 1.0, ""),
        (Some(99.0), None, 0.1, "/proc/pressure/cpu is 99 %"),
        (None, Some(25.0), 0.55, "/proc/pressure/memory is 25 %"),
        (Some(60.0), Some(80.0), 0.1, "/proc/pressure/memory is 80 %"),
    ] {
        ksmd.pressure = Pressure {
            cpu_some_avg10: cpu,
            memory_some_avg10: memory,
        };
        let decision = ksmd.steer(&mut steer, 1).remove(0);
        let ratio = decision.pages_per_second / free;
        assert!((ratio - left).abs() < 0.05, "{cpu:?} {memory:?}: {ratio}");
        assert!(decision.why.contains(word), "{}", decision.why);
        assert_eq!(decision.mode, Mode::Boost);
    }
    ksmd.pressure = Pressure::default();
    let decision = ksmd.steer(&mut steer, 1).remove(0);
    assert!((decision.pages_per_second / free - 1.0).abs() < 0.05);
}

#[test]
fn ksm_stays_within_the_cpu_budget_when_scanning_a_page_becomes_slower() {
    let mut ksmd = Ksmd::new(4 * GIB_PAGES, 0);
    let mut steer = Steer::new(goal(10.0, 1));
    ksmd.cost = 1e-6;
    ksmd.steer(&mut steer, 10);
    ksmd.cost = 10e-6;
    ksmd.steer(&mut steer, 1);
    let before = (ksmd.cpu, ksmd.at);
    ksmd.steer(&mut steer, 10);
    let share = (ksmd.cpu - before.0) / (ksmd.at - before.1);
    assert!(share < 0.105, "{share}");
    assert!((0.08..0.15).contains(&steer.used_share()));
    assert!((steer.cost_s() - 10e-6).abs() < 1e-6);
}

#[test]
fn after_a_short_slowdown_the_estimated_cost_of_scanning_a_page_falls_again() {
    let mut ksmd = Ksmd::new(4 * GIB_PAGES, 0);
    let mut steer = Steer::new(goal(20.0, 600));
    ksmd.steer(&mut steer, 5);
    // During a hiccup of the host, the budget allows only ten pages per second.
    ksmd.cost = 20e-3;
    ksmd.steer(&mut steer, 2);
    assert!(steer.cost_s() > 15e-3, "{}", steer.cost_s());
    ksmd.cost = 4e-6;
    ksmd.steer(&mut steer, 120);
    assert!(steer.cost_s() < 5e-6, "{}", steer.cost_s());
}

#[test]
fn on_kernels_without_a_count_of_scanned_pages_ksmd_stays_within_its_cpu_budget() {
    let mut ksmd = Ksmd::new(4 * GIB_PAGES, 0);
    let mut steer = Steer::new(goal(20.0, 600));
    for _ in 0..30 {
        let sample = Sample {
            scanned: None,
            ..ksmd.sample()
        };
        let decision = steer.step(&sample);
        ksmd.run(&decision, 1.0);
    }
    let share = ksmd.cpu / ksmd.at;
    assert!((0.1..0.22).contains(&share), "{share}");
}

#[test]
fn if_no_memory_is_mergeable_ksmd_scans_one_page_every_ten_seconds() {
    let ksmd = Ksmd::new(0, 0);
    let mut steer = Steer::new(goal(20.0, 60));
    steer.step(&ksmd.sample());
    steer.boost_until = None;
    let decision = steer.step(&ksmd.sample());
    assert_eq!(
        (decision.pages_to_scan, decision.sleep_millisecs),
        (1, 10_000)
    );
}

#[test]
fn if_the_full_scan_counter_is_reset_ksmd_scans_at_its_full_cpu_budget_again() {
    let mut ksmd = Ksmd::new(GIB_PAGES, 0);
    ksmd.full_scans = 1000;
    let mut steer = Steer::new(goal(20.0, 20));
    ksmd.steer(&mut steer, 3);
    // Somebody wrote 2 to `run`, and then 1.
    ksmd.full_scans = 0;
    assert_eq!(ksmd.steer(&mut steer, 1)[0].mode, Mode::Boost);
    let modes: Vec<Mode> = ksmd.steer(&mut steer, 60).iter().map(|d| d.mode).collect();
    assert!(modes.contains(&Mode::Steady), "{modes:?}");
    assert_eq!(modes[59], Mode::Idle);
}
