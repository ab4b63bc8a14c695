//! Metrics of the whole host: how its RAM is used, according to memfold's ledger, and how much
//! memory and CPU time memfold itself takes.

use std::fmt;

use memfold_ledger::{DebtReport, HostAccount};

use super::families::{Family, Samples, Scrape, any, families, one};
use super::process::Process;

pub(super) static FAMILIES: &[Family] = families! {
    Info Numbers "memfold_build" "The daemon's version, and the commit that it was built from" any build;
    Gauge Seconds "memfold_figures_age" "Age of all figures but process_*, which are taken again at most every ten seconds"
        one |s| s.figures.taken.elapsed().as_secs_f64();
    Gauge Seconds "memfold_figures_took" "Time that taking the figures took" one |s| s.figures.took.as_secs_f64();
    Gauge Seconds "memfold_figures_cpu" "CPU time that taking the figures took; they are kept for a hundred times as long, at least ten seconds"
        one |s| s.figures.cpu.as_secs_f64();
    Gauge Bytes "memfold_host_memory" "MemTotal" host |h| h.mem_total_bytes.0 as f64;
    Gauge Bytes "memfold_host_memory_available" "MemAvailable" host |h| h.mem_available_bytes.0 as f64;
    Gauge Bytes "memfold_host_anonymous" "AnonPages" host |h| h.anon_pages_bytes.0 as f64;
    Gauge Bytes "memfold_host_others_anonymous" "Anonymous PSS of all processes that are neither a VM nor memfold"
        host |h| h.others_anon_bytes.0 as f64;
    Gauge Bytes "memfold_host_shared_memory" "Shmem, which includes page stores" host |h| h.shmem_bytes.0 as f64;
    Gauge Bytes "memfold_host_kernel" "Memory of the kernel itself" host |h| h.kernel_bytes.0 as f64;
    Gauge Bytes "memfold_host_reserve" "Free memory that MemAvailable leaves out as the kernel's reserve" host |h| h.reserve_bytes.0 as f64;
    Gauge Bytes "memfold_host_cpu_lists_free" "Free pages in lists of the CPUs, which MemAvailable leaves out"
        host |h| h.per_cpu_free_bytes.0 as f64;
    Gauge Numbers "memfold_host_mappings_limit" "Mappings that a process may have: vm.max_map_count" host |h| h.max_map_count as f64;
    Gauge Bytes "memfold_ledger_physical" "VMs, page stores and memfold, each physical page once, with page tables"
        host |h| h.physical_bytes.0 as f64;
    Gauge Bytes "memfold_ledger_unreclaimable" "The part of memfold_ledger_physical that the kernel cannot reclaim"
        host |h| h.unreclaimable_bytes.0 as f64;
    Gauge Bytes "memfold_ledger_saved" "Memory saved, by mechanism; negative where one costs more than it saves" any saved;
    Gauge Bytes "memfold_ledger_saved_net" "Sum of memfold_ledger_saved less the memory of memfold itself" host |h| h.saved_net_bytes as f64;
    Gauge Numbers "memfold_ledger_disagreements" "Sums of the ledger that differ from the kernel's by more than 2 %; 0 is right"
        one |s| s.figures.report.ledger.disagreements.len() as f64;
    Gauge Bytes "memfold_debt" "Memory that guests could claim by writing to what they share, by the mechanism of sharing" any debts;
    Gauge Bytes "memfold_debt_needed" "The part of the debt that must be available for guests that write at once"
        debt |d| d.needed_bytes as f64;
    Gauge Bytes "memfold_debt_absorbable" "Memory that is available for the debt: MemAvailable less the host's reserve" debt |d| d.absorbable_bytes as f64;
    Gauge Numbers "memfold_debt_level" "0 ok, 1 warning, 2 braked: VMs are not started" debt |d| f64::from(d.level as u8);
    Gauge Numbers "memfold_debt_sharing_held" "1: folding and KSM share no more memory until the level is 0 again"
        debt |d| f64::from(u8::from(d.sharing_held));
    Gauge Bytes "memfold_own_pss" "PSS of the daemon" host |h| h.own.pss_bytes.0 as f64;
    Gauge Bytes "memfold_own_page_tables" "Page tables of the daemon" host |h| h.own.page_table_bytes.0 as f64;
    Gauge Bytes "memfold_own_tables" "Daemon memory that holds folding's tables of pages" host |h| h.own.metadata_bytes.0 as f64;
    Counter Seconds "process_cpu" "CPU time of the daemon" process |p| p.cpu_s;
    Gauge Bytes "process_resident_memory" "Resident memory of the daemon" process |p| p.resident_bytes;
    Gauge Bytes "process_virtual_memory" "Virtual memory of the daemon" process |p| p.virtual_bytes;
    Gauge Seconds "process_start_time" "When the daemon started, in seconds since 1970" process |p| p.start_unix_s;
    Gauge Numbers "process_open_fds" "Open files of the daemon" process |p| p.open_files;
    Gauge Numbers "process_max_fds" "Files that the daemon may have open" process |p| p.files_limit;
    Gauge Numbers "process_threads" "Threads of the daemon" process |p| p.threads;
};

fn build(_: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    let labels = [
        ("version", env!("CARGO_PKG_VERSION")),
        ("commit", memfold_host::commit()),
    ];
    out.with(&labels, 1.0)
}

fn saved(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    let host = &scrape.figures.report.ledger.host;
    let zero = host.saved_by_zero_drop_bytes.0 as f64;
    for (mechanism, bytes) in [
        ("folding", host.saved_by_folding_bytes as f64),
        ("clones", host.saved_by_clones_bytes as f64),
        ("segments", host.saved_by_segments_bytes as f64),
        ("ksm", host.saved_by_ksm_bytes as f64),
        ("zero_drop", zero),
    ] {
        out.with(&[("mechanism", mechanism)], bytes)?;
    }
    Ok(())
}

fn debts(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    let Some(debt) = &scrape.figures.report.ledger.debt else {
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
}

fn host(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&HostAccount) -> f64) -> fmt::Result {
    out.one(figure(&scrape.figures.report.ledger.host))
}

fn debt(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&DebtReport) -> f64) -> fmt::Result {
    out.maybe(scrape.figures.report.ledger.debt.as_ref().map(figure))
}

fn process(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&Process) -> Option<f64>,
) -> fmt::Result {
    out.maybe(figure(&scrape.process))
}
