//! `memfold demo`: folds three real VMs, and compares the memory saved with that of KSM on the same
//! VMs.

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

use crate::host::check_host;
use crate::images;
use crate::output::Output;

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
    for (name, image) in VMS {
        lab.start(Lab::spec(
            name,
            image,
            arguments.memory,
            DiskMode::Buffered,
        )?)?;
    }
    for name in &names {
        lab.wait_ready(name, BOOT_TIMEOUT)?;
    }
    step.end("booted");

    let step = Step::begin("apache2 starts and /usr is read in each");
    let sums = lab.exec_all(&names, WORK, WORK_TIMEOUT)?;
    step.end("worked");
    let before = lab.report()?;

    let step = Step::begin("KSM at the kernel's default rate");
    let ksm_saved_bytes;
    let ksm_cpu_s;
    {
        let controls = ksm::Controls::default();
        let run = ksm::Run::start(
            &controls,
            ksm::NOTES.as_ref(),
            &ksm::Settings::kernel_default(),
        )?;
        let ksmd = ksm::Ksmd::find();
        let cpu = || {
            ksmd.as_ref()
                .and_then(|k| k.cpu_time().ok())
                .unwrap_or_default()
        };
        let began = cpu();
        std::thread::sleep(Duration::from_secs(arguments.ksm));
        ksm_saved_bytes = ksm::Status::read(run.controls())?
            .general_profit
            .unwrap_or(0);
        ksm_cpu_s = cpu().saturating_sub(began).as_secs_f64();
        run.stop(true)?;
    }
    step.end(&format!(
        "KSM saved {} in {} s",
        signed(ksm_saved_bytes),
        arguments.ksm
    ));

    let step = Step::begin("folding");
    let began = Instant::now();
    lab.fold(true)?;
    let fold_seconds = wait_folded(&lab, began)?;
    let folded = lab.report()?;
    step.end(&format!(
        "folded {}",
        PageCount(folded.fold.vms.iter().map(|v| v.mapped_pages).sum()).bytes()
    ));

    let step = Step::begin("every guest reads and hashes all of it again");
    let again = lab.exec_all(&names, WORK, WORK_TIMEOUT)?;
    step.end("hashed");

    let fold_cpu_s = folded.fold.engine_cpu_s + folded.fold.library_cpu_s;
    Ok(Outcome {
        vms: VMS
            .iter()
            .filter_map(|(name, image)| vm_outcome(name, image, &before, &folded))
            .collect(),
        ksm_seconds: arguments.ksm,
        ksm_saved_bytes,
        ksm_cpu_s,
        fold_seconds,
        fold_saved_bytes: total(&before).saturating_sub_unsigned(total(&folded).unsigned_abs()),
        fold_cpu_s,
        memory_before_bytes: total(&before).unsigned_abs(),
        memory_after_bytes: total(&folded).unsigned_abs(),
        checksums_equal: sums == again,
    })
}

/// Waits until the part of the foldable memory that is folded no longer grows. Returns the seconds
/// from `began` to the last growth.
fn wait_folded(lab: &Lab, began: Instant) -> anyhow::Result<f64> {
    let mut best = 0;
    let mut grew = began;
    while grew.elapsed() < Duration::from_secs(6) && began.elapsed() < Duration::from_secs(60) {
        let stats = lab.stats()?;
        let folded: u64 = stats.vms.iter().map(|vm| vm.matched_folded_pages).sum();
        if folded > best + best / 200 {
            best = folded;
            grew = Instant::now();
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok((grew - began).as_secs_f64())
}

/// Returns the physical memory of all VMs and of the page stores, each page counted once: PSS of
/// every QEMU, and store pages that are in no VM's page tables.
fn total(report: &FullReport) -> i64 {
    let pss: u64 = report.ledger.vms.iter().map(|vm| vm.pss_bytes.0).sum();
    let in_vms: u64 = report
        .ledger
        .vms
        .iter()
        .map(|vm| vm.store_pss_bytes.0)
        .sum();
    let stores: u64 = report.fold.domains.iter().map(|d| d.store_bytes).sum();
    i64::try_from(pss + stores.saturating_sub(in_vms)).unwrap_or(i64::MAX)
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
    let size = ByteSize(bytes.unsigned_abs());
    if bytes < 0 {
        format!("-{size}")
    } else {
        size.to_string()
    }
}

fn render(outcome: &Outcome) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "VM",
        "IMAGE",
        "MEMORY BEFORE",
        "AFTER FOLDING",
        "FOLDED",
    ]);
    let size = |bytes: u64| ByteSize(bytes).to_string();
    for vm in &outcome.vms {
        let (before, after) = (size(vm.before_pss_bytes), size(vm.after_pss_bytes));
        table.add_row([
            vm.name.clone(),
            vm.image.clone(),
            before,
            after,
            size(vm.folded_bytes),
        ]);
    }
    let (before, after) = (
        size(outcome.memory_before_bytes),
        size(outcome.memory_after_bytes),
    );
    table.add_row(["all", "", &before, &after, ""]);
    let mut versus = Table::new();
    versus
        .load_preset(presets::NOTHING)
        .set_header(["ON THE SAME VMS", "SAVED", "AFTER", "CPU"]);
    versus.add_row([
        "KSM, kernel default".to_owned(),
        signed(outcome.ksm_saved_bytes),
        format!("{} s", outcome.ksm_seconds),
        format!("{:.2} s", outcome.ksm_cpu_s),
    ]);
    versus.add_row([
        "memfold".to_owned(),
        signed(outcome.fold_saved_bytes),
        format!("{:.1} s", outcome.fold_seconds),
        format!("{:.2} s", outcome.fold_cpu_s),
    ]);
    for (table, columns) in [(&mut table, 2..5), (&mut versus, 1..4)] {
        for at in columns {
            if let Some(column) = table.column_mut(at) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
    }
    let checked = if outcome.checksums_equal {
        "Every guest hashed everything it had read again after folding: not one byte differs."
    } else {
        "CHECKSUMS DIFFER: a guest read other bytes after folding than before."
    };
    format!(
        "\nMemory is each QEMU's PSS, in which a shared page counts in parts; 'all' counts every page once.\n\n{}\n\n{}\n\n{checked}",
        table.trim_fmt(),
        versus.trim_fmt()
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
        memfold_host::say!(
            "{:6.1} s  {}: {result}",
            self.began.elapsed().as_secs_f64(),
            self.what
        );
    }
}
