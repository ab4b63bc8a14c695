//! The host, the ledger, and what memfold itself costs.

use procfs::process::Process as Proc;

use super::families::In::{Bytes, Numbers, Seconds};
use super::families::{Family, Kind, counter, gauge};

pub(super) static FAMILIES: &[Family] = &[
    Family {
        name: "memfold_build",
        unit: Numbers,
        kind: Kind::Info,
        help: "The daemon's version, and the commit that it was built from",
        samples: |_, out| {
            let labels = [
                ("version", env!("CARGO_PKG_VERSION")),
                ("commit", memfold_host::commit()),
            ];
            out.with(&labels, 1.0)
        },
    },
    gauge(
        "memfold_figures_age",
        Seconds,
        "Age of all figures but process_*: they are taken anew at most each ten seconds",
        |s, out| out.one(s.figures.taken.elapsed().as_secs_f64()),
    ),
    gauge(
        "memfold_figures_took",
        Seconds,
        "How long it took to take them",
        |s, out| out.one(s.figures.took.as_secs_f64()),
    ),
    gauge(
        "memfold_figures_cpu",
        Seconds,
        "CPU time that it took: they are kept for a hundred times as long, at least ten seconds",
        |s, out| out.one(s.figures.cpu.as_secs_f64()),
    ),
    gauge("memfold_host_memory", Bytes, "MemTotal", |s, out| {
        out.one(s.figures.report.ledger.host.mem_total_bytes.0 as f64)
    }),
    gauge(
        "memfold_host_memory_available",
        Bytes,
        "MemAvailable",
        |s, out| out.one(s.figures.report.ledger.host.mem_available_bytes.0 as f64),
    ),
    gauge("memfold_host_anonymous", Bytes, "AnonPages", |s, out| {
        out.one(s.figures.report.ledger.host.anon_pages_bytes.0 as f64)
    }),
    gauge(
        "memfold_host_others_anonymous",
        Bytes,
        "Anonymous PSS of all processes that are neither a VM nor memfold",
        |s, out| out.one(s.figures.report.ledger.host.others_anon_bytes.0 as f64),
    ),
    gauge(
        "memfold_host_shared_memory",
        Bytes,
        "Shmem, page stores among it",
        |s, out| out.one(s.figures.report.ledger.host.shmem_bytes.0 as f64),
    ),
    gauge(
        "memfold_host_kernel",
        Bytes,
        "The kernel's own memory",
        |s, out| out.one(s.figures.report.ledger.host.kernel_bytes.0 as f64),
    ),
    gauge(
        "memfold_host_reserve",
        Bytes,
        "What MemAvailable keeps back",
        |s, out| out.one(s.figures.report.ledger.host.reserve_bytes.0 as f64),
    ),
    gauge(
        "memfold_host_cpu_lists_free",
        Bytes,
        "Free pages in lists of the CPUs, which MemAvailable leaves out",
        |s, out| out.one(s.figures.report.ledger.host.per_cpu_free_bytes.0 as f64),
    ),
    gauge(
        "memfold_host_mappings_limit",
        Numbers,
        "Mappings that a process may have: vm.max_map_count",
        |s, out| out.one(s.figures.report.ledger.host.max_map_count as f64),
    ),
    gauge(
        "memfold_ledger_physical",
        Bytes,
        "VMs, page stores and memfold, each physical page once, with page tables",
        |s, out| out.one(s.figures.report.ledger.host.physical_bytes.0 as f64),
    ),
    gauge(
        "memfold_ledger_unreclaimable",
        Bytes,
        "Of the physical bytes, those that the kernel can't drop",
        |s, out| out.one(s.figures.report.ledger.host.unreclaimable_bytes.0 as f64),
    ),
    gauge(
        "memfold_ledger_saved",
        Bytes,
        "Memory saved, by mechanism; negative where one costs more than it saves",
        |s, out| {
            let host = &s.figures.report.ledger.host;
            let zero = host.saved_by_zero_drop_bytes.0 as f64;
            out.with(
                &[("mechanism", "folding")],
                host.saved_by_folding_bytes as f64,
            )?;
            out.with(
                &[("mechanism", "clones")],
                host.saved_by_clones_bytes as f64,
            )?;
            out.with(
                &[("mechanism", "segments")],
                host.saved_by_segments_bytes as f64,
            )?;
            out.with(&[("mechanism", "ksm")], host.saved_by_ksm_bytes as f64)?;
            out.with(&[("mechanism", "zero_drop")], zero)
        },
    ),
    gauge(
        "memfold_ledger_saved_net",
        Bytes,
        "Their sum less what memfold itself takes",
        |s, out| out.one(s.figures.report.ledger.host.saved_net_bytes as f64),
    ),
    gauge(
        "memfold_ledger_disagreements",
        Numbers,
        "Sums of the ledger that are more than 2 % off the kernel's; 0 is right",
        |s, out| out.one(s.figures.report.ledger.disagreements.len() as f64),
    ),
    gauge(
        "memfold_debt",
        Bytes,
        "Memory that guests could call in by writing to what they share, by what they share it through",
        |s, out| {
            let Some(debt) = &s.figures.report.ledger.debt else {
                return Ok(());
            };
            for (through, bytes) in [
                ("folding", debt.folded_bytes),
                ("snapshots", debt.snapshot_bytes),
                ("zero_drop", debt.zero_bytes),
                ("ksm", debt.ksm_bytes),
                ("starting", debt.starting_bytes),
            ] {
                out.with(&[("through", through)], bytes as f64)?;
            }
            Ok(())
        },
    ),
    gauge(
        "memfold_debt_needed",
        Bytes,
        "The part of it that has to be there for guests that call it in at once",
        |s, out| {
            out.maybe(
                s.figures
                    .report
                    .ledger
                    .debt
                    .as_ref()
                    .map(|d| d.needed_bytes as f64),
            )
        },
    ),
    gauge(
        "memfold_debt_absorbable",
        Bytes,
        "What there is for it: MemAvailable less the host's reserve",
        |s, out| {
            out.maybe(
                s.figures
                    .report
                    .ledger
                    .debt
                    .as_ref()
                    .map(|d| d.absorbable_bytes as f64),
            )
        },
    ),
    gauge(
        "memfold_debt_level",
        Numbers,
        "0 ok, 1 warning, 2 braked: VMs are not started",
        |s, out| {
            out.maybe(
                s.figures
                    .report
                    .ledger
                    .debt
                    .as_ref()
                    .map(|d| f64::from(d.level as u8)),
            )
        },
    ),
    gauge(
        "memfold_debt_sharing_held",
        Numbers,
        "1: folding and KSM make no more debt, until the level is 0 again",
        |s, out| {
            out.maybe(
                s.figures
                    .report
                    .ledger
                    .debt
                    .as_ref()
                    .map(|d| f64::from(u8::from(d.sharing_held))),
            )
        },
    ),
    gauge("memfold_own_pss", Bytes, "PSS of the daemon", |s, out| {
        out.one(s.figures.report.ledger.host.own.pss_bytes.0 as f64)
    }),
    gauge(
        "memfold_own_page_tables",
        Bytes,
        "Page tables of the daemon",
        |s, out| out.one(s.figures.report.ledger.host.own.page_table_bytes.0 as f64),
    ),
    gauge(
        "memfold_own_tables",
        Bytes,
        "Of the daemon's memory, what folding knows of pages",
        |s, out| out.one(s.figures.report.ledger.host.own.metadata_bytes.0 as f64),
    ),
    counter(
        "process_cpu",
        Seconds,
        "CPU time of the daemon",
        |s, out| out.maybe(s.process.cpu_s),
    ),
    gauge(
        "process_resident_memory",
        Bytes,
        "Resident memory of the daemon",
        |s, out| out.maybe(s.process.resident_bytes),
    ),
    gauge(
        "process_virtual_memory",
        Bytes,
        "Virtual memory of the daemon",
        |s, out| out.maybe(s.process.virtual_bytes),
    ),
    gauge(
        "process_start_time",
        Seconds,
        "When the daemon started, in seconds since 1970",
        |s, out| out.maybe(s.process.start_unix_s),
    ),
    gauge(
        "process_open_fds",
        Numbers,
        "Open files of the daemon",
        |s, out| out.maybe(s.process.open_files),
    ),
    gauge(
        "process_max_fds",
        Numbers,
        "Files that the daemon may have open",
        |s, out| out.maybe(s.process.files_limit),
    ),
    gauge(
        "process_threads",
        Numbers,
        "Threads of the daemon",
        |s, out| out.maybe(s.process.threads),
    ),
];

/// The daemon's process at this moment, by the names that Prometheus' clients agree on; what `/proc` doesn't say is left out.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub cpu_s: Option<f64>,
    pub resident_bytes: Option<f64>,
    pub virtual_bytes: Option<f64>,
    pub start_unix_s: Option<f64>,
    pub open_files: Option<f64>,
    pub files_limit: Option<f64>,
    pub threads: Option<f64>,
}

impl Process {
    /// Of this process.
    pub(super) fn now() -> Self {
        let Ok(proc) = Proc::myself() else {
            return Self::default();
        };
        let Ok(stat) = proc.stat() else {
            return Self::default();
        };
        let ticks = procfs::ticks_per_second() as f64;
        let booted = procfs::boot_time_secs().ok().map(|s| s as f64);
        let limit = proc.limits().ok().map(|l| l.max_open_files.soft_limit);
        Self {
            cpu_s: Some((stat.utime + stat.stime) as f64 / ticks),
            resident_bytes: Some(stat.rss as f64 * procfs::page_size() as f64),
            virtual_bytes: Some(stat.vsize as f64),
            start_unix_s: booted.map(|s| s + stat.starttime as f64 / ticks),
            open_files: proc.fd_count().ok().map(|n| n as f64),
            files_limit: limit.and_then(|limit| match limit {
                procfs::process::LimitValue::Value(n) => Some(n as f64),
                procfs::process::LimitValue::Unlimited => None,
            }),
            threads: Some(stat.num_threads as f64),
        }
    }
}
