//! Starts the running test program again as a helper process of a test.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

/// Starts this test program again to run only `test`, which is ignored otherwise, with `variable`
/// set to `value`. Returns the process once it has printed a line `READY WORDS`, and the words.
/// Its standard input stays open until the process is waited for.
///
/// # Panics
///
/// If the process cannot be started, or ends before it prints the line.
pub fn start_helper(test: &str, variable: &str, value: impl AsRef<OsStr>) -> (Child, String) {
    let program = std::env::current_exe().expect("the path of the test program");
    let mut child = Command::new(program)
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .env(variable, value)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the test program starts again");
    let output = BufReader::new(child.stdout.take().expect("its output is a pipe"));
    let words = output
        .lines()
        .map_while(Result::ok)
        .find_map(|line| Some(line.strip_prefix("READY")?.trim().to_owned()));
    (child, words.expect("the helper process ended early"))
}
