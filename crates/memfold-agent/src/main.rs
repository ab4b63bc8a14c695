//! The program `memfold-agent`, which runs in guests: parses its options and calls the library.

use std::ffi::OsString;
use std::process::ExitCode;

use memfold_agent::agent::Agent;
use memfold_agent::segment::command;

const HELP: &str = "\
memfold-agent: tells the memfold daemon which files this guest's page cache holds, and where.

Usage: memfold-agent [--dump | --free-pages | --extents | --drop-caches SECONDS | --reseed | --send PATH | --receive NAME DESTINATION | --segment-... | --version | --help]

Without an option it serves the virtio-serial port org.memfold.agent.0 until SIGTERM.

  --dump        write the messages to standard output as text, without a daemon
  --free-pages  write which page frames the kernel has free: first frame and number of frames, a line each
  --extents     read paths from standard input, a line each, and write where on the guest's disks these files lie, a run a line: number of
                the path, first page of the file, pages, disk (major:minor), first page on the disk
  --drop-caches SECONDS
                read paths from standard input as above, and drop these files from the page cache, in this order, for at most so long;
                exit code 3: the time was too short
  --reseed      mix standard input into the kernel's random number generator and reseed it: for a guest that was restored or cloned
  --send PATH   write a file or directory to standard output, as an archive for memfold
  --receive NAME DESTINATION
                read such an archive from standard input, and make it DESTINATION, or DESTINATION/NAME in a directory: whole or not at all
  --version     the version
  --help        this text
";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(code) = command::run(&arguments) {
        return code;
    }
    let arguments: Vec<String> = arguments
        .iter()
        .map(|a| a.to_string_lossy().into_owned())
        .collect();
    let text = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--dump"] => true,
        ["--free-pages"] => {
            return ended(memfold_agent::free_pages::write(
                &mut std::io::stdout().lock(),
            ));
        }
        ["--extents"] => {
            return ended(memfold_agent::extents::write(
                &mut std::io::stdin().lock(),
                &mut std::io::stdout().lock(),
            ));
        }
        ["--drop-caches", seconds] => return drop_caches(seconds),
        ["--reseed"] => return ended(memfold_agent::reseed::reseed(&mut std::io::stdin().lock())),
        ["--send", path] => return ended(memfold_agent::copy::send(path)),
        ["--receive", name, destination] => {
            return ended(memfold_agent::copy::receive(name, destination));
        }
        ["--version" | "-V"] => {
            println!("memfold-agent {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        ["--help" | "-h"] => {
            print!("{HELP}\n{}", command::HELP);
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("{HELP}\n{}", command::HELP);
            return ExitCode::from(2);
        }
    };
    ended(Agent::new(text).and_then(Agent::run))
}

fn drop_caches(seconds: &str) -> ExitCode {
    let limit = seconds.parse().ok();
    let Some(limit) = limit.and_then(|s| std::time::Duration::try_from_secs_f64(s).ok()) else {
        eprintln!("memfold-agent: not a number of seconds: '{seconds}'");
        return ExitCode::from(2);
    };
    let mut input = std::io::BufReader::new(std::io::stdin());
    match memfold_agent::drop_caches::drop_files(limit, &mut input) {
        Ok(false) => ExitCode::from(3),
        other => ended(other.map(drop)),
    }
}

fn ended(result: std::io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.kind() == std::io::ErrorKind::Interrupted => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("memfold-agent: {e}");
            ExitCode::FAILURE
        }
    }
}
