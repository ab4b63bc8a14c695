//! `memfold vm exec`: runs a command in a guest, at once or with live input and output.

use std::io::{ErrorKind, IsTerminal as _, Read as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use memfold_api::{
    Client, ClientError, ExecEvent, ExecOrder, ExecRequest, ExecResult, ExecStreamRequest,
    ExecTerminal,
};

use super::console::Raw;
use super::context::{Context, write_line};
use super::failure;
use super::shell_text::script;
use super::streamed::{Connection, INPUT_PIECE, Interrupt, Streamed};
use super::vm_info::segment;

/// Time limit of a command without live streams, in seconds.
const TIMEOUT_S: f64 = 600.0;
/// Exit code if the command reached its time limit, as of timeout(1).
const TIMED_OUT: u8 = 124;
/// The key that ends the connection if it is typed three times within a second: Ctrl-].
const ESCAPE: u8 = 0x1d;
const ESCAPE_TIMES: usize = 3;
const ESCAPE_TIME: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Pass standard input to the command, and its output on while the command runs
    #[arg(short, long)]
    interactive: bool,
    /// Run the command in a terminal of its own, with the size of this one; with -i, every key goes
    /// to the guest, also Ctrl-C; Ctrl-] three times within a second ends the connection
    #[arg(short, long)]
    tty: bool,
    /// Name of the VM
    name: String,
    /// Seconds that a command without -i and -t may take [default: 600]; then it is killed, and the
    /// exit code is 124, as of timeout(1)
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["interactive", "tty"])]
    timeout: Option<f64>,
    /// One word of shell text ('cd /tmp && ls'), or a command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

pub(super) fn run(
    context: &Context,
    client: &Client,
    arguments: &Arguments,
) -> anyhow::Result<ExitCode> {
    let script = script(&arguments.command);
    if !arguments.interactive && !arguments.tty {
        return at_once(context, client, arguments, script);
    }
    if context.json {
        bail!("--json needs the whole output of a command; leave out -i and -t");
    }
    let request = ExecStreamRequest {
        script,
        copy: None,
        input: arguments.interactive,
        terminal: arguments
            .tty
            .then(|| terminal(arguments.interactive))
            .transpose()?,
    };
    stream(client, &arguments.name, &request)
}

fn at_once(
    context: &Context,
    client: &Client,
    arguments: &Arguments,
    script: String,
) -> anyhow::Result<ExitCode> {
    let request = ExecRequest {
        script,
        timeout_s: arguments.timeout.unwrap_or(TIMEOUT_S),
    };
    let path = format!("/v1/vms/{}/exec", segment(&arguments.name)?);
    let result: ExecResult = match client.post(&path, &request) {
        // The daemon has killed the command.
        Err(error @ ClientError::Refused { status: 504, .. }) => {
            failure::fail(&anyhow::Error::from(error));
            return Ok(ExitCode::from(TIMED_OUT));
        }
        result => result?,
    };
    context.write_file(&result)?;
    if context.json {
        write_line(&serde_json::to_string_pretty(&result)?)?;
    } else {
        match std::io::stdout().write_all(result.stdout.as_bytes()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => return Err(error.into()),
            _ => std::io::stderr().write_all(result.stderr.as_bytes())?,
        }
    }
    Ok(exit_code(result.code))
}

fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Returns the type and the size of this terminal. `has_input`: whether it has the command's input,
/// too.
fn terminal(has_input: bool) -> anyhow::Result<ExecTerminal> {
    if !std::io::stdout().is_terminal() {
        bail!("-t needs a terminal as standard output; leave out -t");
    }
    if has_input && !std::io::stdin().is_terminal() {
        bail!("-it needs a terminal as standard input; leave out -t");
    }
    let (columns, rows) = crossterm::terminal::size().context("cannot read the terminal's size")?;
    let kind = std::env::var("TERM").unwrap_or_else(|_| "xterm".into());
    Ok(ExecTerminal {
        kind,
        rows,
        columns,
    })
}

fn write_all(out: &mut impl std::io::Write, bytes: &[u8]) -> std::io::Result<()> {
    out.write_all(bytes).and_then(|()| out.flush())
}

/// Runs a streamed command, with standard input if `request` asks for input. Returns the command's
/// exit code.
fn stream(client: &Client, name: &str, request: &ExecStreamRequest) -> anyhow::Result<ExitCode> {
    let streamed = Streamed::start(client, name, request, Interrupt::Command)?;
    let has_keys = request.input && request.terminal.is_some();
    // The terminal is restored at each end of this function.
    let raw = has_keys.then(Raw::set).transpose()?;
    if request.input {
        // This thread may wait for input when the command has ended; it then ends with the process.
        let connection = Arc::clone(&streamed.connection);
        std::thread::spawn(move || pass_input(&connection, has_keys));
    }
    let code = streamed.finish(|event| match event {
        ExecEvent::Stdout(bytes) => write_all(&mut std::io::stdout(), bytes),
        ExecEvent::Stderr(bytes) => write_all(&mut std::io::stderr(), bytes),
        _ => Ok(()),
    });
    drop(raw);
    code.map(exit_code)
}

/// Passes standard input to the command, as far as the command has room for it. `has_keys`: whether
/// the input are the keys of a terminal.
fn pass_input(connection: &Connection, has_keys: bool) {
    let mut input = std::io::stdin().lock();
    let mut buffer = [0; INPUT_PIECE];
    let mut escapes = Vec::new();
    while let Some(room) = connection.wait_room() {
        match input.read(&mut buffer[..room.min(INPUT_PIECE)]) {
            Ok(read @ 1..) => {
                let bytes = &buffer[..read];
                if has_keys && is_escape(bytes, &mut escapes, Instant::now()) {
                    connection.hang_up();
                    return;
                }
                if !connection.input(bytes) {
                    return;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // Input that cannot be read ends like a file.
            Ok(0) | Err(_) => {
                connection.send(&ExecOrder::EndInput);
                return;
            }
        }
    }
}

/// Returns whether the third Ctrl-] within a second was typed. `escapes`: times of the last ones.
fn is_escape(keys: &[u8], escapes: &mut Vec<Instant>, now: Instant) -> bool {
    for &key in keys {
        if key == ESCAPE {
            escapes.push(now);
        } else {
            escapes.clear();
        }
    }
    escapes.retain(|&at| now.duration_since(at) < ESCAPE_TIME);
    escapes.len() >= ESCAPE_TIMES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_three_escape_keys_within_a_second_end_the_connection() {
        let began = Instant::now();
        let after = |ms| began + Duration::from_millis(ms);
        let mut escapes = Vec::new();
        assert!(!is_escape(b"\x1d", &mut escapes, began));
        assert!(!is_escape(b"a\x1d", &mut escapes, after(10)));
        assert!(!is_escape(b"\x1d", &mut escapes, after(20)));
        assert!(!is_escape(b"\x1d", &mut escapes, after(1015)));
        assert!(is_escape(b"\x1d", &mut escapes, after(1018)));
        assert!(is_escape(b"\x1d\x1d\x1d", &mut Vec::new(), began));
    }
}
