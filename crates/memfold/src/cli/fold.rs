//! `memfold fold`: shows, pauses and resumes folding, and limits its CPU time and its rate.

use std::process::ExitCode;

use clap::Subcommand;

use memfold_api::FoldRequest;
use memfold_fold::{EngineStats, VmStats};
use memfold_units::PageCount;

use super::context::Context;
use super::table::table;

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Show what folding has done, by VM
    Status,
    /// Pause folding; folded memory stays folded
    Pause,
    /// Resume folding
    Resume,
    /// Set limits of folding
    Budget {
        /// CPU limit of folding over time, in percent of one core, 0 to 100; 0 stops folding
        #[arg(long, value_name = "PERCENT")]
        cpu: Option<f64>,
        /// Most pages that folding examines a second; 0 for no limit
        #[arg(long, value_name = "PAGES")]
        pages_per_second: Option<u64>,
    },
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    let mut request = FoldRequest::default();
    match arguments {
        Arguments::Status => return context.print(&client.get("/v1/fold")?, render),
        Arguments::Pause => request.paused = Some(true),
        Arguments::Resume => request.paused = Some(false),
        Arguments::Budget {
            cpu,
            pages_per_second,
        } => (request.cpu_percent, request.pages_per_second) = (*cpu, *pages_per_second),
    }
    context.print(&client.put("/v1/fold", &request)?, render)
}

fn render(stats: &EngineStats) -> String {
    let size = |pages: u64| PageCount(pages).bytes().to_string();
    let rows = stats.vms.iter().map(|vm| {
        [
            vm.name.clone(),
            size(vm.cached_pages),
            size(vm.matched_pages),
            size(vm.matched_folded_pages),
            size(vm.refolded_pages),
            size(vm.copied_pages),
            size(vm.differing_pages),
            size(vm.zero_pages),
            size(vm.folded_back_pages),
            vm.mappings.to_string(),
            vm.problem.clone().unwrap_or_default(),
        ]
    });
    let headings =
        "VM  >CACHED  >MATCHED  >FOLDED  >AGAIN  >COPIED  >DIFFER  >ZERO  >BACK  >MAPPINGS  ";
    let latency =
        |seconds: Option<f64>| seconds.map_or_else(|| "-".into(), |s| format!("{s:.1} s"));
    let rate = stats
        .pages_per_second
        .map_or_else(String::new, |n| format!(", {n} pages/s"));
    let most = |of: fn(&VmStats) -> u64| stats.vms.iter().map(of).max().unwrap_or(0);
    let store: u64 = stats.domains.iter().map(|d| d.store_bytes).sum();
    let age = if stats.age_s > 0.0 {
        format!(
            "figures are {:.0} s old: folding waits for a VM that does not answer\n",
            stats.age_s
        )
    } else {
        String::new()
    };
    format!(
        "{}{age}folding: {}; budget {:.1} % of a core{rate}; used {:.2} s engine + {:.2} s in QEMUs\n\
         hint to fold: median {}, 95 % within {}; {} hints waiting; page store {}\n\
         judged pages: same path {} equal, {} different; same name and size elsewhere {} equal, {} different\n\
         longest freeze of a run {:.1} ms; longest pause {} ms\n\n{}",
        if stats.vms.is_empty() { "no VMs\n" } else { "" },
        match &stats.braked {
            _ if stats.paused => "paused".to_owned(),
            Some(why) => format!("braked, folded memory stays folded: {why}"),
            None => "on".to_owned(),
        },
        stats.cpu_share * 100.0,
        stats.engine_cpu_s,
        stats.library_cpu_s,
        latency(stats.hint_to_fold_p50_s),
        latency(stats.hint_to_fold_p95_s),
        stats.hints_waiting,
        memfold_units::ByteSize(store),
        stats.case_same_path_same_content,
        stats.case_same_path_different_content,
        stats.case_different_path_same_content,
        stats.case_different_path_different_content,
        most(|vm| vm.freeze_max_ns) as f64 / 1e6,
        most(|vm| vm.pause_max_ms),
        table(headings, rows),
    )
}
