//! `memfold bench`: the studies.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use memfold_api::DEFAULT_STATE;
use memfold_host::{HostFacts, examine};
use serde_json::Value;

use super::context::Context;
use super::doctor;
use crate::bench::{self, record};

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
pub(super) struct Arguments {
    study: Study,
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
    /// Write the results to FILE as JSON; without FILE or with '-', print them instead of text
    // The same id as the flag of all commands, so that this one takes its place.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<String>,
}

/// Options that not all studies have.
fn check(arguments: &Arguments, name: &str) -> anyhow::Result<()> {
    let has_arms = [
        Study::Hints,
        Study::Remote,
        Study::Desktops,
        Study::Snapshots,
    ];
    anyhow::ensure!(
        arguments.arms.is_empty() || has_arms.contains(&arguments.study),
        "the study '{name}' has no arms"
    );
    anyhow::ensure!(
        arguments.vms.is_none() || matches!(arguments.study, Study::Ksm),
        "the study '{name}' has its number of VMs: --vms is for 'ksm'"
    );
    Ok(())
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (name, quick) = (study_name(arguments.study), arguments.quick);
    check(arguments, name)?;
    // All but this one boot VMs.
    if !matches!(arguments.study, Study::Fold) {
        let host = examine(HostFacts::probe(DEFAULT_STATE.as_ref()));
        if !host.can_run {
            context.print(&host, doctor::text)?;
            return Ok(doctor::exit_code(&host));
        }
    }
    let (measured, draw): (Value, Draw) = match arguments.study {
        Study::Fold => {
            let options = if quick {
                bench::fold::Options::quick()
            } else {
                bench::fold::Options::default()
            };
            (bench::fold::run(&options)?, bench::fold::figures)
        }
        Study::Hints => {
            let mut options = if quick {
                bench::hints::Options::quick()
            } else {
                bench::hints::Options::full()?
            };
            if !arguments.arms.is_empty() {
                options.keep_arms(&arguments.arms)?;
            }
            (bench::hints::run(&options)?, bench::hints::figures)
        }
        Study::Snapshots => {
            let mut options = if quick {
                bench::snapshots::Options::quick()
            } else {
                bench::snapshots::Options::default()
            };
            if !arguments.arms.is_empty() {
                options.keep_arms(&arguments.arms)?;
            }
            (bench::snapshots::run(&options)?, bench::snapshots::figures)
        }
        Study::Clones => {
            let options = if quick {
                bench::clones::Options::quick()
            } else {
                bench::clones::Options::default()
            };
            (bench::clones::run(&options)?, bench::clones::figures)
        }
        Study::Segments => {
            let options = if quick {
                bench::segments::Options::quick()
            } else {
                bench::segments::Options::default()
            };
            (bench::segments::run(&options)?, |_| Vec::new())
        }
        Study::Ksm => {
            let mut options = if quick {
                bench::ksm::Options::quick()
            } else {
                bench::ksm::Options::default()
            };
            if let Some(vms) = arguments.vms {
                options = options.with_vms(vms.into());
            }
            (bench::ksm::run(&options)?, bench::ksm::figures)
        }
        Study::Desktops => {
            let mut options = if quick {
                bench::desktops::Options::quick()
            } else {
                bench::desktops::Options::default()
            };
            if !arguments.arms.is_empty() {
                options.keep_arms(&arguments.arms)?;
            }
            (bench::desktops::run(&options)?, bench::desktops::figures)
        }
        Study::Remote => {
            let mut options = if quick {
                bench::remote::Options::quick()
            } else {
                bench::remote::Options::default()
            };
            if !arguments.arms.is_empty() {
                options.keep_arms(&arguments.arms)?;
            }
            (bench::remote::run(&options)?, bench::remote::figures)
        }
    };
    let result = record::envelope(name, quick, measured);
    if let Some(directory) = &arguments.figures {
        write_figures(directory, &draw(&result))?;
    }
    context.print(&result, summary)?;
    Ok(ExitCode::SUCCESS)
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
