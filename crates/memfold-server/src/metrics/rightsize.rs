//! Metrics of right-sizing: its mode, the host's rung, orders, and each VM's size and need.

use std::fmt;

use memfold_api::{OrderCount, RightsizeReport, VmRightsize};

use super::families::{Family, Samples, Scrape, any, families};
use super::vms::domain_of;

pub(super) static FAMILIES: &[Family] = families! {
    Gauge Numbers "memfold_rightsize_mode" "Whether right-sizing changes the memory of VMs: 0 off, 1 watch (it only says what it would do), 2 on"
        report |report| Some(f64::from(report.mode as u8));
    Gauge Numbers "memfold_rightsize_rung" "How short the host is: 0 ample, 1 trim, 2 balloon, 3 lent, 4 brake; absent while right-sizing is off"
        report |report| report.rung_number().map(f64::from);
    Counter Numbers "memfold_rightsize_orders" "Orders of right-sizing, by what was ordered and why" orders |order| order.count;
    Counter Numbers "memfold_rightsize_orders_failed" "Orders of right-sizing that could not be carried out" orders |order| order.failed;
    Gauge Bytes "memfold_vm_size" "Memory that the guest may use: RAM and plugged memory less what the balloon holds; absent while right-sizing is off"
        vms |vm| Some(vm.size_bytes as f64);
    Gauge Bytes "memfold_vm_plugged" "Part of the size that virtio-mem has plugged; absent without such a device"
        vms |vm| vm.plugged_bytes.map(|bytes| bytes as f64);
    Gauge Bytes "memfold_vm_working_set" "Memory that the guest would miss; absent without a believable report of the guest"
        vms |vm| known(vm).map(|vm| vm.working_set_bytes as f64);
    Gauge Bytes "memfold_vm_size_target" "Size that the VM should have: working set and buffer, within its limits; absent as the working set"
        vms |vm| known(vm).map(|vm| vm.target_bytes as f64);
    Gauge Ratio "memfold_vm_memory_pressure" "Share of time in which a task of the guest waited for memory; absent if the guest does not report it"
        vms |vm| vm.pressure;
    Gauge Numbers "memfold_vm_pinned" "1: the VM is pinned, so its size does not change" any pinned;
};

/// Returns the VM if its need is known.
fn known(vm: &VmRightsize) -> Option<&VmRightsize> {
    (vm.basis != "unknown").then_some(vm)
}

fn report(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&RightsizeReport) -> Option<f64>,
) -> fmt::Result {
    out.maybe(figure(&scrape.figures.rightsizing))
}

fn orders(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&OrderCount) -> u64) -> fmt::Result {
    for order in &scrape.figures.rightsizing.orders {
        let labels = [("kind", &*order.kind), ("reason", &*order.reason)];
        out.with(&labels, figure(order) as f64)?;
    }
    Ok(())
}

/// Writes a figure of each VM that the account contains, unless the VM lacks the figure.
fn vms(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&VmRightsize) -> Option<f64>,
) -> fmt::Result {
    let accounts = &scrape.figures.report.ledger.vms;
    for vm in &scrape.figures.rightsizing.vms {
        let account = accounts.iter().find(|account| account.name == vm.vm);
        if let (Some(account), Some(value)) = (account, figure(vm)) {
            let domain = domain_of(account);
            out.with(&[("vm", &vm.vm), ("domain", &domain)], value)?;
        }
    }
    Ok(())
}

fn pinned(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    vms(scrape, out, |vm| {
        Some(f64::from(u8::from(vm.sizing.pinned == Some(true))))
    })
}
