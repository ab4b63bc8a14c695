//! Prints the ledger's report as tables for people (`memfold report`).

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, TableComponent, presets};
use memfold_units::ByteSize;

use super::account::{Report, VmAccount};

const LEGEND: &str = "\
backed = private + unfolded + folded pages in its page table + template or shared files.  folded: mapped to the page store, not
copied.  unfolded: folded once, written since.  zero and free cost nothing.  PSS: each page divided by how many map it.
QEMU: the process beside guest RAM (TCG's code included), with its page tables.";

/// Returns the whole report as text: a table of the VMs, a table of the host with the savings, and
/// the sums that disagree.
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

type Column = (&'static str, fn(&VmAccount) -> Option<ByteSize>);

/// Columns of sizes in the table of VMs; `None`: unknown.
const COLUMNS: [Column; 11] = [
    ("RAM", |vm| Some(vm.ram_bytes)),
    ("backed", |vm| Some(vm.backed_bytes)),
    ("folded", |vm| Some(vm.folded_bytes)),
    ("unfolded", |vm| Some(vm.unfolded_bytes)),
    ("private", |vm| Some(vm.private_bytes)),
    ("zero", |vm| Some(vm.zero_bytes)),
    ("free", |vm| Some(vm.free_bytes)),
    ("KSM", |vm| vm.ksm_merged_bytes),
    ("huge", |vm| Some(vm.huge_bytes)),
    ("PSS", |vm| Some(vm.pss_bytes)),
    ("QEMU", |vm| Some(vm.overhead_bytes())),
];

fn vms(vms: &[VmAccount]) -> Table {
    let swapped = vms.iter().any(|v| v.swapped_bytes.0 > 0);
    let mut header = vec!["VM", "domain"];
    header.extend(COLUMNS.map(|(name, _)| name));
    header.push("mappings");
    header.extend(swapped.then_some("swapped"));
    let mut table = table(&header);
    let row = |vms: &[VmAccount], name: &str, domain: &str| {
        let mut cells = vec![name.to_owned(), domain.to_owned()];
        cells.extend(COLUMNS.map(|(_, bytes)| {
            let sum = vms.iter().filter_map(bytes).reduce(|a, b| a + b);
            sum.map_or_else(|| "?".into(), size)
        }));
        cells.push(vms.iter().map(|vm| vm.mappings).sum::<u64>().to_string());
        cells.extend(swapped.then(|| size(vms.iter().map(|vm| vm.swapped_bytes).sum())));
        cells
    };
    for vm in vms {
        let domain = vm.domain.as_deref().unwrap_or("-");
        table.add_row(row(std::slice::from_ref(vm), &vm.name, domain));
    }
    if vms.len() > 1 {
        table.add_row(row(vms, "all", ""));
    }
    table
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
    line("  memfold itself", size(host.own.total_bytes()));
    if host.images_bytes.0 > 0 {
        line("  snapshots laid out in memory", size(host.images_bytes));
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

/// Returns a number of bytes as text with a binary unit, and with a minus sign if the number is
/// negative.
pub fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", ByteSize(bytes.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_table_of_the_ledger_columns_are_aligned_and_negative_savings_have_a_minus_sign() {
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
