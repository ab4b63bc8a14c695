//! `memfold generate`: writes manual pages, shell completions, the API reference and the API's
//! `OpenAPI` description, from the program's own definitions. Used to build packages and docs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Command};
use clap_complete::Shell;
use memfold_server::{openapi, reference};

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Directory for the manual pages, one for each command
    #[arg(long, value_name = "DIR")]
    man: Option<PathBuf>,
    /// Directory for completions of bash, zsh and fish, under the names that these shells look for
    #[arg(long, value_name = "DIR")]
    completions: Option<PathBuf>,
    /// File for the reference of the HTTP API, in Markdown
    #[arg(long, value_name = "FILE")]
    api: Option<PathBuf>,
    /// File for the description of the HTTP API that programs read, in JSON
    #[arg(long, value_name = "FILE")]
    openapi: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments, mut program: Command) -> anyhow::Result<ExitCode> {
    if let Some(directory) = &arguments.man {
        std::fs::create_dir_all(directory)
            .and_then(|()| clap_mangen::generate_to(program.clone(), directory))
            // The package of `memfold-bench` has its own page.
            .and_then(|()| std::fs::remove_file(directory.join("memfold-bench.1")))
            .with_context(|| format!("cannot write into {}", directory.display()))?;
    }
    if let Some(directory) = &arguments.completions {
        for (shell, name) in [
            (Shell::Bash, "memfold"),
            (Shell::Zsh, "_memfold"),
            (Shell::Fish, "memfold.fish"),
        ] {
            complete(&mut program, shell, &directory.join(name))?;
        }
    }
    if let Some(file) = &arguments.api {
        std::fs::write(file, reference(&openapi()))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    if let Some(file) = &arguments.openapi {
        std::fs::write(file, format!("{:#}\n", openapi()))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn complete(program: &mut Command, shell: Shell, path: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", path.display());
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).with_context(failed)?;
    }
    let mut file = File::create(path).with_context(failed)?;
    clap_complete::generate(shell, program, "memfold", &mut file);
    Ok(())
}
