//! Between a VM's QEMU and those who lend it memory: a small process on the borrower's host, one for each lent part of a swap disk.
//!
//! ```text
//!   QEMU --NBD, Unix socket--> relay (sums) --NBD--> lender's export          it believes no lender:
//!                                           --NBD--> another's (stripes)      what is read is what was written, or an error
//! ```
//! It is this program again, `memfold relay`, so that the daemon may die: whoever started it gave it its [`Orders`] and has heard that it is ready.
//! It serves one client, in whose life it has one connection to each lender, and ends with the first of them that ends. So nobody has to end
//! it: who wants it gone cuts its client's connection. Killed at any instant it is a lender that died.
//!
//! Its own pages are locked: it stands in the way of memory that a guest waits for.

pub mod asks;
pub mod compare;
pub mod serve;
pub mod start;
pub mod stream;
pub mod stripes;
pub mod sums;

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MlockAllFlags, mlockall};
use serde::{Deserialize, Serialize};

use self::asks::Patience;
use self::compare::Limits;
use self::serve::Relay;
use self::stream::Stream;
use self::stripes::Stripes;
use self::sums::Sums;
use super::nbd;
use super::registry::Endpoint;

/// How long the client may take to connect and for its handshake.
const CLIENT: Duration = Duration::from_secs(10);

/// What a relay is to do; it comes over its standard input, since it holds keys.
#[derive(Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Where it is to listen.
    pub socket: PathBuf,
    /// Bytes of the disk.
    pub bytes: u64,
    /// Exports, in the order of their stripes.
    pub lenders: Vec<Endpoint>,
    /// How long a lender may take for an answer, in milliseconds. 4 MiB may be asked before it: with 3 s a link needs 11 Mbit/s.
    pub patience_ms: u64,
}

/// What a relay says on its standard output before its client comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// It listens, and is connected to all lenders.
    Ready,
    /// It has ended.
    Failed {
        /// Which lender is at fault, if one is.
        lender: Option<usize>,
        /// In words.
        why: String,
    },
}

/// Why a relay left its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A lender served other bytes than were written, or talked nonsense.
    Lied,
    /// A lender refused a request.
    Failed,
    /// A lender did not answer.
    Silent,
    /// A lender ended its connection.
    Gone,
}

/// How it ended, for the daemon: beside its socket, with the ending `.end`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Which lender was at fault; `None`: none alone.
    pub lender: Option<usize>,
    /// What it did.
    pub why: Why,
    /// In words.
    pub what: String,
}

impl Ended {
    const fn of(lender: usize, why: Why, what: String) -> Self {
        Self {
            lender: Some(lender),
            why,
            what,
        }
    }

    const fn of_all(why: Why, what: String) -> Self {
        Self {
            lender: None,
            why,
            what,
        }
    }

    /// Where a relay that listens there says how it ended.
    #[must_use]
    pub fn file(socket: &Path) -> PathBuf {
        socket.with_extension("end")
    }
}

/// `memfold relay`: carries out what standard input says. Whether it ended as it should.
pub fn main() -> bool {
    // Keys and a guest's bytes are in no dump. It may be forbidden to say so.
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
        // Only now has the client's connection ended, so that who sees that finds the note.
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

/// Until the client is there; `None`: it has been said why that comes to nothing.
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
    // Nobody waits for it who isn't there any more. One client in its life.
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

/// One that waits for its client.
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
    // What isn't touched isn't locked, and needs no memory: sums of blocks that were never written, most of the program.
    let locked = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT);
    locked.map_err(|error| {
        own(io::Error::other(format!(
            "its memory can't be locked ({error}); memfold's daemon has to run as root, with CAP_IPC_LOCK"
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
