//! The agent's program; see the library for everything.

use std::process::ExitCode;

use memfold_agent::agent::Agent;

const HELP: &str = "\
memfold-agent: tells the memfold daemon which files this guest's page cache holds, and where.

Usage: memfold-agent [--dump | --version | --help]

Without an option it serves the virtio-serial port org.memfold.agent.0 until SIGTERM.

  --dump      write the messages to standard output as text, without a daemon
  --version   the version
  --help      this text
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let text = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--dump"] => true,
        ["--version" | "-V"] => {
            println!("memfold-agent {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        ["--help" | "-h"] => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match Agent::new(text).and_then(Agent::run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.kind() == std::io::ErrorKind::Interrupted => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("memfold-agent: {e}");
            ExitCode::FAILURE
        }
    }
}
