//! Workloads from traces: what a real guest reported, as phases.
//!
//! ```text
//!   rows, about 10 s apart:   anonymous    dirty    file cache
//!                                 v          v          v growth from row to row
//!   a phase for each step:    anonymous    dirty    files that are read once
//! ```
//!
//! What a trace does not say, and what is assumed instead:
//!
//! - *Which files are read again.* Page cache that stays may be needed or forgotten. The caller
//!   gives the set of such files. The guest reads it in all phases, so it seems to need it while
//!   the real guest rests, too.
//! - *Which files are read while as many others are dropped.* Only growth of the page cache counts
//!   as reading, and only as files that are read once, although some of them may be of the set.
//! - *What happens between two rows.* Memory that is allocated and freed between two rows is
//!   missing. Memory that is still held at a row is allocated at once, as fast as the kernel can.

use super::workload::{FileSet, Phase, Workload};

const MIB: f64 = 1_048_576.0;

/// Steps are one phase if their memory differs by at most this, in bytes.
const SAME_BYTES: f64 = 4.0 * MIB;

/// Steps are one phase if they read files at rates that differ by at most this, in bytes a second.
const SAME_RATE: f64 = 0.25 * MIB;

/// How fast memory is allocated, in bytes a second.
const ALLOCATION_RATE: f64 = 1024.0 * MIB;

/// What a guest reported at one moment. All amounts are bytes.
#[derive(Clone, Copy, Debug)]
pub struct TraceRow {
    /// Time since the recording began, in seconds.
    pub at_s: f64,
    /// Memory that cannot be dropped: `AnonPages` and `Shmem` of `/proc/meminfo`.
    pub anonymous: f64,
    /// Page cache of files: `Cached` of `/proc/meminfo`, without `Shmem`.
    pub file_cache: f64,
    /// `Dirty` of `/proc/meminfo`.
    pub dirty: f64,
}

impl Workload {
    /// Makes the workload of a guest that reported `rows` and reads `files` again and again. After
    /// the last row, the trace begins again.
    ///
    /// # Panics
    ///
    /// If there are fewer than two rows, or rows that are not at least a second after the row
    /// before.
    #[must_use]
    pub fn of_trace(rows: &[TraceRow], files: FileSet) -> Self {
        assert!(rows.len() >= 2, "a trace has at least two rows");
        let mut phases: Vec<Phase> = Vec::new();
        for step in rows.windows(2) {
            let next = phase_between(step[0], step[1]);
            match phases.last_mut() {
                Some(last) if is_same(last, &next) => append(last, &next),
                _ => phases.push(next),
            }
        }
        let anonymous = rows.iter().map(|row| row.anonymous);
        Self {
            base: anonymous.fold(f64::INFINITY, f64::min),
            sets: vec![files],
            phases,
        }
    }
}

/// Returns the phase between two rows. It lasts whole seconds, because the model's ticks do: a part
/// of a second would make each phase a tick longer.
fn phase_between(from: TraceRow, to: TraceRow) -> Phase {
    let seconds = to.at_s.round() - from.at_s.round();
    assert!(
        seconds >= 1.0,
        "the row at {} s is not a second after the row at {} s",
        to.at_s,
        from.at_s
    );
    Phase {
        seconds,
        anonymous: from.anonymous,
        leak: 0.0,
        allocation_rate: ALLOCATION_RATE,
        files: 0,
        stream: (to.file_cache - from.file_cache).max(0.0) / seconds,
        dirty: from.dirty,
    }
}

fn is_same(phase: &Phase, next: &Phase) -> bool {
    (phase.anonymous - next.anonymous).abs() <= SAME_BYTES
        && (phase.dirty - next.dirty).abs() <= SAME_BYTES
        && (phase.stream - next.stream).abs() <= SAME_RATE
}

/// Makes `phase` longer by `next`. As many bytes of files are read as in both.
fn append(phase: &mut Phase, next: &Phase) {
    let read = phase.stream * phase.seconds + next.stream * next.seconds;
    phase.seconds += next.seconds;
    phase.stream = read / phase.seconds;
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: FileSet = FileSet {
        bytes: 100.0 * MIB,
        period: 30.0,
        skew: 0.8,
    };

    /// Makes rows 10 s apart of MiB of anonymous memory and of page cache.
    fn rows(mib: &[(f64, f64)]) -> Vec<TraceRow> {
        let at_s = (0..).map(|row| f64::from(row) * 10.02);
        let rows = at_s.zip(mib);
        rows.map(|(at_s, (anonymous, file_cache))| TraceRow {
            at_s,
            anonymous: anonymous * MIB,
            file_cache: file_cache * MIB,
            dirty: MIB,
        })
        .collect()
    }

    /// Returns seconds, MiB of anonymous memory and KiB a second of files of each phase.
    fn phases(workload: &Workload) -> Vec<(f64, f64, f64)> {
        let phases = workload.phases.iter();
        phases
            .map(|phase| {
                let rate = (phase.stream / 1024.0).round();
                (phase.seconds, phase.anonymous / MIB, rate)
            })
            .collect()
    }

    #[test]
    fn a_step_of_a_trace_has_the_memory_of_its_first_row_and_reads_what_the_page_cache_grows() {
        let trace = rows(&[(80.0, 400.0), (592.0, 410.0), (90.0, 300.0), (80.0, 300.0)]);
        let workload = Workload::of_trace(&trace, FILES);
        let expected = [(10.0, 80.0, 1024.0), (10.0, 592.0, 0.0), (10.0, 90.0, 0.0)];
        assert_eq!(phases(&workload), expected);
        assert!((workload.base - 80.0 * MIB).abs() < 1.0);
    }

    #[test]
    fn steps_of_a_trace_that_hardly_differ_are_one_phase_that_reads_as_many_files() {
        let trace = rows(&[(80.0, 400.0), (81.0, 401.0), (79.0, 401.0), (80.0, 403.0)]);
        let workload = Workload::of_trace(&trace, FILES);
        assert_eq!(phases(&workload), [(30.0, 80.0, 102.0)]);
    }

    #[test]
    fn memory_that_grows_slowly_in_a_trace_grows_in_the_workload() {
        let leak: Vec<(f64, f64)> = (0..100).map(|row| (f64::from(row), 400.0)).collect();
        let phases = phases(&Workload::of_trace(&rows(&leak), FILES));
        assert!(phases.len() >= 10 && phases.len() < 50, "{phases:?}");
        let last = phases.last().expect("a phase").1;
        assert!(last >= 94.0, "{phases:?}");
    }
}
