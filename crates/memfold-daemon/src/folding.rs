//! Figures and settings of folding, asked of the engine. It waits for a QEMU that does not answer; those who ask it don't.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use memfold_api::FoldRequest;
use memfold_fold::{Command, EngineStats, VmStats};

use super::{Daemon, DaemonError};

/// How long the engine may take beside a VM that does not answer.
const PATIENCE: Duration = Duration::from_millis(700);

/// Time between two looks whether a VM keeps the engine waiting.
const LOOK: Duration = Duration::from_millis(50);

/// What the engine said last, and when.
#[derive(Debug, Default)]
pub(super) struct LastStats(Mutex<Option<(Instant, EngineStats)>>);

impl Daemon {
    /// Whether the daemon works: waits until nobody holds the table of VMs and the engine answers, or is known to wait for a VM. `false`: the
    /// engine has ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        drop(self.lock());
        self.reports_cpu().is_ok()
    }

    /// CPU time of the engine for [`Daemon::fold_stats`] so far.
    pub(super) fn reports_cpu(&self) -> Result<Duration, DaemonError> {
        if let Some(nanoseconds) = self.ask_engine(Command::ReportsCpu)? {
            return Ok(Duration::from_nanos(nanoseconds));
        }
        let known = self.known().map_or(0.0, |(_, stats)| stats.report_cpu_s);
        Ok(Duration::from_secs_f64(known.max(0.0)))
    }

    /// What folding has done: as of now, or, while the engine waits for a VM that does not answer, as it was known before.
    pub fn fold_stats(&self) -> Result<EngineStats, DaemonError> {
        let mut stats = match self.ask_engine(Command::Stats)? {
            Some(stats) => {
                let known = Some((Instant::now(), stats.clone()));
                *self
                    .folding
                    .0
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = known;
                stats
            }
            None => self.as_known(),
        };
        for machine in self.machines() {
            let mut vms = stats.vms.iter_mut();
            let vm = vms.find(|vm| vm.name == machine.name());
            if let (Some(vm), Some(why)) = (vm, machine.is_silent()) {
                vm.problem = Some(why);
            }
        }
        Ok(stats)
    }

    fn known(&self) -> Option<(Instant, EngineStats)> {
        let known = self.folding.0.lock();
        known.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The engine's answer; `None`: it waits for a VM that does not answer.
    fn ask_engine<T>(
        &self,
        question: impl FnOnce(SyncSender<T>) -> Command,
    ) -> Result<Option<T>, DaemonError> {
        let ended = || DaemonError::Internal("the fold engine has ended");
        let (answer, answered) = sync_channel(1);
        let (asked, mut question) = (Instant::now(), Some(question(answer)));
        loop {
            if let Some(command) = question.take() {
                match self.commands.try_send(command) {
                    Ok(()) => {}
                    // Others ask, too.
                    Err(TrySendError::Full(command)) => question = Some(command),
                    Err(TrySendError::Disconnected(_)) => return Err(ended()),
                }
            }
            match answered.recv_timeout(LOOK) {
                Ok(answer) => return Ok(Some(answer)),
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let is_late = asked.elapsed() >= PATIENCE;
            if is_late && self.machines().iter().any(|vm| vm.is_silent().is_some()) {
                return Ok(None);
            }
        }
    }

    /// Figures of before, of the VMs that there are now.
    fn as_known(&self) -> EngineStats {
        let mut stats = match self.known() {
            Some((at, stats)) => EngineStats {
                age_s: at.elapsed().as_secs_f64(),
                ..stats
            },
            None => EngineStats::default(),
        };
        let mut before = std::mem::take(&mut stats.vms);
        for machine in self.machines() {
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

    /// Pauses folding, resumes it, changes its budget.
    pub fn set_fold(&self, request: &FoldRequest) -> Result<EngineStats, DaemonError> {
        if let Some(percent) = request.cpu_percent.filter(|p| !(0.0..=100.0).contains(p)) {
            return Err(DaemonError::BadRequest(format!(
                "cpu_percent is {percent}; give 0 to 100"
            )));
        }
        if let Some(paused) = request.paused {
            self.tell(Command::SetPaused(paused))?;
        }
        if request.cpu_percent.is_some() || request.pages_per_second.is_some() {
            let now = self.fold_stats()?;
            self.tell(Command::SetBudget {
                cpu_share: request.cpu_percent.map_or(now.cpu_share, |p| p / 100.0),
                pages_per_second: request
                    .pages_per_second
                    .or(now.pages_per_second)
                    .filter(|&n| n > 0),
            })?;
        }
        let mut stats = self.fold_stats()?;
        // The engine may get to it later.
        stats.paused = request.paused.unwrap_or(stats.paused);
        Ok(stats)
    }
}
