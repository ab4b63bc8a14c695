//! Sends commands to the thread that folds VMs' memory (the fold engine), changes its settings, and
//! reads its figures. The engine may be waiting for a QEMU that does not answer. Requests for
//! figures then get the last known figures.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use memfold_api::FoldRequest;
use memfold_fold::{CachedPages, Command, Engine, EngineSettings, EngineStats, Owed, VmStats};
use parking_lot::Mutex;

use crate::error::{DaemonError, check};
use crate::machine::Machine;
use crate::threads;
use crate::vm_registry::VmRegistry;

/// Time limit for the engine's answer while the engine waits for a VM that does not answer.
const PATIENCE: Duration = Duration::from_millis(700);

/// Time between two checks whether the engine waits for a VM that does not answer.
const LOOK: Duration = Duration::from_millis(50);

/// Capacity of the command queue. Senders wait when it is full, for example for a guest whose hints
/// come too fast.
const MAILBOX: usize = 1024;

/// The daemon's connection to the fold engine's thread.
#[derive(Debug)]
pub struct Folding {
    registry: Arc<VmRegistry>,
    commands: SyncSender<Command>,
    /// The engine's last figures, and when they arrived.
    last: Mutex<Option<(Instant, EngineStats)>>,
}

impl Folding {
    /// Starts the engine's thread.
    pub(crate) fn start(
        mut settings: EngineSettings,
        registry: Arc<VmRegistry>,
    ) -> io::Result<Self> {
        settings.max_mappings = max_map_count().unwrap_or(settings.max_mappings);
        let (commands, receiver) = sync_channel(MAILBOX);
        threads::begin("fold-engine", move || Engine::new(settings).run(&receiver))?;
        Ok(Self {
            registry,
            commands,
            last: Mutex::default(),
        })
    }

    /// Returns the queue to which VMs send their agents' hints.
    pub(crate) const fn commands(&self) -> &SyncSender<Command> {
        &self.commands
    }

    pub(crate) fn tell(&self, command: Command) -> Result<(), DaemonError> {
        self.commands.send(command).map_err(|_| ended())
    }

    /// Sends a question to the engine, and waits for the answer without a time limit.
    pub(crate) fn ask<T>(
        &self,
        question: impl FnOnce(SyncSender<T>) -> Command,
    ) -> Result<T, DaemonError> {
        let (answer, answered) = sync_channel(1);
        self.tell(question(answer))?;
        answered.recv().map_err(|_| ended())
    }

    /// Makes the engine leave a VM alone until [`Command::Release`]. Returns whether it will do so:
    /// an engine that waits for another VM does it later.
    pub(crate) fn leave_alone(&self, machine: &Machine) -> bool {
        let asked = self.ask_for_a_while(|answer| Command::LeaveAlone(machine.id(), answer));
        matches!(asked, Ok(None | Some(Ok(()))))
    }

    /// Returns the CPU time that the engine has spent on [`Folding::stats`] so far.
    pub(crate) fn reports_cpu(&self) -> Result<Duration, DaemonError> {
        if let Some(nanoseconds) = self.ask_for_a_while(Command::ReportsCpu)? {
            return Ok(Duration::from_nanos(nanoseconds));
        }
        let known = self.known().map_or(0.0, |(_, stats)| stats.report_cpu_s);
        Ok(Duration::from_secs_f64(known.max(0.0)))
    }

    /// Returns the fold engine's figures. While the engine waits for a VM that does not answer,
    /// these are the last known figures.
    pub fn stats(&self) -> Result<EngineStats, DaemonError> {
        Ok(self.look()?.0)
    }

    /// Returns the pages of files that a guest caches, as its agent reported them; `None` if the
    /// engine does not know the VM.
    pub fn cached_pages(&self, vm: &str) -> Result<Option<CachedPages>, DaemonError> {
        let id = self.registry.machine(vm)?.id();
        self.ask(|answer| Command::CachedPages(id, answer))
    }

    /// Returns the figures of folding, and the debt at the same time (`None` while the engine waits
    /// for a VM that does not answer).
    pub(crate) fn look(&self) -> Result<(EngineStats, Option<Owed>), DaemonError> {
        let (mut stats, owed) = match self.ask_for_a_while(Command::Stats)? {
            Some((stats, owed)) => {
                *self.last.lock() = Some((Instant::now(), stats.clone()));
                (stats, Some(owed))
            }
            None => (self.as_known(), None),
        };
        for machine in self.registry.machines() {
            let Some(why) = machine.is_silent() else {
                continue;
            };
            let mut vms = stats.vms.iter_mut();
            if let Some(vm) = vms.find(|vm| vm.name == machine.name()) {
                vm.problem = Some(why);
            }
        }
        Ok((stats, owed))
    }

    fn known(&self) -> Option<(Instant, EngineStats)> {
        self.last.lock().clone()
    }

    /// Sends a question to the engine; `None`: the engine waits for a VM that does not answer.
    fn ask_for_a_while<T>(
        &self,
        question: impl FnOnce(SyncSender<T>) -> Command,
    ) -> Result<Option<T>, DaemonError> {
        let (answer, answered) = sync_channel(1);
        let (asked, mut question) = (Instant::now(), Some(question(answer)));
        loop {
            if let Some(command) = question.take() {
                match self.commands.try_send(command) {
                    Ok(()) => {}
                    // The queue is full: other threads send commands, too.
                    Err(TrySendError::Full(command)) => question = Some(command),
                    Err(TrySendError::Disconnected(_)) => return Err(ended()),
                }
            }
            match answered.recv_timeout(LOOK) {
                Ok(answer) => return Ok(Some(answer)),
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if asked.elapsed() >= PATIENCE && self.registry.has_silent() {
                return Ok(None);
            }
        }
    }

    /// Returns the engine's last known figures, limited to the VMs that run now.
    fn as_known(&self) -> EngineStats {
        let mut stats = EngineStats::default();
        if let Some((at, known)) = self.known() {
            stats = known;
            stats.age_s = at.elapsed().as_secs_f64();
        }
        let mut before = std::mem::take(&mut stats.vms);
        for machine in self.registry.machines() {
            let found = before.iter().position(|vm| vm.name == machine.name());
            stats.vms.push(match found {
                Some(at) => before.swap_remove(at),
                None => VmStats {
                    name: machine.name().to_owned(),
                    domain: machine.domain().unwrap_or_default().to_owned(),
                    problem: machine.problem(),
                    ..VmStats::default()
                },
            });
        }
        stats
    }

    /// Pauses or resumes folding, or changes its limits of CPU time and of pages a second.
    ///
    /// # Errors
    ///
    /// [`DaemonError::BadRequest`] if `cpu_percent` is below 0 or above 100.
    pub fn set(&self, request: &FoldRequest) -> Result<EngineStats, DaemonError> {
        if let Some(percent) = request.cpu_percent {
            let is_fine = (0.0..=100.0).contains(&percent);
            check("cpu_percent", percent, is_fine, "0 to 100")?;
        }
        if let Some(paused) = request.paused {
            self.tell(Command::SetPaused(paused))?;
        }
        if request.cpu_percent.is_some() || request.pages_per_second.is_some() {
            let now = self.stats()?;
            self.tell(Command::SetBudget {
                cpu_share: request.cpu_percent.map_or(now.cpu_share, |p| p / 100.0),
                pages_per_second: request
                    .pages_per_second
                    .or(now.pages_per_second)
                    .filter(|&n| n > 0),
            })?;
        }
        let mut stats = self.stats()?;
        // The engine may execute the command later, so the new settings are filled in here.
        stats.paused = request.paused.unwrap_or(stats.paused);
        Ok(stats)
    }
}

/// Returns the error for a request after the engine's thread has ended.
pub(crate) const fn ended() -> DaemonError {
    DaemonError::Internal("the fold engine has ended")
}

/// Reads `vm.max_map_count` (`Documentation/admin-guide/sysctl/vm.rst`).
fn max_map_count() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?;
    text.trim().parse().ok()
}
