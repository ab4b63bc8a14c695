//! The `memfold` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    memfold::cli::main()
}
