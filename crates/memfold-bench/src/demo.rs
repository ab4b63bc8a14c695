//! The demo (`memfold demo`): folds three real VMs, and compares the memory saved with the memory
//! that KSM saves on the same VMs.

use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use memfold_api::FullReport;
use memfold_fold::EngineSettings;
use memfold_ksm as ksm;
use memfold_lab::{DiskMode, Lab};
use memfold_units::{ByteSize, PageCount};
use serde::Serialize;

use crate::host::{check_host, start_ksm};
use crate::images;
use crate::output::Output;
use crate::wait::most_folded;

/// Name and image of each VM. Two images are built separately from the same packages, as those of
/// users' VMs are; the third is a copy.
const VMS: [(&str, &str); 3] = [
    ("alpha", "trixie-a"),
    ("beta", "trixie-b"),
    ("gamma", "trixie-a"),
];

/// Shell script that every guest runs: a web server answers, an interpreter runs, and all files in
/// `/usr` are read and hashed. The hashes are compared at the end.
const WORK: &str = "systemctl start apache2 && curl -sf http://127.0.0.1/ | sha256sum && \
    find /usr/bin /usr/sbin /usr/lib -xdev -type f -size -8M -print0 | sort -z | head -z -n 6000 | xargs -0 sha256sum | sha256sum";

const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
const WORK_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Args, Debug)]
pub struct Arguments {
    /// Seconds that KSM runs at the kernel's default rate
    #[arg(long, value_name = "SECONDS")]
    ksm: u64,
    /// RAM of each VM
    #[arg(long, value_name = "SIZE")]
    memory: ByteSize,
    #[command(flatten)]
    output: Output,
}

/// Figures of the demo, all of which the kernel reported at that moment.
#[derive(Debug, Serialize)]
struct Outcome {
    vms: Vec<VmOutcome>,
    ksm_seconds: u64,
    ksm_saved_bytes: i64,
    ksm_cpu_s: f64,
    fold_seconds: f64,
    fold_saved_bytes: i64,
    fold_cpu_s: f64,
    memory_before_bytes: u64,
    memory_after_bytes: u64,
    checksums_equal: bool,
}

#[derive(Debug, Serialize)]
struct VmOutcome {
    name: String,
    image: String,
    before_pss_bytes: u64,
    after_pss_bytes: u64,
    folded_bytes: u64,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    check_host(&arguments.output)?;
    images::build_missing(&VMS.map(|(_, image)| image))?;
    let outcome = show(arguments)?;
    arguments.output.print(&outcome, render)?;
    ensure!(
        outcome.checksums_equal,
        "a guest read other bytes after folding than before; please report this"
    );
    Ok(())
}

fn show(arguments: &Arguments) -> anyhow::Result<Outcome> {
    let names: Vec<&str> = VMS.iter().map(|(name, _)| *name).collect();
    let lab = Lab::new(EngineSettings::default())?;

    let step = Step::begin("booting three Debian VMs");
    let spec = |(name, image)| Lab::spec(name, image, arguments.memory, DiskMode::Buffered);
    let specs = VMS.into_iter().map(spec);
    lab.boot(specs.collect::<Result<_, _>>()?, BOOT_TIMEOUT)?;
    step.end("booted");

    let step = Step::begin("apache2 starts and /usr is read in each");
    let sums = lab.exec_all(&names, WORK, WORK_TIMEOUT)?;
    step.end("worked");
    let before = lab.report()?;

    let step = Step::begin("KSM at the kernel's default rate");
    let run = start_ksm(&ksm::Settings::kernel_default())?;
    let ksmd = ksm::Ksmd::find();
    let cpu = || ksmd.as_ref().and_then(|ksmd| ksmd.cpu_time().ok());
    let began = cpu().unwrap_or_default();
    std::thread::sleep(Duration::from_secs(arguments.ksm));
    let profit = ksm::Status::read(run.controls())?.general_profit;
    let ksm_cpu = cpu().unwrap_or_default().saturating_sub(began);
    run.stop(true)?;
    let ksm_saved_bytes = profit.unwrap_or(0);
    let saved = signed(ksm_saved_bytes);
    step.end(&format!("KSM saved {saved} in {} s", arguments.ksm));

    let step = Step::begin("folding");
    let began = Instant::now();
    lab.fold(true)?;
    let (_, grew) = most_folded(&lab, |vm| vm.matched_folded_pages)?;
    let folded = lab.report()?;
    let pages = folded.fold.vms.iter().map(|vm| vm.mapped_pages).sum();
    step.end(&format!("folded {}", PageCount(pages).bytes()));

    let step = Step::begin("every guest reads and hashes all of it again");
    let again = lab.exec_all(&names, WORK, WORK_TIMEOUT)?;
    step.end("hashed");

    let (memory_before, memory_after) = (total(&before), total(&folded));
    Ok(Outcome {
        vms: VMS
            .iter()
            .filter_map(|(name, image)| vm_outcome(name, image, &before, &folded))
            .collect(),
        ksm_seconds: arguments.ksm,
        ksm_saved_bytes,
        ksm_cpu_s: ksm_cpu.as_secs_f64(),
        fold_seconds: (grew - began).as_secs_f64(),
        fold_saved_bytes: i64::try_from(memory_before)? - i64::try_from(memory_after)?,
        fold_cpu_s: folded.fold.engine_cpu_s + folded.fold.library_cpu_s,
        memory_before_bytes: memory_before,
        memory_after_bytes: memory_after,
        checksums_equal: sums == again,
    })
}

/// Returns the physical memory of all VMs and of the page stores, each page counted once: PSS of
/// every QEMU, and store pages that are in no VM's page tables.
fn total(report: &FullReport) -> u64 {
    let vms = &report.ledger.vms;
    let pss: u64 = vms.iter().map(|vm| vm.pss_bytes.0).sum();
    let in_vms = vms.iter().map(|vm| vm.store_pss_bytes.0).sum();
    let stores: u64 = report.fold.domains.iter().map(|d| d.store_bytes).sum();
    pss + stores.saturating_sub(in_vms)
}

fn vm_outcome(
    name: &str,
    image: &str,
    before: &FullReport,
    after: &FullReport,
) -> Option<VmOutcome> {
    let find = |report: &FullReport| report.ledger.vms.iter().find(|vm| vm.name == name).cloned();
    let (before, after) = (find(before)?, find(after)?);
    Some(VmOutcome {
        name: name.to_owned(),
        image: image.to_owned(),
        before_pss_bytes: before.pss_bytes.0,
        after_pss_bytes: after.pss_bytes.0,
        folded_bytes: after.folded_bytes.0,
    })
}

fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", ByteSize(bytes.unsigned_abs()))
}

/// Returns a table whose columns behind the first `words` hold numbers.
fn table<const N: usize>(header: [&str; N], words: usize, rows: Vec<[String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

fn render(outcome: &Outcome) -> String {
    let row = |name: &str, image: &str, sizes: [u64; 2], folded: String| {
        let [before, after] = sizes.map(|bytes| ByteSize(bytes).to_string());
        [name.to_owned(), image.to_owned(), before, after, folded]
    };
    let vms = outcome.vms.iter().map(|vm| {
        let folded = ByteSize(vm.folded_bytes).to_string();
        let sizes = [vm.before_pss_bytes, vm.after_pss_bytes];
        row(&vm.name, &vm.image, sizes, folded)
    });
    let all = [outcome.memory_before_bytes, outcome.memory_after_bytes];
    let rows = vms.chain([row("all", "", all, String::new())]).collect();
    let header = ["VM", "IMAGE", "MEMORY BEFORE", "AFTER FOLDING", "FOLDED"];
    let vms = table(header, 2, rows);
    let row = |name: &str, saved, after: String, cpu_s: f64| {
        let cpu = format!("{cpu_s:.2} s");
        [name.to_owned(), signed(saved), after, cpu]
    };
    let ksm_after = format!("{} s", outcome.ksm_seconds);
    let fold_after = format!("{:.1} s", outcome.fold_seconds);
    let (ksm, fold) = (outcome.ksm_saved_bytes, outcome.fold_saved_bytes);
    let rows = vec![
        row("KSM, kernel default", ksm, ksm_after, outcome.ksm_cpu_s),
        row("memfold", fold, fold_after, outcome.fold_cpu_s),
    ];
    let versus = table(["ON THE SAME VMS", "SAVED", "AFTER", "CPU"], 1, rows);
    let checked = if outcome.checksums_equal {
        "Every guest hashed everything it had read again after folding: not one byte differs."
    } else {
        "CHECKSUMS DIFFER: a guest read other bytes after folding than before."
    };
    format!(
        "\nMemory is each QEMU's PSS, in which a shared page counts in parts; 'all' counts every page once.\n\n{vms}\n\n{versus}\n\n{checked}"
    )
}

/// A step of the demo, shown with a spinner on a terminal and as a line in a pipe.
struct Step {
    bar: ProgressBar,
    began: Instant,
    what: &'static str,
}

impl Step {
    fn begin(what: &'static str) -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_message(what);
        bar.enable_steady_tick(Duration::from_millis(120));
        Self {
            bar,
            began: Instant::now(),
            what,
        }
    }

    fn end(self, result: &str) {
        self.bar.finish_and_clear();
        let took = self.began.elapsed().as_secs_f64();
        memfold_host::say!("{took:6.1} s  {}: {result}", self.what);
    }
}
