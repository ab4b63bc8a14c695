//! `memfold bench`: the studies.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use serde_json::Value;

use super::Context;
use crate::bench;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Study {
    /// Cost of folding by run length, next to a bare compare and to ksmd
    Fold,
}

#[derive(Args, Debug)]
pub(super) struct Arguments {
    study: Study,
    /// Smaller and shorter
    #[arg(long)]
    quick: bool,
    /// Write the results here as JSON
    #[arg(long = "output", value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let result = match arguments.study {
        Study::Fold => {
            let options = if arguments.quick {
                bench::fold::Options::quick()
            } else {
                bench::fold::Options::default()
            };
            bench::fold::run(&options)?
        }
    };
    if let Some(path) = &arguments.output {
        std::fs::write(path, serde_json::to_vec_pretty(&result)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    context.print(&result, summary)?;
    Ok(ExitCode::SUCCESS)
}

/// The results, a line each.
fn summary(study: &Value) -> String {
    let results = study["results"].as_object().cloned().unwrap_or_default();
    let width = results.keys().map(String::len).max().unwrap_or(0);
    let line = |(key, value): (&String, &Value)| match value.as_f64() {
        Some(number) if !value.is_i64() && !value.is_u64() => format!("{key:width$}  {number:.3}"),
        _ => format!("{key:width$}  {value}"),
    };
    results.iter().map(line).collect::<Vec<_>>().join("\n")
}
