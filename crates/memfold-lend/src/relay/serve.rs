//! Main loop of the relay, the process that passes QEMU's requests on to lending hosts and checks
//! the bytes that these return. One thread polls all sockets.
//!
//! ```text
//!   client's request -> valid, and no conflict? -> a piece for each lender -> answers, checked -> answer to the client
//! ```
//! Invariants:
//! - While a write is in progress, no other request for the same blocks is sent to a lender. So
//!   each read returns the last write, and can be compared with it.
//! - At most [`UNDER_WAY`] bytes of requests are in progress, and one request more. This limits
//!   memory, and the time that an answer may take.
//! - The first wrong block, refusal, timeout or disconnect of any lender ends the relay: the relay
//!   answers pending requests with an error and disconnects the client. The VM continues on its
//!   other copy.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::nbd::{
    BLOCK, Command, EINVAL, EIO, MAX_BYTES, REPLY_BYTES, REQUEST_BYTES, Reply, Request,
};
use super::asks::Patience;
use super::buffer::{Buffer, MOST, READ};
use super::messages::{Ended, Why};
use super::stream::Stream;
use super::stripes::{Run, Stripes};
use super::sums::Sums;

/// No request is started while the requests in progress have this many bytes, or while the client
/// has this many bytes of answers to read. The requests in progress are still answered, so unread
/// answers reach at most twice this, and two requests.
const UNDER_WAY: u64 = 4 << 20;

/// If the previous wait was shorter than this, the next wait polls for this long before it sleeps,
/// because waking up takes as long as a lender's answer. At most this much CPU time is wasted per
/// request, and none while there are no requests.
const SOON: Duration = Duration::from_micros(250);

/// Longest wait of the relay. A new time limit then reaches the connections before the kernel ends
/// them by the old one, which is at least 3 s.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

const BLOCK_BYTES: u64 = BLOCK as u64;

/// A request of the client that has no answer yet.
#[derive(Debug)]
struct Waiting {
    /// Number of the request in requests to lenders. (The client may use a cookie twice.)
    number: u64,
    request: Request,
    /// Number of pieces that lenders have not answered.
    pieces: usize,
    /// Bytes of a read, which the answers to its pieces fill.
    data: Vec<u8>,
}

impl Waiting {
    fn meets(&self, other: &Request) -> bool {
        let writes = |request: &Request| request.command != Command::Read;
        let end = |request: &Request| request.offset + u64::from(request.length);
        (writes(&self.request) || writes(other))
            && self.request.offset < end(other)
            && other.offset < end(&self.request)
    }
}

/// The part of a client's request that one lender must do.
#[derive(Debug)]
struct Piece {
    number: u64,
    run: Run,
    asked: Instant,
}

#[derive(Debug)]
struct Lender {
    stream: Stream,
    inbox: Buffer,
    outbox: Buffer,
    /// Pieces that the lender has not answered, oldest first.
    asked: VecDeque<Piece>,
}

/// Waits until a descriptor is ready. If `soon` is set, polls for the first [`SOON`] without
/// sleeping.
fn wait(fds: &mut [PollFd<'_>], most: Option<&Timespec>, soon: bool) -> rustix::io::Result<()> {
    let began = Instant::now();
    while soon && began.elapsed() < SOON {
        if poll(fds, Some(&Timespec::default()))? > 0 {
            return Ok(());
        }
        // Another thread may need this core, for the lender's packets or a guest's virtual CPU.
        std::thread::yield_now();
    }
    poll(fds, most).map(|_| ())
}

/// A relay: the connection to one client (QEMU), and the connections to all lenders of a disk.
#[derive(Debug)]
pub struct Relay {
    client: UnixStream,
    inbox: Buffer,
    outbox: Buffer,
    lenders: Vec<Lender>,
    stripes: Stripes,
    sums: Arc<Sums>,
    waiting: Vec<Waiting>,
    bytes_under_way: u64,
    /// Time limit for a lender's answer. `told`: the limit that was last set as the
    /// connections' TCP timeout.
    patience: Arc<Patience>,
    told: Duration,
    next: u64,
    scratch: Vec<u8>,
    /// Whether the client will send no more requests.
    leaves: bool,
    /// Whether the last wait was short: first for waits for the client, then for waits for a
    /// lender.
    soon: [bool; 2],
}

impl Relay {
    /// Creates a relay between a client and lenders whose NBD handshakes are complete. `patience`:
    /// how long the relay waits for a lender's answer.
    #[must_use]
    pub fn new(
        client: UnixStream,
        lenders: Vec<Stream>,
        stripes: Stripes,
        sums: Arc<Sums>,
        patience: Arc<Patience>,
    ) -> Self {
        let lender = |stream| Lender {
            stream,
            inbox: Buffer::default(),
            outbox: Buffer::default(),
            asked: VecDeque::new(),
        };
        Self {
            client,
            inbox: Buffer::default(),
            outbox: Buffer::default(),
            lenders: lenders.into_iter().map(lender).collect(),
            stripes,
            sums,
            waiting: Vec::new(),
            bytes_under_way: 0,
            told: Duration::ZERO,
            patience,
            next: 0,
            scratch: vec![0; READ],
            leaves: false,
            soon: [false; 2],
        }
    }

    /// Serves the client's requests until the client disconnects.
    ///
    /// # Errors
    /// Fails if a lender fails. Pending requests were then answered with errors. The client stays
    /// connected until this value is dropped.
    pub fn serve(&mut self) -> Result<(), Ended> {
        let ended = self.work();
        match &ended {
            Ok(()) => self.say_good_bye(),
            Err(_) => self.give_up(),
        }
        ended
    }

    fn work(&mut self) -> Result<(), Ended> {
        while !self.leaves {
            let ready = self.look()?;
            // Answers are read first: an answer that has arrived counts even if the time limit has
            // just passed.
            for number in 0..self.lenders.len() {
                if ready[number + 1] {
                    self.hear_lender(number)?;
                }
            }
            if ready[0] {
                self.hear_client();
            }
            loop {
                let is_held_back = self.take_requests();
                self.send()?;
                if !is_held_back || !self.outbox.is_empty() {
                    break;
                }
            }
            self.end_silent()?;
        }
        Ok(())
    }

    /// Waits until a socket is ready. Returns which sockets can be read: first the client's, then
    /// each lender's.
    fn look(&mut self) -> Result<Vec<bool>, Ended> {
        let wants = |outbox: &Buffer, reads: bool| {
            let mut wants = PollFlags::empty();
            wants.set(PollFlags::IN, reads);
            wants.set(PollFlags::OUT, !outbox.is_empty());
            wants
        };
        let reads = self.inbox.rest().len() < READ + MAX_BYTES as usize;
        let mut fds = vec![PollFd::new(&self.client, wants(&self.outbox, reads))];
        for lender in &self.lenders {
            fds.push(PollFd::new(&lender.stream, wants(&lender.outbox, true)));
        }
        let oldest = self.lenders.iter().filter_map(|l| l.asked.front());
        let oldest = oldest.map(|piece| piece.asked).min();
        self.patience.note_oldest(oldest);
        let patience = self.patience.get();
        let left = oldest.map_or(LOOK_AGAIN, |asked| patience.saturating_sub(asked.elapsed()));
        let left = left.min(LOOK_AGAIN);
        let left = Timespec::try_from(left).ok();
        let began = Instant::now();
        let soon = &mut self.soon[usize::from(oldest.is_some())];
        let looked = wait(&mut fds, left.as_ref(), *soon);
        *soon = began.elapsed() < SOON;
        match looked {
            Ok(()) => {}
            Err(rustix::io::Errno::INTR) => return Ok(vec![false; fds.len()]),
            Err(error) => {
                let what = format!("cannot watch the relay's sockets: {error}");
                return Err(Ended::of(None, Why::Failed, what));
            }
        }
        let can_be_read = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        Ok(fds
            .iter()
            .map(|fd| fd.revents().intersects(can_be_read))
            .collect())
    }

    fn hear_client(&mut self) {
        let filled = self.inbox.fill(&mut self.client, &mut self.scratch, false);
        // Requests of a client that has disconnected need no answer.
        self.leaves |= filled.unwrap_or(true);
    }

    fn hear_lender(&mut self, number: usize) -> Result<(), Ended> {
        let lender = &mut self.lenders[number];
        let ahead = lender.stream.reads_ahead();
        let ended = lender
            .inbox
            .fill(&mut lender.stream, &mut self.scratch, ahead)
            .map_err(broken(number))?;
        while self.take_answer(number)? {}
        if self.lenders[number].inbox.rest().len() >= MOST {
            let what = "the lender sent more than was asked for".into();
            return Err(Ended::of(number, Why::Lied, what));
        }
        if ended {
            let what = "the lender closed the connection".into();
            return Err(Ended::of(number, Why::Gone, what));
        }
        Ok(())
    }

    /// Processes one answer of a lender. Returns false if no answer has arrived completely.
    fn take_answer(&mut self, number: usize) -> Result<bool, Ended> {
        let lender = &mut self.lenders[number];
        let Some(head) = lender.inbox.first::<REPLY_BYTES>() else {
            return Ok(false);
        };
        let lie = |what: String| Ended::of(number, Why::Lied, what);
        let reply = Reply::decode(&head).map_err(|nonsense| lie(nonsense.to_string()))?;
        let at = lender.asked.iter().position(|p| p.number == reply.cookie);
        let index = self.waiting.iter().position(|w| w.number == reply.cookie);
        let (Some(at), Some(index)) = (at, index) else {
            return Err(lie("the lender's answer does not match a request".into()));
        };
        if reply.error != 0 {
            let what = format!("the lender refused a request (NBD error {})", reply.error);
            return Err(Ended::of(number, Why::Failed, what));
        }
        let (run, waiting) = (&lender.asked[at].run, &mut self.waiting[index]);
        let is_read = waiting.request.command == Command::Read;
        let whole = range(0, if is_read { run.length } else { 0 });
        let rest = lender.inbox.rest().get(REPLY_BYTES..);
        let Some(said) = rest.and_then(|rest| rest.get(whole.clone())) else {
            return Ok(false);
        };
        if is_read {
            for chunk in &run.chunks {
                let from = range(chunk.at - run.at, chunk.length);
                let into = &mut waiting.data[range(chunk.from, chunk.length)];
                let first = (waiting.request.offset + chunk.from) / BLOCK_BYTES;
                if let Err(block) = self.sums.checked(first, &said[from], into) {
                    let what = format!("block {block} of the disk differs from what was written");
                    return Err(lie(what));
                }
            }
        }
        waiting.pieces -= 1;
        lender.inbox.skip(REPLY_BYTES + whole.end);
        lender.asked.remove(at);
        if waiting.pieces == 0 {
            let done = self.waiting.swap_remove(index);
            self.bytes_under_way -= u64::from(done.request.length);
            self.answer(&done.request, 0, &done.data);
        }
        Ok(true)
    }

    fn answer(&mut self, request: &Request, error: u32, data: &[u8]) {
        let reply = Reply {
            error,
            cookie: request.cookie,
        };
        self.outbox.bytes.extend_from_slice(&reply.encode());
        self.outbox.bytes.extend_from_slice(data);
    }

    /// Starts the client's requests, until one is incomplete or must wait. Returns whether one
    /// waits until the client has read answers.
    fn take_requests(&mut self) -> bool {
        while let Some(head) = self.inbox.first::<REQUEST_BYTES>() {
            if self.outbox.rest().len() as u64 >= UNDER_WAY {
                return true;
            }
            let Ok(request) = Request::decode(&head) else {
                // QEMU never sends an invalid header. After one, the position of the next request
                // is unknown.
                self.leaves = true;
                return false;
            };
            let mut whole = REQUEST_BYTES;
            if request.command == Command::Write {
                whole += request.length as usize;
            }
            if self.inbox.rest().len() < whole {
                return false;
            }
            if !request.is_valid(self.stripes.bytes) {
                self.inbox.skip(whole);
                self.answer(&request, EINVAL, &[]);
                continue;
            }
            if self.bytes_under_way >= UNDER_WAY || self.waiting.iter().any(|w| w.meets(&request)) {
                return false;
            }
            match request.command {
                Command::Disconnect => {
                    self.leaves = true;
                    return false;
                }
                Command::Read | Command::Write => self.forward(&request),
                Command::Trim | Command::WriteZeroes => {
                    self.sums.zeroed(
                        request.offset / BLOCK_BYTES,
                        u64::from(request.length) / BLOCK_BYTES,
                    );
                    self.answer(&request, 0, &[]);
                }
                // Lent memory is not durable, and a write that was answered is already at the
                // lender.
                Command::Flush | Command::Other(_) => self.answer(&request, 0, &[]),
            }
            self.inbox.skip(whole);
        }
        false
    }

    /// Sends a read or a write to the lenders of its blocks, and leaves out lenders of which it
    /// needs only zeroes.
    fn forward(&mut self, request: &Request) {
        let is_write = request.command == Command::Write;
        let number = self.next;
        self.next += 1;
        let mut pieces = 0;
        // The data of a write follow the header in the inbox; the caller skips both.
        let inbox = std::mem::take(&mut self.inbox);
        let data = &inbox.rest()[REQUEST_BYTES..];
        for run in self.stripes.runs(request.offset, u64::from(request.length)) {
            let mut is_needed = false;
            for chunk in &run.chunks {
                let first = (request.offset + chunk.from) / BLOCK_BYTES;
                is_needed |= if is_write {
                    let data = &data[range(chunk.from, chunk.length)];
                    self.sums.written(first, data)
                } else {
                    !self.sums.are_zero(first, chunk.length / BLOCK_BYTES)
                };
            }
            if !is_needed {
                continue;
            }
            pieces += 1;
            let asked = Request {
                command: request.command,
                cookie: number,
                offset: run.at,
                // The run is never longer than the client's request.
                length: u32::try_from(run.length).unwrap_or(0),
            };
            let lender = &mut self.lenders[run.lender];
            let outbox = &mut lender.outbox.bytes;
            outbox.extend_from_slice(&asked.encode());
            if is_write {
                for chunk in &run.chunks {
                    outbox.extend_from_slice(&data[range(chunk.from, chunk.length)]);
                }
            }
            lender.asked.push_back(Piece {
                number,
                run,
                asked: Instant::now(),
            });
        }
        self.inbox = inbox;
        let data = vec![0; if is_write { 0 } else { request.length as usize }];
        if pieces == 0 {
            self.answer(request, 0, &data);
            return;
        }
        self.bytes_under_way += u64::from(request.length);
        self.waiting.push(Waiting {
            number,
            request: *request,
            pieces,
            data,
        });
    }

    fn send(&mut self) -> Result<(), Ended> {
        for (number, lender) in self.lenders.iter_mut().enumerate() {
            let sent = lender.outbox.drain(&mut lender.stream);
            sent.map_err(broken(number))?;
        }
        self.leaves |= self.outbox.drain(&mut self.client).is_err();
        Ok(())
    }

    fn end_silent(&mut self) -> Result<(), Ended> {
        let patience = self.patience.get();
        if patience != self.told {
            self.told = patience;
            for lender in &self.lenders {
                if let Err(error) = lender.stream.keep_alive(patience) {
                    memfold_host::say!(
                        "cannot change the TCP timeout of a lender's connection: {error}"
                    );
                }
            }
        }
        for (number, lender) in self.lenders.iter().enumerate() {
            let oldest = lender.asked.front();
            if oldest.is_some_and(|piece| piece.asked.elapsed() >= patience) {
                let what = format!("the lender has not answered for {} s", patience.as_secs());
                return Err(Ended::of(number, Why::Silent, what));
            }
        }
        Ok(())
    }

    /// Disconnects from the lenders as NBD requires, after the client has disconnected. Lenders
    /// then do not count a broken connection.
    fn say_good_bye(&mut self) {
        for lender in &mut self.lenders {
            let leave = Request {
                command: Command::Disconnect,
                cookie: 0,
                offset: 0,
                length: 0,
            };
            lender.outbox.bytes.extend_from_slice(&leave.encode());
            // If the request cannot be sent, the end of the connection tells the lender.
            let _ = lender.outbox.drain(&mut lender.stream);
        }
    }

    /// Answers all pending requests with an error, after a lender has failed.
    fn give_up(&mut self) {
        for waiting in std::mem::take(&mut self.waiting) {
            self.answer(&waiting.request, EIO, &[]);
        }
        // If the answers cannot be sent, the end of the connection tells the client.
        let _ = self.outbox.drain(&mut self.client);
    }
}

/// Returns how to report that the connection to a lender is broken.
fn broken(lender: usize) -> impl FnOnce(io::Error) -> Ended {
    move |error| {
        let what = format!("the connection to the lender has ended: {error}");
        Ended::of(lender, Why::Gone, what)
    }
}

/// Returns an index range within a request, which is far shorter than the address space.
fn range(from: u64, length: u64) -> std::ops::Range<usize> {
    let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    at(from)..at(from + length)
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
