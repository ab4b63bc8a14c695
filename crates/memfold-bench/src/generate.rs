//! `memfold-bench generate`, for packages: writes the manual page and shell completions from the
//! definition of the command line.

use std::fs::File;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Command};
use clap_complete::Shell;

#[derive(Args, Debug)]
pub struct Arguments {
    /// Directory for the manual page
    #[arg(long, value_name = "DIR")]
    man: PathBuf,
    /// Directory for completions of bash, zsh and fish, under the names that the shells look for
    #[arg(long, value_name = "DIR")]
    completions: PathBuf,
}

pub fn run(arguments: &Arguments, mut program: Command) -> anyhow::Result<()> {
    std::fs::create_dir_all(&arguments.man)
        .and_then(|()| clap_mangen::generate_to(program.clone(), &arguments.man))
        .with_context(|| format!("cannot write into {}", arguments.man.display()))?;
    let place = &arguments.completions;
    std::fs::create_dir_all(place).with_context(|| format!("cannot make {}", place.display()))?;
    for (shell, name) in [
        (Shell::Bash, "memfold-bench"),
        (Shell::Zsh, "_memfold-bench"),
        (Shell::Fish, "memfold-bench.fish"),
    ] {
        let path = place.join(name);
        let mut file =
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        clap_complete::generate(shell, &mut program, "memfold-bench", &mut file);
    }
    Ok(())
}
