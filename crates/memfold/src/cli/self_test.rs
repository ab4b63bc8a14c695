//! `memfold self-test`: proves on this host that folding loses no byte, and measures what memfold
//! costs and saves here. The program `memfold-bench` runs the self-test.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};

use clap::Args;
use memfold_api::DEFAULT_STATE;
use memfold_host::{HostFacts, examine};

use super::bench::become_bench;
use super::context::Context;
use super::doctor;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Also measure saves, clones, forks, lending and the costs of folding, and write a report to
    /// FILE, without names of this host and its users
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// End after this many minutes; parts that do not fit are left out
    #[arg(long, value_name = "MINUTES", default_value_t = 20, requires = "report", value_parser = clap::value_parser!(u64).range(1..=240))]
    limit: u64,
    /// Guest image that all guests boot, by its name in memfold's cache (default: trixie-a and
    /// trixie-b)
    #[arg(long, value_name = "NAME", requires = "report")]
    image: Option<OsString>,
    /// Measure only this part (may be given several times): proof, fold, huge-pages, guests,
    /// snapshots, clones, fork, lending
    #[arg(long = "part", value_name = "PART", requires = "report")]
    parts: Vec<OsString>,
    /// Compare two reports, and run no test
    #[arg(long, num_args = 2, value_names = ["FILE", "FILE"], conflicts_with = "report")]
    compare: Vec<PathBuf>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut words = vec![OsString::from("self-test")];
    if arguments.compare.is_empty() {
        let host = examine(HostFacts::probe(DEFAULT_STATE.as_ref()));
        if !host.can_run {
            context.print(&host, doctor::text)?;
            return Ok(doctor::exit_code(&host));
        }
        let Some(report) = &arguments.report else {
            return doctor::self_test(context, &host);
        };
        let mut option = |name: &str, value: OsString| words.extend([name.into(), value]);
        option("--report", report.into());
        option("--limit", arguments.limit.to_string().into());
        if let Some(image) = &arguments.image {
            option("--image", image.clone());
        }
        for part in &arguments.parts {
            option("--part", part.clone());
        }
    } else {
        words.push("--compare".into());
        words.extend(arguments.compare.iter().map(Into::into));
    }
    let words = words.into_iter();
    become_bench(words.chain(context.json_argument()), Stdio::inherit())
}
