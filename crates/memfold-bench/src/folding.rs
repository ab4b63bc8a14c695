//! Folds memory of this process, for a study and the self-test, with the same code that runs in
//! QEMU.

use std::os::fd::OwnedFd;

use anyhow::{Context as _, anyhow, bail};
use memfold_folder::Folder;
use memfold_sys::region::Area;
use memfold_wire::library::{FoldRun, Freeze, Order, Outcome, Reply, Stats, VERSION};

/// The fold library, which carries out orders. A reply of the wrong kind is an error.
pub struct Library(Folder);

fn unexpected<T>(reply: &Reply) -> anyhow::Result<T> {
    Err(anyhow!(
        "the fold library sent an unexpected reply: {reply:?}"
    ))
}

impl Library {
    /// Starts the fold library in this process. The error says why this host cannot fold.
    pub fn new() -> anyhow::Result<Self> {
        let folder = Folder::new(None, None);
        match folder.execute(&Order::Hello { version: VERSION }, None) {
            Reply::Hello { problem: None, .. } => Ok(Self(folder)),
            Reply::Hello { problem, .. } => bail!(problem.unwrap_or_default()),
            other => unexpected(&other),
        }
    }

    /// Gives the fold library an order whose only result is success or failure. `file`: the file
    /// that some orders need.
    pub fn give(&self, order: &Order, file: Option<OwnedFd>) -> anyhow::Result<()> {
        match self.0.execute(order, file) {
            Reply::Ok => Ok(()),
            Reply::Error { reason } => bail!(reason),
            other => unexpected(&other),
        }
    }

    /// Gives the fold library an order about runs. Returns the outcome of each run, and the CPU
    /// time of the order in nanoseconds.
    pub fn outcomes(&self, order: &Order) -> anyhow::Result<(Vec<Outcome>, u64)> {
        match self.0.execute(order, None) {
            Reply::Outcomes {
                outcomes, cpu_ns, ..
            } => Ok((outcomes, cpu_ns)),
            other => unexpected(&other),
        }
    }

    /// Folds one run, and returns the outcome.
    pub fn fold(&self, freeze: Freeze, run: FoldRun) -> anyhow::Result<Outcome> {
        let runs = vec![run];
        match self.outcomes(&Order::Fold { freeze, runs })?.0[..] {
            [outcome] => Ok(outcome),
            ref others => bail!("the fold library sent an unexpected reply: {others:?}"),
        }
    }

    /// Discards memory as QEMU does it, which goes through the fold library.
    pub fn discard(&self, area: Area) -> anyhow::Result<()> {
        let (start, bytes) = (area.start().0, area.bytes());
        let done = self.0.discard(start.try_into()?, bytes.try_into()?);
        Ok(done.context("the memory to discard is no RAM of the fold library")??)
    }

    pub fn stats(&self) -> anyhow::Result<Box<Stats>> {
        match self.0.execute(&Order::Stats, None) {
            Reply::Stats(stats) => Ok(stats),
            other => unexpected(&other),
        }
    }
}
