//! Streams the input and output of a command in a guest: API path `/v1/vms/{name}/exec/stream`.
//!
//! ```text
//!   client --ExecOrder frames--> receive --> StreamedCommand --> agent in the guest
//!   client <--ExecEvent frames-- pass_on <-- queue <------------ agent's link
//! ```
//! The agent may send only as much output as the queue may hold, and gets more room when the client
//! has got the output. The client may send only as much input as the agent has room for. So neither
//! a slow client nor a slow command fills the daemon's memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Json;
use axum::extract::{Extension, FromRequest, Request};
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::response::{IntoResponse, Response};
use memfold_api::{
    EXEC_HEADER, EXEC_PROTOCOL, ErrorBody, ExecEvent, ExecOrder, ExecStreamRequest, GuestCopy,
    GuestCopyKind, exec_header,
};
use memfold_vm::{
    AgentError, GuestOrder, GuestTask, INPUT_WINDOW, OutputStream, StreamEvent, StreamRequest,
    StreamedCommand, Terminal, TerminalSize,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::{UnboundedReceiver, WeakUnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tracing::debug;

use super::access::{Access, Upgrade};
use super::answer::{Asked, Named, Served, blocking, refusal};
use super::runtimes::on_worker;

/// Counts of streamed commands since the daemon's start.
#[derive(Debug, Default)]
pub(super) struct StreamCounts {
    /// Number of commands that were started.
    pub started: AtomicU64,
    /// Number of connections of commands that ended.
    pub ended: AtomicU64,
    /// Bytes of input that the commands got.
    pub input_bytes: AtomicU64,
    /// Bytes of output that the clients got.
    pub output_bytes: AtomicU64,
}

fn count(counter: &AtomicU64, bytes: usize) {
    counter.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// What is sent to the client next.
enum Next {
    Event(StreamEvent),
    /// The command is ended for this reason.
    Failed(String),
}

/// Runs a command in a guest, through its agent, and streams its input and output. The request has
/// the headers `connection: upgrade` and `upgrade: memfold-exec`; after the response with status
/// 101, the connection carries frames: a byte for the kind, the payload's length as a
/// little-endian `u32`, at most 65,536, and the payload. From the client: 0 standard input, 1 its
/// end, 2 new size of the terminal (`u16` rows and columns), 3 a signal (`u8`). From the daemon: 0
/// standard output, 1 standard error, 2 room for so many bytes more of standard input (`u32`; none
/// at first), 3 exit code (`i32`, 128 + signal), 4 text of an error. If the client closes the
/// connection, the command's processes are ended.
#[utoipa::path(post, path = "/v1/vms/{name}/exec/stream", request_body = ExecStreamRequest, responses((status = 101), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn exec_stream(
    daemon: Served,
    Extension(access): Extension<Arc<Access>>,
    Extension(counts): Extension<Arc<StreamCounts>>,
    name: Named,
    mut request: Request,
) -> Response {
    let asked = request.headers().get(UPGRADE);
    if asked.is_none_or(|protocol| protocol != EXEC_PROTOCOL) {
        let why = "a streamed command needs the header 'upgrade: memfold-exec'";
        return refusal(StatusCode::UPGRADE_REQUIRED, why);
    }
    let upgrade = Upgrade::of(&mut request);
    let asked = match Asked::<ExecStreamRequest>::from_request(request, &()).await {
        Ok(Asked(asked)) => asked,
        Err(bad) => return bad.into_response(),
    };
    let has_input = asked.input;
    let task = match task(asked.script, asked.copy, asked.terminal.is_some()) {
        Ok(task) => task,
        Err(why) => return refusal(StatusCode::BAD_REQUEST, why),
    };
    let (sender, events) = unbounded_channel();
    let failed = sender.downgrade();
    let sink = move |event| {
        // The client may be gone; then the command is ended soon.
        let _ = sender.send(Next::Event(event));
    };
    let request = StreamRequest {
        task,
        has_input,
        terminal: asked.terminal.map(|terminal| Terminal {
            kind: terminal.kind,
            size: TerminalSize {
                rows: terminal.rows,
                columns: terminal.columns,
            },
        }),
    };
    let started = blocking(daemon, move |d| d.vms().stream(&name, request, sink)).await;
    let command = match started {
        Ok(Json(command)) => Arc::new(command),
        Err(failure) => return failure.into_response(),
    };
    let stream = Stream {
        command,
        has_input,
        failed,
        ending: access.ending.clone(),
        counts: counts.clone(),
    };
    count(&counts.started, 1);
    tokio::spawn(async move {
        if let Err(error) = stream.serve(upgrade, events).await {
            debug!(%error, "connection of a streamed command ended with an error");
        }
        count(&counts.ended, 1);
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, EXEC_PROTOCOL)];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

/// Returns what the guest is to do.
fn task(
    script: String,
    copy: Option<GuestCopy>,
    has_terminal: bool,
) -> Result<GuestTask, &'static str> {
    let Some(copy) = copy else {
        return Ok(GuestTask::Script(script));
    };
    if !script.is_empty() || has_terminal {
        return Err("a request with 'copy' has neither 'script' nor 'terminal'; leave them out");
    }
    let GuestCopy { kind, path, name } = copy;
    Ok(GuestTask::Order(match kind {
        GuestCopyKind::SendArchive => GuestOrder::SendArchive { path },
        GuestCopyKind::SendFile => GuestOrder::SendFile { path },
        GuestCopyKind::ReceiveArchive => GuestOrder::ReceiveArchive {
            name: name.unwrap_or_default(),
            destination: path,
        },
    }))
}

struct Stream {
    command: Arc<StreamedCommand>,
    has_input: bool,
    /// Queue to the client. It ends when the link to the agent drops the command.
    failed: WeakUnboundedSender<Next>,
    ending: watch::Receiver<bool>,
    counts: Arc<StreamCounts>,
}

impl Stream {
    /// Serves the client until the command has ended, or the client or the daemon ends. Then ends
    /// the command, unless it has ended.
    async fn serve(mut self, upgrade: Upgrade, events: UnboundedReceiver<Next>) -> io::Result<()> {
        let client = upgrade.connection().await?;
        let (reader, writer) = tokio::io::split(client);
        let served = tokio::select! {
            passed = pass_on(writer, events, &self.command, self.has_input, &self.counts) => passed,
            received = receive(reader, &self.command, &self.failed, &self.counts) => received,
            _ = self.ending.wait_for(|ends| *ends) => Ok(()),
        };
        // To end the command, a message is sent to the guest.
        on_worker(move || drop(self));
        served
    }
}

/// Calls a method of the command that may block.
async fn call(
    command: &Arc<StreamedCommand>,
    work: impl FnOnce(&StreamedCommand) -> Result<(), AgentError> + Send + 'static,
) -> Result<(), AgentError> {
    let command = command.clone();
    let done = on_worker(move || work(&command)).await;
    done.unwrap_or(Err(AgentError::Lost))
}

/// Passes the command's events to the client until the command has ended.
async fn pass_on(
    mut client: impl AsyncWriteExt + Unpin,
    mut events: UnboundedReceiver<Next>,
    command: &Arc<StreamedCommand>,
    has_input: bool,
    counts: &StreamCounts,
) -> io::Result<()> {
    if has_input {
        let room = u32::try_from(INPUT_WINDOW).unwrap_or(u32::MAX);
        client
            .write_all(&ExecEvent::InputRoom(room).encode())
            .await?;
    }
    let last = loop {
        let event = match events.recv().await {
            Some(Next::Event(event)) => event,
            Some(Next::Failed(why)) => break ExecEvent::Failed(why),
            None => {
                let why = "the connection to the guest's agent ended, and the command with it";
                break ExecEvent::Failed(why.into());
            }
        };
        match event {
            StreamEvent::Output(stream, bytes) => {
                let length = bytes.len();
                let frame = match stream {
                    OutputStream::Stdout => ExecEvent::Stdout(bytes),
                    OutputStream::Stderr => ExecEvent::Stderr(bytes),
                };
                client.write_all(&frame.encode()).await?;
                count(&counts.output_bytes, length);
                // If this fails, the queue ends, too.
                let _ = if command.tells_agent(length) {
                    call(command, move |command| command.passed_on(length)).await
                } else {
                    command.passed_on(length)
                };
            }
            StreamEvent::InputRoom(bytes) => {
                let frame = ExecEvent::InputRoom(bytes).encode();
                client.write_all(&frame).await?;
            }
            StreamEvent::Exited(code) => break ExecEvent::Exited(code),
            StreamEvent::NotAllowed(permission) => break ExecEvent::Failed(permission.refusal()),
        }
    };
    client.write_all(&last.encode()).await?;
    client.shutdown().await
}

/// Carries out the client's frames until the client closes the connection. A frame that cannot be
/// carried out ends the command, and the client gets the reason.
async fn receive(
    mut client: impl AsyncReadExt + Unpin,
    command: &Arc<StreamedCommand>,
    failed: &WeakUnboundedSender<Next>,
    counts: &StreamCounts,
) -> io::Result<()> {
    loop {
        let mut header = [0; EXEC_HEADER];
        match client.read_exact(&mut header).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => drop(read?),
        }
        let carried_out = match exec_header(header) {
            Ok((kind, length)) => {
                let mut payload = vec![0; length];
                client.read_exact(&mut payload).await?;
                match ExecOrder::decode(kind, payload) {
                    Ok(order) => {
                        let input = match &order {
                            ExecOrder::Input(bytes) => bytes.len(),
                            _ => 0,
                        };
                        let done = call(command, move |command| carry_out(command, order)).await;
                        let done = done.map_err(|error| error.to_string());
                        done.inspect(|()| count(&counts.input_bytes, input))
                    }
                    Err(error) => Err(error.to_string()),
                }
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = carried_out {
            if let Some(queue) = failed.upgrade() {
                // This fails only if the other direction has ended, which ends this one.
                let _ = queue.send(Next::Failed(why));
            }
            // The other direction ends the connection.
            std::future::pending::<()>().await;
        }
    }
}

fn carry_out(command: &StreamedCommand, order: ExecOrder) -> Result<(), AgentError> {
    match order {
        ExecOrder::Input(bytes) => command.input(&bytes),
        ExecOrder::EndInput => command.end_input(),
        ExecOrder::Resize { rows, columns } => command.resize(TerminalSize { rows, columns }),
        ExecOrder::Signal(number) => command.signal(number),
    }
}
