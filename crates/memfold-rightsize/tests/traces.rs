//! The controller on a model host whose guests need what real guests needed. The study
//! `memfold bench rightsize` recorded what its guests reported, and `scripts/rightsize-traces` cut
//! `traces/VM.csv` out of that record (arm `reporting`, in which nobody takes memory from a guest).
//!
//! A trace does not say which files a guest reads again. `files_bytes` of each fixture does, by the
//! sizes of what the study's scripts read. [`Workload::of_trace`] has the other assumptions.

mod support;

use std::path::Path;
use std::slice;

use memfold_rightsize::sim::{Arm, FileSet, HostSpec, Phase, TraceRow, VmSpec, Workload, simulate};
use support::{DAY, GIB, assert_sizes_are_steady, table};

/// The VMs of the full study, and the RAM of each.
const VMS: [&str; 6] = ["idle", "build", "db", "web", "leak", "spike"];
const RAM: f64 = GIB;

/// Memory of the host for its VMs, as a part of their RAM, and the part of that memory that they
/// are to take at most. Both are the study's.
const BUDGET: f64 = 0.75;
const GOAL: f64 = 0.8;

/// So much less memory do the VMs take than with free page reporting alone, at least.
const LEAST_SAVING: f64 = 0.5;

/// Time in which a VM reads all its files once at the beginning, in seconds, as in a backup.
const BACKUP: f64 = 600.0;

/// How often each trace is followed: more than a day, because a trace has about twelve minutes.
const ROUNDS: usize = 120;

/// How the files that a guest reads again are read.
const PERIOD: f64 = 30.0;
const SKEW: f64 = 0.8;

const COLUMNS: &str = "at_s,anonymous_bytes,shared_bytes,file_cache_bytes,dirty_bytes";
const PAGE: f64 = 4096.0;

/// Shortest trace, and longest time between two of its rows, in seconds.
const LEAST_LENGTH: f64 = 600.0;
const LONGEST_STEP: f64 = 30.0;

/// What one guest reported, and the bytes of files that it reads again.
struct RecordedGuest {
    files: f64,
    rows: Vec<TraceRow>,
}

impl RecordedGuest {
    /// Reads the fixture of the VM `vm`.
    fn of_vm(vm: &str) -> Self {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces");
        let text = std::fs::read_to_string(directory.join(format!("{vm}.csv")));
        let text = text.unwrap_or_else(|error| panic!("no trace of VM '{vm}': {error}"));
        Self::parse(&text).unwrap_or_else(|problem| panic!("trace of VM '{vm}': {problem}"))
    }

    /// Parses a fixture, and refuses one that no guest with [`RAM`] can have reported.
    fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines().filter(|line| !line.starts_with('#'));
        let files = lines
            .next()
            .and_then(|line| line.strip_prefix("files_bytes,"));
        let files = files.and_then(|bytes| bytes.parse().ok());
        let files = files.ok_or("the size of the files is missing")?;
        if lines.next() != Some(COLUMNS) {
            return Err(format!("the columns are not {COLUMNS}"));
        }
        let rows = lines.map(|line| parse_row(line).ok_or_else(|| format!("wrong row '{line}'")));
        let rows: Vec<TraceRow> = rows.collect::<Result<_, _>>()?;
        for step in rows.windows(2) {
            let seconds = step[1].at_s - step[0].at_s;
            if !(1.0..=LONGEST_STEP).contains(&seconds) {
                return Err(format!("{seconds} s after the row at {} s", step[0].at_s));
            }
        }
        let length = rows.last().map_or(0.0, |row| row.at_s);
        if length < LEAST_LENGTH {
            return Err(format!("it ends after {length} s"));
        }
        Ok(Self { files, rows })
    }

    /// What the VM does in a day: it reads all its files once, so that its page cache is as full as
    /// in the study, and then follows the trace again and again.
    fn workload(&self) -> Workload {
        let files = FileSet {
            bytes: self.files,
            period: PERIOD,
            skew: SKEW,
        };
        let mut workload = Workload::of_trace(&self.rows, files);
        let read_once = (self.rows[0].file_cache - self.files).max(0.0);
        let backup = Phase {
            seconds: BACKUP,
            stream: read_once / BACKUP,
            ..workload.phases[0]
        };
        workload.phases = [vec![backup], workload.phases.repeat(ROUNDS)].concat();
        workload
    }
}

/// Parses one row. `None`: it has not one number for each column, or no guest can have reported it.
fn parse_row(line: &str) -> Option<TraceRow> {
    let values = line.split(',').map(|value| value.parse().ok());
    let values: Vec<f64> = values.collect::<Option<_>>()?;
    let [at_s, anonymous, shared, cached, dirty] = *values.as_slice() else {
        return None;
    };
    // `Cached` contains `Shmem`.
    let row = TraceRow {
        at_s,
        anonymous: anonymous + shared,
        file_cache: cached - shared,
        dirty,
    };
    let has_whole_pages = values[1..].iter().all(|bytes| bytes % PAGE == 0.0);
    let has_memory = anonymous > 0.0 && shared >= 0.0 && row.file_cache > 0.0;
    let fits = row.anonymous + row.file_cache < RAM && (0.0..=row.file_cache).contains(&dirty);
    (at_s >= 0.0 && has_whole_pages && has_memory && fits).then_some(row)
}

/// The host of the study, whose memory for VMs is their budget. As in the study, the reserve makes
/// the host short if the VMs take more than [`GOAL`]: it has room above a reserve and a quarter.
fn study_host() -> HostSpec {
    let vms = VMS.map(|vm| VmSpec::new(RAM, RecordedGuest::of_vm(vm).workload()));
    let mut host = HostSpec::for_vms(vms.to_vec(), 1.0 / BUDGET);
    host.reserve = (host.ram - host.base) * (1.0 - GOAL) / 1.25;
    host
}

#[test]
fn recorded_guests_take_less_memory_than_with_free_page_reporting_alone_and_never_lack_any() {
    let host = study_host();
    let [reporting, memfold] = [Arm::Reporting, Arm::Memfold].map(|arm| {
        let outcome = simulate(&host, arm, DAY);
        table(arm, slice::from_ref(&outcome));
        outcome
    });
    let saving = 1.0 - memfold.mean_backed / reporting.mean_backed;
    println!(
        "{:.1} % less memory, most orders an hour {}, most turns an hour {}",
        saving * 100.0,
        memfold.orders_an_hour,
        memfold.turns_an_hour
    );
    assert!(
        saving >= LEAST_SAVING,
        "VMs took {:.1} % less memory than with free page reporting alone, {:.0} % were promised",
        saving * 100.0,
        LEAST_SAVING * 100.0
    );
    assert_eq!(memfold.kills(), 0, "processes or VMs were killed");
    assert!(memfold.swapped == 0.0, "guests swapped");
    assert!(memfold.host_swapping == 0.0, "the host swapped");
    assert_sizes_are_steady("the study's host", &memfold);
}

#[test]
fn each_vm_of_the_study_has_a_trace_that_a_guest_can_have_reported_and_all_end_together() {
    let ends = VMS.map(|vm| {
        RecordedGuest::of_vm(vm)
            .rows
            .last()
            .map_or(0.0, |row| row.at_s)
    });
    let first = ends.into_iter().fold(f64::INFINITY, f64::min);
    let last = ends.into_iter().fold(0.0, f64::max);
    assert!(last - first <= LONGEST_STEP, "{VMS:?} end at {ends:?} s");
}

#[test]
fn a_damaged_trace_is_refused() {
    let rows = (0..70).map(|row| format!("{}.1,123457536,4194304,419430400,4096", row * 10));
    let rows: Vec<String> = rows.collect();
    let parse = |rows: &[String]| {
        let rows = rows.join("\n");
        RecordedGuest::parse(&format!(
            "# VM web\nfiles_bytes,41943040\n{COLUMNS}\n{rows}\n"
        ))
    };
    assert!(parse(&rows).is_ok_and(|guest| guest.rows.len() == rows.len()));
    let edited = |from: &str, to: &str| {
        let mut rows = rows.clone();
        rows[30] = rows[30].replace(from, to);
        rows
    };
    let exchanged = [&rows[..30], &rows[31..32], &rows[30..31], &rows[32..]].concat();
    let damaged = [
        ("no rows", Vec::new()),
        ("cut off", rows[..40].to_vec()),
        ("rows missing", [&rows[..30], &rows[33..]].concat()),
        ("rows exchanged", exchanged),
        ("a value missing", edited(",4096", "")),
        ("a value too many", edited(",4096", ",4096,4096")),
        ("not a number", edited("4096", "4k")),
        ("a digit missing", edited("123457536", "12345753")),
        ("more than the RAM", edited("123457536", "1234575360")),
    ];
    for (damage, rows) in damaged {
        assert!(parse(&rows).is_err(), "{damage}: the trace was accepted");
    }
}
