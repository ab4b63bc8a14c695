//! VMs: where their memory is, and what folding does with it.
//!
//! About fifty samples a VM. `vm` is its name; `domain` its trust domain, or `vm/NAME` for one that shares with nobody.

use std::fmt;

use memfold_fold::VmStats;
use memfold_ledger::VmAccount;
use memfold_units::PAGE_SIZE;

use super::Scrape;
use super::families::In::{Bytes, Numbers, Seconds};
use super::families::{Family, Samples, counter, flag, gauge};

pub(super) static FAMILIES: &[Family] = &[
    gauge(
        "memfold_vms",
        Numbers,
        "VMs that the daemon knows",
        |s, out| out.one(s.figures.vms.len() as f64),
    ),
    gauge(
        "memfold_vm_state",
        Numbers,
        "1: what the VM does: running, or why not (QEMU's run state, starting, taking-over, silent)",
        |s, out| {
            for vm in &s.figures.vms {
                out.with(&[("vm", &vm.name), ("state", &vm.state)], 1.0)?;
            }
            Ok(())
        },
    ),
    gauge(
        "memfold_vm_ram",
        Bytes,
        "Guest RAM as QEMU made it: the sum of its places",
        |s, out| accounts(s, out, |vm| Some(vm.ram_bytes.0)),
    ),
    gauge(
        "memfold_vm_ram_place",
        Bytes,
        "Guest RAM, each page in exactly one place",
        places,
    ),
    gauge(
        "memfold_vm_huge",
        Bytes,
        "Guest RAM in memory that is mapped by huge pages",
        |s, out| accounts(s, out, |vm| Some(vm.huge_bytes.0)),
    ),
    gauge(
        "memfold_vm_ksm_merged",
        Bytes,
        "Guest RAM that ksmd merged; absent before Linux 6.6",
        |s, out| accounts(s, out, |vm| vm.ksm_merged_bytes.map(|b| b.0)),
    ),
    gauge(
        "memfold_vm_pss",
        Bytes,
        "PSS of the QEMU process",
        |s, out| accounts(s, out, |vm| Some(vm.pss_bytes.0)),
    ),
    gauge(
        "memfold_vm_store_pss",
        Bytes,
        "Of it, shares of page stores",
        |s, out| accounts(s, out, |vm| Some(vm.store_pss_bytes.0)),
    ),
    gauge(
        "memfold_vm_image_pss",
        Bytes,
        "Of it, shares of the snapshot that it runs from",
        |s, out| accounts(s, out, |vm| Some(vm.file_pss_bytes.0)),
    ),
    gauge(
        "memfold_vm_segment_pss",
        Bytes,
        "Of it, shares of segments",
        |s, out| accounts(s, out, |vm| Some(vm.segment_pss_bytes.0)),
    ),
    gauge(
        "memfold_vm_qemu_pss",
        Bytes,
        "Of it, what lies outside guest RAM",
        |s, out| accounts(s, out, |vm| Some(vm.qemu_pss_bytes.0)),
    ),
    gauge(
        "memfold_vm_page_tables",
        Bytes,
        "Page tables of the QEMU process, in no PSS",
        |s, out| accounts(s, out, |vm| Some(vm.page_table_bytes.0)),
    ),
    gauge(
        "memfold_vm_mappings",
        Numbers,
        "Mappings of the QEMU process",
        |s, out| accounts(s, out, |vm| Some(vm.mappings)),
    ),
    gauge(
        "memfold_vm_store_mappings",
        Numbers,
        "Of them, mappings of page stores",
        |s, out| accounts(s, out, |vm| Some(vm.store_mappings)),
    ),
    gauge(
        "memfold_vm_folding",
        Numbers,
        "1: it is folded; 0: something keeps it from that (memfold vm list says what)",
        |s, out| folding(s, out, |vm| flag(vm.problem.is_none())),
    ),
    gauge(
        "memfold_vm_agent_ready",
        Numbers,
        "1: its agent is connected and has told what is cached",
        |s, out| folding(s, out, |vm| flag(vm.agent_ready)),
    ),
    gauge(
        "memfold_vm_cached",
        Bytes,
        "Page cache whose file is known",
        |s, out| folding(s, out, |vm| bytes(vm.cached_pages)),
    ),
    gauge(
        "memfold_vm_matched",
        Bytes,
        "Of it, what the store holds or another file of the same content caches",
        |s, out| folding(s, out, |vm| bytes(vm.matched_pages)),
    ),
    gauge(
        "memfold_vm_matched_folded",
        Bytes,
        "Of the matched, what is folded and not copied since",
        |s, out| folding(s, out, |vm| bytes(vm.matched_folded_pages)),
    ),
    gauge(
        "memfold_vm_store_mapped",
        Bytes,
        "Guest RAM where a store is mapped",
        |s, out| folding(s, out, |vm| bytes(vm.mapped_pages)),
    ),
    gauge(
        "memfold_vm_store_copied",
        Bytes,
        "Of it, private copies: the guest wrote since",
        |s, out| folding(s, out, |vm| bytes(vm.copied_pages)),
    ),
    gauge(
        "memfold_vm_image_mapped",
        Bytes,
        "Guest RAM in views of the snapshot that it runs from",
        |s, out| folding(s, out, |vm| bytes(vm.template_pages)),
    ),
    gauge(
        "memfold_vm_image_copied",
        Bytes,
        "Of it, private copies: the guest wrote since",
        |s, out| folding(s, out, |vm| bytes(vm.template_copied_pages)),
    ),
    counter(
        "memfold_vm_folded",
        Bytes,
        "Folded from anonymous memory",
        |s, out| folding(s, out, |vm| bytes(vm.folded_pages)),
    ),
    counter("memfold_vm_refolded", Bytes, "Folded again", |s, out| {
        folding(s, out, |vm| bytes(vm.refolded_pages))
    }),
    counter(
        "memfold_vm_folded_back",
        Bytes,
        "Private copies that held again what the snapshot holds, and were given back",
        |s, out| folding(s, out, |vm| bytes(vm.folded_back_pages)),
    ),
    counter(
        "memfold_vm_zero_dropped",
        Bytes,
        "Pages of zeroes given back",
        |s, out| folding(s, out, |vm| bytes(vm.zero_pages)),
    ),
    counter(
        "memfold_vm_differing",
        Bytes,
        "Compared and different: nothing was folded",
        |s, out| folding(s, out, |vm| bytes(vm.differing_pages)),
    ),
    counter(
        "memfold_vm_busy",
        Bytes,
        "Not folded because a device was using them",
        |s, out| folding(s, out, |vm| bytes(vm.busy_pages)),
    ),
    counter(
        "memfold_vm_hint_runs",
        Numbers,
        "Runs that the agent offered",
        |s, out| folding(s, out, |vm| vm.hint_runs as f64),
    ),
    counter("memfold_vm_hinted", Bytes, "Pages in them", |s, out| {
        folding(s, out, |vm| bytes(vm.hint_pages))
    }),
    counter(
        "memfold_vm_bogus",
        Bytes,
        "Offered outside RAM or of unknown files: the agent is wrong, or lies",
        |s, out| folding(s, out, |vm| bytes(vm.bogus_pages)),
    ),
    counter(
        "memfold_vm_over_limit",
        Bytes,
        "Not taken on because the tables of this VM are at their limit",
        |s, out| folding(s, out, |vm| bytes(vm.over_limit_pages)),
    ),
    counter(
        "memfold_vm_hints_dropped",
        Numbers,
        "Hints dropped because too many waited; a sweep finds their pages later",
        |s, out| folding(s, out, |vm| vm.hints_dropped as f64),
    ),
    counter(
        "memfold_vm_events_lost",
        Numbers,
        "Events that the guest lost, as its agent says",
        |s, out| folding(s, out, |vm| vm.events_lost as f64),
    ),
    counter(
        "memfold_vm_agent_cpu",
        Seconds,
        "CPU time of the agent, as it says",
        |s, out| folding(s, out, |vm| vm.agent_cpu_us as f64 / 1e6),
    ),
    gauge(
        "memfold_vm_agent_resident_memory",
        Bytes,
        "Resident memory of the agent, as it says",
        |s, out| folding(s, out, |vm| vm.agent_rss_bytes as f64),
    ),
    counter(
        "memfold_vm_pauses",
        Numbers,
        "Times that the VM was stopped to fold again",
        |s, out| folding(s, out, |vm| vm.pauses as f64),
    ),
    gauge(
        "memfold_vm_pause_longest",
        Seconds,
        "The longest of them",
        |s, out| folding(s, out, |vm| vm.pause_max_ms as f64 / 1e3),
    ),
    gauge(
        "memfold_vm_freeze_longest",
        Seconds,
        "Longest time that a run was frozen: the longest wait of a vCPU",
        |s, out| folding(s, out, |vm| vm.freeze_max_ns as f64 / 1e9),
    ),
];

fn bytes(pages: u64) -> f64 {
    (pages * PAGE_SIZE) as f64
}

/// A figure of each VM's account, where there is one.
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

/// As folding names it.
fn domain_of(vm: &VmAccount) -> String {
    let alone = || format!("vm/{}", vm.name);
    vm.domain.clone().unwrap_or_else(alone)
}

/// Where each VM's pages are.
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

/// A figure of what folding has done in each VM.
fn folding(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&VmStats) -> f64) -> fmt::Result {
    for vm in &scrape.figures.report.fold.vms {
        out.with(&[("vm", &vm.name), ("domain", &vm.domain)], figure(vm))?;
    }
    Ok(())
}
