//! The daemon's end of the connection to memfold's library in QEMU. The daemon sends an order, such
//! as to fold pages, and waits for the library's reply.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_wire::library::{Order, Reply, VERSION};
use memfold_wire::{Decoder, FrameError, encode};
use rustix::process::Pid;

use super::process::peer_pid;

/// Device from which a process gets userfaultfds that also catch faults of the kernel.
const DEVICE: &str = "/dev/userfaultfd";

/// Why an order to memfold's library in QEMU failed. After some errors the daemon does not know
/// whether the library carried out the order.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum LibraryError {
    #[error("cannot connect to memfold's library in QEMU at {path}")]
    Connect {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("connection to memfold's library in QEMU lost")]
    Lost(#[source] std::io::Error),
    /// The library did not reply in time. The connection can no longer be used.
    #[error("memfold's library in QEMU did not reply within {seconds} s")]
    Timeout { seconds: f64 },
    #[error("invalid message between the daemon and memfold's library in QEMU")]
    Frame(#[from] FrameError),
    #[error(
        "memfold's library in QEMU uses protocol version {library}, this daemon uses version {VERSION}; restart the VM with this daemon's library"
    )]
    Version { library: u16 },
    #[error("memfold's library in QEMU sent a reply that does not match the order: {0}")]
    Mismatch(String),
    #[error(
        "a process other than this QEMU listens on {path}, the socket of memfold's library in QEMU"
    )]
    Stranger { path: PathBuf },
    /// The library refused the whole order and changed nothing.
    #[error("memfold's library in QEMU refused the order: {0}")]
    Refused(String),
    /// An earlier error has made the connection unusable.
    #[error("connection to memfold's library in QEMU is closed after an earlier error")]
    Closed,
}

impl LibraryError {
    /// Returns whether another attempt to connect may succeed: QEMU may have been stopped, or may
    /// have got no CPU.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Lost(_) | Self::Timeout { .. } | Self::Closed
        )
    }
}

/// What memfold's library in QEMU can do, from the library's greeting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibraryFacts {
    /// Package version of the library in QEMU.
    pub version: String,
    /// Whether the library can fold anonymous memory, for which the kernel needs `UFFDIO_MOVE`.
    pub can_move: bool,
    /// Whether the library can fold pages again that the guest has written, while the VM runs.
    pub can_write_protect: bool,
    /// Whether the library can stop the VM for a moment during an order.
    pub can_stop: bool,
    /// Why the library cannot fold, as text; `None` if the library can fold.
    pub problem: Option<String>,
}

/// The daemon's connection to memfold's library in one QEMU.
#[derive(Debug)]
pub struct LibraryLink {
    stream: Option<UnixStream>,
    decoder: Decoder,
    timeout: Duration,
    facts: LibraryFacts,
}

impl LibraryLink {
    /// Connects to the library's socket at `path` and exchanges greetings. `timeout` also applies
    /// to each later reply. The library serves one connection at a time, so a second one times out.
    /// With `only`, a socket that another process listens on is refused before anything is sent.
    pub fn connect(
        path: &Path,
        timeout: Duration,
        only: Option<Pid>,
    ) -> Result<Self, LibraryError> {
        // A library that hangs accepts no connection, and the socket's queue is short.
        let stream = memfold_host::socket::connect(path, Duration::ZERO)
            .and_then(|s| s.set_write_timeout(Some(timeout)).map(|()| s))
            .map_err(|source| LibraryError::Connect {
                path: path.into(),
                source,
            })?;
        let mut link = Self {
            stream: Some(stream),
            decoder: Decoder::new(),
            timeout,
            facts: LibraryFacts::default(),
        };
        if only.is_some_and(|pid| link.peer_pid() != Some(pid)) {
            return Err(LibraryError::Stranger { path: path.into() });
        }
        link.greet(None)?;
        // A QEMU without root's rights usually cannot open this device. The descriptor works only
        // in the process that creates a userfaultfd with it, so the device itself is passed.
        if link.facts.problem.is_some() {
            if let Ok(device) = File::options().read(true).write(true).open(DEVICE) {
                link.greet(Some(device.as_fd()))?;
            }
        }
        Ok(link)
    }

    /// Sends the greeting, with a descriptor of `/dev/userfaultfd` for a library that cannot open
    /// it.
    fn greet(&mut self, device: Option<BorrowedFd<'_>>) -> Result<(), LibraryError> {
        match self.order(&Order::Hello { version: VERSION }, device)? {
            Reply::Hello { version, .. } if version != VERSION => {
                Err(LibraryError::Version { library: version })
            }
            Reply::Hello {
                library,
                can_move,
                can_write_protect,
                can_stop,
                problem,
                ..
            } => {
                self.facts = LibraryFacts {
                    version: library,
                    can_move,
                    can_write_protect,
                    can_stop,
                    problem,
                };
                Ok(())
            }
            other => Err(LibraryError::Mismatch(format!("{other:?} to Hello"))),
        }
    }

    /// Returns the ID of the process that listens on the library's socket (`SO_PEERCRED`).
    #[must_use]
    pub fn peer_pid(&self) -> Option<Pid> {
        peer_pid(self.stream.as_ref()?)
    }

    /// Returns what the library said about itself in its greeting.
    #[must_use]
    pub const fn facts(&self) -> &LibraryFacts {
        &self.facts
    }

    /// Sends an order to the library, with `descriptor` for orders that need one, and returns the
    /// reply. A refusal by the library ([`Reply::Error`]) becomes [`LibraryError::Refused`]. After
    /// any other error the connection is closed, and the caller must make a new one.
    pub fn order(
        &mut self,
        order: &Order,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, LibraryError> {
        memfold_wire::frame::Validate::validate(order)?;
        let bytes = encode(order)?;
        let reply = self.exchange(&bytes, descriptor).and_then(|reply| {
            if fits(order, &reply) {
                return Ok(reply);
            }
            let text = format!("{reply:?}").chars().take(200).collect();
            Err(LibraryError::Mismatch(text))
        });
        match reply.inspect_err(|_| self.stream = None)? {
            Reply::Error { reason } => Err(LibraryError::Refused(reason)),
            reply => Ok(reply),
        }
    }

    fn exchange(
        &mut self,
        bytes: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, LibraryError> {
        let stream = self.stream.as_mut().ok_or(LibraryError::Closed)?;
        memfold_sys::descriptor::send(stream, bytes, descriptor).map_err(LibraryError::Lost)?;
        let deadline = Instant::now() + self.timeout;
        let mut chunk = vec![0; 64 << 10];
        loop {
            if let Some(reply) = self.decoder.next::<Reply>()? {
                return Ok(reply);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let late = LibraryError::Timeout {
                seconds: self.timeout.as_secs_f64(),
            };
            if left.is_zero() {
                return Err(late);
            }
            let got = stream
                .set_read_timeout(Some(left))
                .and_then(|()| std::io::Read::read(stream, &mut chunk));
            match got {
                Ok(0) => return Err(LibraryError::Lost(ErrorKind::UnexpectedEof.into())),
                Ok(n) => self.decoder.push(&chunk[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(late),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(LibraryError::Lost(e)),
            }
        }
    }
}

/// Returns whether `reply` can be the answer to `order`.
fn fits(order: &Order, reply: &Reply) -> bool {
    match (order, reply) {
        (_, Reply::Error { .. })
        | (Order::Hello { .. }, Reply::Hello { .. })
        | (Order::DropZero { .. }, Reply::Zero { .. })
        | (Order::Stats, Reply::Stats(_)) => true,
        (Order::Fold { runs, .. }, Reply::Outcomes { outcomes, .. }) => {
            runs.len() == outcomes.len()
        }
        (Order::Release { ranges, .. }, Reply::Outcomes { outcomes, .. }) => {
            ranges.len() == outcomes.len()
        }
        (
            Order::Hello { .. }
            | Order::DropZero { .. }
            | Order::Stats
            | Order::Fold { .. }
            | Order::Release { .. },
            _,
        ) => false,
        (_, reply) => matches!(reply, Reply::Ok),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_wire::library::{FoldRun, Freeze, Outcome};
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;

    fn hello(version: u16) -> Reply {
        Reply::Hello {
            version,
            library: "test".into(),
            can_move: true,
            can_write_protect: true,
            can_stop: true,
            problem: None,
        }
    }

    /// Starts a library that answers with `replies`, one for each order, and reports whether
    /// descriptors came.
    fn library(
        replies: Vec<Reply>,
    ) -> (
        tempfile::TempDir,
        PathBuf,
        std::thread::JoinHandle<Vec<bool>>,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut decoder = Decoder::new();
            let mut with_descriptor = Vec::new();
            for reply in replies {
                let mut descriptor = false;
                while decoder.next::<Order>().unwrap().is_none() {
                    let mut chunk = [0; 4096];
                    let (n, fd) = memfold_sys::descriptor::receive(&stream, &mut chunk).unwrap();
                    assert_ne!(n, 0);
                    descriptor |= fd.is_some();
                    decoder.push(&chunk[..n]);
                }
                with_descriptor.push(descriptor);
                stream.write_all(&encode(&reply).unwrap()).unwrap();
            }
            with_descriptor
        });
        (dir, path, thread)
    }

    fn fold(runs: usize) -> Order {
        let run = FoldRun {
            hva: 0x1000,
            pages: 1,
            store: 0,
            store_page: 0,
        };
        Order::Fold {
            freeze: Freeze::Move,
            runs: vec![run; runs],
        }
    }

    #[test]
    fn each_request_to_the_preload_library_gets_its_reply_and_passes_its_descriptor() {
        let (_dir, path, thread) = library(vec![
            hello(VERSION),
            Reply::Ok,
            Reply::Outcomes {
                outcomes: vec![Outcome::Done; 3],
                cpu_ns: 1,
                stopped_ns: 0,
            },
            Reply::Error {
                reason: "no such store".into(),
            },
        ]);
        let mut link = LibraryLink::connect(&path, Duration::from_secs(5), None).unwrap();
        assert!(link.facts().can_move);
        let null = std::fs::File::open("/dev/null").unwrap();
        let add = Order::AddStore {
            store: 0,
            max_pages: 1,
        };
        assert_eq!(link.order(&add, Some(null.as_fd())).unwrap(), Reply::Ok);
        link.order(&fold(3), None).unwrap();
        assert!(matches!(
            link.order(&fold(1), None),
            Err(LibraryError::Refused(_))
        ));
        assert_eq!(thread.join().unwrap(), [false, true, false, false]);
    }

    #[test]
    fn a_preload_library_that_cannot_open_userfaultfd_gets_the_device_from_the_daemon() {
        if File::options().read(true).write(true).open(DEVICE).is_err() {
            memfold_testkit::skip!("{DEVICE} can't be opened");
        }
        let Reply::Hello {
            version,
            library: name,
            ..
        } = hello(VERSION)
        else {
            unreachable!()
        };
        let lacking = Reply::Hello {
            version,
            library: name,
            can_move: false,
            can_write_protect: false,
            can_stop: false,
            problem: Some("no userfaultfd".into()),
        };
        let (_dir, path, thread) = library(vec![lacking, hello(VERSION)]);
        let link = LibraryLink::connect(&path, Duration::from_secs(5), None).unwrap();
        assert_eq!(link.facts().problem, None);
        assert_eq!(link.peer_pid(), Some(rustix::process::getpid()));
        drop(link);
        assert_eq!(thread.join().unwrap(), [false, true]);
    }

    #[test]
    fn if_the_preload_library_replies_with_a_wrong_number_of_outcomes_the_link_is_closed() {
        let (_dir, path, _thread) = library(vec![
            hello(VERSION),
            Reply::Outcomes {
                outcomes: vec![Outcome::Done; 2],
                cpu_ns: 1,
                stopped_ns: 0,
            },
        ]);
        let mut link = LibraryLink::connect(&path, Duration::from_secs(5), None).unwrap();
        assert!(matches!(
            link.order(&fold(3), None),
            Err(LibraryError::Mismatch(_))
        ));
        assert!(matches!(
            link.order(&fold(3), None),
            Err(LibraryError::Closed)
        ));
    }

    #[test]
    fn a_preload_library_of_another_version_and_a_silent_one_are_different_errors() {
        let (_dir, path, _thread) = library(vec![hello(VERSION + 1)]);
        let error = LibraryLink::connect(&path, Duration::from_secs(5), None).unwrap_err();
        assert!(matches!(error, LibraryError::Version { .. }), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l");
        let _silent = UnixListener::bind(&path).unwrap();
        let error = LibraryLink::connect(&path, Duration::from_millis(30), None).unwrap_err();
        assert!(matches!(error, LibraryError::Timeout { .. }), "{error}");
    }
}
