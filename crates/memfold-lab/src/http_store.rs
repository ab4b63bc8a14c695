//! An HTTP server that serves an object store in a directory over a link of a given speed, and can
//! be told to lie or to go away.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// What the server does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMode {
    /// It sends the files.
    Right,
    /// It changes a bit of every chunk.
    Lies,
    /// It ends every connection without an answer.
    Gone,
}

/// A web server on 127.0.0.1 for the objects in a directory. It runs until the process ends.
#[derive(Debug)]
pub struct HttpStore {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    directory: PathBuf,
    bytes_per_s: f64,
    latency: Duration,
    mode: Mutex<StoreMode>,
    /// Time at which the link is free again.
    free: Mutex<Instant>,
    sent: AtomicU64,
    /// Part of `sent`: pages that VMs touch at once, which are stored together.
    sent_first: AtomicU64,
}

impl HttpStore {
    /// Serves the files of `directory` over a link of this speed. `latency` is the time before the
    /// first byte of each answer.
    pub fn start(directory: &Path, bytes_per_s: f64, latency: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared {
            directory: directory.to_owned(),
            bytes_per_s,
            latency,
            mode: Mutex::new(StoreMode::Right),
            free: Mutex::new(Instant::now()),
            sent: AtomicU64::new(0),
            sent_first: AtomicU64::new(0),
        });
        let of_server = Arc::clone(&shared);
        thread::Builder::new()
            .name("http-store".into())
            .spawn(move || {
                for stream in listener.incoming().flatten() {
                    let shared = Arc::clone(&of_server);
                    // A client that goes away needs no answer.
                    thread::spawn(move || shared.answer(&stream));
                }
            })?;
        Ok(Self { port, shared })
    }

    /// Returns the URL of the store.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Changes what the server does from now on.
    pub fn set(&self, mode: StoreMode) {
        *self.shared.mode.lock() = mode;
    }

    /// Returns the number of bytes of objects that were sent.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    /// Returns the part of [`Self::sent_bytes`] that was sent of first pages, the pages that VMs
    /// touch at once.
    #[must_use]
    pub fn sent_first_bytes(&self) -> u64 {
        self.shared.sent_first.load(Ordering::Relaxed)
    }
}

impl Shared {
    /// Answers the requests of a connection.
    fn answer(&self, mut stream: &TcpStream) -> Option<()> {
        // As web servers do: the last bytes of an answer don't wait until the client has confirmed
        // those before them.
        stream.set_nodelay(true).ok()?;
        let mut lines = BufReader::new(stream).lines();
        loop {
            let request = lines.next()?.ok()?;
            let path = PathBuf::from(request.split(' ').nth(1)?.trim_start_matches('/'));
            while !lines.next()?.ok()?.is_empty() {}
            let mode = *self.mode.lock();
            if mode == StoreMode::Gone {
                return None;
            }
            thread::sleep(self.latency);
            let Ok(mut bytes) = std::fs::read(self.directory.join(&path)) else {
                let none = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
                stream.write_all(none.as_bytes()).ok()?;
                continue;
            };
            if mode == StoreMode::Lies && path.starts_with("chunks") {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
            }
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", bytes.len());
            stream.write_all(head.as_bytes()).ok()?;
            // Connections share the link: each object is sent when those before it would be.
            for piece in bytes.chunks(64 << 10) {
                let takes = Duration::from_secs_f64(piece.len() as f64 / self.bytes_per_s);
                let due = {
                    let mut free = self.free.lock();
                    *free = (*free).max(Instant::now()) + takes;
                    *free
                };
                thread::sleep(due.saturating_duration_since(Instant::now()));
                stream.write_all(piece).ok()?;
                self.sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
                if path.starts_with("first-pages") {
                    self.sent_first
                        .fetch_add(piece.len() as u64, Ordering::Relaxed);
                }
            }
        }
    }
}
