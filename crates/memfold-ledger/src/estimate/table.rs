//! Prints an estimate of possible savings as tables for people (`memfold estimate`).

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};
use memfold_units::ByteSize;

use super::mechanisms::{Mechanism, Way};
use super::report::{EstimateReport, How, VmEstimate};
use super::statistics::Estimate;

/// Largest number of files that the table shows.
const FILES: usize = 15;

const LEGEND: &str = "\
PRIVATE: in memory and the VM's own. FILE: already shared by file (folded, a snapshot's image, a segment).
ZERO, WITHIN, BETWEEN could be saved: zero pages; copies within the VM; its part of what the domain's VMs have in common.
MERGED: already by KSM. VOLATILE: changed between two reads. HUGE: private memory in huge pages.";

/// Returns the whole report of an estimate as text.
#[must_use]
pub fn render(report: &EstimateReport) -> String {
    let mut text = format!("{}\n{LEGEND}\n", vms(report).trim_fmt());
    let _ = writeln!(text, "\n{}", domains(report).trim_fmt());
    if report.across_domains.bytes > 0 {
        let _ = writeln!(
            text,
            "between trust domains: {}, which may not be shared and is in no sum",
            amount(report.across_domains)
        );
    }
    let huge = match (report.broken_huge_pages, report.plus_minus_huge_pages) {
        (0, _) => "no huge page would be split".to_owned(),
        (n, 0) => format!("{n} huge pages would be split"),
        (n, bar) => format!("{n} ± {bar} huge pages would be split"),
    };
    let _ = writeln!(text, "could be saved: {}; {huge}", amount(report.saved));
    let _ = writeln!(text, "\n{}", mechanisms(&report.mechanisms).trim_fmt());
    if !report.files.is_empty() {
        let _ = writeln!(text, "\n{}", files(report).trim_fmt());
    }
    let _ = write!(text, "\n{}", how(&report.how));
    if !report.daemon {
        text.push_str(
            "\nno memfold daemon answers: each QEMU is its own trust domain unless --domain-of or --one-domain say otherwise, and which pages \
             belong to files is not known",
        );
    }
    text
}

fn table(header: &[&str], right: std::ops::Range<usize>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    for at in right {
        if let Some(column) = table.column_mut(at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

/// Returns the amount as text, with its error bar if it has one.
pub(super) fn amount(estimate: Estimate) -> String {
    match estimate.plus_minus_bytes {
        0 => size(estimate.bytes),
        bar => format!("{} ± {}", size(estimate.bytes), size(bar)),
    }
}

type Column = (&'static str, fn(&VmEstimate) -> Estimate);

/// Columns of sizes in the table of VMs.
const COLUMNS: [Column; 10] = [
    ("MEMORY", |vm| Estimate::exactly(vm.memory_bytes)),
    ("PRIVATE", |vm| Estimate::exactly(vm.private_bytes)),
    ("FILE", |vm| Estimate::exactly(vm.file_bytes)),
    ("ZERO", |vm| vm.zero),
    ("WITHIN", |vm| vm.within),
    ("BETWEEN", |vm| vm.between),
    ("MERGED", |vm| vm.merged),
    ("VOLATILE", |vm| vm.volatile),
    ("REST", |vm| Estimate::exactly(vm.rest_bytes)),
    ("HUGE", |vm| Estimate::exactly(vm.huge_bytes)),
];

fn vms(report: &EstimateReport) -> Table {
    let mut header = vec!["VM", "DOMAIN", "PID"];
    header.extend(COLUMNS.map(|(name, _)| name));
    let mut table = table(&header, 2..header.len());
    let row = |vms: &[VmEstimate], first: [String; 3]| {
        let mut cells = first.to_vec();
        cells.extend(COLUMNS.map(|(_, of)| {
            // Errors are added linearly: if several VMs hold a content, they have the same error.
            let mut sum = Estimate::default();
            for one in vms.iter().map(of) {
                sum.bytes += one.bytes;
                sum.plus_minus_bytes += one.plus_minus_bytes;
            }
            amount(sum)
        }));
        cells
    };
    for vm in &report.vms {
        let domain = vm.domain.clone().unwrap_or_else(|| "-".to_owned());
        let first = [vm.name.clone(), domain, vm.pid.to_string()];
        table.add_row(row(std::slice::from_ref(vm), first));
    }
    if report.vms.len() > 1 {
        table.add_row(row(
            &report.vms,
            ["all".to_owned(), String::new(), String::new()],
        ));
    }
    table
}

fn domains(report: &EstimateReport) -> Table {
    let header = [
        "DOMAIN",
        "VMS",
        "COULD BE SAVED",
        "ZERO",
        "WITHIN",
        "BETWEEN",
        "OF THESE TWO: FILES",
    ];
    let mut table = table(&header, 1..header.len());
    for domain in &report.domains {
        let name = match &domain.domain {
            Some(name) => name.clone(),
            None => format!("- ({})", domain.vms.join(", ")),
        };
        table.add_row([
            name,
            domain.vms.len().to_string(),
            amount(domain.saved),
            amount(domain.zero),
            amount(domain.within),
            amount(domain.between),
            domain.of_files.map_or_else(|| "?".to_owned(), amount),
        ]);
    }
    table
}

fn mechanisms(all: &[Mechanism]) -> Table {
    let mut table = table(&["BY", "WOULD SAVE", "CPU", ""], 1..3);
    for one in all {
        let name = match one.way {
            Way::Segment => "segment",
            Way::Clone => "clone",
            Way::Fold => "fold",
            Way::Zero => "zero pages",
            Way::Ksm => "KSM",
            Way::KsmIfOffered => "KSM, all VMs",
            Way::FreePageReporting => "free page reporting",
        };
        let most = one.at_most_bytes.map(size);
        let saved = match (one.saved, most) {
            (Some(saved), Some(most)) => format!("{} to {most}", amount(saved)),
            (Some(saved), None) => amount(saved),
            (None, Some(most)) => format!("up to {most}"),
            (None, None) => "?".to_owned(),
        };
        let cpu = match one.cpu_seconds {
            None => "?".to_owned(),
            Some(0.0) => "none".to_owned(),
            Some(seconds) => format!("{seconds:.1} s"),
        };
        table.add_row([name, &saved, &cpu, &one.words]);
    }
    table
}

fn files(report: &EstimateReport) -> Table {
    let mut table = table(&["FILE", "DOMAIN", "CACHED", "COULD BE SAVED"], 2..4);
    for file in report.files.iter().take(FILES) {
        table.add_row([
            file.path.clone(),
            file.domain.clone().unwrap_or_else(|| "-".to_owned()),
            size(file.cached_bytes),
            amount(file.saved),
        ]);
    }
    if let Some(more) = report.files.len().checked_sub(FILES).filter(|n| *n > 0) {
        table.add_row([format!("and {more} more (--json)")]);
    }
    table
}

fn how(how: &How) -> String {
    let mut text = format!(
        "read {} in {:.1} s with {:.2} s of CPU ({:.1} % of one core, {:.0} allowed), {} of that twice",
        size(how.read_bytes),
        how.seconds,
        how.cpu_seconds,
        how.cpu_percent,
        how.cpu_limit_percent,
        size(how.read_again_bytes),
    );
    if how.one_in > 1.0 {
        let _ = write!(text, "; one page content in {} sampled", how.one_in);
    }
    if how.read_percent < 100.0 {
        let _ = write!(
            text,
            "\nonly {:.1} % of the memory could be read in the time given: copies in the rest were not found, and WITHIN and BETWEEN \
             are at least what is shown; give more --seconds or --cpu",
            how.read_percent
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_table_of_an_estimate_columns_are_aligned_and_unknown_figures_are_not_zero() {
        let mib = |n: u64, bar: u64| Estimate {
            bytes: n << 20,
            plus_minus_bytes: bar << 20,
        };
        let vm = |name: &str, zero| VmEstimate {
            name: name.to_owned(),
            pid: 7,
            zero,
            ..VmEstimate::default()
        };
        let mut report = EstimateReport {
            vms: vec![vm("web", mib(512, 3)), vm("database", mib(2, 0))],
            saved: mib(514, 3),
            across_domains: mib(9, 0),
            ..EstimateReport::default()
        };
        report.mechanisms.push(Mechanism {
            way: Way::FreePageReporting,
            saved: None,
            at_most_bytes: None,
            cpu_seconds: None,
            words: "needs agents".to_owned(),
        });
        report.how.read_percent = 50.0;
        let text = render(&report);
        let line = |needle: &str| text.lines().find(|line| line.contains(needle)).unwrap();
        let end = |needle: &str, word: &str| {
            let line = line(needle);
            line[..line.find(word).unwrap() + word.len()]
                .chars()
                .count()
        };
        assert_eq!(end("web ", "± 3.00 MiB"), end("database ", "2.00 MiB"));
        assert!(line("all ").contains("514 MiB ± 3.00 MiB"), "{text}");
        assert!(line("free page reporting").contains('?'), "{text}");
        assert!(line("between trust domains").contains("9.00 MiB, which may not"));
        assert!(
            text.contains("only 50.0 %") && text.contains("no huge page"),
            "{text}"
        );
    }
}
