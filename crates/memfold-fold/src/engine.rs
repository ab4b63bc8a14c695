//! Main loop of the fold engine: handles the daemon's commands, and does the work that is due
//! (folding, reading the kernel's page tables, searching for pages to fold).

use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use memfold_sys::cpu::thread_cpu_ns;
use memfold_wire::library::Order;

use super::batch::SWEEP_INTERVAL;
use super::command::Command;
use super::debt::Owed;
use super::schedule::Work;
use super::state::Engine;
use super::stats::EngineStats;
use super::task::BATCH_PAGES;

/// Shortest time between two small batches of hints. Pages that are read one after another become
/// one run, and an order costs about as much as ten pages.
const GATHER: Duration = Duration::from_millis(500);

/// Time after which other work that is due comes before further hints. Otherwise, a VM that sends
/// hints without end could keep the other VMs' work back forever.
const LATE: Duration = Duration::from_secs(10);

/// Number of commands that are handled before the next turn in any case.
const COMMANDS: usize = 64;

/// A piece of the engine's work; returns whether it was due.
type Step = fn(&mut Engine, Instant) -> bool;

impl Engine {
    /// Runs the engine: handles commands and does the work that is due, until [`Command::Stop`] or
    /// until every sender of commands is dropped. If no work is due, the engine waits without a
    /// timeout.
    pub fn run(mut self, commands: &Receiver<Command>) {
        // Time that the last turn took.
        let mut took = Duration::ZERO;
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
            if !self.handle_waiting(first, commands, Instant::now() + took) {
                return;
            }
            took = Duration::ZERO;
            let now = Instant::now();
            if self.next_due(now).is_some_and(|due| due <= now) {
                self.turn(now);
                self.settle_matches();
                took = now.elapsed();
            }
            self.charge(Instant::now());
        }
    }

    /// Handles waiting commands before the next turn: [`COMMANDS`] of them, and more until `until`,
    /// so that commands have as much time as the work. A flood of commands must not delay the work
    /// forever, and a turn of some seconds must not block the links to the agents. Returns `false`
    /// at [`Command::Stop`].
    fn handle_waiting(
        &mut self,
        first: Option<Command>,
        commands: &Receiver<Command>,
        until: Instant,
    ) -> bool {
        for (handled, command) in (1..).zip(first.into_iter().chain(commands.try_iter())) {
            if matches!(command, Command::Stop) {
                return false;
            }
            self.handle(command);
            if handled >= COMMANDS && Instant::now() >= until {
                break;
            }
        }
        true
    }

    /// Does one piece of work: the most useful one that is due.
    fn turn(&mut self, now: Instant) {
        if self.braked.is_some() {
            self.sync_due(now);
            return;
        }
        self.reschedule();
        // After late work, hints have a turn again.
        if std::mem::take(&mut self.has_folded) && self.late_work(now) {
            return;
        }
        let gathered = self.hints_due().is_some_and(|due| due <= now);
        if gathered || !self.swept.is_empty() {
            let tasks = self.take_tasks(now);
            if !tasks.is_empty() {
                let pages: u32 = tasks.iter().map(|task| task.hint.pages).sum();
                let is_full = pages >= BATCH_PAGES;
                self.next_small_batch = if is_full { now } else { now + GATHER };
                self.has_folded = true;
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

    /// Does the piece of work besides hints that has been late for longest. Returns whether there
    /// was one.
    ///
    /// Work is late if it has been due for [`LATE`], but folding in a pause is late at once: in a
    /// VM with direct I/O, it is the rest of the work on hints, and must get its part of the budget
    /// if the hints of other VMs use it up.
    fn late_work(&mut self, now: Instant) -> bool {
        let sync_may_run = self.sync_time(now).is_some_and(|due| due <= now);
        let sync = self.schedule.first(Work::Sync);
        let sync = sync.into_iter().chain(self.schedule.reclaims.first()).min();
        let may_sweep = self.sweep_wanted && self.swept.is_empty();
        let steps: [(Option<Instant>, Step); 5] = [
            (sync.filter(|_| sync_may_run), Self::sync_due),
            (self.schedule.pairs.first(), Self::sample_due),
            (self.schedule.first(Work::Zero), Self::zero_due),
            (
                may_sweep.then(|| self.last_sweep + SWEEP_INTERVAL),
                |engine, _| {
                    engine.sweep();
                    true
                },
            ),
            (self.schedule.first(Work::FoldBack), |engine, now| {
                engine.fold_back_due(now);
                true
            }),
        ];
        let late = steps
            .into_iter()
            .filter_map(|(due, step)| due.map(|due| (due + LATE, step)));
        let pause = self.schedule.first(Work::Pause);
        let pause = pause.map(|due| (due, Self::pause_due as Step));
        let first = late.chain(pause).min_by_key(|(late, _)| *late);
        first.is_some_and(|(late, step)| late <= now && step(self, now))
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
        // Also while folding is paused, so that the notes about changed VMs do not pile up.
        self.reschedule();
        if self.paused {
            return None;
        }
        let sync = self.sync_time(now);
        let due = if self.braked.is_some() {
            sync?
        } else {
            let sweep = self.sweep_wanted.then(|| self.last_sweep + SWEEP_INTERVAL);
            let work = [
                self.hints_due(),
                sync,
                self.schedule.first(Work::Pause),
                self.schedule.first(Work::Zero),
                self.schedule.first(Work::FoldBack),
                self.schedule.pairs.first(),
                sweep,
                (!self.swept.is_empty()).then_some(now),
            ];
            work.into_iter().flatten().min()?
        };
        let rate = self.rate.as_mut().filter(|_| self.braked.is_none());
        let budget = [self.cpu.wait(now), rate.and_then(|rate| rate.wait(now))];
        let budget = budget.into_iter().flatten().max();
        Some(due.max(now + budget.unwrap_or_default()))
    }

    /// Returns the time at which hints must be processed. Hints are gathered for a while, unless
    /// those of a VM suffice for a batch, or those of all VMs have filled the last batch.
    fn hints_due(&self) -> Option<Instant> {
        let full = self.schedule.first(Work::FullBatch);
        let small = self.schedule.first(Work::SmallBatch);
        let small = small.map(|due| due.max(self.next_small_batch));
        full.into_iter().chain(small).min()
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
            // The receiver may be gone.
            Command::Await(id, socket, answer) => drop(answer.send(self.await_pages(id, &socket))),
            Command::Layout { id, layout, advice } => self.set_layout(id, &layout, advice),
            Command::Reached { id, guest, problem } => self.set_reached(id, guest, problem),
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

#[cfg(test)]
mod tests {
    use memfold_wire::agent::{FileFacts, FromAgent};

    use super::*;
    use crate::hint_stack::Hint;
    use crate::random_changes::add;
    use crate::settings::EngineSettings;

    #[test]
    fn after_a_full_batch_of_the_hints_of_many_vms_the_next_batch_is_due_at_once() {
        let mut engine = Engine::new(EngineSettings::default());
        let begin = Instant::now();
        for id in 1..=3 {
            add(&mut engine, id);
            let facts = FileFacts {
                file: 1,
                path: b"/f".into(),
                size_bytes: 1 << 30,
            };
            engine.agent(id, FromAgent::Files(vec![facts]));
            let vm = engine.vms.get_mut(&id).unwrap();
            vm.stack.push(Hint::new(1, 0, BATCH_PAGES / 2, begin));
        }
        // The hints of two VMs fill a batch. Those of the third do not, so that later ones are
        // gathered.
        let now = begin + Duration::from_secs(10);
        for (left, due) in [(1, now), (0, now + GATHER)] {
            engine.turn(now);
            let waiting = engine.vms.values().filter(|vm| vm.stack.due().is_some());
            assert_eq!(waiting.count(), left);
            assert_eq!(engine.next_small_batch, due);
        }
    }

    #[test]
    fn hints_without_end_do_not_keep_the_other_work_back() {
        let mut engine = Engine::new(EngineSettings::default());
        add(&mut engine, 1);
        add(&mut engine, 2);
        let facts = FileFacts {
            file: 1,
            path: b"/f".into(),
            size_bytes: 1 << 30,
        };
        engine.agent(1, FromAgent::Files(vec![facts]));
        engine.sweep_wanted = true;
        let begin = Instant::now();
        let (mut batches, mut pauses, mut has_swept) = (0, 0, false);
        for second in 10..80 {
            let stack = &mut engine.vms.get_mut(&1).unwrap().stack;
            while stack.pages() < u64::from(BATCH_PAGES) {
                stack.push(Hint::new(1, 0, BATCH_PAGES, begin));
            }
            // A hint waits for a pause, which finds nothing to fold.
            let vm = engine.vms.get_mut(&2).unwrap();
            vm.wait_for_pause = vec![Hint::new(1, 0, 1, begin)];
            engine.turn(begin + Duration::from_secs(second));
            pauses += u32::from(engine.vms[&2].wait_for_pause.is_empty());
            batches += u64::from(engine.has_folded);
            has_swept |= !engine.sweep_wanted;
        }
        assert!(has_swept);
        for id in [1, 2] {
            let vm = &engine.vms[&id];
            assert!(vm.last_sync > begin, "the VM is synced");
            assert_eq!(vm.zero.due, None, "the VM's zero pages are searched for");
        }
        assert!(batches >= 35, "hints have half of the turns: {batches}");
        assert!(pauses >= 25, "pauses have most other turns: {pauses}");
    }

    #[test]
    fn after_a_long_turn_more_commands_are_handled_than_after_a_short_one() {
        let mut engine = Engine::new(EngineSettings::default());
        let (sender, commands) = std::sync::mpsc::channel();
        let send = |n| (0..n).for_each(|_| sender.send(Command::AgentGone(1)).unwrap());
        let now = Instant::now();
        for (until, left) in [(now, 1000 - COMMANDS), (now + Duration::from_secs(600), 0)] {
            send(1000);
            assert!(engine.handle_waiting(None, &commands, until));
            assert_eq!(commands.try_iter().count(), left);
        }
        sender.send(Command::Stop).unwrap();
        assert!(!engine.handle_waiting(None, &commands, now));
    }

    #[test]
    fn notes_about_changed_vms_do_not_pile_up_while_folding_is_paused() {
        let mut engine = Engine::new(EngineSettings::default());
        engine.handle(Command::SetPaused(true));
        for id in 1..=3 {
            add(&mut engine, id);
            engine.remove(id);
            assert_eq!(engine.next_due(Instant::now()), None);
            assert!(engine.vms.take_changed().is_empty());
        }
    }
}
