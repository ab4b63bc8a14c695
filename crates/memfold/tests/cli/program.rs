//! The program and its log, for the tests of the command line and those of injected faults.

use std::process::{Command, Stdio};

/// Returns a command for the program, without the caller's settings for memfold.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfold"));
    for name in ["MEMFOLD_SOCKET", "MEMFOLD_STATE", "MEMFOLD_LOG"] {
        command.env_remove(name);
    }
    // The configuration file of this host is not read either.
    command.env("MEMFOLD_CONFIG", "/dev/null");
    command.stdin(Stdio::null());
    command
}

/// Returns the destination of daemons' logs: a file, if the environment names one for debugging.
pub fn log() -> Stdio {
    let Some(path) = std::env::var_os("MEMFOLD_TEST_LOG") else {
        return Stdio::null();
    };
    let file = std::fs::File::options()
        .append(true)
        .create(true)
        .open(path);
    file.unwrap().into()
}
