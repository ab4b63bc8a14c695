//! `memfold vm exec`: runs a command in a guest, at once or with live input and output.

use std::io::{ErrorKind, IsTerminal as _, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use memfold_api::{
    Client, EXEC_PROTOCOL, ExecEvent, ExecOrder, ExecRequest, ExecResult, ExecStreamRequest,
    ExecTerminal,
};
use tokio::signal::unix::{SignalKind, signal};

use super::console::Raw;
use super::context::{Context, write_line};
use super::vm_info::segment;

/// Time limit of a command without live streams, in seconds.
const TIMEOUT_S: f64 = 600.0;
/// The key that ends the connection if it is typed three times within a second: Ctrl-].
const ESCAPE: u8 = 0x1d;
const ESCAPE_TIMES: usize = 3;
const ESCAPE_TIME: Duration = Duration::from_secs(1);
/// Most bytes of input in one frame.
const INPUT_PIECE: usize = 16 << 10;

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
    /// Seconds that a command without -i and -t may take [default: 600]
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
    let script = super::vm::script(&arguments.command);
    if !arguments.interactive && !arguments.tty {
        return at_once(context, client, arguments, script);
    }
    if context.json {
        bail!("--json needs the whole output of a command; leave out -i and -t");
    }
    let request = ExecStreamRequest {
        script,
        input: arguments.interactive,
        terminal: arguments.tty.then(terminal).transpose()?,
    };
    let mut output = |event: &ExecEvent| match event {
        ExecEvent::Stdout(bytes) => write_all(&mut std::io::stdout(), bytes),
        ExecEvent::Stderr(bytes) => write_all(&mut std::io::stderr(), bytes),
        _ => Ok(()),
    };
    stream(client, &arguments.name, &request, &mut output)
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
    let result: ExecResult = client.post(&path, &request)?;
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

/// Returns the type and the size of this terminal.
fn terminal() -> anyhow::Result<ExecTerminal> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        bail!("-t needs a terminal as standard input and output; leave out -t");
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

/// The connection of a streamed command, for the threads that send to it.
struct Connection {
    stream: Mutex<UnixStream>,
    /// Second handle of the connection, which a thread closes while another one writes.
    closer: UnixStream,
    /// Number of bytes of input that may be sent.
    room: Mutex<usize>,
    has_room: Condvar,
    /// Number of the signal that ended this client; 0: none.
    ended_by: AtomicU8,
}

impl Connection {
    /// Sends a frame. Returns whether the connection still exists.
    fn send(&self, order: &ExecOrder) -> bool {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&order.encode()).is_ok()
    }

    fn close(&self) {
        // This fails only if the connection is closed already.
        let _ = self.closer.shutdown(Shutdown::Both);
    }

    fn add_room(&self, bytes: usize) {
        *self.room.lock().unwrap_or_else(PoisonError::into_inner) += bytes;
        self.has_room.notify_all();
    }

    /// Waits until input may be sent. Returns the number of bytes.
    fn wait_room(&self) -> usize {
        let room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let room = self.has_room.wait_while(room, |room| *room == 0);
        *room.unwrap_or_else(PoisonError::into_inner)
    }

    fn take_room(&self, bytes: usize) {
        *self.room.lock().unwrap_or_else(PoisonError::into_inner) -= bytes;
    }
}

/// Runs a streamed command, with standard input if `request` asks for input. Passes the command's
/// output to `output`, and returns the command's exit code. The command ends with this process.
fn stream(
    client: &Client,
    name: &str,
    request: &ExecStreamRequest,
    output: &mut impl FnMut(&ExecEvent) -> std::io::Result<()>,
) -> anyhow::Result<ExitCode> {
    let path = format!("/v1/vms/{}/exec/stream", segment(name)?);
    let (stream, first) = client.upgrade(&path, EXEC_PROTOCOL, request)?;
    let connection = Arc::new(Connection {
        stream: Mutex::new(stream.try_clone()?),
        closer: stream.try_clone()?,
        room: Mutex::new(0),
        has_room: Condvar::new(),
        ended_by: AtomicU8::new(0),
    });
    let has_keys = request.input && request.terminal.is_some();
    // The terminal is restored at each end of this function.
    let raw = has_keys.then(Raw::set).transpose()?;
    watch_signals(&connection, request.terminal.is_some())?;
    if request.input {
        // This thread may wait for input when the command has ended; it then ends with the process.
        let connection = Arc::clone(&connection);
        std::thread::spawn(move || pass_input(&connection, has_keys));
    }
    let mut reader = std::io::Cursor::new(first).chain(stream);
    let result = loop {
        match ExecEvent::read(&mut reader) {
            Ok(Some(ExecEvent::Exited(code))) => break Ok(exit_code(code)),
            Ok(Some(ExecEvent::Failed(why))) => {
                break Err(anyhow::anyhow!("{why}").context(format!("VM '{name}'")));
            }
            Ok(Some(ExecEvent::InputRoom(bytes))) => {
                connection.add_room(usize::try_from(bytes).unwrap_or(0));
            }
            Ok(Some(event)) => match output(&event) {
                Ok(()) => {}
                // As if SIGPIPE had ended this program.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                    break Ok(exit_code(128 + 13));
                }
                Err(error) => break Err(error.into()),
            },
            ended => {
                let signal = connection.ended_by.load(Ordering::Relaxed);
                if signal != 0 {
                    break Ok(exit_code(128 + i32::from(signal)));
                }
                let lost = "the daemon closed the connection, which ended the command; see the daemon's log";
                break match ended {
                    Err(error) => Err(anyhow::Error::new(error).context(lost)),
                    Ok(_) => Err(anyhow::anyhow!(lost)),
                };
            }
        }
    };
    connection.close();
    drop(raw);
    result
}

/// Passes standard input to the command, as far as the command has room for it. `has_keys`: whether
/// the input are the keys of a terminal.
fn pass_input(connection: &Connection, has_keys: bool) {
    let mut input = std::io::stdin().lock();
    let mut buffer = [0; INPUT_PIECE];
    let mut escapes = Vec::new();
    loop {
        let most = connection.wait_room().min(INPUT_PIECE);
        match input.read(&mut buffer[..most]) {
            Ok(read @ 1..) => {
                let bytes = &buffer[..read];
                if has_keys && is_escape(bytes, &mut escapes, Instant::now()) {
                    connection.ended_by.store(1, Ordering::Relaxed);
                    connection.close();
                    return;
                }
                connection.take_room(read);
                if !connection.send(&ExecOrder::Input(bytes.to_vec())) {
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

/// Starts a thread that passes signals on: the first SIGINT goes to the command. A second one,
/// SIGTERM and SIGHUP end the connection, and the command with it. Changes of the terminal's size
/// go to the command's terminal.
fn watch_signals(connection: &Arc<Connection>, has_terminal: bool) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut signals = {
        let _inside = runtime.enter();
        [
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
            signal(SignalKind::window_change())?,
        ]
    };
    let connection = Arc::clone(connection);
    std::thread::spawn(move || {
        let [interrupt, terminate, hang_up, resize] = &mut signals;
        let mut interrupted = false;
        runtime.block_on(async {
            loop {
                let ended_by = tokio::select! {
                    _ = interrupt.recv() => {
                        if !std::mem::replace(&mut interrupted, true) {
                            connection.send(&ExecOrder::Signal(2));
                            continue;
                        }
                        2
                    }
                    _ = terminate.recv() => 15,
                    _ = hang_up.recv() => 1,
                    _ = resize.recv() => {
                        if let (true, Ok((columns, rows))) = (has_terminal, crossterm::terminal::size()) {
                            connection.send(&ExecOrder::Resize { rows, columns });
                        }
                        continue;
                    }
                };
                connection.ended_by.store(ended_by, Ordering::Relaxed);
                connection.close();
                return;
            }
        });
    });
    Ok(())
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
