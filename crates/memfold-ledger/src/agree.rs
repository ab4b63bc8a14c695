//! Checks the ledger. Sums of the ledger's accounts must agree with sums that the kernel computes
//! independently, such as a process's Rss.

use memfold_units::ByteSize;

use super::account::{Disagreement, HostAccount, Report, VmAccount, signed};

/// Largest difference between two sums that counts as agreement.
const TOLERANCE_PERCENT: f64 = 2.0;

/// Largest difference that is ignored, however small the sums are: noise of reading a running VM
/// (64 pages).
const SLACK_BYTES: u64 = 64 * 4096;

fn off_percent(ledger: u64, kernel: u64) -> f64 {
    let off = (ledger as f64 - kernel as f64) / kernel.max(1) as f64;
    // The percentage is rounded to two decimals.
    (off * 1e4).round() / 1e2
}

struct Checks(Vec<Disagreement>);

impl Checks {
    fn equal(&mut self, vm: Option<&VmAccount>, what: &str, ledger: ByteSize, kernel: ByteSize) {
        let off_percent = off_percent(ledger.0, kernel.0);
        if off_percent.abs() > TOLERANCE_PERCENT && ledger.0.abs_diff(kernel.0) > SLACK_BYTES {
            self.0.push(Disagreement {
                vm: vm.map(|v| v.name.clone()),
                what: what.to_owned(),
                ledger_bytes: ledger,
                kernel_bytes: kernel,
                off_percent,
            });
        }
    }

    fn at_most(&mut self, what: &str, ledger: ByteSize, kernel: ByteSize) {
        if ledger > kernel {
            self.equal(None, what, ledger, kernel);
        }
    }
}

/// Returns the pairs of sums in `report` that should be equal and differ by more than 2 %; normally
/// none.
#[must_use]
pub fn check(report: &Report) -> Vec<Disagreement> {
    let mut checks = Checks(Vec::new());
    for vm in &report.vms {
        let one = Some(vm);
        if vm.sum_of_parts() != vm.ram_bytes {
            checks.0.push(Disagreement {
                vm: Some(vm.name.clone()),
                what: "guest RAM against the sum of its parts".to_owned(),
                ledger_bytes: vm.sum_of_parts(),
                kernel_bytes: vm.ram_bytes,
                off_percent: off_percent(vm.sum_of_parts().0, vm.ram_bytes.0),
            });
        }
        checks.equal(
            one,
            "backed guest RAM against Rss in smaps",
            vm.backed_bytes,
            vm.ram_rss_bytes,
        );
        checks.equal(
            one,
            "guest RAM + QEMU against Pss in smaps_rollup",
            vm.ram_pss_bytes + vm.qemu_pss_bytes,
            vm.pss_bytes,
        );
    }

    let host = &report.host;
    let shares: ByteSize = report.vms.iter().map(|v| v.store_pss_bytes).sum();
    checks.at_most(
        "shares of store pages in PSS against the stores' allocation",
        shares + host.own.store_pss_bytes,
        host.stores_bytes,
    );
    let anon: ByteSize = report.vms.iter().map(|v| v.pss_anon_bytes).sum();
    checks.equal(
        None,
        "anonymous memory of all processes against AnonPages",
        anon + host.own.pss_anon_bytes + host.others_anon_bytes,
        host.anon_pages_bytes,
    );
    checks.at_most(
        "page stores against Shmem",
        host.stores_bytes,
        host.shmem_bytes,
    );
    checks.equal(
        None,
        "memory not in use against MemAvailable",
        host.mem_total_bytes - not_available(report),
        host.mem_available_bytes,
    );
    if let Some(ksm) = host.ksm {
        let merged: ByteSize = report.vms.iter().filter_map(|v| v.ksm_merged_bytes).sum();
        checks.at_most(
            "pages merged by KSM against pages_shared + pages_sharing",
            merged,
            ByteSize((ksm.pages_shared + ksm.pages_sharing) * memfold_units::PAGE_SIZE),
        );
    }
    checks.0
}

/// Returns the memory that is not in `MemAvailable`: VMs, memfold, page stores, other processes,
/// other memory files, the kernel, and the kernel's reserves.
fn not_available(report: &Report) -> ByteSize {
    let host = &report.host;
    let page_tables: ByteSize = report.vms.iter().map(|v| v.page_table_bytes).sum();
    let shmem: ByteSize = report
        .vms
        .iter()
        .map(|v| v.pss_shmem_bytes - v.store_pss_bytes)
        .sum();
    let our_shmem = shmem + host.own.pss_shmem_bytes - host.own.store_pss_bytes
        + host.stores_bytes
        + unmapped_images(host.images_bytes, &report.vms);
    let other_shmem = host.shmem_bytes - our_shmem;
    // Page tables are part of the kernel's memory too, so they are subtracted here to count once.
    host.unreclaimable_bytes - page_tables - host.own.page_table_bytes
        + host.others_anon_bytes
        + other_shmem
        + host.kernel_bytes
        + host.reserve_bytes
        + host.per_cpu_free_bytes
}

/// Returns the part of assembled RAM images that no VM maps. `images`: the memory of all of them.
pub(super) fn unmapped_images(images: ByteSize, vms: &[VmAccount]) -> ByteSize {
    let mapped: ByteSize = vms.iter().map(|vm| vm.image_shmem_bytes).sum();
    images - mapped
}

/// Compares the change of `MemAvailable` between two reports with the change of the ledger's sums,
/// and returns the two changes if they disagree. If VMs use a small part of the host's memory, this
/// check finds smaller errors than [`check`]. Memory that other processes and the kernel took or
/// gave back meanwhile is part of the sums, so such changes do not hide an error. The two changes
/// may differ by 2 % of the larger of the VMs' change and `MemAvailable`'s change.
#[must_use]
pub fn check_change(before: &Report, after: &Report) -> Option<Disagreement> {
    // Memory sizes are far below 2^63.
    let change = |of: fn(&Report) -> ByteSize| signed(of(after)) - signed(of(before));
    let ledger = change(not_available);
    let kernel = change(|report| report.host.mem_total_bytes - report.host.mem_available_bytes);
    let vms = change(|report| report.host.unreclaimable_bytes);
    let scale = vms.unsigned_abs().max(kernel.unsigned_abs());
    let off = ledger.abs_diff(kernel);
    let off_percent = off_percent(scale.saturating_add(off), scale);
    (off > SLACK_BYTES && off_percent > TOLERANCE_PERCENT).then(|| Disagreement {
        vm: None,
        what: "change of memory in use against the change of MemAvailable".to_owned(),
        ledger_bytes: ByteSize(ledger.unsigned_abs()),
        kernel_bytes: ByteSize(kernel.unsigned_abs()),
        off_percent,
    })
}

impl Report {
    /// Makes a report of `host` and `vms` with the present time, and records which of the report's
    /// sums disagree.
    #[must_use]
    pub fn new(host: HostAccount, vms: Vec<VmAccount>) -> Self {
        let taken_unix_s = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0.0, |d| d.as_millis() as f64 / 1e3);
        let mut report = Self {
            taken_unix_s,
            host,
            vms,
            debt: None,
            disagreements: Vec::new(),
        };
        report.disagreements = check(&report);
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mib(n: u64) -> ByteSize {
        ByteSize::mib(n)
    }

    fn agreeing() -> Report {
        let vm = VmAccount {
            name: "a".into(),
            ram_bytes: mib(512),
            private_bytes: mib(100),
            folded_resident_bytes: mib(50),
            free_bytes: mib(362),
            backed_bytes: mib(150),
            folded_bytes: mib(50),
            ram_rss_bytes: mib(150),
            ram_pss_bytes: mib(125),
            qemu_pss_bytes: mib(40),
            pss_bytes: mib(165),
            pss_anon_bytes: mib(140),
            pss_shmem_bytes: mib(25),
            store_pss_bytes: mib(25),
            ..VmAccount::default()
        };
        let mut report = Report::default();
        report.vms.push(vm);
        let host = &mut report.host;
        host.stores_bytes = mib(50);
        host.shmem_bytes = mib(60);
        host.anon_pages_bytes = mib(200);
        host.others_anon_bytes = mib(60);
        host.unreclaimable_bytes = mib(190);
        host.kernel_bytes = mib(100);
        host.reserve_bytes = mib(20);
        host.mem_total_bytes = mib(1000);
        host.mem_available_bytes = mib(1000 - 140 - 60 - 60 - 100 - 20);
        report
    }

    #[test]
    fn if_all_sums_of_the_ledger_match_the_kernels_no_disagreement_is_reported() {
        assert_eq!(check(&agreeing()), []);
    }

    #[test]
    fn if_a_sum_of_the_ledger_does_not_match_the_kernels_the_sum_is_named() {
        type Break = fn(&mut Report);
        let cases: [(&str, Break); 6] = [
            ("sum of its parts", |r| r.vms[0].free_bytes = mib(361)),
            ("Rss in smaps", |r| r.vms[0].ram_rss_bytes = mib(160)),
            ("smaps_rollup", |r| r.vms[0].pss_bytes = mib(170)),
            ("AnonPages", |r| r.host.others_anon_bytes = mib(66)),
            ("MemAvailable", |r| r.host.kernel_bytes = mib(120)),
            ("stores' allocation", |r| r.host.stores_bytes = mib(24)),
        ];
        for (name, spoil) in cases {
            let mut report = agreeing();
            spoil(&mut report);
            let found = check(&report);
            assert!(
                found.iter().any(|d| d.what.contains(name)),
                "{name}: {found:?}"
            );
        }
    }

    #[test]
    fn if_the_ledger_and_mem_available_change_by_different_amounts_this_is_reported() {
        let before = agreeing();
        let mut after = agreeing();
        after.host.unreclaimable_bytes = mib(290);
        after.host.mem_available_bytes = before.host.mem_available_bytes - mib(100);
        assert_eq!(check_change(&before, &after), None);
        after.host.mem_available_bytes = before.host.mem_available_bytes - mib(103);
        assert!(check_change(&before, &after).is_some());
        // Another process gave back as much as the VMs took. The total is unchanged, but an error
        // of 3 MiB is still 3 % of the VMs' change.
        after.host.others_anon_bytes = mib(0);
        after.host.mem_available_bytes = before.host.mem_available_bytes - mib(40);
        assert_eq!(check_change(&before, &after), None);
        after.host.mem_available_bytes = before.host.mem_available_bytes - mib(43);
        assert!(check_change(&before, &after).is_some());
    }
}
