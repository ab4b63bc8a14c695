//! Collects facts about the VMs for `memfold estimate`, which reads the VMs' memory itself.

use std::collections::HashMap;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use memfold_fold::{Command, PageRun};
use memfold_ledger::estimate::{FileRun, KnownFile, KnownVm, VmFacts};
use memfold_vm::RamBlock;

use crate::error::DaemonError;
use crate::folding::ended;
use crate::machine::Machine;
use crate::views::Views;

/// Time limit for a guest to report its free memory.
const ANSWER: Duration = Duration::from_secs(5);

impl Views {
    /// Returns names, trust domains, RAM ranges and cached files of all VMs, and the guests' free
    /// memory.
    pub fn estimate_facts(&self) -> Result<VmFacts, DaemonError> {
        let (answer, cached) = sync_channel(1);
        self.folding.tell(Command::CachedFiles(answer))?;
        let machines = self.registry.machines();
        // All guests are asked at the same time, so a guest that does not answer delays only its
        // own part.
        let free: Vec<Option<u64>> = std::thread::scope(|scope| {
            let asked: Vec<_> = machines
                .iter()
                .map(|machine| scope.spawn(|| free_bytes(machine)))
                .collect();
            let answers = asked.into_iter();
            answers.map(|thread| thread.join().ok().flatten()).collect()
        });
        let cached = cached.recv().map_err(|_| ended())?;
        let mut runs: HashMap<String, Vec<PageRun>> = cached.vms.into_iter().collect();
        let range = |block: &RamBlock| (block.hva.0, block.hva.add_pages(block.pages).0);
        let vms = machines
            .iter()
            .zip(free)
            .map(|(machine, free_bytes)| KnownVm {
                name: machine.name().to_owned(),
                domain: machine.domain().map(str::to_owned),
                pid: machine.pid().as_raw_nonzero().get(),
                ram: machine.layout().blocks.iter().map(range).collect(),
                free_bytes,
                runs: runs
                    .remove(machine.name())
                    .map(|runs| runs.into_iter().map(file_run).collect()),
            });
        let file = |(path, file_bytes): (Vec<u8>, u64)| KnownFile {
            path: String::from_utf8_lossy(&path).into_owned(),
            file_bytes,
        };
        Ok(VmFacts {
            vms: vms.collect(),
            files: cached.files.into_iter().map(file).collect(),
        })
    }
}

fn file_run(run: PageRun) -> FileRun {
    FileRun {
        hva: run.hva.0,
        pages: run.pages,
        file: run.file,
        page: run.page,
    }
}

/// Returns `MemFree` of a guest, in bytes; `None` if the guest's agent does not answer.
fn free_bytes(machine: &Machine) -> Option<u64> {
    machine.info().agent?;
    let answer = machine.run("cat /proc/meminfo", ANSWER).ok()?;
    let text = String::from_utf8_lossy(&answer.stdout);
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemFree:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}
