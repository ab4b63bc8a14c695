//! A streamed command in a guest, for `vm exec -it` and `vm cp`: the connection to the daemon, the
//! room for input, and signals.

use std::io::{self, ErrorKind, Read as _, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use memfold_api::{Client, EXEC_PROTOCOL, ExecEvent, ExecOrder, ExecStreamRequest};
use tokio::signal::unix::{SignalKind, signal};

use super::vm_info::segment;

/// Most bytes of input in one frame.
pub(super) const INPUT_PIECE: usize = 16 << 10;
/// Numbers of signals in Linux.
const SIGHUP: u8 = 1;
const SIGINT: u8 = 2;
const SIGPIPE: i32 = 13;
const SIGTERM: u8 = 15;

/// Who gets this program's SIGINT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interrupt {
    /// The first SIGINT goes to the command; a second one ends the connection.
    Command,
    /// SIGINT ends the connection.
    Connection,
}

/// The connection of a streamed command, for the threads that send to it.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Mutex<UnixStream>,
    /// Second handle of the connection, which a thread closes while another one writes.
    closer: UnixStream,
    room: Mutex<Room>,
    changed: Condvar,
    /// Number of the signal that ended this client; 0: none.
    ended_by: AtomicU8,
}

#[derive(Debug)]
struct Room {
    /// Number of bytes of input that may be sent.
    bytes: usize,
    is_closed: bool,
}

impl Connection {
    /// Sends a frame. Returns whether the connection still exists.
    pub(super) fn send(&self, order: &ExecOrder) -> bool {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&order.encode()).is_ok()
    }

    /// Ends the connection, and the command with it.
    pub(super) fn close(&self) {
        // This fails only if the connection is closed already.
        let _ = self.closer.shutdown(Shutdown::Both);
        self.room().is_closed = true;
        self.changed.notify_all();
    }

    /// Ends the connection as if this program had got a signal.
    pub(super) fn close_by(&self, signal: u8) {
        self.ended_by.store(signal, Ordering::Relaxed);
        self.close();
    }

    /// Ends the connection as if this program's terminal were gone.
    pub(super) fn hang_up(&self) {
        self.close_by(SIGHUP);
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until input may be sent. Returns the number of bytes; `None`: the connection is
    /// closed.
    pub(super) fn wait_room(&self) -> Option<usize> {
        let waiting = |room: &mut Room| room.bytes == 0 && !room.is_closed;
        let room = self.changed.wait_while(self.room(), waiting);
        let room = room.unwrap_or_else(PoisonError::into_inner);
        (!room.is_closed).then_some(room.bytes)
    }

    /// Sends input, for which there must be room. Returns whether the connection still exists.
    pub(super) fn input(&self, bytes: &[u8]) -> bool {
        {
            let mut room = self.room();
            room.bytes = room.bytes.saturating_sub(bytes.len());
        }
        self.send(&ExecOrder::Input(bytes.to_vec()))
    }
}

/// Standard input of a streamed command, as a writer.
#[derive(Debug)]
pub(super) struct Input(pub(super) Arc<Connection>);

impl Write for Input {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.0.wait_room().ok_or(ErrorKind::BrokenPipe)?;
        let length = bytes.len().min(room).min(INPUT_PIECE);
        if self.0.input(&bytes[..length]) {
            Ok(length)
        } else {
            Err(ErrorKind::BrokenPipe.into())
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A streamed command that was started in a guest. It ends with this process.
#[derive(Debug)]
pub(super) struct Streamed {
    pub(super) connection: Arc<Connection>,
    vm: String,
    reader: io::Chain<io::Cursor<Vec<u8>>, UnixStream>,
}

impl Streamed {
    /// Starts a command in the guest of VM `vm`.
    pub(super) fn start(
        client: &Client,
        vm: &str,
        request: &ExecStreamRequest,
        interrupt: Interrupt,
    ) -> anyhow::Result<Self> {
        let path = format!("/v1/vms/{}/exec/stream", segment(vm)?);
        let (stream, first) = client.upgrade(&path, EXEC_PROTOCOL, request)?;
        let connection = Arc::new(Connection {
            stream: Mutex::new(stream.try_clone()?),
            closer: stream.try_clone()?,
            room: Mutex::new(Room {
                bytes: 0,
                is_closed: false,
            }),
            changed: Condvar::new(),
            ended_by: AtomicU8::new(0),
        });
        watch_signals(&connection, interrupt, request.terminal.is_some())?;
        Ok(Self {
            connection,
            vm: vm.to_owned(),
            reader: io::Cursor::new(first).chain(stream),
        })
    }

    /// Passes the command's output to `output` until the command has ended. Returns its exit code;
    /// 128 + N if signal N ended this client.
    pub(super) fn finish(
        mut self,
        mut output: impl FnMut(&ExecEvent) -> io::Result<()>,
    ) -> anyhow::Result<i32> {
        let result = loop {
            match ExecEvent::read(&mut self.reader) {
                Ok(Some(ExecEvent::Exited(code))) => break Ok(code),
                Ok(Some(ExecEvent::Failed(why))) => {
                    break Err(anyhow::anyhow!("{why}").context(format!("VM '{}'", self.vm)));
                }
                Ok(Some(ExecEvent::InputRoom(bytes))) => {
                    self.connection.room().bytes += usize::try_from(bytes).unwrap_or(0);
                    self.connection.changed.notify_all();
                }
                Ok(Some(event)) => match output(&event) {
                    Ok(()) => {}
                    // As if SIGPIPE had ended this program.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => break Ok(128 + SIGPIPE),
                    Err(error) => break Err(error.into()),
                },
                ended => {
                    let signal = self.connection.ended_by.load(Ordering::Relaxed);
                    if signal != 0 {
                        break Ok(128 + i32::from(signal));
                    }
                    let lost = "the daemon closed the connection, which ended the command; see the daemon's log";
                    break match ended {
                        Err(error) => Err(anyhow::Error::new(error).context(lost)),
                        Ok(_) => Err(anyhow::anyhow!(lost)),
                    };
                }
            }
        };
        self.connection.close();
        result
    }
}

/// Starts a thread that handles signals. SIGTERM and SIGHUP end the connection, and the command
/// with it. Changes of the terminal's size go to the command's terminal.
fn watch_signals(
    connection: &Arc<Connection>,
    interrupt: Interrupt,
    has_terminal: bool,
) -> anyhow::Result<()> {
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
    let mut goes_to_command = interrupt == Interrupt::Command;
    std::thread::spawn(move || {
        let [interrupted, terminated, hung_up, resized] = &mut signals;
        let ended_by = runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = interrupted.recv() => {
                        if !std::mem::replace(&mut goes_to_command, false) {
                            return SIGINT;
                        }
                        connection.send(&ExecOrder::Signal(SIGINT));
                    }
                    _ = terminated.recv() => return SIGTERM,
                    _ = hung_up.recv() => return SIGHUP,
                    _ = resized.recv() => {
                        if let (true, Ok((columns, rows))) =
                            (has_terminal, crossterm::terminal::size())
                        {
                            connection.send(&ExecOrder::Resize { rows, columns });
                        }
                    }
                }
            }
        });
        connection.close_by(ended_by);
    });
    Ok(())
}
