//! Prints the ledger's report as tables for people.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, TableComponent, presets};
use memfold_units::ByteSize;

use super::account::{Report, VmAccount};

const LEGEND: &str = "\
backed = private + unfolded + folded pages in its page table + template or shared files.  folded: mapped to the page store, not
copied.  unfolded: folded once, written since.  zero and free cost nothing.  PSS: each page divided by how many map it.
QEMU: the process beside guest RAM (TCG's code included), with its page tables.";

/// Returns the whole report as text: VMs, host, savings, and sums that disagree.
#[must_use]
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    if report.vms.is_empty() {
        text.push_str("no VMs\n");
    } else {
        let _ = writeln!(text, "{}\n{LEGEND}", vms(&report.vms));
    }
    let _ = writeln!(text, "\n{}", host(report));
    for disagreement in &report.disagreements {
        let _ = writeln!(text, "does not agree: {disagreement}");
    }
    text
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    // There are lines only around the header and at both ends, none between rows.
    for line in [
        TableComponent::HorizontalLines,
        TableComponent::MiddleIntersections,
        TableComponent::LeftBorderIntersections,
        TableComponent::RightBorderIntersections,
    ] {
        table.remove_style(line);
    }
    table.set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn vms(vms: &[VmAccount]) -> Table {
    let swapped = vms.iter().any(|v| v.swapped_bytes.0 > 0);
    let mut header = vec![
        "VM", "domain", "RAM", "backed", "folded", "unfolded", "private", "zero", "free", "KSM",
        "huge", "PSS", "QEMU", "mappings",
    ];
    if swapped {
        header.push("swapped");
    }
    let mut table = table(&header);
    let row = |vm: &VmAccount, name: &str, domain: &str| {
        let mut cells = vec![name.to_owned(), domain.to_owned()];
        cells.extend(
            [
                vm.ram_bytes,
                vm.backed_bytes,
                vm.folded_bytes,
                vm.unfolded_bytes,
                vm.private_bytes,
                vm.zero_bytes,
                vm.free_bytes,
            ]
            .map(size),
        );
        cells.push(vm.ksm_merged_bytes.map_or_else(|| "?".into(), size));
        cells.extend([vm.huge_bytes, vm.pss_bytes, vm.overhead_bytes()].map(size));
        cells.push(vm.mappings.to_string());
        if swapped {
            cells.push(size(vm.swapped_bytes));
        }
        cells
    };
    for vm in vms {
        table.add_row(row(vm, &vm.name, vm.domain.as_deref().unwrap_or("-")));
    }
    if vms.len() > 1 {
        table.add_row(row(&total(vms), "all", ""));
    }
    table
}

/// Returns the sums of the table's columns.
fn total(vms: &[VmAccount]) -> VmAccount {
    let mut sum = VmAccount::default();
    for vm in vms {
        sum.ram_bytes += vm.ram_bytes;
        sum.backed_bytes += vm.backed_bytes;
        sum.folded_bytes += vm.folded_bytes;
        sum.unfolded_bytes += vm.unfolded_bytes;
        sum.private_bytes += vm.private_bytes;
        sum.zero_bytes += vm.zero_bytes;
        sum.free_bytes += vm.free_bytes;
        sum.huge_bytes += vm.huge_bytes;
        sum.pss_bytes += vm.pss_bytes;
        sum.qemu_pss_bytes += vm.qemu_pss_bytes;
        sum.segment_pss_bytes += vm.segment_pss_bytes;
        sum.page_table_bytes += vm.page_table_bytes;
        sum.swapped_bytes += vm.swapped_bytes;
        sum.mappings += vm.mappings;
        if let Some(merged) = vm.ksm_merged_bytes {
            *sum.ksm_merged_bytes.get_or_insert_default() += merged;
        }
    }
    sum
}

fn host(report: &Report) -> Table {
    let host = &report.host;
    let mut table = table(&["host", ""]);
    let mut line = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    line("memory", size(host.mem_total_bytes));
    line("available", size(host.mem_available_bytes));
    line(
        "  free beside, in the CPUs' own lists",
        size(host.per_cpu_free_bytes),
    );
    line("VMs + page stores + memfold", size(host.physical_bytes));
    for store in &host.stores {
        line(
            &format!("  page store of domain '{}'", store.domain),
            size(store.allocated_bytes),
        );
    }
    line(
        "  memfold itself",
        size(host.own.pss_bytes - host.own.store_pss_bytes + host.own.page_table_bytes),
    );
    if host.images_bytes.0 > 0 {
        line("snapshots laid out in memory", size(host.images_bytes));
    }
    if host.lent_bytes.0 > 0 {
        line("lent to other hosts", size(host.lent_bytes));
    }
    if let Some(ksm) = host.ksm {
        let state = if ksm.run == 1 { "running" } else { "stopped" };
        line(
            &format!("KSM ({state})"),
            format!("{} pages sharing", ksm.pages_sharing),
        );
        line(
            "  ksmd's CPU since boot",
            format!("{:.1} s", ksm.ksmd_cpu_s),
        );
    }
    line("saved by folding", signed(host.saved_by_folding_bytes));
    if host.saved_by_clones_bytes != 0 {
        line("saved by clones", signed(host.saved_by_clones_bytes));
    }
    if host.saved_by_segments_bytes != 0 {
        line("saved by segments", signed(host.saved_by_segments_bytes));
    }
    line("saved by KSM", signed(host.saved_by_ksm_bytes));
    line("saved by zero pages", size(host.saved_by_zero_drop_bytes));
    line("saved, less memfold itself", signed(host.saved_net_bytes));
    if let Some(debt) = &report.debt {
        let bytes = |bytes| size(ByteSize(bytes));
        line("shared, and owed when written to", bytes(debt.debt_bytes));
        line("  needed at once", bytes(debt.needed_bytes));
        line("  available for it", bytes(debt.absorbable_bytes));
        line("  brake", debt.level.to_string());
    }
    table
}

fn size(bytes: ByteSize) -> String {
    bytes.to_string()
}

/// Returns a number of bytes as text, with a sign if it is negative.
pub fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", ByteSize(bytes.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ledger_table_columns_are_aligned_and_negative_savings_have_a_minus_sign() {
        let mut report = Report::default();
        for (name, mib) in [("web", 512), ("database", 2)] {
            report.vms.push(VmAccount {
                name: name.into(),
                ram_bytes: ByteSize::mib(mib),
                ..VmAccount::default()
            });
        }
        report.host.saved_by_folding_bytes = -(3 << 20);
        let text = render(&report);
        let end = |needle: &str| {
            let line = text.lines().find(|l| l.contains(needle)).unwrap();
            line.find("iB").unwrap()
        };
        assert_eq!(end(" web "), end(" database "));
        assert!(text.contains("-3.00 MiB"), "{text}");
        assert!(text.contains("514 MiB"), "no total in\n{text}");
    }
}
