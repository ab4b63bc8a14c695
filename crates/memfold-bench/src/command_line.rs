//! The command line of `memfold-bench`: the studies, and the demo and self-test, which `memfold`
//! starts for its own commands.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not possible on this host.

use std::io::{IsTerminal as _, stderr, stdin};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use memfold_api::ClientError;
use serde_json::{Map, Value};
use tracing_subscriber::EnvFilter;

use crate::host::check_host;
use crate::images::{self, NoImages};
use crate::output::Output;
use crate::study::{Options, Study};
use crate::{
    clones, demo, desktops, figure, fold, fork, generate, hints, ksm, mappings, record, remote,
    report, rightsize, scale, segments, selftest, snapshots,
};

/// Exit code of a program that this host cannot run.
const IMPOSSIBLE_HERE: u8 = 3;

/// Studies of memfold's savings and costs, on VMs of their own.
#[derive(Parser, Debug)]
#[command(
    name = "memfold-bench",
    version,
    about,
    max_term_width = 100,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
struct Cli {
    #[command(flatten)]
    study: Arguments,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Commands that other programs start.
#[derive(Subcommand, Debug)]
enum Command {
    /// Demo: boot real VMs, fold them, and compare the memory saved with KSM's
    #[command(hide = true)]
    Demo(demo::Arguments),
    /// Prove that folding loses no byte on this host
    #[command(hide = true)]
    SelfTest(Box<SelfTestArguments>),
    /// Measured process of the study 'mappings'
    #[command(hide = true)]
    MappingsProcess(mappings::process::Arguments),
    /// Manual page and completions, for packages
    #[command(hide = true)]
    Generate(generate::Arguments),
}

#[derive(Args, Debug)]
struct SelfTestArguments {
    #[command(flatten)]
    report: report::Arguments,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Cost of folding by run length, compared with a plain comparison and with ksmd
    Fold,
    /// Two VMs compile: what folding by hints shares and costs, compared with KSM at its defaults
    /// and at equal CPU
    Hints,
    /// Saving and restoring a VM without its caches, compared with QEMU's mapped-ram with multifd
    Snapshots,
    /// Clones of one warm VM: time until each runs, and its memory
    Clones,
    /// Forks of a running VM: how long it stands still, how soon a fork runs, what a fork writes
    Fork,
    /// Memory of VMs that execute files in place from one image, compared with VMs with disks and
    /// with clones
    Segments,
    /// KSM: what it saves by workload, how soon, for how much CPU, and how much it slows guests
    /// down
    Ksm,
    /// Memory that a browser and an office suite add to VMs that execute them from one image,
    /// compared with VMs with disks
    Desktops,
    /// A VM that swaps to this host's disk and to RAM of another host: throughput, loss of a
    /// lender, a real sort
    Remote,
    /// VMs with changing work in one memory budget: their memory and work if nobody sizes them,
    /// with free page reporting alone, with Proxmox VE's rule for balloons, and with memfold
    Rightsize,
    /// Memory and time of the fold engine for up to 1,000 VMs, by their number
    Scale,
    /// Up to 60,000 folded runs in one process: how long its threads stall while KSM, compaction,
    /// forks and more go on, and what a mapping costs
    Mappings,
}

#[derive(Args, Debug)]
struct Arguments {
    #[arg(required = true)]
    study: Option<Name>,
    #[command(flatten)]
    options: Options,
    /// Write the study's figures here, as SVG
    #[arg(long, value_name = "DIR")]
    figures: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl Name {
    fn study(self) -> Study {
        let study = |run, figures, has_arms| Study {
            run,
            figures,
            has_arms,
        };
        match self {
            Self::Fold => study(fold::run, fold::figures, false),
            Self::Hints => study(hints::run, hints::figures, true),
            Self::Snapshots => study(snapshots::run, snapshots::figures, true),
            Self::Clones => study(clones::run, clones::figures, false),
            Self::Fork => study(fork::run, |_| Vec::new(), false),
            Self::Segments => study(segments::run, |_| Vec::new(), false),
            Self::Ksm => study(ksm::run, ksm::figures, false),
            Self::Desktops => study(desktops::run, desktops::figures, true),
            Self::Remote => study(remote::run, remote::figures, true),
            Self::Rightsize => study(rightsize::run, rightsize::figures, true),
            Self::Scale => study(scale::run, |_| Vec::new(), true),
            Self::Mappings => study(mappings::run, mappings::figures, true),
        }
    }
}

/// Parses the command line of `memfold-bench`, runs the command, and returns the exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("MEMFOLD_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .log_internal_errors(false)
        .init();
    let result = match (&cli.command, cli.study.study) {
        (Some(Command::Demo(arguments)), _) => demo::run(arguments).map(|()| true),
        (Some(Command::SelfTest(arguments)), _) => self_test(arguments),
        (Some(Command::MappingsProcess(arguments)), _) => {
            mappings::process::run(arguments).map(|()| true)
        }
        (Some(Command::Generate(arguments)), _) => {
            generate::run(arguments, Cli::command()).map(|()| true)
        }
        (None, Some(study)) => run(study, &cli.study).map(|()| true),
        // Clap makes sure that one of them is given.
        (None, None) => Ok(false),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    memfold_host::say!("memfold-bench: {error:#}");
    if let Some(ClientError::Refused { body, .. }) = error.downcast_ref::<ClientError>() {
        if let Some(hint) = &body.hint {
            memfold_host::say!("hint: {hint}");
        }
    }
    if error.is::<NoImages>() {
        ExitCode::from(IMPOSSIBLE_HERE)
    } else {
        ExitCode::FAILURE
    }
}

/// Runs the self-test, with a report if the user asked for one. Returns whether it was passed.
fn self_test(arguments: &SelfTestArguments) -> anyhow::Result<bool> {
    let SelfTestArguments { report, output } = arguments;
    if let Some(results) = &report.results {
        return report::run_part(report, results);
    }
    if !report.compare.is_empty() {
        return report::print_comparison(report, output);
    }
    output.check()?;
    match &report.report {
        Some(file) => report::run(report, file, output),
        None => prove(output),
    }
}

/// Proves that folding loses no byte. Returns whether it loses none. Unless standard input is a
/// terminal, the host's report (`memfold doctor --json`) is read from it.
fn prove(output: &Output) -> anyhow::Result<bool> {
    check_host(output)?;
    images::build_missing(&selftest::GUESTS.map(|(_, image)| image))?;
    let mut report: Map<String, Value> = if stdin().is_terminal() {
        Map::new()
    } else {
        serde_json::from_reader(stdin())
            .context("cannot parse standard input as the output of 'memfold doctor --json'")?
    };
    let began = Instant::now();
    let images = selftest::GUESTS.map(|(_, image)| image);
    let test = selftest::run(images, selftest::CHURN_SECONDS, &|step| {
        memfold_host::say!("{:6.1} s  {step}", began.elapsed().as_secs_f64());
    })?;
    report.insert("self_test".into(), serde_json::to_value(&test)?);
    output.print(&report, |_| selftest::table::text(&test))?;
    Ok(test.passed)
}

fn run(name: Name, arguments: &Arguments) -> anyhow::Result<()> {
    let (study, options) = (name.study(), &arguments.options);
    let known = name.to_possible_value();
    let title = known.as_ref().map_or("", |value| value.get_name());
    ensure!(
        options.arms.is_empty() || study.has_arms,
        "the study '{title}' has no arms"
    );
    ensure!(
        options.vms.is_none() || name == Name::Ksm,
        "the study '{title}' has its number of VMs: --vms is for 'ksm'"
    );
    ensure!(
        options.memory.is_none() || matches!(name, Name::Snapshots | Name::Fork),
        "the study '{title}' has its sizes of VMs: --memory is for 'snapshots' and 'fork'"
    );
    arguments.output.check()?;
    let boots_vms = match name {
        Name::Fold => false,
        Name::Mappings => options.is_wanted(mappings::NEIGHBOURS),
        _ => true,
    };
    if boots_vms {
        check_host(&arguments.output)?;
    }
    let result = record::envelope(title, options.quick, (study.run)(options)?);
    if let Some(directory) = &arguments.figures {
        figure::write(directory, &(study.figures)(&result))?;
    }
    arguments.output.print(&result, record::summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(line: &str) -> Option<String> {
        let line = format!("memfold-bench {line}");
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        match cli.command {
            Some(Command::SelfTest(arguments)) => arguments.output.json,
            _ => cli.study.output.json,
        }
    }

    #[test]
    fn the_command_line_definition_of_memfold_bench_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_option_json_takes_an_optional_file_and_the_last_json_option_wins() {
        assert_eq!(json("fold --quick"), None);
        for line in [
            "fold --json",
            "fold --json -",
            "fold --json --quick",
            "--json=- fold",
            "self-test --json",
        ] {
            assert_eq!(json(line).as_deref(), Some("-"), "{line}");
        }
        for line in [
            "fold --json f.json",
            "fold --quick --json=f.json",
            "--json=- fold --json f.json",
            "self-test --json=f.json",
        ] {
            assert_eq!(json(line).as_deref(), Some("f.json"), "{line}");
        }
    }
}
