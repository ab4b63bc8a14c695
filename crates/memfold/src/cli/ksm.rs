//! `memfold ksm`: shows the state of KSM (the kernel's page merging), steers KSM, and explains why
//! a VM's memory merges or does not.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use clap::Subcommand;

use memfold_api::{ClientError, KsmStartRequest, KsmStopRequest};
use memfold_ksm::files::FileRole;
use memfold_ksm::overview::{Overview, Part, Steering};
use memfold_ksm::{self as ksm, Controls, Explanation, Facts, processes};
use memfold_ledger::table::signed;
use memfold_units::{ByteSize, PAGE_SIZE, PageCount};
use memfold_vm::endpoints;
use rustix::process::Pid;

use super::context::Context;
use super::failure::IMPOSSIBLE_HERE;
use super::table::{known, table};

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Show every control and counter of KSM, ksmd's CPU, and each VM's share; works without a
    /// daemon
    Status,
    /// Have the daemon steer ksmd for the VMs of one trust domain: faster after a VM starts, slower
    /// while tasks wait or nothing merges
    Start {
        /// Trust domain whose VMs are merged (by default the only one whose VMs have mergeable
        /// memory)
        #[arg(long)]
        domain: Option<String>,
        /// CPU that ksmd may use, in percent of one core: more than 0, and 95 at most
        #[arg(long, default_value_t = 20.0, value_name = "PERCENT")]
        cpu: f64,
        /// Target time for a full scan of the mergeable memory, in seconds, 1 or more
        #[arg(long, default_value_t = 120.0, value_name = "SECONDS")]
        target: f64,
        /// Have the kernel's advisor set ksmd's speed (Linux 6.8 or newer)
        #[arg(long)]
        advisor: bool,
    },
    /// Stop steering KSM: its previous settings are restored, and merged pages stay merged
    Stop {
        /// Give each merged page its own copy again, which takes as much memory at once as merging
        /// saves
        #[arg(long)]
        unmerge: bool,
    },
    /// Explain why a VM's memory merges or not, and what would change that
    Explain {
        /// Name of the VM; without a daemon also the process number of a QEMU
        vm: String,
    },
}

pub(super) fn run(context: &Context, arguments: Arguments) -> anyhow::Result<ExitCode> {
    match arguments {
        Arguments::Status => {
            let overview = match context.client()?.get("/v1/ksm") {
                Err(ClientError::NoDaemon { .. }) => Overview::now(None)?,
                answer => answer?,
            };
            let printed = context.print(&overview, render)?;
            if !overview.available {
                return Ok(ExitCode::from(IMPOSSIBLE_HERE));
            }
            Ok(printed)
        }
        Arguments::Start {
            domain,
            cpu,
            target,
            advisor,
        } => {
            let request = KsmStartRequest {
                domain,
                cpu_percent: cpu,
                target_s: target,
                advisor,
            };
            let overview: Overview = context.client()?.post("/v1/ksm/start", &request)?;
            context.print(&overview, |now| {
                now.steering.as_ref().map_or_else(String::new, steering)
            })
        }
        Arguments::Stop { unmerge } => {
            let request = KsmStopRequest { unmerge };
            let overview: Overview = context.client()?.post("/v1/ksm/stop", &request)?;
            context.print(&overview, |overview| {
                let left = match overview.totals.ksm_merging_pages {
                    0 => "nothing is merged".to_owned(),
                    pages => format!(
                        "{} of memory are merged and stay merged until guests write to them",
                        PageCount(pages).bytes()
                    ),
                };
                format!("KSM's previous settings are restored; {left}")
            })
        }
        Arguments::Explain { vm } => {
            let path = format!("/v1/ksm/explain/{}", super::vm_info::segment(&vm)?);
            let explanation = match context.client()?.get(&path) {
                Err(ClientError::NoDaemon { .. }) => explain_alone(&vm)?,
                answer => answer?,
            };
            context.print(&explanation, explain)
        }
    }
}

/// Explains the merging of a QEMU without a daemon. `vm`: its `-name`, or its process number.
fn explain_alone(vm: &str) -> anyhow::Result<Explanation> {
    let proc_root = Path::new("/proc");
    let number: Option<i32> = vm.parse().ok();
    let is_named = |pid: i32| {
        let words = Pid::from_raw(pid).and_then(|pid| endpoints::command_line(pid).ok());
        words.is_some_and(|words| endpoints::guest_name(&words).as_deref() == Some(vm))
    };
    let mut found: Vec<i32> = processes::all(proc_root)?
        .into_iter()
        .filter_map(|process| process.qemu.then_some(process.pid))
        .collect();
    found.retain(|&pid| number == Some(pid) || is_named(pid));
    match found[..] {
        [pid] => {
            let facts = Facts::read(&Controls::default(), proc_root, pid, None, None)?;
            Ok(ksm::weigh(&facts))
        }
        [] => bail!(
            "no QEMU process has the name or number '{vm}', and no memfold daemon answers; 'memfold ksm status' lists QEMU processes with mergeable memory"
        ),
        _ => bail!(
            "several QEMU processes are named '{vm}'; give one of their process numbers: {found:?}"
        ),
    }
}

fn render(overview: &Overview) -> String {
    if !overview.available {
        return "this kernel has no KSM: /sys/kernel/mm/ksm is missing (CONFIG_KSM)".to_owned();
    }
    let mut text = String::new();
    for (role, name) in [
        (FileRole::Control, "CONTROL"),
        (FileRole::Counter, "COUNTER"),
    ] {
        let files = overview.files.iter().filter(|file| file.role == role);
        let rows = files.map(|file| {
            let absent = || format!("absent (Linux {})", file.since);
            let value = file.value.as_ref().map_or_else(absent, ToString::to_string);
            [&file.name, &value, &file.unit, &file.meaning].map(ToString::to_string)
        });
        let headings = format!("{name}  >VALUE  UNIT  MEANING");
        let _ = writeln!(text, "{}\n", table(&headings, rows));
    }
    let seconds = |value: Option<f64>| known(value.map(|s| format!("{s:.1} s")));
    let percent = |value: Option<f64>| known(value.map(|p| format!("{p:.1} %")));
    let _ = writeln!(
        text,
        "ksmd's CPU since boot {}; mergeable memory {}, a full scan at these settings {}\n\
         tasks wait for CPU {}, for memory {} of the time (some avg10)",
        seconds(overview.ksmd_cpu_s),
        ByteSize(overview.mergeable_bytes),
        seconds(overview.pass_s),
        percent(overview.pressure.cpu_some_avg10),
        percent(overview.pressure.memory_some_avg10),
    );
    let steered = match (&overview.steering, overview.daemon) {
        (Some(now), _) => steering(now),
        (None, true) => "not steered; run 'memfold ksm start' to steer KSM".to_owned(),
        (None, false) => {
            "no memfold daemon answers: VMs have no names and trust domains here".to_owned()
        }
    };
    let _ = writeln!(text, "{steered}");
    if overview.vms.is_empty() && overview.others.is_empty() {
        text.push_str("\nno process has mergeable memory");
        return text;
    }
    text + "\n" + &parts(overview)
}

fn parts(overview: &Overview) -> String {
    let size = |pages: Option<u64>| known(pages.map(|pages| PageCount(pages).bytes()));
    let row = |part: &Part, name: String| {
        [
            name,
            part.domain.clone().unwrap_or_else(|| "-".to_owned()),
            part.pid.to_string(),
            if part.mergeable { "yes" } else { "no" }.to_owned(),
            size(part.ksm_merging_pages),
            size(part.ksm_zero_pages),
            size(part.ksm_rmap_items),
            known(part.rmap_overhead_bytes.map(ByteSize)),
            known(part.ksm_process_profit.map(signed)),
        ]
    };
    let vms = overview.vms.iter().map(|vm| row(vm, vm.name.clone()));
    let others = overview.others.iter();
    let others = others.map(|part| row(part, format!("({})", part.name)));
    let totals = &overview.totals;
    let all = [
        "all".to_owned(),
        String::new(),
        String::new(),
        String::new(),
        size(Some(totals.ksm_merging_pages)),
        size(Some(totals.ksm_zero_pages)),
        size(Some(totals.ksm_rmap_items)),
        ByteSize(totals.rmap_overhead_bytes).to_string(),
        signed(totals.ksm_process_profit),
    ];
    table(
        "VM  DOMAIN  >PID  MERGEABLE  >MERGED  >ZERO  >LOOKED AT  >METADATA  >PROFIT",
        vms.chain(others).chain([all]),
    )
}

fn steering(now: &Steering) -> String {
    let mode = match now.mode {
        None => "stands still".to_owned(),
        Some(mode) => format!("{mode:?}").to_lowercase(),
    };
    let by = if now.advisor {
        ", by the kernel's advisor"
    } else {
        ""
    };
    let out = match now.kept_out.as_slice() {
        [] => String::new(),
        names => format!("\nkept out (other trust domains): {}", names.join(", ")),
    };
    format!(
        "steered for trust domain '{}': at most {} % of a CPU, a full scan every {} s{by}\n\
         now {mode}: {}\n\
         ksmd {:.1} % of a CPU, {:.1} us a page; pages_to_scan {}, sleep_millisecs {}; {} full scans and {:.1} s of CPU in {:.0} s{out}",
        now.domain,
        now.cpu_percent,
        now.target_s,
        now.why,
        now.ksmd_cpu_percent,
        now.cost_us_per_page,
        now.pages_to_scan,
        now.sleep_millisecs,
        now.full_scans,
        now.ksmd_cpu_s,
        now.running_s,
    )
}

fn explain(explanation: &Explanation) -> String {
    let domain = explanation.domain.as_deref();
    let mut text = format!(
        "{} (process {}, trust domain {}): {}\n\
         guest memory {}, mergeable {}, of it in memory {}, merged {}; profit {}, metadata {}\n",
        explanation.vm,
        explanation.pid,
        domain.unwrap_or("-"),
        explanation.verdict,
        ByteSize(explanation.guest_bytes),
        ByteSize(explanation.mergeable_bytes),
        ByteSize(explanation.present_bytes),
        ByteSize(explanation.merged_bytes),
        known(explanation.profit_bytes.map(signed)),
        known(explanation.rmap_overhead_bytes.map(ByteSize)),
    );
    if let Some(seconds) = explanation.first_merge_s {
        let _ = writeln!(
            text,
            "first merge, if any pages are equal: within {seconds:.0} s at this rate"
        );
    }
    for finding in &explanation.causes {
        let mark = if finding.blocks { "!" } else { "-" };
        let size = match finding.pages {
            0 => String::new(),
            pages => format!("{}: ", ByteSize(pages * PAGE_SIZE)),
        };
        let _ = write!(
            text,
            "\n{mark} {size}{}\n    {}",
            finding.words, finding.fix
        );
    }
    text
}
