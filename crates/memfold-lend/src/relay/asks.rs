//! Questions of the daemon to a running relay (the process between QEMU and a lending host), on a
//! socket that the relay has only for the daemon. Question and answer are one line of JSON each.
//!
//! The relay answers each question on a separate thread, so that no request of QEMU waits
//! meanwhile.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::setpriority_process;
use serde::{Deserialize, Serialize};

use super::super::lease::ms;
use super::compare::{self, Limits};
use super::sums::Sums;

/// Maximum length of a line in bytes.
const MAX_LINE: u64 = 8192;

/// Nice value of the thread that compares a file.
const NICE: i32 = 10;

/// A question of the daemon to a relay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ask {
    /// Asks whether this file, the copy on the host's disk, holds the bytes that the relay's client
    /// wrote. The answer takes a while ([`Limits`]).
    Compare(PathBuf),
    /// Changes how long the relay waits for a lender's answer, in milliseconds.
    Patience(u64),
    /// Asks for how long the relay's client has waited for its oldest request to a lender.
    Waited,
}

/// A relay's answer to a question of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Every block of the file holds the bytes that the relay's client wrote.
    Same,
    /// The file's block with this number differs from what the relay's client wrote.
    Differs(u64),
    /// The relay has changed the setting.
    Done,
    /// The client's oldest request to a lender has waited for so many milliseconds; 0 if there is
    /// none.
    Waited(u64),
    /// The relay could not answer the question. The text says why.
    Failed(String),
}

/// How long a relay waits for a lender's answer, and for how long it has waited. The daemon may
/// change the limit while the relay waits.
#[derive(Debug)]
pub struct Patience {
    limit_ms: AtomicU64,
    began: Instant,
    /// Time from `began` to the oldest request without an answer, in milliseconds; [`NO_REQUEST`]:
    /// there is none.
    oldest_ms: AtomicU64,
}

const NO_REQUEST: u64 = u64::MAX;

impl Patience {
    /// Creates a time limit of `ms` milliseconds for a lender's answer.
    #[must_use]
    pub fn ms(ms: u64) -> Self {
        Self {
            limit_ms: AtomicU64::new(ms),
            began: Instant::now(),
            oldest_ms: AtomicU64::new(NO_REQUEST),
        }
    }

    /// Returns how long the relay waits for a lender's answer now.
    #[must_use]
    pub fn get(&self) -> Duration {
        Duration::from_millis(self.limit_ms.load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, ms: u64) {
        self.limit_ms.store(ms, Ordering::Relaxed);
    }

    /// Notes when the oldest request without an answer was sent.
    pub(super) fn note_oldest(&self, oldest: Option<Instant>) {
        let since_begin = |asked: Instant| ms(asked.saturating_duration_since(self.began));
        let oldest = oldest.map_or(NO_REQUEST, since_begin);
        self.oldest_ms.store(oldest, Ordering::Relaxed);
    }

    /// Returns for how long the oldest request has waited, in milliseconds; 0 if there is none.
    pub(super) fn waited_ms(&self) -> u64 {
        match self.oldest_ms.load(Ordering::Relaxed) {
            NO_REQUEST => 0,
            oldest => ms(self.began.elapsed()).saturating_sub(oldest),
        }
    }
}

/// Returns the path of the socket for questions to a relay. `socket`: path of the socket for the
/// relay's client.
#[must_use]
pub fn place(socket: &Path) -> PathBuf {
    socket.with_extension("ask")
}

fn answer(
    mut asker: UnixStream,
    sums: &Sums,
    patience: &Patience,
    limits: Limits,
) -> io::Result<()> {
    asker.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut line = String::new();
    BufReader::new((&asker).take(MAX_LINE)).read_line(&mut line)?;
    let answer = match serde_json::from_str(&line) {
        Ok(Ask::Compare(file)) => compare(&file, sums, patience, limits),
        Ok(Ask::Patience(ms)) => {
            patience.set(ms);
            Answer::Done
        }
        Ok(Ask::Waited) => Answer::Waited(patience.waited_ms()),
        Err(error) => Answer::Failed(error.to_string()),
    };
    let mut said = serde_json::to_vec(&answer)?;
    said.push(b'\n');
    asker.write_all(&said)
}

fn compare(file: &Path, sums: &Sums, patience: &Patience, limits: Limits) -> Answer {
    // The call affects this thread only (setpriority(2): Linux treats the caller as a thread).
    if let Err(error) = setpriority_process(None, NICE) {
        memfold_host::say!("cannot lower the priority of the comparing thread: {error}");
    }
    let waited = || Duration::from_millis(patience.waited_ms());
    let compared = File::open(file).and_then(|file| compare::compare(&file, sums, limits, &waited));
    match compared {
        Ok(None) => Answer::Same,
        Ok(Some(block)) => Answer::Differs(block),
        Err(error) => Answer::Failed(format!("{}: {error}", file.display())),
    }
}

/// Starts a thread that answers questions for as long as this process lives.
///
/// # Errors
/// Fails if the socket or the thread cannot be created.
pub(super) fn begin(
    socket: &Path,
    sums: Arc<Sums>,
    patience: Arc<Patience>,
    limits: Limits,
) -> io::Result<()> {
    let listener = UnixListener::bind(place(socket))?;
    thread(move || {
        for asker in listener.incoming() {
            let (sums, patience) = (sums.clone(), patience.clone());
            let answering = |asker| {
                thread(move || {
                    if let Err(error) = answer(asker, &sums, &patience, limits) {
                        memfold_host::say!("cannot answer a client: {error}");
                    }
                })
            };
            if let Err(error) = asker.and_then(answering) {
                memfold_host::say!("cannot accept a client: {error}");
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    })
}

fn thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("asked".into());
    thread.spawn(work).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::process::getpid;

    use super::super::start::Running;
    use super::*;
    use memfold_vm::Identity;

    const BLOCKS: u64 = 16;

    fn hear(running: &Running, ask: &Ask) -> io::Result<Answer> {
        let mut asked = running.ask(ask)?;
        memfold_testkit::wait_for("the relay answers", Duration::from_secs(60), || {
            asked.answer().transpose().ok_or("nothing yet")
        })
    }

    #[test]
    fn on_request_a_relay_process_compares_the_disk_copy_and_changes_its_timeout() {
        let directory = tempfile::tempdir().unwrap();
        let running = Running {
            process: Identity::of(getpid()).unwrap(),
            socket: directory.path().join("lent0-0"),
        };
        let ask = Ask::Patience(60_000);
        hear(&running, &ask).unwrap_err();
        let sums = Arc::new(Sums::new(BLOCKS * 4096).unwrap());
        let patience = Arc::new(Patience::ms(3000));
        let limits = Limits {
            answer: Duration::from_secs(3),
            before: Duration::ZERO,
            stays: Duration::from_millis(50),
            most: Duration::from_millis(200),
        };
        begin(&running.socket, sums.clone(), patience.clone(), limits).unwrap();
        assert_eq!(hear(&running, &ask).unwrap(), Answer::Done);
        assert_eq!(patience.get(), Duration::from_secs(60));

        let path = directory.path().join("copy");
        let compare = Ask::Compare(path.clone());
        let Answer::Failed(why) = hear(&running, &compare).unwrap() else {
            panic!("there is no such file")
        };
        assert!(why.contains("copy"), "{why}");
        let file = File::create(&path).unwrap();
        file.set_len(BLOCKS * 4096).unwrap();
        assert_eq!(hear(&running, &compare).unwrap(), Answer::Same);
        sums.written(5, &[7; 4096]);
        assert_eq!(hear(&running, &compare).unwrap(), Answer::Differs(5));
        file.write_all_at(&[7; 4096], 5 * 4096).unwrap();
        assert_eq!(hear(&running, &compare).unwrap(), Answer::Same);

        // The relay answers a malformed question with an error.
        let mut stream = UnixStream::connect(place(&running.socket)).unwrap();
        stream.write_all(b"{\"compare\": 1}\n").unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("{\"failed\":"), "{said}");
    }
}
