//! `memfold bench`: runs a study. Finds and starts the program `memfold-bench`, which contains the
//! studies, the demo and the self-test.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, bail};
use clap::Args;

use super::context::Context;

const NAME: &str = "memfold-bench";

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Name of a study, and its options; 'memfold-bench --help' lists the studies
    #[arg(
        value_name = "WORD",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(super) words: Vec<OsString>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let json = context.json_argument().into_iter();
    let words = json.chain(arguments.words.iter().cloned());
    become_bench(words, Stdio::inherit())
}

/// Replaces this process by `memfold-bench`. Returns only if that fails.
pub(super) fn become_bench(
    words: impl Iterator<Item = OsString>,
    input: Stdio,
) -> anyhow::Result<ExitCode> {
    let program = find_bench()?;
    let error = Command::new(&program).args(words).stdin(input).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}

/// Finds the program `memfold-bench`: beside this program, else in `PATH`.
fn find_bench() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the path of the running program")?;
    let beside = own.with_file_name(NAME);
    if beside.is_file() {
        return Ok(beside);
    }
    let Some(in_path) = memfold_host::files::program(NAME) else {
        bail!(
            "the program {NAME} is needed, and is neither beside {} nor in PATH; install the package {NAME}, or run 'cargo build --release -p {NAME}' in a checkout",
            own.display()
        );
    };
    Ok(in_path)
}
