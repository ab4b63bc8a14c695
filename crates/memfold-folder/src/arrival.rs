//! Maps a snapshot's pages into RAM when they have arrived on this host, while the VM runs.
//!
//! ```text
//!   vCPU, device     accesses a page that is not there yet: sleeps
//!                      | event
//!                      v
//!   thread "wants"   sends the page's address to the daemon
//!   daemon           fetches the pages, checks them, writes them to the snapshot's file
//!                      | Arrived, with the file
//!                      v
//!   thread "arrive"  maps the pages privately, and wakes whoever waits for them
//! ```
//! A page is mapped once, before anybody could write to it. If the daemon dies, threads wait for
//! the next daemon, which brings a new socket.

use std::collections::BTreeSet;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use memfold_sys::descriptor;
use memfold_sys::region::Area;
use memfold_sys::signals;
use memfold_sys::userfaultfd::Userfaultfd;
use memfold_units::Hva;
use memfold_wire::library::{Arrived, Awaited, MapRun};
use memfold_wire::{Decoder, encode};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::ram::{Kind, Mapped};
use crate::state::State;

/// Pages that are awaited, and the connection to the daemon that brings them.
#[derive(Debug)]
pub(crate) struct Arrivals {
    shared: Arc<Shared>,
    /// End of a pipe; closing it ends the thread that reads events.
    _end: OwnedFd,
}

#[derive(Debug)]
struct Shared {
    uffd: Arc<Userfaultfd>,
    state: Arc<Mutex<State>>,
    link: Mutex<Link>,
}

/// Why pages were not mapped.
#[derive(Debug)]
enum Failed {
    /// The next attempt may succeed.
    ForNow(String),
    /// The daemon has sent something wrong.
    ForGood(String),
}

/// Pause between two attempts to map pages.
const PAUSE: Duration = Duration::from_secs(1);

/// The daemon's socket, and the pages for which threads wait.
#[derive(Debug, Default)]
struct Link {
    socket: Option<Arc<UnixStream>>,
    wanted: BTreeSet<Hva>,
}

impl Arrivals {
    /// Starts the thread that reads which pages are wanted. It ends when this value is dropped.
    pub(crate) fn start(uffd: Arc<Userfaultfd>, state: Arc<Mutex<State>>) -> Result<Self, String> {
        let shared = Arc::new(Shared {
            uffd,
            state,
            link: Mutex::default(),
        });
        let (ended, end) = pipe_with(PipeFlags::CLOEXEC)
            .map_err(|errno| format!("cannot create a pipe: {errno}"))?;
        let watching = Arc::clone(&shared);
        begin("memfold-wants", move || watching.watch(&ended))?;
        Ok(Self { shared, _end: end })
    }

    /// Uses this socket from now on, and sends the daemon at its other end what is wanted.
    pub(crate) fn connect(&self, socket: UnixStream) -> Result<(), String> {
        let socket = Arc::new(socket);
        let mut link = self.shared.link();
        let wanted: Vec<Hva> = link.wanted.iter().copied().collect();
        for page in wanted {
            send(&socket, Awaited::Wanted { hva: page.0 });
        }
        if self.shared.state().ram.awaited_pages() == 0 {
            send(&socket, Awaited::Complete);
        }
        link.socket = Some(Arc::clone(&socket));
        drop(link);
        let shared = Arc::clone(&self.shared);
        begin("memfold-arrive", move || shared.receive(&socket))
    }
}

fn begin(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let spawn = || {
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(work)
    };
    let spawned = signals::with_all_blocked(spawn);
    spawned
        .map(drop)
        .map_err(|error| format!("cannot start a thread: {error}"))
}

/// Sends the daemon a message. A daemon that is gone is told nothing: the next one is.
fn send(socket: &UnixStream, message: Awaited) {
    if let Ok(frame) = encode(&message) {
        let _ = descriptor::send(socket, &frame, None);
    }
}

impl Shared {
    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the daemon each page for which a thread waits, until the other end of `ended` is
    /// closed.
    fn watch(&self, ended: &OwnedFd) {
        loop {
            let mut ready = [
                PollFd::new(&*self.uffd, PollFlags::IN),
                PollFd::new(ended, PollFlags::IN),
            ];
            // An interrupted call is repeated.
            let _ = poll(&mut ready, None);
            if !ready[1].revents().is_empty() {
                return;
            }
            while let Ok(Some(page)) = self.uffd.next_fault() {
                self.want(page);
            }
        }
    }

    fn want(&self, page: Hva) {
        let mut link = self.link();
        link.wanted.insert(page);
        // The page may have arrived after the event: then nobody would take it from the list.
        let is_awaited = {
            let mut state = self.state();
            let found = state.ram.find(page.0, 1);
            found.map(|(block, area)| (block.first_kind(area).0 == Kind::Awaited, area))
        };
        match is_awaited {
            Some((true, _)) => {
                if let Some(socket) = &link.socket {
                    send(socket, Awaited::Wanted { hva: page.0 });
                }
            }
            Some((false, area)) => {
                link.wanted.remove(&page);
                // Whoever waits finds the page there.
                let _ = self.uffd.wake(area);
            }
            None => {
                link.wanted.remove(&page);
            }
        }
    }

    /// Maps what the daemon brings until it closes the socket or breaks the protocol.
    fn receive(&self, socket: &Arc<UnixStream>) {
        if let Err(why) = self.bring(socket) {
            // The pages stay awaited, so nobody sees wrong bytes.
            crate::say!("memfold: cannot map memory that has arrived: {why}");
        }
        // The daemon sees that nobody listens any more.
        let _ = socket.shutdown(Shutdown::Both);
    }

    fn bring(&self, socket: &Arc<UnixStream>) -> Result<(), String> {
        let mut decoder = Decoder::new();
        let mut buffer = vec![0; 64 << 10];
        let mut file: Option<OwnedFd> = None;
        loop {
            match descriptor::receive(socket, &mut buffer) {
                Ok((0, _)) => return Ok(()),
                Ok((n, came)) => {
                    decoder.push(&buffer[..n]);
                    // The kernel delivers a file with the first bytes that were sent with it. With
                    // two files, it is unknown which one belongs to the next message.
                    if came.is_some() && file.is_some() {
                        return Err("two files came with one message".to_owned());
                    }
                    file = came.or(file);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                // The daemon has ended; the next one connects again.
                Err(_) => return Ok(()),
            }
            loop {
                match decoder.next::<Arrived>() {
                    Ok(Some(arrived)) => {
                        let file = file.take().ok_or("no file came with the message")?;
                        self.map_until_done(socket, &arrived.runs, &file)?;
                        if self.state().ram.awaited_pages() == 0 {
                            send(socket, Awaited::Complete);
                        }
                    }
                    Ok(None) => break,
                    Err(error) => return Err(error.to_string()),
                }
            }
        }
    }

    /// Maps the pages of `runs`, and tries again if the kernel refuses, for example because the
    /// process has too many mappings: VMs may wait for these pages. Ends if the next daemon has
    /// connected, which brings them again.
    fn map_until_done(
        &self,
        socket: &Arc<UnixStream>,
        runs: &[MapRun],
        file: &OwnedFd,
    ) -> Result<(), String> {
        let mut is_told = false;
        loop {
            let why = match self.map(runs, file) {
                Ok(()) => return Ok(()),
                Err(Failed::ForGood(why)) => return Err(why),
                Err(Failed::ForNow(why)) => why,
            };
            if !is_told {
                crate::say!("memfold: cannot map memory that has arrived; retrying: {why}");
                is_told = true;
            }
            std::thread::sleep(PAUSE);
            let is_current = |now: &Arc<UnixStream>| Arc::ptr_eq(now, socket);
            if !self.link().socket.as_ref().is_some_and(is_current) {
                return Ok(());
            }
        }
    }

    /// Maps the pages of `runs` that are awaited.
    fn map(&self, runs: &[MapRun], file: &OwnedFd) -> Result<(), Failed> {
        let file = Mapped::open(file).map_err(Failed::ForGood)?;
        for run in runs {
            file.check(run).map_err(Failed::ForGood)?;
            let mut mapped = Vec::new();
            let mut result = Ok(());
            {
                let mut state = self.state();
                let found = state.ram.find(run.hva, run.pages);
                let outside = || Failed::ForGood("the pages are not inside one RAM block".into());
                let (block, all) = found.ok_or_else(outside)?;
                let mut rest = all;
                while !rest.is_empty() {
                    let (kind, part) = block.first_kind(rest);
                    if kind == Kind::Awaited {
                        let skipped = part.start().pages_since(all.start());
                        let from = run.file_page + skipped;
                        if let Err(why) = file.map(block, part, from) {
                            result = Err(Failed::ForNow(why));
                            break;
                        }
                        mapped.push(part);
                    }
                    rest = rest.after(part.pages());
                }
            }
            self.wake(&mapped);
            result?;
        }
        Ok(())
    }

    fn wake(&self, mapped: &[Area]) {
        let mut link = self.link();
        for &area in mapped {
            let arrived: Vec<Hva> = link
                .wanted
                .range(area.start()..area.end())
                .copied()
                .collect();
            for page in arrived {
                link.wanted.remove(&page);
            }
            // The mapping on which they wait is gone; they find the new one.
            let _ = self.uffd.wake(area);
        }
    }
}
