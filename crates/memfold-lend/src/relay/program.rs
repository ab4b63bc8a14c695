//! The command `memfold relay`: reads the relay's orders, connects to the lenders, and serves until
//! the client disconnects.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MlockAllFlags, mlockall};

use super::super::nbd;
use super::asks::{self, Patience};
use super::compare::Limits;
use super::ended::Ended;
use super::orders::{Orders, Said};
use super::serve::Relay;
use super::stream::Stream;
use super::stripes::Stripes;
use super::sums::Sums;

/// Time limit for the client to connect and to do its handshake.
const CLIENT: Duration = Duration::from_secs(10);

/// Runs `memfold relay` with orders from standard input. Returns whether the relay ended without a
/// failure.
pub fn main() -> bool {
    // Core dumps must contain neither keys nor a guest's bytes. Writing the file may be forbidden.
    let _ = std::fs::write("/proc/self/coredump_filter", "0");
    let served = ready().map(|(client, began)| {
        let Began {
            lenders,
            stripes,
            sums,
            socket,
            patience,
            ..
        } = began;
        let mut relay = Relay::new(client, lenders, stripes, sums, patience);
        let served = relay.serve();
        if let Err(ended) = &served {
            note(&socket, ended);
        }
        // The client's connection ends only now, after the record was written, so that a process
        // that sees the connection's end finds the record.
        drop(relay);
        served.is_ok()
    });
    served.unwrap_or(false)
}

fn note(socket: &Path, ended: &Ended) {
    let file = Ended::file(socket);
    let part = file.with_extension("part");
    let written = serde_json::to_vec(ended)
        .map_err(io::Error::other)
        .and_then(|text| std::fs::write(&part, text))
        .and_then(|()| std::fs::rename(&part, &file));
    if let Err(error) = written {
        memfold_host::say!("{}: {error}; {}", file.display(), ended.what);
    }
}

/// Starts the relay and waits for the client. Returns `None` if the relay has failed and reported
/// the reason.
fn ready() -> Option<(UnixStream, Began)> {
    let began = begin();
    let said = match &began {
        Ok(_) => Said::Ready,
        Err((lender, error)) => Said::Failed {
            lender: *lender,
            why: error.to_string(),
        },
    };
    let mut line = serde_json::to_vec(&said).unwrap_or_default();
    line.push(b'\n');
    let heard = io::stdout()
        .write_all(&line)
        .and_then(|()| io::stdout().flush());
    let mut began = began.ok()?;
    // If nobody reads the answer, no client will connect. The listener goes after the first client,
    // because the relay serves only one.
    let client = began.listener.take();
    let client =
        client.map(|listener| heard.and_then(|()| accept(&listener, began.stripes.bytes)))?;
    if let Err(error) = std::fs::remove_file(&began.socket) {
        memfold_host::say!("{}: {error}", began.socket.display());
    }
    match client {
        Ok(client) => Some((client, began)),
        Err(error) => {
            memfold_host::say!("no client: {error}");
            None
        }
    }
}

/// A started relay that waits for its client.
struct Began {
    listener: Option<UnixListener>,
    lenders: Vec<Stream>,
    stripes: Stripes,
    sums: Arc<Sums>,
    socket: PathBuf,
    patience: Arc<Patience>,
}

fn begin() -> Result<Began, (Option<usize>, io::Error)> {
    let own = |error| (None, error);
    let mut orders = Vec::new();
    io::stdin().read_to_end(&mut orders).map_err(own)?;
    let orders: Orders =
        serde_json::from_slice(&orders).map_err(|error| own(io::Error::other(error)))?;
    // Untouched pages are not locked and need no memory: checksums of unwritten blocks, and most of
    // the program.
    let locked = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT);
    locked.map_err(|error| {
        own(io::Error::other(format!(
            "cannot lock the relay's memory ({error}); run memfold's daemon as root, with CAP_IPC_LOCK"
        )))
    })?;
    let stripes = Stripes {
        count: orders.lenders.len() as u64,
        bytes: orders.bytes,
    };
    let sums = Arc::new(Sums::new(orders.bytes).map_err(own)?);
    let patience = Arc::new(Patience::ms(orders.patience_ms));
    let mut lenders = Vec::new();
    for (number, endpoint) in orders.lenders.iter().enumerate() {
        let stream = Stream::open(endpoint, stripes.of_each(), patience.get());
        lenders.push(stream.map_err(|error| (Some(number), error))?);
    }
    let listener = UnixListener::bind(&orders.socket).map_err(|error| {
        own(io::Error::other(format!(
            "{}: {error}",
            orders.socket.display()
        )))
    })?;
    asks::begin(&orders.socket, sums.clone(), patience.clone(), Limits::REAL).map_err(own)?;
    Ok(Began {
        listener: Some(listener),
        lenders,
        stripes,
        sums,
        socket: orders.socket,
        patience,
    })
}

fn accept(listener: &UnixListener, bytes: u64) -> io::Result<UnixStream> {
    let patience = Timespec::try_from(CLIENT).map_err(io::Error::other)?;
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    if poll(&mut fds, Some(&patience))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let (mut client, _) = listener.accept()?;
    client.set_read_timeout(Some(CLIENT))?;
    client.set_write_timeout(Some(CLIENT))?;
    nbd::welcome(&mut client, bytes)?;
    client.set_nonblocking(true)?;
    Ok(client)
}
