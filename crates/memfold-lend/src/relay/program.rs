//! The command `memfold relay`, the process between QEMU and lending hosts: reads its orders from
//! the daemon, connects to the lenders, and serves QEMU until QEMU disconnects.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use memfold_host::private_memory;
use rustix::mm::{MlockAllFlags, mlockall};

use super::asks::{self, Patience};
use super::compare::Limits;
use super::messages::{Ended, Orders, Said};
use super::serve::Relay;
use super::stream::Stream;
use super::stripes::Stripes;
use super::sums::Sums;
use crate::{child, files, nbd};

/// Time limit for the client to connect and to do its handshake.
const CLIENT: Duration = Duration::from_secs(10);

/// Runs the relay process (`memfold relay`), with orders from standard input. Returns whether the
/// relay ended without a failure.
pub fn main() -> bool {
    // Core dumps must contain neither keys nor a guest's bytes.
    if let Err(error) = private_memory::protect_with_children() {
        memfold_host::say!("cannot keep the relay's memory out of core dumps: {error}");
    }
    let began = begin();
    let said = match &began {
        Ok(_) => Said::Ready,
        Err((lender, error)) => Said::Failed {
            lender: *lender,
            why: error.to_string(),
        },
    };
    let line = serde_json::to_string(&said).unwrap_or_default() + "\n";
    let mut output = io::stdout();
    let heard = output.write_all(line.as_bytes()).and(output.flush());
    let Ok(Began {
        listener,
        socket,
        stripes,
        relay,
    }) = began
    else {
        return false;
    };
    // If nobody reads the answer, no client will connect. The listener goes after the first client,
    // because the relay serves only one.
    let client = heard.and_then(|()| accept(&listener, stripes.bytes));
    drop(listener);
    if let Err(error) = std::fs::remove_file(&socket) {
        memfold_host::say!("{}: {error}", socket.display());
    }
    let mut relay = match client {
        Ok(client) => relay(client),
        Err(error) => {
            memfold_host::say!("no client: {error}");
            return false;
        }
    };
    let served = relay.serve();
    if let Err(ended) = &served {
        let file = Ended::file(&socket);
        if let Err(error) = files::write_json(&file, ended) {
            memfold_host::say!("{}: {error}; {}", file.display(), ended.what);
        }
    }
    // The client's connection ends only now, after the record was written, so that a process that
    // sees the connection's end finds the record.
    drop(relay);
    served.is_ok()
}

/// A started relay that waits for its client.
struct Began<R> {
    listener: UnixListener,
    socket: PathBuf,
    stripes: Stripes,
    /// Makes the relay of a client.
    relay: R,
}

/// Starts the relay. An error has the number of the lender at fault, if there is one.
fn begin() -> Result<Began<impl FnOnce(UnixStream) -> Relay>, (Option<usize>, io::Error)> {
    let own = |error| (None, error);
    let mut orders = Vec::new();
    io::stdin().read_to_end(&mut orders).map_err(own)?;
    let orders: Orders = serde_json::from_slice(&orders).map_err(|error| own(error.into()))?;
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
    let socket = orders.socket;
    let listener = UnixListener::bind(&socket)
        .map_err(|error| own(io::Error::other(format!("{}: {error}", socket.display()))))?;
    asks::begin(&socket, sums.clone(), patience.clone(), Limits::REAL).map_err(own)?;
    Ok(Began {
        listener,
        socket,
        stripes,
        relay: move |client| Relay::new(client, lenders, stripes, sums, patience),
    })
}

fn accept(listener: &UnixListener, bytes: u64) -> io::Result<UnixStream> {
    if !child::is_readable(listener, CLIENT)? {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let (mut client, _) = listener.accept()?;
    client.set_read_timeout(Some(CLIENT))?;
    client.set_write_timeout(Some(CLIENT))?;
    nbd::welcome(&mut client, bytes)?;
    client.set_nonblocking(true)?;
    Ok(client)
}
