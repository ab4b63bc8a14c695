//! Metrics of each VM: where the pages of its RAM are (private, shared, swapped, ...), and how much
//! memory folding saves.
//!
//! There are about sixty samples for each VM. The label `vm` is the VM's name. The label `domain`
//! is its trust domain, or `vm/NAME` for a VM that shares with no other.

use std::fmt;

use memfold_fold::VmStats;
use memfold_ledger::{GuestMemory, VmAccount};
use memfold_units::ByteSize;

use super::families::{Family, Samples, Scrape, any, bytes, families, flag, one};

pub(super) static FAMILIES: &[Family] = families! {
    Gauge Numbers "memfold_vms" "VMs that the daemon knows" one |s| s.figures.vms.len() as f64;
    Gauge Numbers "memfold_vm_state" "1: the VM's state: running, or why not (QEMU's run state, starting, taking-over, silent)" any states;
    Gauge Bytes "memfold_vm_ram" "Guest RAM as QEMU allocated it: the sum of memfold_vm_ram_place" accounts |vm| Some(vm.ram_bytes.0);
    Gauge Bytes "memfold_vm_ram_place" "Guest RAM, each page in exactly one place" any places;
    Gauge Bytes "memfold_vm_huge" "Guest RAM in memory that is mapped by huge pages" accounts |vm| Some(vm.huge_bytes.0);
    Gauge Bytes "memfold_vm_ksm_merged" "Guest RAM that ksmd merged; absent before Linux 6.6"
        accounts |vm| vm.ksm_merged_bytes.map(|b| b.0);
    Gauge Bytes "memfold_vm_pss" "PSS of the QEMU process" accounts |vm| Some(vm.pss_bytes.0);
    Gauge Bytes "memfold_vm_store_pss" "Part of the VM's PSS that are shares of page stores" accounts |vm| Some(vm.store_pss_bytes.0);
    Gauge Bytes "memfold_vm_image_pss" "Part of the VM's PSS that are shares of the snapshot that the VM runs from" accounts |vm| Some(vm.file_pss_bytes.0);
    Gauge Bytes "memfold_vm_segment_pss" "Part of the VM's PSS that are shares of segments" accounts |vm| Some(vm.segment_pss_bytes.0);
    Gauge Bytes "memfold_vm_qemu_pss" "Part of the VM's PSS outside guest RAM" accounts |vm| Some(vm.qemu_pss_bytes.0);
    Gauge Bytes "memfold_vm_page_tables" "Page tables of the QEMU process, which PSS does not include" accounts |vm| Some(vm.page_table_bytes.0);
    Gauge Numbers "memfold_vm_mappings" "Mappings of the QEMU process" accounts |vm| Some(vm.mappings);
    Gauge Numbers "memfold_vm_store_mappings" "Mappings of page stores in the QEMU process" accounts |vm| Some(vm.store_mappings);
    Gauge Numbers "memfold_vm_folding" "1: the VM is folded; 0: something prevents that ('memfold vm list' says what)"
        folding |vm| flag(vm.problem.is_none());
    Gauge Numbers "memfold_vm_agent_ready" "1: the guest's agent is connected and has reported the page cache" folding |vm| flag(vm.agent_ready);
    Gauge Bytes "memfold_vm_cached" "Guest page cache whose file is known" folding |vm| bytes(vm.cached_pages);
    Gauge Bytes "memfold_vm_matched" "Guest page cache whose content the page store holds, or another file caches"
        folding |vm| bytes(vm.matched_pages);
    Gauge Bytes "memfold_vm_matched_folded" "Part of memfold_vm_matched that is folded and not copied since"
        folding |vm| bytes(vm.matched_folded_pages);
    Gauge Bytes "memfold_vm_store_mapped" "Guest RAM that maps a page store" folding |vm| bytes(vm.mapped_pages);
    Gauge Bytes "memfold_vm_store_copied" "Part of memfold_vm_store_mapped that the guest wrote to, now private copies" folding |vm| bytes(vm.copied_pages);
    Gauge Bytes "memfold_vm_image_mapped" "Guest RAM that maps the image of the snapshot that the VM runs from" folding |vm| bytes(vm.template_pages);
    Gauge Bytes "memfold_vm_image_copied" "Part of memfold_vm_image_mapped that the guest wrote to, now private copies" folding |vm| bytes(vm.template_copied_pages);
    Counter Bytes "memfold_vm_folded" "Anonymous memory that was folded" folding |vm| bytes(vm.folded_pages);
    Counter Bytes "memfold_vm_refolded" "Memory that was folded again after the guest's write" folding |vm| bytes(vm.refolded_pages);
    Counter Bytes "memfold_vm_folded_back" "Private copies that equalled the snapshot again and were given back"
        folding |vm| bytes(vm.folded_back_pages);
    Counter Bytes "memfold_vm_zero_dropped" "Zero pages that were given back" folding |vm| bytes(vm.zero_pages);
    Counter Bytes "memfold_vm_differing" "Memory that differed when compared, and was not folded" folding |vm| bytes(vm.differing_pages);
    Counter Bytes "memfold_vm_busy" "Memory that was not folded because a device was using it" folding |vm| bytes(vm.busy_pages);
    Counter Numbers "memfold_vm_hint_runs" "Runs that the agent reported as hints" folding |vm| vm.hint_runs as f64;
    Counter Bytes "memfold_vm_hinted" "Memory in the runs that the agent reported as hints" folding |vm| bytes(vm.hint_pages);
    Counter Bytes "memfold_vm_bogus" "Hinted memory outside RAM or of unknown files: the agent is wrong, or lies"
        folding |vm| bytes(vm.bogus_pages);
    Counter Bytes "memfold_vm_over_limit" "Hinted memory that was ignored because the tables of this VM are at their limit"
        folding |vm| bytes(vm.over_limit_pages);
    Counter Numbers "memfold_vm_hints_dropped" "Hints dropped because too many waited; a sweep finds their pages later"
        folding |vm| vm.hints_dropped as f64;
    Counter Numbers "memfold_vm_events_lost" "Trace events that the guest lost, as its agent reports" folding |vm| vm.events_lost as f64;
    Counter Seconds "memfold_vm_agent_cpu" "CPU time of the guest's agent, as the agent reports" folding |vm| vm.agent_cpu_us as f64 / 1e6;
    Gauge Bytes "memfold_vm_agent_resident_memory" "Resident memory of the guest's agent, as the agent reports" folding |vm| vm.agent_rss_bytes as f64;
    Counter Numbers "memfold_vm_pauses" "Times that the VM was paused to fold again" folding |vm| vm.pauses as f64;
    Gauge Seconds "memfold_vm_pause_longest" "Longest pause of the VM to fold again" folding |vm| vm.pause_max_ms as f64 / 1e3;
    Gauge Seconds "memfold_vm_freeze_longest" "Longest time that a run was frozen, which is the longest wait of a vCPU"
        folding |vm| vm.freeze_max_ns as f64 / 1e9;
    Gauge Bytes "memfold_vm_guest_memory" "MemTotal of the guest, as the guest reports it" guests |guest| Some(guest.mem_total_bytes.0 as f64);
    Gauge Bytes "memfold_vm_guest_available" "MemAvailable of the guest: memory that programs could get without swapping, as the guest reports it"
        guests |guest| Some(guest.mem_available_bytes.0 as f64);
    Gauge Bytes "memfold_vm_guest_free" "MemFree of the guest, as the guest reports it" guests |guest| of_bytes(guest.mem_free_bytes);
    Gauge Bytes "memfold_vm_guest_anon" "AnonPages of the guest: memory of programs, as the guest reports it" guests |guest| of_bytes(guest.anon_pages_bytes);
    Gauge Bytes "memfold_vm_guest_cached" "Cached of the guest: page cache and files in memory, as the guest reports it"
        guests |guest| of_bytes(guest.cached_bytes);
    Gauge Bytes "memfold_vm_guest_dirty" "Dirty of the guest: page cache that is not on disk yet, as the guest reports it"
        guests |guest| of_bytes(guest.dirty_bytes);
    Gauge Bytes "memfold_vm_guest_swap_used" "SwapTotal - SwapFree of the guest, as the guest reports it" guests swap_used;
    Counter Seconds "memfold_vm_guest_pressure_some" "Time in which a task of the guest waited for memory (PSI some), as the guest reports it"
        guests |guest| guest.pressure.map(|pressure| pressure.some_us as f64 / 1e6);
    Counter Seconds "memfold_vm_guest_pressure_full" "Time in which all tasks of the guest waited for memory (PSI full), as the guest reports it"
        guests |guest| guest.pressure.map(|pressure| pressure.full_us as f64 / 1e6);
    Counter Bytes "memfold_vm_guest_refaulted" "Page cache of the guest that was read again soon after its eviction, as the guest reports it"
        guests |guest| guest.workingset_refault_file.map(bytes);
    Counter Bytes "memfold_vm_guest_reclaimed" "Memory that the guest's kernel reclaimed, as the guest reports it" guests |guest| guest.pgsteal.map(bytes);
    Counter Bytes "memfold_vm_guest_swapped_in" "Memory that the guest read from its swap, as the guest reports it" guests |guest| guest.pswpin.map(bytes);
    Counter Numbers "memfold_vm_guest_oom_kills" "Processes that the guest's kernel killed for lack of memory, as the guest reports it"
        guests |guest| guest.oom_kill.map(|kills| kills as f64);
};

fn of_bytes(bytes: Option<ByteSize>) -> Option<f64> {
    bytes.map(|bytes| bytes.0 as f64)
}

fn swap_used(guest: &GuestMemory) -> Option<f64> {
    let used = guest
        .swap_total_bytes?
        .0
        .checked_sub(guest.swap_free_bytes?.0)?;
    Some(used as f64)
}

/// Writes a figure that each VM's guest reports, unless it does not, or the figure is old.
fn guests(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&GuestMemory) -> Option<f64>,
) -> fmt::Result {
    for vm in &scrape.figures.report.ledger.vms {
        let guest = vm.guest.as_ref().filter(|guest| guest.is_fresh());
        if let Some(value) = guest.and_then(figure) {
            let domain = domain_of(vm);
            out.with(&[("vm", &vm.name), ("domain", &domain)], value)?;
        }
    }
    Ok(())
}

fn states(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    for vm in &scrape.figures.vms {
        out.with(&[("vm", &vm.name), ("state", &vm.state)], 1.0)?;
    }
    Ok(())
}

/// Writes a figure from each VM's memory account, unless the VM lacks the figure.
fn accounts(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&VmAccount) -> Option<u64>,
) -> fmt::Result {
    for vm in &scrape.figures.report.ledger.vms {
        if let Some(value) = figure(vm) {
            let domain = domain_of(vm);
            out.with(&[("vm", &vm.name), ("domain", &domain)], value as f64)?;
        }
    }
    Ok(())
}

/// Returns the VM's trust domain by the name that folding uses.
pub(super) fn domain_of(vm: &VmAccount) -> String {
    let alone = || format!("vm/{}", vm.name);
    vm.domain.clone().unwrap_or_else(alone)
}

/// Writes the sizes of the places of each VM's pages.
fn places(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    for vm in &scrape.figures.report.ledger.vms {
        let domain = domain_of(vm);
        for (place, bytes) in [
            ("private", vm.private_bytes),
            ("unfolded", vm.unfolded_bytes),
            ("folded_resident", vm.folded_resident_bytes),
            ("folded_untouched", vm.folded_untouched_bytes),
            ("file_resident", vm.file_resident_bytes),
            ("file_untouched", vm.file_untouched_bytes),
            ("zero", vm.zero_bytes),
            ("swapped", vm.swapped_bytes),
            ("free", vm.free_bytes),
        ] {
            let labels = [
                ("vm", vm.name.as_str()),
                ("domain", &domain),
                ("place", place),
            ];
            out.with(&labels, bytes.0 as f64)?;
        }
    }
    Ok(())
}

/// Writes a figure of folding for each VM.
fn folding(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&VmStats) -> f64) -> fmt::Result {
    for vm in &scrape.figures.report.fold.vms {
        out.with(&[("vm", &vm.name), ("domain", &vm.domain)], figure(vm))?;
    }
    Ok(())
}
