//! The connection of the agent in the guest to the daemon on the host, through a virtio-serial
//! port: waits for the daemon, does the handshake, carries out the daemon's messages, and forgets
//! what the daemon knew when the connection is lost.

use std::fs;
use std::time::{Duration, Instant};

use memfold_wire::agent::{
    FromAgent, OLDEST_VERSION, ORDERS_VERSION, OutputStream, ToAgent, VERSION, max_files,
};
use memfold_wire::memory;
use memfold_wire::permission::Permission;
use rustix::event::PollFlags;

use super::state::{Agent, Sink, State};
use crate::glob::Rules;
use crate::memory::{Reports, total_pages};
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
        self.has_heard = true;
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

    /// Returns whether a new session should begin, because this one has used most of its file
    /// numbers. The daemon would ignore further files. Numbers are not used again, because pages of
    /// the earlier file may still be cached.
    pub(super) fn is_session_used_up(&mut self) -> bool {
        let is_used_up = self.cache.numbers_used() >= self.most_files - self.most_files / 8;
        if self.state != State::Working || !is_used_up || !self.has_room() {
            return false;
        }
        if self.renewal.due.is_none() {
            self.renewal.want(Duration::ZERO);
        }
        self.renewal.take()
    }

    /// Begins a new session of the same connection. The daemon drops what it knows of this one,
    /// also its commands, so no command may run.
    pub(super) fn renew_session(&mut self) {
        self.gather = None;
        self.patience = PATIENCE.0;
        self.say_hello();
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
            Ok(_) => self.has_heard = true,
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
                // Until Welcome, all else is of an earlier session, whose commands the daemon has
                // given up.
                Ok(Some(message))
                    if self.state == State::Working
                        || matches!(message, ToAgent::Welcome { .. } | ToAgent::Refused { .. }) =>
                {
                    self.order(message);
                }
                Ok(Some(_)) => {}
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
            // Older daemons send a script for everything that they do in the guest.
            ToAgent::Run { command, .. } | ToAgent::Stream { command, .. }
                if !self.consent.allows(Permission::Exec) =>
            {
                self.refuse(command, Permission::Exec);
            }
            ToAgent::Order { command, order } | ToAgent::StreamOrder { command, order, .. }
                if !self.consent.allows(order.permission()) =>
            {
                self.refuse(command, order.permission());
            }
            ToAgent::Run { command, script } => self.commands.run(command, script),
            ToAgent::Order { command, order } => self.commands.run(command, order.script()),
            ToAgent::StreamOrder {
                command,
                order,
                has_input,
            } => drop(self.commands.stream(ToAgent::Stream {
                command,
                script: order.script(),
                has_input,
                terminal: None,
            })),
            ToAgent::Kill { command } => self.commands.kill(command),
            ToAgent::ReportMemory { interval_ms } => {
                if self.consent.allows(Permission::Inspect) {
                    self.memory.set_interval(interval_ms);
                }
            }
            ToAgent::Trim(order) => {
                let is_allowed = self.consent.allows(Permission::Trim);
                self.trimmer
                    .start(order, is_allowed, self.commands.outbox());
            }
            other => drop(self.commands.stream(other)),
        }
    }

    /// Answers a command or an order that the guest's owner does not allow.
    fn refuse(&self, command: u32, permission: Permission) {
        say!("memfold-agent: order refused: {}", permission.refusal());
        let messages = if self.version >= ORDERS_VERSION {
            let word = permission.word().to_owned();
            vec![FromAgent::NotAllowed { command, word }]
        } else {
            refusal_as_output(command, permission)
        };
        self.commands.answer(messages);
    }

    pub(super) fn welcome(&mut self, rules: Rules) {
        self.worker.cancel();
        (self.inventory_running, self.finding) = (false, false);
        self.cache.reset(rules);
        // The kernel keeps some of the VM's RAM for itself, so the daemon allows a few more.
        self.most_files = max_files(total_pages());
        self.state = State::Working;
        if self.version >= ORDERS_VERSION {
            let words = self.consent.words().map(str::to_owned).collect();
            self.say(&FromAgent::Allowed { words });
        }
        if let Some(tracer) = &mut self.tracer {
            match tracer.start() {
                Ok(None) => {}
                Ok(Some(problem)) => say!("memfold-agent: {problem}"),
                Err(e) => say!("memfold-agent: trace events: {e}"),
            }
        }
    }
}

/// Exit code of a command that the guest's owner does not allow: "cannot execute" of shells.
const NOT_ALLOWED: i32 = 126;

/// Returns a refusal for a daemon that knows no other: output and end of a command.
fn refusal_as_output(command: u32, permission: Permission) -> Vec<FromAgent> {
    let bytes = format!("memfold-agent: {}\n", permission.refusal()).into_bytes();
    let stream = OutputStream::Stderr;
    vec![
        FromAgent::Output {
            command,
            stream,
            bytes,
        },
        FromAgent::Exited {
            command,
            code: NOT_ALLOWED,
        },
    ]
}

#[cfg(test)]
mod tests;
