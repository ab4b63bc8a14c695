//! What right-sizing records of each VM: the limits that the operator set, and what it did to the
//! VM's balloon. The next daemon reads it.
//!
//! VMs that memfold started have a file in their directory, which ends with the VM. All other VMs
//! are in one file of the state directory, by the identity of their QEMU process.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memfold_api::Sizing;
use memfold_units::ByteSize;
use memfold_vm::{Identity, Process, VmDirectory};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::error::{DaemonError, state_error};
use crate::json_file::write_json;
use crate::machine::Machine;

/// What is recorded of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmRecord {
    /// Limits of the VM's size: those of its description, as the operator has changed them since.
    pub sizing: Sizing,
    /// What right-sizing did to the VM's balloon; unset: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<MovedBalloon>,
}

/// A balloon that right-sizing has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MovedBalloon {
    /// Size of the VM before, which it gets back. libvirt moves balloons, too (`currentMemory`), so
    /// this can be less than the VM's RAM.
    before_bytes: u64,
    /// Smallest size that right-sizing has ordered since.
    lowest_bytes: u64,
    /// Whether the last order was to give everything back. The guest may take a while for it.
    #[serde(default)]
    is_returned: bool,
}

impl MovedBalloon {
    /// Size of the VM before right-sizing moved its balloon.
    pub const fn before(self) -> ByteSize {
        ByteSize(self.before_bytes)
    }

    /// Whether the guest was told to take everything back.
    pub const fn is_returned(self) -> bool {
        self.is_returned
    }

    /// Returns the record after a VM of the size `now` was told to reach `target`. A VM that is
    /// larger than before was given memory by another program.
    pub fn moved(record: Option<Self>, now: ByteSize, target: ByteSize) -> Self {
        let before_bytes = record.map_or(now.0, |record| record.before_bytes.max(now.0));
        let lowest_bytes = record.map_or(now.0, |record| record.lowest_bytes);
        Self {
            before_bytes,
            lowest_bytes: lowest_bytes.min(target.0),
            is_returned: target.0 >= before_bytes,
        }
    }

    /// Returns the record for a VM that has the size `now`. `None`: the VM has everything back. If
    /// the VM is smaller than right-sizing has ordered, another program has moved the balloon, and
    /// this size counts from now on. A larger VM may only be booting: its balloon is empty then.
    pub fn seen(self, now: ByteSize) -> Option<Self> {
        if self.is_returned && now.0 >= self.before_bytes {
            return None;
        }
        if now.0 >= self.lowest_bytes {
            return Some(self);
        }
        Some(Self {
            before_bytes: now.0,
            lowest_bytes: now.0,
            ..self
        })
    }
}

/// The record of a VM that has no directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Attached {
    process: Identity,
    record: VmRecord,
}

/// The records of all VMs.
#[derive(Debug)]
pub(crate) struct SizeRecords {
    /// File of the VMs that have no directory.
    file: PathBuf,
    /// By the machine's number.
    known: Mutex<BTreeMap<u32, VmRecord>>,
}

impl SizeRecords {
    pub fn open(state: &Path) -> Self {
        Self {
            file: state.join("rightsize.json"),
            known: Mutex::default(),
        }
    }

    /// Forgets VMs that have ended. Their files end with them.
    pub fn keep(&self, machines: &[Arc<Machine>]) {
        let is_there = |id: u32| machines.iter().any(|machine| machine.id() == id);
        self.known.lock().retain(|id, _| is_there(*id));
    }

    /// Returns the record of a VM.
    pub fn get(&self, machine: &Machine) -> VmRecord {
        let mut known = self.known.lock();
        *known
            .entry(machine.id())
            .or_insert_with(|| self.read(machine))
    }

    /// Returns whether the operator pinned a VM, so that nothing is taken from its guest.
    pub fn is_pinned(&self, machine: &Machine) -> bool {
        self.get(machine).sizing.pinned == Some(true)
    }

    /// Changes the record of a VM. If the new record cannot be written, the old one stays.
    pub fn change(
        &self,
        machine: &Machine,
        change: impl FnOnce(&mut VmRecord),
    ) -> Result<(), DaemonError> {
        let mut known = self.known.lock();
        let place = known
            .entry(machine.id())
            .or_insert_with(|| self.read(machine));
        let mut new = *place;
        change(&mut new);
        if new != *place {
            self.write(machine, new)?;
            *place = new;
        }
        Ok(())
    }

    fn read(&self, machine: &Machine) -> VmRecord {
        let spec = machine.vm().spec();
        let described = VmRecord {
            sizing: spec.map_or_else(Sizing::default, |spec| spec.sizing.into()),
            moved: None,
        };
        let found = match machine.vm().directory() {
            Some(directory) => VmDirectory::read_json(&directory.rightsize()).map(Some),
            None => self.attached().map(|all| {
                let process = machine.vm().process().identity();
                let mut own = all.into_iter().filter(|of| of.process == process);
                own.next().map(|of| of.record)
            }),
        };
        match found {
            Ok(record) => record.unwrap_or(described),
            Err(error) if error.kind() == io::ErrorKind::NotFound => described,
            Err(error) => {
                warn!(vm = machine.name(), %error, "cannot read the limits of a VM's size, so those of its description count; set them again with 'memfold rightsize set'");
                described
            }
        }
    }

    fn write(&self, machine: &Machine, record: VmRecord) -> Result<(), DaemonError> {
        if let Some(directory) = machine.vm().directory() {
            let path = directory.rightsize();
            let written = directory.write_json(&path, &record);
            return written.map_err(state_error(&path));
        }
        let process = machine.vm().process().identity();
        let mut all = self.attached().unwrap_or_default();
        let has_ended = |of: &Attached| {
            let opened = Process::open(of.process);
            opened.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        all.retain(|of| of.process != process && !has_ended(of));
        all.push(Attached { process, record });
        write_json(&self.file, &all).map_err(state_error(&self.file))
    }

    fn attached(&self) -> io::Result<Vec<Attached>> {
        Ok(serde_json::from_slice(&std::fs::read(&self.file)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn moved(before_mib: u64, lowest_mib: u64, is_returned: bool) -> MovedBalloon {
        MovedBalloon {
            before_bytes: before_mib << 20,
            lowest_bytes: lowest_mib << 20,
            is_returned,
        }
    }

    #[test]
    fn a_vm_gets_back_the_size_that_it_had_before_its_balloon_was_first_moved() {
        let mib = ByteSize::mib;
        // libvirt has given the VM 1500 MiB of 2048 MiB (currentMemory).
        let first = MovedBalloon::moved(None, mib(1500), mib(1200));
        assert_eq!(first, moved(1500, 1200, false));
        let second = MovedBalloon::moved(Some(first), mib(1200), mib(800));
        assert_eq!(second, moved(1500, 800, false));
        let third = MovedBalloon::moved(Some(second), mib(800), mib(1000));
        assert_eq!(third, moved(1500, 800, false));
        let last = MovedBalloon::moved(Some(third), mib(1000), mib(1500));
        assert_eq!(last, moved(1500, 800, true));
        // The record stays until the guest has taken everything.
        assert_eq!(last.seen(mib(1499)), Some(last));
        assert_eq!(last.seen(mib(1500)), None);
        let again = MovedBalloon::moved(Some(last), mib(1200), mib(1100));
        assert_eq!(again, moved(1500, 800, false));
    }

    #[test]
    fn a_size_to_which_another_program_has_moved_the_balloon_is_the_one_that_counts() {
        let record = moved(1500, 800, false);
        for between in [800, 1000, 1500] {
            assert_eq!(record.seen(ByteSize::mib(between)), Some(record));
        }
        let smaller = record.seen(ByteSize::mib(600));
        assert_eq!(smaller, Some(moved(600, 600, false)));
        // While the guest boots, its balloon is empty.
        let larger = ByteSize::mib(2048);
        assert_eq!(record.seen(larger), Some(record));
        let taken = MovedBalloon::moved(Some(record), larger, ByteSize::mib(1900));
        assert_eq!(taken, moved(2048, 800, false));
    }
}
