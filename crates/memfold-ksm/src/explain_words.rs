//! Texts of `memfold ksm explain`: a description of each reason why pages do not merge, and its
//! remedy.

use super::cause::Cause;
use super::facts::Facts;
use super::passes::Passes;

/// Returns a duration as text for people.
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

fn number(value: Option<u64>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}

/// Returns the description of a cause.
pub(super) fn words(cause: Cause, facts: &Facts, passes: &Passes) -> String {
    let host = facts.host.clone().unwrap_or_default();
    let steered = facts.steered.as_ref();
    match cause {
        Cause::NoKsm => "this kernel has no KSM (no /sys/kernel/mm/ksm)".into(),
        Cause::Stopped => {
            let pass = passes.pass_s.map_or_else(String::new, |pass| {
                format!(
                    "; with the present settings pages would merge within {} of its start",
                    time(2.0 * pass)
                )
            });
            format!(
                "KSM is stopped (/sys/kernel/mm/ksm/run is 0): merged pages stay merged, no further page merges{pass}"
            )
        }
        Cause::Unmerged => "KSM is stopped and everything was unmerged (/sys/kernel/mm/ksm/run is 2)".into(),
        Cause::Held => {
            let why = steered.and_then(|s| s.held.as_deref());
            format!("memfold steers KSM and has paused it: {}", why.unwrap_or_default())
        }
        Cause::MaxPageSharing => format!(
            "{} contents on this host have more than max_page_sharing ({}) mappings and take one more page for each so many mappings",
            number(host.status.stable_node_chains),
            number(host.settings.max_page_sharing)
        ),
        Cause::UseZeroPages => "use_zero_pages is 0: zero pages (their number is from a sample of this VM's memory) merge with each other, and each max_page_sharing of them keep one page".into(),
        Cause::AcrossNodes => "merge_across_nodes is 0: equal pages of different NUMA nodes do not merge".into(),
        Cause::SmartScan => format!(
            "smart_scan skips pages that did not merge in several passes ({} visits skipped so far on this host): an equal page that appears later is found later",
            number(host.status.pages_skipped)
        ),
        Cause::AnotherDomain => format!(
            "KSM runs for trust domain '{}', and this VM belongs to '{}': KSM merges across VMs, so memfold started the VM with mem-merge=off",
            steered.map_or("another", |s| &s.domain),
            facts.domain.as_deref().unwrap_or("none")
        ),
        Cause::NoDomain => "the VM has no trust domain and so shares with no other VM: memfold started it with mem-merge=off".into(),
        Cause::MergeOff => "QEMU was told not to offer this memory to KSM (-machine mem-merge=off)".into(),
        Cause::Refused => "this memory is not mergeable (no 'mg' in VmFlags) though QEMU offers it by default, and the process has a second seccomp filter, which refuses madvise(MADV_MERGEABLE)".into(),
        Cause::NotAdvised => "this memory is not mergeable (no 'mg' in VmFlags): no process offered it, or prctl(PR_SET_MEMORY_MERGE, 0) withdrew it".into(),
        Cause::Shared => "shared memory: KSM merges private anonymous pages only".into(),
        Cause::Hugetlb => "pages of hugetlbfs: KSM does not scan them".into(),
        Cause::Pmem => "a shared view of a file (persistent memory, DAX segment): its pages are the file's, which KSM does not scan".into(),
        Cause::Folded => "folded: these pages lie in memfold's page store and are already shared; KSM does not scan them".into(),
        Cause::FileView => "a private view of a file (a snapshot's image, or a memory backend on a file): KSM scans neither the file's pages nor the guest's private copies of them".into(),
        Cause::Swapped => "swapped out: KSM scans only pages in memory".into(),
        Cause::NotPresent => "not in memory: never used by the guest, or given back".into(),
        Cause::TooYoung => {
            let pass = passes.pass_s.map_or_else(
                || "pages_to_scan is 0: ksmd scans no pages".to_owned(),
                |pass| {
                    format!(
                        "a full scan takes {} (pages_to_scan {}, sleep_millisecs {}, {} mergeable pages on the host)",
                        time(pass),
                        number(host.settings.pages_to_scan),
                        number(host.settings.sleep_millisecs),
                        host.mergeable_pages
                    )
                },
            );
            format!(
                "ksmd has not scanned this memory twice, which a page needs unless a merged page equals it: {:.0} % of this VM's pages are scanned; {pass}",
                passes.visited * 100.0
            )
        }
        Cause::NotVisited => "used since ksmd's last pass".into(),
        Cause::Unique => "scanned in two passes or more, and no other page was equal (pages_unshared)".into(),
        Cause::Volatile => "changed between two passes (pages_volatile): pages that change faster than ksmd scans do not merge".into(),
        Cause::HugePages => "in transparent huge pages: KSM splits one when a page of it merges, which costs the guest TLB misses (its zero pages then map the kernel's zero page, Linux 6.13); khugepaged may build the huge page again".into(),
    }
}

/// Returns the remedy for a cause.
pub(super) fn fix(cause: Cause, facts: &Facts) -> String {
    let domain = facts.domain.as_deref().unwrap_or("D");
    match cause {
        Cause::NoKsm => "a kernel with CONFIG_KSM".into(),
        Cause::Stopped | Cause::Unmerged => format!(
            "memfold ksm start --domain {domain} (or echo 1 > /sys/kernel/mm/ksm/run, which knows no trust domains)"
        ),
        Cause::Held => "nothing: KSM resumes by itself when the cause has ended".into(),
        Cause::AnotherDomain => format!(
            "memfold ksm stop, restart the VM, memfold ksm start --domain {domain}; KSM serves one trust domain a host"
        ),
        Cause::NoDomain => "start the VM with --domain".into(),
        Cause::MergeOff => "start QEMU without that option; under memfold with merge = \"domain\"".into(),
        Cause::Refused => "allow madvise in the filter (container runtime, SystemCallFilter= of systemd), and restart the VM".into(),
        Cause::NotAdvised => "start QEMU with -machine mem-merge=on".into(),
        Cause::Shared => "use memory-backend-ram with share=off, which also lets memfold fold it".into(),
        Cause::Hugetlb => "use memory-backend-ram; transparent huge pages may stay on".into(),
        Cause::Pmem | Cause::Folded | Cause::Unique | Cause::NotPresent => "no action is needed".into(),
        Cause::FileView => "no action is needed; clones share their image, and fold what they read alike".into(),
        Cause::Swapped => "more free memory".into(),
        Cause::TooYoung | Cause::NotVisited => "wait, or scan faster: memfold ksm start --cpu PERCENT --target SECONDS".into(),
        Cause::Volatile => "scan faster: memfold ksm start --cpu PERCENT --target SECONDS".into(),
        Cause::HugePages => "no action is needed; /sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_shared limits which huge pages khugepaged builds again".into(),
        Cause::MaxPageSharing => "a larger max_page_sharing, after echo 2 > /sys/kernel/mm/ksm/run; the kernel's walks over mappings get longer".into(),
        Cause::UseZeroPages => "echo 1 > /sys/kernel/mm/ksm/use_zero_pages; memfold frees zero pages by itself where it folds".into(),
        Cause::AcrossNodes => "echo 1 > /sys/kernel/mm/ksm/merge_across_nodes, after echo 2 > /sys/kernel/mm/ksm/run".into(),
        Cause::SmartScan => "echo 0 > /sys/kernel/mm/ksm/smart_scan: each pass takes more CPU".into(),
    }
}
