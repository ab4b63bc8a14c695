//! Main loop of the agent in the guest: connects to the daemon, and turns kernel events into
//! messages.
//!
//! The drawing shows the states of the connection. When the daemon closes its side of the port, the
//! connection starts again at "host absent":
//!
//! ```text
//!   no port --> host absent --> waiting (Hello sent) --> working (Welcome received)
//!      ^             ^  ^______________________|____________________|   host side closed
//!      |_____________|__________________________________________________ port gone
//! ```
//! Tracing is on only in the state "working". Every wait for the host has a time limit.

mod connection;
mod state;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use memfold_sys::guest;
use memfold_wire::agent::{AgentCounters, FromAgent, VERSION};
use memfold_wire::permission::Permission;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::connection::{PATIENCE, RETRY};
pub use self::state::Agent;
use self::state::{Sink, State};
use crate::backoff::Backoff;
use crate::commands::Commands;
use crate::consent::Consent;
use crate::glob::Rules;
use crate::memory::{Reports, Trimmer, hotplug};
use crate::mounts::Mounts;
use crate::page_cache::PageCache;
use crate::port::{self, Port};
use crate::privileges;
use crate::trace::{Round, Tracer};
use crate::worker::{Finding, Job, Worker};

/// Delay between the first trace event and the reading of the ring buffers, so that several events
/// are read at once.
const GATHER: Duration = Duration::from_millis(100);
/// The same delay after a large round of reading. It is shorter, so that the ring buffer does not
/// overflow.
const GATHER_BUSY: Duration = Duration::from_millis(10);
/// Number of events above which a round of reading counts as large: a quarter of a CPU's ring
/// buffer.
const BUSY_ROUND: u64 = 5000;
/// Time after received data within which a `SIGIO` of the port is taken to announce that data.
const SIGNAL_SLACK: Duration = Duration::from_millis(500);
/// Delay between the last loss of trace events and the inventory that repairs the daemon's
/// knowledge.
const REPAIR_DELAY: Duration = Duration::from_secs(2);
/// Shortest and longest interval between two repair inventories. The interval doubles while events
/// are still being lost.
const REPAIR_INTERVAL: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(300));
/// Shortest and longest interval between two directory walks for files without a path.
const FIND_INTERVAL: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(120));
/// Shortest and longest interval between two sessions that the agent begins because it has used
/// most of its file numbers. (Each session costs an inventory.)
const RENEWAL_INTERVAL: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(600));

/// Result of one `poll`. The worker and the commands are polled only while the send queue has space
/// for their messages.
struct Polled {
    signals: PollFlags,
    port: Option<PollFlags>,
    mounts: PollFlags,
    worker: PollFlags,
    commands: PollFlags,
    trace: bool,
}

impl Agent {
    /// Sets up tracing, waits until the port exists, and starts the threads. If tracing fails, the
    /// agent continues and reports the problem in its Hello. With `text`, messages are printed to
    /// standard output instead of being sent to the port.
    pub fn new(text: bool) -> io::Result<Self> {
        // This comes before any thread starts, because threads inherit the signal mask.
        let signals = guest::signal_descriptor(&[
            guest::signal::IO,
            guest::signal::TERM,
            guest::signal::INT,
        ])?;
        let consent = Consent::read();
        for problem in &consent.problems {
            say!("memfold-agent: {problem}");
        }
        let mut problems = consent.problems.clone();
        // Threads inherit the capabilities, too.
        if let Err(e) = privileges::give_up(&consent) {
            say!("memfold-agent: cannot give up capabilities: {e}");
        }
        // The host may shrink this guest's memory, so it may let it grow, too.
        if !text && consent.allows(Permission::Trim) {
            if let Err(e) = hotplug::prepare(Path::new("/")) {
                problems.push(format!("plugged memory may stay offline: {e}"));
            }
        }
        let tracer = match Tracer::new() {
            Ok(tracer) => Some(tracer),
            Err(e) => {
                problems.push(format!("no trace events, so only inventories: {e}"));
                None
            }
        };
        let sink = if text {
            Sink::Text
        } else {
            Sink::Port(wait_for_port(&signals)?)
        };
        let mut agent = Self::assemble(signals, sink, tracer, problems, consent)?;
        agent.read_mounts();
        Ok(agent)
    }

    fn assemble(
        signals: OwnedFd,
        sink: Sink,
        tracer: Option<Tracer>,
        problems: Vec<String>,
        consent: Consent,
    ) -> io::Result<Self> {
        Ok(Self {
            signals,
            mountinfo: File::open("/proc/self/mountinfo").ok(),
            statm: File::open("/proc/self/statm").ok(),
            sink,
            state: State::Absent(Instant::now()),
            version: VERSION,
            retry: RETRY.0,
            patience: PATIENCE.0,
            heard: Instant::now(),
            has_heard: false,
            tracer,
            problems,
            round: Round::default(),
            gather: None,
            busy: false,
            cache: PageCache::default(),
            worker: Worker::start()?,
            commands: Commands::new()?,
            consent,
            inventory_running: false,
            inventory_wanted: false,
            repair: Backoff::new(REPAIR_INTERVAL),
            find: Backoff::new(FIND_INTERVAL),
            finding: false,
            counters_sent: (Instant::now(), AgentCounters::default()),
            most_files: u32::MAX,
            renewal: Backoff::new(RENEWAL_INTERVAL),
            memory: Reports::default(),
            trimmer: Trimmer::default(),
        })
    }

    /// Runs the agent until `SIGTERM` or `SIGINT`.
    pub fn run(mut self) -> io::Result<()> {
        if matches!(self.sink, Sink::Text) {
            self.welcome(Rules::default());
            self.inventory_wanted = true;
        }
        self.deadlines()?;
        while !self.wait()? {
            self.deadlines()?;
        }
        if let Some(tracer) = self.tracer.take() {
            tracer.remove();
        }
        Ok(())
    }

    /// Does the work that is due now, and the work that waited for space in the send queue.
    fn deadlines(&mut self) -> io::Result<()> {
        if matches!(self.state, State::Absent(when) if when <= Instant::now()) {
            self.look_for_host();
        }
        if let State::Waiting(until) = self.state {
            // After a turn that took long, the answer may be there already. A daemon that gets
            // Hello again drops the session, and the commands that it has sent since.
            let is_answered = matches!(&self.sink, Sink::Port(port) if port.has_input());
            if until <= Instant::now() && !is_answered {
                self.say_hello();
            }
        }
        // Answers come first: somebody waits for them.
        let is_idle = self.commands.is_idle();
        while self.state != State::Refused && self.has_room_for_answer() {
            let Some(message) = self.commands.next() else {
                break;
            };
            self.say(&message);
        }
        if self.state == State::Working {
            if self.gather.is_some_and(|when| when <= Instant::now()) {
                self.read_events()?;
            }
            if self.has_room() {
                self.take_findings();
                self.start_jobs();
            }
            self.say_counters(false);
            if let Some(figures) = self.memory.next() {
                // If the queue is full, the next figures tell as much, at most seven seconds later.
                self.say(&figures);
            }
        }
        if is_idle && matches!(self.sink, Sink::Port(_)) && self.is_session_used_up() {
            self.renew_session();
        }
        if let Sink::Port(port) = &mut self.sink {
            if !matches!(self.state, State::Absent(_)) && port.send().is_err() {
                self.lost_host();
            }
        }
        Ok(())
    }

    /// Waits until an event or a deadline. Returns true if a signal asks the agent to end.
    fn wait(&mut self) -> io::Result<bool> {
        // The signal of data that came after the last look at the signals is pending. However long
        // the work took since then, it announces that data.
        let has_heard = std::mem::take(&mut self.has_heard);
        if has_heard {
            self.heard = Instant::now();
        }
        let polled = self.poll()?;
        let mut port_signal = false;
        // A signal that comes after this poll is reported by the next poll.
        if !polled.signals.is_empty() {
            while let Some(signal) = guest::next_signal(&self.signals)? {
                if signal != guest::signal::IO {
                    return Ok(true);
                }
                port_signal = true;
            }
        }
        if polled.mounts.intersects(PollFlags::PRI | PollFlags::ERR) {
            self.read_mounts();
        }
        if !polled.worker.is_empty() {
            self.worker.wake.rest();
        }
        if !polled.commands.is_empty() {
            self.commands.wake.rest();
        }
        if polled.trace {
            let delay = if self.busy { GATHER_BUSY } else { GATHER };
            self.gather = Some(Instant::now() + delay);
        }
        if let Some(events) = polled.port {
            self.port_event(events);
            // A signal without data, while the host side is open: the host side closed and opened
            // again, and waits for a Hello. If data came after the poll, its signal may have come
            // already, so the port is asked again.
            if port_signal
                && !has_heard
                && !matches!(self.state, State::Absent(_))
                && !events.contains(PollFlags::IN)
                && self.heard.elapsed() > SIGNAL_SLACK
                && matches!(&self.sink, Sink::Port(port) if !port.has_input())
            {
                self.lost_host();
            }
        }
        if port_signal && matches!(self.state, State::Absent(_)) {
            self.state = State::Absent(Instant::now());
        }
        Ok(false)
    }

    fn poll(&self) -> io::Result<Polled> {
        let working = self.state == State::Working;
        let connected = !matches!(self.state, State::Absent(_));
        let room = self.has_room();
        let mut set = vec![PollFd::new(&self.signals, PollFlags::IN)];
        let port_at = match &self.sink {
            Sink::Port(port) if connected => {
                set.push(port.poll_fd());
                Some(1)
            }
            _ => None,
        };
        let mounts_at = set.len();
        if let Some(file) = &self.mountinfo {
            set.push(PollFd::new(file, PollFlags::PRI));
        }
        let worker_at = set.len();
        if room {
            set.push(PollFd::new(&*self.worker.wake, PollFlags::IN));
        }
        let commands_at = set.len();
        let room_for_answer = self.has_room_for_answer();
        if room_for_answer {
            set.push(PollFd::new(&*self.commands.wake, PollFlags::IN));
        }
        let trace_at = set.len();
        if let (Some(tracer), true, None) = (&self.tracer, working, self.gather) {
            let rings = tracer.descriptors();
            set.extend(rings.map(|d| PollFd::from_borrowed_fd(d, PollFlags::IN)));
        }
        let timeout = self.next_deadline().and_then(|when| {
            // The timeout is rounded up, because a timeout that ends too early would cause a busy
            // loop.
            let left = when.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec::try_from(left).ok()
        });
        match poll(&mut set, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let events: Vec<PollFlags> = set.iter().map(PollFd::revents).collect();
        let of = |is_asked: bool, at: usize| {
            let asked = is_asked.then(|| events[at]);
            asked.unwrap_or(PollFlags::empty())
        };
        Ok(Polled {
            signals: events[0],
            port: port_at.map(|at| events[at]),
            mounts: of(self.mountinfo.is_some(), mounts_at),
            worker: of(room, worker_at),
            commands: of(room_for_answer, commands_at),
            trace: events[trace_at..].iter().any(|e| !e.is_empty()),
        })
    }

    fn next_deadline(&self) -> Option<Instant> {
        let mut list = vec![self.gather];
        if let State::Absent(when) | State::Waiting(when) = self.state {
            list.push(Some(when));
        }
        if self.state == State::Working {
            // Work that waits for space or for a running job is started when the space or the job's
            // end is noticed.
            let free = !self.inventory_running && self.has_room();
            list.push(self.repair.due.filter(|_| free));
            list.push(self.find.due.filter(|_| !self.finding && self.has_room()));
            list.push(self.counters_due());
            list.push(self.memory.due());
        }
        list.into_iter().flatten().min()
    }

    fn read_mounts(&mut self) {
        use std::io::{Read, Seek};
        // Only reading through the polled descriptor makes it unreadable again.
        let mut text = Vec::new();
        let read = self.mountinfo.as_mut().and_then(|file| {
            file.rewind().ok()?;
            file.read_to_end(&mut text).ok()
        });
        if read.is_some() {
            self.cache.set_mounts(Mounts::parse(&text));
        }
    }

    fn read_events(&mut self) -> io::Result<()> {
        self.gather = None;
        let Some(tracer) = &mut self.tracer else {
            return Ok(());
        };
        tracer.read(&mut self.round)?;
        let counters = &mut self.cache.counters;
        counters.events += self.round.records;
        counters.events_lost += self.round.lost;
        self.busy = self.round.records > BUSY_ROUND;
        let mut lost = self.round.lost > 0;
        if let Sink::Port(port) = &self.sink {
            if port.is_full() {
                // The daemon is too slow. Events are still read, so that the number of lost events
                // is known.
                counters.events_lost += self.round.records;
                self.round.events.clear();
                lost = true;
            }
        }
        let events = std::mem::take(&mut self.round.events);
        self.cache.events(&events);
        self.cache.end_round();
        self.round.events = events;
        if self.round.more {
            self.gather = Some(Instant::now());
        }
        self.cache.batch.flush();
        if !self.send_batch() || lost {
            self.repair.want(REPAIR_DELAY);
        }
        if self.cache.wants() && self.find.due.is_none() {
            self.find.want(FIND_INTERVAL.0);
        }
        Ok(())
    }

    fn take_findings(&mut self) {
        while self.has_room() {
            let Some(findings) = self.worker.next() else {
                break;
            };
            for finding in findings {
                match finding {
                    Finding::InventoryDone { files, pages } => {
                        self.inventory_running = false;
                        self.cache.counters.inventories += 1;
                        let end = FromAgent::InventoryEnd { files, pages };
                        self.cache.batch.message(end);
                    }
                    Finding::FindDone { .. } => self.finding = false,
                    Finding::Path(..) => self.find.was_useful(),
                    _ => {}
                }
                self.cache.finding(finding);
            }
            self.cache.batch.flush();
            if !self.send_batch() {
                self.repair.want(REPAIR_DELAY);
            }
        }
    }

    fn start_jobs(&mut self) {
        if !self.inventory_running
            && (std::mem::take(&mut self.inventory_wanted) || self.repair.take())
        {
            self.inventory_running = true;
            self.repair.due = None;
            self.say(&FromAgent::InventoryBegin);
            let job = Job::Inventory(self.cache.mounts.clone(), self.cache.rules.clone());
            self.worker.submit(job);
        }
        if !self.finding && self.find.take() {
            if let Some(wanted) = self.cache.take_wanted() {
                self.finding = true;
                let job = Job::Find(self.cache.mounts.clone(), wanted);
                self.worker.submit(job);
            }
        }
    }

    /// Sends the messages of the batch. Returns false if a message was dropped.
    fn send_batch(&mut self) -> bool {
        let mut all = true;
        for message in self.cache.batch.take_ready() {
            all &= self.say(&message);
        }
        if !all {
            self.cache.forget_files();
        }
        all
    }
}

/// Waits until the port exists, and opens it.
///
/// # Errors
///
/// An error of kind `Interrupted` if a signal ended the wait.
fn wait_for_port(signals: &OwnedFd) -> io::Result<Port> {
    let mut told = false;
    loop {
        let opened = port::find().map(|path| Port::open(&path));
        let reason = match opened {
            Some(Ok(port)) => return Ok(port),
            Some(Err(e)) => e.to_string(),
            None => "there is none".into(),
        };
        if !std::mem::replace(&mut told, true) {
            say!(
                "memfold-agent: waiting for the port {}: {reason}",
                memfold_wire::agent::PORT_NAME
            );
        }
        let mut set = [PollFd::new(signals, PollFlags::IN)];
        let pause = Timespec::try_from(Duration::from_secs(1)).ok();
        if poll(&mut set, pause.as_ref())? > 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
}
