//! The command line of the studies; and what `memfold` starts for its own commands: the demo and the self-test.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not possible on this host.

use std::io::{IsTerminal as _, stderr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use memfold_api::ClientError;
use serde_json::Value;
use tracing_subscriber::EnvFilter;

use crate::host::check_host;
use crate::output::Output;
use crate::{
    clones, demo, desktops, fold, generate, hints, ksm, record, remote, segments, selftest,
    snapshots,
};

/// Studies of what memfold saves and costs, on VMs of their own.
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

/// What other programs start.
#[derive(Subcommand, Debug)]
enum Command {
    /// The main job: boot real VMs, fold them, show what was saved next to KSM
    #[command(hide = true)]
    Demo(demo::Arguments),
    /// Prove that folding loses no byte on this host
    #[command(hide = true)]
    SelfTest(Output),
    /// Manual page and completions, for packages
    #[command(hide = true)]
    Generate(generate::Arguments),
}

/// Makes a study's figures of its result: names and SVG.
type Draw = fn(&Value) -> Vec<(String, String)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Study {
    /// Cost of folding by run length, next to a bare compare and to ksmd
    Fold,
    /// Two VMs compile: what folding by hints shares and costs, next to KSM at its defaults and at equal CPU
    Hints,
    /// Saving and restoring a VM without its soft state, next to QEMU's mapped-ram with multifd
    Snapshots,
    /// Clones of one warm VM: time until each runs, and its memory
    Clones,
    /// Memory of VMs that execute files in place from one image, next to VMs with disks and to clones
    Segments,
    /// The kernel's own merging: what it saves by what guests do, how soon and for how much CPU, and how much it slows them down
    Ksm,
    /// Memory that a browser and an office suite add to VMs that execute them from one image, next to VMs with disks
    Desktops,
    /// A VM that swaps, on this host's disk and on RAM that another host lends: throughput, lenders that die, a real sort
    Remote,
}

#[derive(Args, Debug)]
struct Arguments {
    #[arg(required = true)]
    study: Option<Study>,
    /// Smaller and shorter
    #[arg(long)]
    quick: bool,
    /// Only this arm of `hints` (may be given several times), `block-path` of `remote`, `starts` of `desktops`, or `pipeline` of `snapshots`. A wrong name prints all
    #[arg(long = "arm", value_name = "NAME")]
    arms: Vec<String>,
    /// Most VMs at once, of `ksm` (4; with --quick 2)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    vms: Option<u8>,
    /// Write the study's figures here, as SVG
    #[arg(long, value_name = "DIR")]
    figures: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Options that not all studies have.
fn check(study: Study, arguments: &Arguments, name: &str) -> anyhow::Result<()> {
    let has_arms = [
        Study::Hints,
        Study::Remote,
        Study::Desktops,
        Study::Snapshots,
    ];
    anyhow::ensure!(
        arguments.arms.is_empty() || has_arms.contains(&study),
        "the study '{name}' has no arms"
    );
    anyhow::ensure!(
        arguments.vms.is_none() || matches!(study, Study::Ksm),
        "the study '{name}' has its number of VMs: --vms is for 'ksm'"
    );
    Ok(())
}

/// Parses the command line and carries it out.
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
        (Some(Command::SelfTest(output)), _) => self_test(output),
        (Some(Command::Generate(arguments)), _) => {
            generate::run(arguments, Cli::command()).map(|()| true)
        }
        (None, Some(study)) => run(study, &cli.study).map(|()| true),
        // Clap asks for one of them.
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
    if let Some(ClientError::Refused(body)) = error.downcast_ref::<ClientError>() {
        if let Some(hint) = &body.hint {
            memfold_host::say!("hint: {hint}");
        }
    }
    ExitCode::FAILURE
}

/// Whether it was passed.
fn self_test(output: &Output) -> anyhow::Result<bool> {
    check_host(output)?;
    let began = Instant::now();
    let test = selftest::run(&|step| {
        memfold_host::say!("{:6.1} s  {step}", began.elapsed().as_secs_f64());
    })?;
    output.print(&test, selftest::table::text)?;
    Ok(test.passed)
}

fn run(study: Study, arguments: &Arguments) -> anyhow::Result<()> {
    let (name, quick) = (study_name(study), arguments.quick);
    check(study, arguments, name)?;
    // All but this one boot VMs.
    if !matches!(study, Study::Fold) {
        check_host(&arguments.output)?;
    }
    let (measured, draw): (Value, Draw) = match study {
        Study::Fold => {
            let options = if quick {
                fold::Options::quick()
            } else {
                fold::Options::default()
            };
            (fold::run(&options)?, fold::figures)
        }
        Study::Hints => {
            let mut options = if quick {
                hints::Options::quick()
            } else {
                hints::Options::full()?
            };
            if !arguments.arms.is_empty() {
                options.keep_arms(&arguments.arms)?;
            }
            (hints::run(&options)?, hints::figures)
        }
        Study::Snapshots => {
            let mut options = if quick {
                snapshots::Options::quick()
            } else {
                snapshots::Options::default()
            };
            if !arguments.arms.is_empty() {
                options.keep_arms(&arguments.arms)?;
            }
            (snapshots::run(&options)?, snapshots::figures)
        }
        Study::Clones => {
            let options = if quick {
                clones::Options::quick()
            } else {
                clones::Options::default()
            };
            (clones::run(&options)?, clones::figures)
        }
        Study::Segments => {
            let options = if quick {
                segments::Options::quick()
            } else {
                segments::Options::default()
            };
            (segments::run(&options)?, |_| Vec::new())
        }
        Study::Ksm => {
            let mut options = if quick {
                ksm::Options::quick()
            } else {
                ksm::Options::default()
            };
            if let Some(vms) = arguments.vms {
                options = options.with_vms(vms.into());
            }
            (ksm::run(&options)?, ksm::figures)
        }
        Study::Desktops => {
            let mut options = if quick {
                desktops::Options::quick()
            } else {
                desktops::Options::default()
            };
            if !arguments.arms.is_empty() {
                options.keep_arms(&arguments.arms)?;
            }
            (desktops::run(&options)?, desktops::figures)
        }
        Study::Remote => {
            let mut options = if quick {
                remote::Options::quick()
            } else {
                remote::Options::default()
            };
            if !arguments.arms.is_empty() {
                options.keep_arms(&arguments.arms)?;
            }
            (remote::run(&options)?, remote::figures)
        }
    };
    let result = record::envelope(name, quick, measured);
    if let Some(directory) = &arguments.figures {
        write_figures(directory, &draw(&result))?;
    }
    arguments.output.print(&result, summary)
}

fn study_name(study: Study) -> &'static str {
    match study {
        Study::Fold => "fold",
        Study::Hints => "hints",
        Study::Snapshots => "snapshots",
        Study::Clones => "clones",
        Study::Segments => "segments",
        Study::Ksm => "ksm",
        Study::Desktops => "desktops",
        Study::Remote => "remote",
    }
}

fn write_figures(directory: &Path, figures: &[(String, String)]) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    for (name, svg) in figures {
        let path = directory.join(format!("{name}.svg"));
        std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The results, a line each; those within others by their whole name.
fn summary(study: &Value) -> String {
    let mut lines = Vec::new();
    flatten("", &study["results"], &mut lines);
    let width = lines.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    let line = |(key, value): &(String, String)| format!("{key:width$}  {value}");
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn flatten(name: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    match value {
        Value::Object(parts) => {
            for (key, part) in parts {
                let name = if name.is_empty() {
                    key.clone()
                } else {
                    format!("{name}.{key}")
                };
                flatten(&name, part, lines);
            }
        }
        // Lists are for programs: --json.
        Value::Array(_) => {}
        Value::Number(number) if number.is_f64() => {
            lines.push((
                name.into(),
                format!("{:.3}", number.as_f64().unwrap_or(f64::NAN)),
            ));
        }
        other => lines.push((name.into(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(line: &str) -> Option<String> {
        let line = format!("memfold-bench {line}");
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        match cli.command {
            Some(Command::SelfTest(output)) => output.json,
            _ => cli.study.output.json,
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn json_takes_a_file_or_none_and_the_last_one_counts() {
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
