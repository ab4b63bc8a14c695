//! The connection of the agent in the guest to the daemon on the host, through a virtio-serial
//! port: waits for the daemon, does the handshake, carries out the daemon's messages, and forgets
//! what the daemon knew when the connection is lost.

use std::fs;
use std::time::{Duration, Instant};

use memfold_wire::agent::{FromAgent, OLDEST_VERSION, ToAgent, VERSION};
use memfold_wire::memory;
use rustix::event::PollFlags;

use super::state::{Agent, Sink, State};
use crate::glob::Rules;
use crate::memory::Reports;
use crate::trace::Round;

/// Shortest and longest interval between two checks whether the host side is open.
pub(super) const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));

/// Shortest and longest time to wait for the daemon's answer before Hello is sent again. QEMU drops
/// what it has not delivered when a daemon's connection ends, so a Hello can be lost although the
/// next daemon is there already.
pub(super) const PATIENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(32));

/// Messages beyond the protocol's first version that this agent knows.
const FEATURES: [&str; 1] = [memory::FEATURE];

impl Agent {
    pub(super) fn look_for_host(&mut self) {
        let Sink::Port(port) = &mut self.sink else {
            return;
        };
        if !port.host_is_there() {
            self.state = State::Absent(Instant::now() + self.retry);
            self.retry = (self.retry * 2).min(RETRY.1);
            return;
        }
        self.retry = RETRY.0;
        port.begin();
        // The signal for the opening of the host side may still come.
        self.heard = Instant::now();
        self.patience = PATIENCE.0;
        self.say_hello();
    }

    pub(super) fn say_hello(&mut self) {
        self.state = State::Waiting(Instant::now() + self.patience);
        self.patience = (self.patience * 2).min(PATIENCE.1);
        let read = |path| {
            fs::read_to_string(path)
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        let hello = FromAgent::Hello {
            version: self.version,
            agent: memory::version_with(env!("CARGO_PKG_VERSION"), &FEATURES),
            kernel: read("/proc/sys/kernel/osrelease"),
            boot_id: read("/proc/sys/kernel/random/boot_id"),
            host_name: read("/proc/sys/kernel/hostname"),
            problems: self.problems.clone(),
        };
        self.say(&hello);
    }

    /// Resets all state of the connection after the host side has closed.
    pub(super) fn lost_host(&mut self) {
        if let Some(tracer) = &mut self.tracer {
            tracer.stop();
        }
        if let Sink::Port(port) = &mut self.sink {
            port.begin();
        }
        self.worker.cancel();
        self.commands.forget();
        self.version = VERSION;
        self.memory = Reports::default();
        self.trimmer.stop();
        self.cache.reset(Rules::default());
        self.round = Round::default();
        self.gather = None;
        (self.inventory_running, self.inventory_wanted, self.finding) = (false, false, false);
        (self.repair.due, self.find.due) = (None, None);
        self.state = State::Absent(Instant::now() + self.retry);
    }

    pub(super) fn port_event(&mut self, events: PollFlags) {
        let Sink::Port(port) = &mut self.sink else {
            return;
        };
        if events.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            self.lost_host();
            return;
        }
        if !events.contains(PollFlags::IN) {
            return;
        }
        match port.receive() {
            Ok(0) => {}
            Ok(_) => self.heard = Instant::now(),
            Err(_) => {
                self.lost_host();
                return;
            }
        }
        loop {
            let Sink::Port(port) = &mut self.sink else {
                return;
            };
            match port.order() {
                Ok(Some(message)) => self.order(message),
                Ok(None) => return,
                Err(e) => {
                    say!("memfold-agent: cannot parse the daemon's message: {e}");
                    self.lost_host();
                    return;
                }
            }
        }
    }

    fn order(&mut self, message: ToAgent) {
        match message {
            ToAgent::Welcome {
                version,
                include,
                exclude,
            } if (OLDEST_VERSION..=self.version).contains(&version) => {
                self.version = version;
                self.welcome(Rules::new(include, exclude));
            }
            ToAgent::Welcome { version, .. } => {
                say!(
                    "memfold-agent: the daemon speaks version {version}, this agent {OLDEST_VERSION} to {VERSION}: update the older one"
                );
                self.state = State::Refused;
            }
            // A daemon of the oldest version refuses an agent of any other version.
            ToAgent::Refused { .. } if self.version > OLDEST_VERSION => {
                self.version = OLDEST_VERSION;
                self.say_hello();
            }
            ToAgent::Refused { reason } => {
                say!("memfold-agent: the daemon refused: {reason}");
                self.state = State::Refused;
            }
            ToAgent::Inventory => self.inventory_wanted = true,
            ToAgent::Ping => self.say_counters(true),
            ToAgent::Run { command, script } => self.commands.run(command, script),
            ToAgent::Kill { command } => self.commands.kill(command),
            ToAgent::ReportMemory { interval_ms } => self.memory.set_interval(interval_ms),
            ToAgent::Trim(order) => self.trimmer.start(order, self.commands.outbox()),
            other => drop(self.commands.stream(other)),
        }
    }

    pub(super) fn welcome(&mut self, rules: Rules) {
        self.worker.cancel();
        (self.inventory_running, self.finding) = (false, false);
        self.cache.reset(rules);
        self.state = State::Working;
        if let Some(tracer) = &mut self.tracer {
            match tracer.start() {
                Ok(None) => {}
                Ok(Some(problem)) => say!("memfold-agent: {problem}"),
                Err(e) => say!("memfold-agent: trace events: {e}"),
            }
        }
    }
}
