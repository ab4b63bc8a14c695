//! Main loop of the fold engine: handles the daemon's commands, and does the work that is due
//! (folding, reading the kernel's page tables, searching for pages to fold).

use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use memfold_sys::cpu::thread_cpu_ns;
use memfold_wire::library::Order;

use super::command::Command;
use super::debt::Owed;
use super::state::{Engine, VmState};
use super::stats::EngineStats;
use super::task::BATCH_PAGES;

/// Shortest time between two small batches of hints. Pages that are read one after another become
/// one run, and an order costs about as much as ten pages.
const GATHER: Duration = Duration::from_millis(500);

/// Time between two sweeps, which search for matched pages that are not folded.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

impl Engine {
    /// Runs the engine: handles commands and does the work that is due, until [`Command::Stop`] or
    /// until every sender of commands is dropped. If no work is due, the engine waits without a
    /// timeout.
    pub fn run(mut self, commands: &Receiver<Command>) {
        loop {
            let now = Instant::now();
            let first = match self.next_due(now) {
                Some(due) => match commands.recv_timeout(due.saturating_duration_since(now)) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                },
                None => match commands.recv() {
                    Ok(command) => Some(command),
                    Err(_) => return,
                },
            };
            // Handle waiting commands before the next batch, but at most 64, because a flood of
            // commands must not delay the work forever.
            for command in first.into_iter().chain(commands.try_iter().take(64)) {
                if matches!(command, Command::Stop) {
                    return;
                }
                self.handle(command);
            }
            let now = Instant::now();
            if self.next_due(now).is_some_and(|due| due <= now) {
                self.turn(now);
            }
            self.charge(Instant::now());
        }
    }

    /// Does one piece of work: the most useful one that is due.
    fn turn(&mut self, now: Instant) {
        if self.braked.is_some() {
            self.sync_due(now);
            return;
        }
        let gathered = self
            .vms
            .values()
            .any(|vm| self.hints_due(vm, now).is_some_and(|due| due <= now));
        if gathered || !self.swept.is_empty() {
            let tasks = self.take_tasks(now);
            if !tasks.is_empty() {
                self.last_batch = now;
                return self.fold(&tasks);
            }
        }
        if self.sync_due(now) || self.pause_due(now) || self.sample_due(now) || self.zero_due(now) {
            return;
        }
        if self.sweep_wanted && self.swept.is_empty() && now >= self.last_sweep + SWEEP_INTERVAL {
            return self.sweep();
        }
        self.fold_back_due(now);
    }

    /// Charges the budget for the CPU time used since the last call.
    fn charge(&mut self, now: Instant) {
        let used = thread_cpu_ns() + self.library_cpu_ns;
        self.cpu
            .spend((used - self.charged_ns.min(used)) as f64, now);
        self.charged_ns = used;
    }

    /// Returns the time at which the next work is due; `None` if there is no work.
    fn next_due(&mut self, now: Instant) -> Option<Instant> {
        if self.paused {
            return None;
        }
        if self.braked.is_some() {
            return self.look_again_due(now);
        }
        let settings = &self.settings;
        let work = self
            .vms
            .values()
            .filter(|vm| vm.is_foldable())
            .flat_map(|vm| {
                let sync = vm.look_due(settings.sync_interval);
                let pause = vm.pause_due(settings.pause_interval);
                let back = vm.back_due();
                [self.hints_due(vm, now), sync, pause, vm.zero.due, back]
            })
            .flatten();
        let aliases = self.domains.values().filter_map(|d| d.candidates.due());
        let sweep = self.sweep_wanted.then(|| self.last_sweep + SWEEP_INTERVAL);
        let swept = (!self.swept.is_empty()).then_some(now);
        let due = work.chain(aliases).chain(sweep).chain(swept).min()?;
        let budget = [
            self.cpu.wait(now),
            self.rate.as_mut().and_then(|r| r.wait(now)),
        ]
        .into_iter()
        .flatten()
        .max();
        Some(due.max(now + budget.unwrap_or_default()))
    }

    /// Returns the time at which a VM's hints must be processed. Hints are gathered for a while,
    /// unless they suffice for a batch.
    fn hints_due(&self, vm: &VmState, now: Instant) -> Option<Instant> {
        let due = vm.stack.due(now)?;
        let enough = vm.stack.pages() >= u64::from(BATCH_PAGES);
        Some(if enough {
            due
        } else {
            due.max(self.last_batch + GATHER)
        })
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Add {
                id,
                name,
                domain,
                layout,
                advice,
                guest,
                problem,
            } => {
                self.add(id, name, domain, layout, &advice, guest, problem);
            }
            Command::Remove(id) => self.remove(id),
            Command::Problem(id, problem) => self.set_problem(id, problem),
            Command::Layout { id, layout, advice } => self.set_layout(id, &layout, advice),
            Command::Reached { id, guest, problem } => {
                if let Some(vm) = self.vms.get_mut(&id) {
                    vm.guest = guest;
                    // The effects of the last orders are unknown, so the library must be told
                    // everything again.
                    vm.introduced = false;
                    self.set_problem(id, problem);
                }
            }
            Command::AgentSession(id) => self.agent_session(id),
            Command::Agent(id, message) => self.agent(id, message),
            Command::AgentGone(id) => {
                if let Some(vm) = self.vms.get_mut(&id) {
                    vm.stats.agent_ready = false;
                }
            }
            Command::Track(id, answer) => self.hold(id, Some(&Order::TrackWrites), None, &answer),
            Command::KeepPast(id, ranges, file, answer) => {
                let order = Order::KeepPast { ranges };
                self.hold(id, Some(&order), Some(file.as_fd()), &answer);
            }
            Command::Untrack(id, answer) => {
                self.hold(id, Some(&Order::UntrackWrites), None, &answer);
            }
            Command::GoOn(id, answer) => self.hold(id, Some(&Order::Continue), None, &answer),
            Command::LeaveAlone(id, answer) => self.hold(id, None, None, &answer),
            Command::Hold(id, answer) => self.hold(id, Some(&Order::Stop), None, &answer),
            Command::FoldOnto(id, file, ranges, answer) => {
                self.fold_onto(id, &file, &ranges, &answer);
            }
            Command::Release(id) => self.release(id),
            Command::SetPaused(paused) => {
                if self.paused && !paused {
                    self.resumed = Instant::now();
                }
                self.paused = paused;
                self.sweep_wanted = true;
            }
            Command::SetBraked(why) => self.set_braked(why),
            Command::Owed {
                look,
                give_back,
                answer,
            } => self.tell_owed(look, give_back, &answer),
            Command::SetBudget {
                cpu_share,
                pages_per_second,
            } => self.set_budget(cpu_share, pages_per_second),
            Command::ReportsCpu(answer) => drop(answer.send(self.reports_ns)),
            // The receiver may be gone.
            Command::FileUses(answer) => drop(answer.send(self.file_uses())),
            Command::CachedFiles(answer) => drop(answer.send(self.cached_files())),
            Command::CachedPages(id, answer) => drop(answer.send(self.cached_pages(id))),
            Command::FilePaths(id, files, answer) => drop(answer.send(self.file_paths(id, &files))),
            Command::Stats(answer) => {
                // The receiver may be gone.
                let _ = answer.send(self.stats());
                self.charged_ns = thread_cpu_ns() + self.library_cpu_ns;
            }
            Command::Stop => {}
        }
    }

    fn stats(&mut self) -> (EngineStats, Owed) {
        let began_ns = thread_cpu_ns();
        // Syncs of the engine's own still happen at their own times.
        self.sync_all();
        let mut report = self.report();
        let owed = self.owed(false, false);
        // Reports do not count as folding: frequent reports must neither use up the budget of
        // folding nor appear in its CPU time.
        report.engine_cpu_s = began_ns.saturating_sub(self.reports_ns) as f64 / 1e9;
        self.reports_ns += thread_cpu_ns() - began_ns;
        report.report_cpu_s = self.reports_ns as f64 / 1e9;
        (report, owed)
    }
}
