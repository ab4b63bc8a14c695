//! `memfold estimate`: estimates how much memory the host's VMs could save by sharing, without
//! changing anything.

use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use memfold_api::ClientError;
use memfold_ledger::estimate::fingerprint::{self, HostMemory, Key};
use memfold_ledger::estimate::look::{self, Looked};
use memfold_ledger::estimate::program::{self, Kind, ProgramReport};
use memfold_ledger::estimate::{
    self, Domains, EstimateError, EstimateReport, Options, Pace, Told, VmFacts, estimate, targets,
};
use memfold_ledger::read::Proc;
use memfold_units::ByteSize;
use serde_json::json;

use super::context::Context;
use super::failure::IMPOSSIBLE_HERE;
use super::number::number;
use super::table::table;
use super::top;

/// Exit code of an interrupted program: 128 + SIGINT, as in shells.
const INTERRUPTED: u8 = 130;

/// Largest value of `--seconds`: one day.
const LONGEST_S: f64 = 86_400.0;

/// Estimate what could be saved, without changing anything.
///
/// Reads the memory of QEMU processes from outside: no VM needs memfold's library or agent, and
/// nothing is written. Each private page is read, and a sample of the pages is read again a second
/// later. The possible saving is split into pages of zeroes, copies within a VM, copies between VMs
/// of a trust domain, and, if agents in the guests report files, by file. Copies between trust
/// domains are shown and never counted. Needs root.
///
/// A memfold daemon reports names, trust domains and files. Without a daemon, and for QEMUs that
/// the daemon does not know, each QEMU is its own trust domain unless --domain-of or --one-domain
/// say otherwise.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Read only these VMs, given by name or by QEMU's process number
    #[arg(value_name = "VM|PID")]
    vms: Vec<String>,
    /// CPU limit, in percent of one core: more than 0, and 100 at most
    #[arg(long, default_value_t = 10.0, value_name = "PERCENT", value_parser = percent)]
    cpu: f64,
    /// Stop after so many seconds, 1 to 86400, and show what was found until then; by default, all
    /// memory is read (0.2 to 0.3 GiB a second at 10 % of a core)
    #[arg(long, value_name = "N", value_parser = seconds)]
    seconds: Option<Duration>,
    /// Trust domain of a QEMU (may be given several times)
    #[arg(long, value_name = "PID=DOMAIN", value_parser = domain_of)]
    domain_of: Vec<(i32, String)>,
    /// Assume that all VMs are in one trust domain
    #[arg(long, conflicts_with = "domain_of")]
    one_domain: bool,
    /// Instead: show how much of a running program VMs could share, by mapping mode (all processes
    /// of that name, or one)
    #[arg(long, value_name = "PID|NAME", conflicts_with_all = ["vms", "cpu", "seconds", "domain_of", "one_domain"])]
    program: Option<String>,
    /// Instead: write fingerprints of the VMs' memory to FILE, for 'memfold plan --place'; only
    /// hosts with the same key can compare fingerprints, which reveal nothing without the key
    #[arg(long, value_name = "FILE", requires = "key", conflicts_with_all = ["program", "vms", "seconds"])]
    fingerprint: Option<PathBuf>,
    /// Key shared by the hosts to compare, created if FILE does not exist; copy this file to the
    /// other hosts
    #[arg(long, value_name = "FILE", requires = "fingerprint")]
    key: Option<PathBuf>,
    /// This host's name in the fingerprint; by default the kernel's
    #[arg(long, value_name = "NAME", requires = "fingerprint")]
    host: Option<String>,
}

fn percent(text: &str) -> Result<f64, String> {
    let range = (Bound::Excluded(0.0), Bound::Included(100.0));
    number(text, range, "give more than 0, and 100 at most")
}

fn seconds(text: &str) -> Result<Duration, String> {
    let fix = format!("give 1 to {LONGEST_S}");
    number(text, 1.0..=LONGEST_S, &fix).map(Duration::from_secs_f64)
}

fn domain_of(text: &str) -> Result<(i32, String), String> {
    let (pid, domain) = text
        .split_once('=')
        .ok_or("give a process number, '=', and a trust domain")?;
    let pid = pid
        .parse()
        .map_err(|_| format!("'{pid}' is not a process number"))?;
    memfold_vm::check_name("domain", domain).map_err(|error| error.to_string())?;
    Ok((pid, domain.to_owned()))
}

/// Set to true by Ctrl-C.
static STOP: AtomicBool = AtomicBool::new(false);

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Some(program) = &arguments.program {
        return of_program(context, program);
    }
    // The budget begins here, because reading the daemon's answer counts, too.
    let pace = Pace::new(arguments.cpu / 100.0, arguments.seconds, &STOP);
    top::at_interrupt(|_| STOP.store(true, Ordering::Relaxed))?;
    let (facts, daemon): (VmFacts, bool) = match context.client()?.get("/v1/estimate") {
        Err(ClientError::NoDaemon { .. }) => (VmFacts::default(), false),
        answer => (answer?, true),
    };
    let domains = Domains {
        one: arguments.one_domain,
        of: arguments.domain_of.clone(),
    };
    if let (Some(file), Some(key)) = (&arguments.fingerprint, &arguments.key) {
        let (key, is_new) = Key::open(key)?;
        let here = rustix::system::uname();
        let own_name = || here.nodename().to_string_lossy().into_owned();
        let host = arguments.host.clone().unwrap_or_else(own_name);
        let options = Options {
            seed: key.seed(),
            reads_files: true,
            ..Options::here()
        };
        let looked = watched(|told| {
            targets::find(Path::new("/proc"), &[], &domains, &facts)
                .and_then(|targets| look::look(targets, &options, &pace, told))
        });
        return match looked {
            Ok(looked) => write_fingerprint(context, &looked, (&key, is_new), &host, file),
            Err(error) => fail(error),
        };
    }
    let options = Options::here();
    let found = watched(|told| {
        targets::find(Path::new("/proc"), &arguments.vms, &domains, &facts)
            .and_then(|targets| estimate(targets, &facts.files, &options, &pace, told))
    });
    let report = match found {
        Ok(report) => EstimateReport { daemon, ..report },
        Err(error) => return fail(error),
    };
    context.print(&report, estimate::table::render)
}

/// Prints an error that has an exit code of its own, and returns the code.
fn fail(error: EstimateError) -> anyhow::Result<ExitCode> {
    let code = match error {
        EstimateError::NoScan => IMPOSSIBLE_HERE,
        EstimateError::Interrupted => INTERRUPTED,
        _ => return Err(error.into()),
    };
    memfold_host::say!("memfold: {error}");
    Ok(ExitCode::from(code))
}

/// Runs `work` with a progress bar.
fn watched<T>(work: impl FnOnce(Told<'_>) -> T) -> T {
    // The template is valid, so this cannot fail.
    let style = ProgressStyle::with_template("{msg} {wide_bar} {percent} %, {eta} left");
    let bar =
        ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut shown = "";
    let result = work(&mut |step: &'static str, done: u64, total: u64| {
        if step != shown {
            shown = step;
            bar.reset();
            bar.set_message(step);
            bar.set_length(total);
        }
        bar.set_position(done);
    });
    bar.finish_and_clear();
    result
}

fn write_fingerprint(
    context: &Context,
    looked: &Looked,
    (key, is_new): (&Key, bool),
    host: &str,
    file: &Path,
) -> anyhow::Result<ExitCode> {
    let info = Proc::default().meminfo()?;
    let field = |name: &str| info.get(name).map_or(0, |bytes| bytes.0);
    let memory = HostMemory {
        total_bytes: field("MemTotal"),
        available_bytes: field("MemAvailable"),
    };
    let print = fingerprint::of(looked, key, host, memory).context(
        "cannot read the memory that QEMU processes use in addition to guest RAM; run this as root",
    )?;
    let text = serde_json::to_vec(&print)?;
    // The rename makes the file appear with its whole content.
    let part = file.with_extension("part");
    std::fs::write(&part, &text)
        .and_then(|()| std::fs::rename(&part, file))
        .with_context(|| format!("cannot write {}", file.display()))?;
    let contents = print.vms.iter().map(|vm| vm.contents.len()).sum::<usize>();
    let written = json!({
        "host": print.host, "key": print.key, "key_is_new": is_new, "vms": print.vms.len(), "contents": contents, "level": print.level,
    });
    context.print(&written, |_| {
        let key = &print.key;
        let made = if is_new {
            format!("; key {key} is new: copy that file to the other hosts")
        } else {
            String::new()
        };
        format!(
            "{}: {} VMs of '{host}', {contents} contents, one of {} drawn{made}",
            file.display(),
            print.vms.len(),
            1_u64 << print.level.min(63)
        )
    })
}

fn of_program(context: &Context, program: &str) -> anyhow::Result<ExitCode> {
    let proc_root = Path::new("/proc");
    let pids = program::find(proc_root, program).context("cannot list processes")?;
    if pids.is_empty() {
        bail!("no process has the name or number '{program}'; 'ps -e' lists processes");
    }
    let report = program::read(proc_root, program, &pids)
        .with_context(|| format!("cannot read the mappings of '{program}'; run this as root"))?;
    if report.pids.is_empty() {
        bail!("all processes of '{program}' have ended");
    }
    context.print(&report, render_program)
}

fn render_program(report: &ProgramReport) -> String {
    let rows = report.modes.iter().map(|mode| {
        let kind = match mode.kind {
            Kind::Text => "file, text",
            Kind::ReadOnly => "file, read-only data",
            Kind::PrivateFile => "file, private and writable",
            Kind::Shared => "shared memory or file",
            Kind::Anonymous => "anonymous",
        };
        [
            kind.to_owned(),
            mode.permissions.clone(),
            ByteSize(mode.resident_bytes).to_string(),
            ByteSize(mode.file_bytes).to_string(),
        ]
    });
    let size = ByteSize;
    format!(
        "{}: {} processes, {} resident\n\n{}\n\n\
         mapped without write permission: {} ({:.1} %)\n\
         shareable between VMs, as pages of private mappings that nobody has written: {} ({:.1} %)",
        report.program,
        report.pids.len(),
        size(report.resident_bytes),
        table("MAPPING  MODE  >RESIDENT  >THE FILE'S OWN PAGES", rows),
        size(report.not_writable_bytes),
        report.not_writable_percent,
        size(report.shareable_bytes),
        report.shareable_percent,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_options_out_of_range_are_refused_and_the_error_names_the_range() {
        assert_eq!(percent("10"), Ok(10.0));
        for text in ["0", "-1", "101", "NaN", "much"] {
            assert!(percent(text).unwrap_err().contains("100 at most"));
        }
        assert_eq!(seconds("2.5"), Ok(Duration::from_millis(2500)));
        for text in ["0", "1e9", "NaN", "inf"] {
            assert!(seconds(text).unwrap_err().contains("1 to 86400"));
        }
        assert_eq!(domain_of("7=web"), Ok((7, "web".to_owned())));
        assert!(domain_of("7").unwrap_err().contains("process number"));
        assert!(domain_of("x=web").unwrap_err().contains("'x'"));
        assert!(domain_of("7=a/b").is_err());
    }
}
