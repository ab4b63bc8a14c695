//! The program `memfold`: daemon and command line in one.

use std::process::ExitCode;

fn main() -> ExitCode {
    memfold_host::set_commit(env!("MEMFOLD_GIT"));
    memfold::cli::main()
}
