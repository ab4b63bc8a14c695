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
    /// RAM of the VM, with DIMMs, to which these sizes belong; unset in records of older daemons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ram_bytes: Option<u64>,
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

    /// Returns the record for a VM that has the RAM `ram` now, with DIMMs. All sizes change by what
    /// was plugged or removed since; the balloon holds as much as before.
    pub fn for_ram(self, ram: ByteSize) -> Self {
        let then = self.ram_bytes.unwrap_or(ram.0);
        let now = |bytes: u64| bytes.saturating_add(ram.0).saturating_sub(then);
        Self {
            before_bytes: now(self.before_bytes),
            lowest_bytes: now(self.lowest_bytes),
            ram_bytes: Some(ram.0),
            ..self
        }
    }

    /// Returns the record after a VM of the size `now` was told to reach `target`. A VM that is
    /// larger than before was given memory by another program. `ram`: RAM of the VM, with DIMMs.
    pub fn moved(record: Option<Self>, now: ByteSize, target: ByteSize, ram: ByteSize) -> Self {
        let record = record.map(|record| record.for_ram(ram));
        let before_bytes = record.map_or(now.0, |record| record.before_bytes.max(now.0));
        let lowest_bytes = record.map_or(now.0, |record| record.lowest_bytes);
        Self {
            before_bytes,
            lowest_bytes: lowest_bytes.min(target.0),
            ram_bytes: Some(ram.0),
            is_returned: target.0 >= before_bytes,
        }
    }

    /// Returns the record after a VM of the size `now` was told to take everything back. What it
    /// gets is [`before`](Self::before) of that record: a VM that is larger than before was given
    /// memory by another program, and keeps it.
    pub fn given_back(self, now: ByteSize, ram: ByteSize) -> Self {
        let size = self.for_ram(ram).before().max(now);
        Self::moved(Some(self), now, size, ram)
    }

    /// Returns the record for a VM that has the size `now` of the RAM `ram`. `None`: the VM has
    /// everything back. If the VM is smaller than right-sizing has ordered, another program has
    /// moved the balloon, and this size counts from now on. A larger VM may only be booting: its
    /// balloon is empty then.
    pub fn seen(self, now: ByteSize, ram: ByteSize) -> Option<Self> {
        let record = self.for_ram(ram);
        if record.is_returned && now.0 >= record.before_bytes {
            return None;
        }
        if now.0 >= record.lowest_bytes {
            return Some(record);
        }
        Some(Self {
            before_bytes: now.0,
            lowest_bytes: now.0,
            ..record
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

    const RAM: ByteSize = ByteSize::mib(2048);

    const fn moved(before_mib: u64, lowest_mib: u64, is_returned: bool) -> MovedBalloon {
        MovedBalloon {
            before_bytes: before_mib << 20,
            lowest_bytes: lowest_mib << 20,
            ram_bytes: Some(RAM.0),
            is_returned,
        }
    }

    #[test]
    fn a_vm_gets_back_the_size_that_it_had_before_its_balloon_was_first_moved() {
        let mib = ByteSize::mib;
        let then = |record, now, target| MovedBalloon::moved(record, mib(now), mib(target), RAM);
        // libvirt has given the VM 1500 MiB of 2048 MiB (currentMemory).
        let first = then(None, 1500, 1200);
        assert_eq!(first, moved(1500, 1200, false));
        let second = then(Some(first), 1200, 800);
        assert_eq!(second, moved(1500, 800, false));
        let third = then(Some(second), 800, 1000);
        assert_eq!(third, moved(1500, 800, false));
        let last = then(Some(third), 1000, 1500);
        assert_eq!(last, moved(1500, 800, true));
        // The record stays until the guest has taken everything.
        assert_eq!(last.seen(mib(1499), RAM), Some(last));
        assert_eq!(last.seen(mib(1500), RAM), None);
        let again = then(Some(last), 1200, 1100);
        assert_eq!(again, moved(1500, 800, false));
    }

    #[test]
    fn a_size_to_which_another_program_has_moved_the_balloon_is_the_one_that_counts() {
        let record = moved(1500, 800, false);
        for between in [800, 1000, 1500] {
            assert_eq!(record.seen(ByteSize::mib(between), RAM), Some(record));
        }
        let smaller = record.seen(ByteSize::mib(600), RAM);
        assert_eq!(smaller, Some(moved(600, 600, false)));
        // While the guest boots, its balloon is empty.
        assert_eq!(record.seen(RAM, RAM), Some(record));
        let taken = MovedBalloon::moved(Some(record), RAM, ByteSize::mib(1900), RAM);
        assert_eq!(taken, moved(2048, 800, false));
    }

    #[test]
    fn a_vm_that_another_program_has_enlarged_loses_nothing_when_it_gets_its_balloon_back() {
        let mib = ByteSize::mib;
        let record = moved(1500, 800, false);
        let smaller = record.given_back(mib(900), RAM);
        assert_eq!(smaller, moved(1500, 800, true));
        let larger = record.given_back(mib(1800), RAM);
        assert_eq!(larger, moved(1800, 800, true));
        assert_eq!(larger.seen(mib(1800), RAM), None);
        // A DIMM was plugged since.
        let plugged = record.given_back(mib(2000), mib(3072));
        assert_eq!(plugged.before(), mib(2524));
    }

    #[test]
    fn a_dimm_that_is_removed_or_plugged_changes_no_balloon_and_what_the_vm_gets_back_by_its_size()
    {
        let mib = ByteSize::mib;
        // The balloon holds 1248 MiB of 2048 MiB.
        let record = MovedBalloon::moved(None, RAM, mib(800), RAM);
        let of_ram = |ram_mib: u64, record: MovedBalloon| MovedBalloon {
            ram_bytes: Some(ram_mib << 20),
            ..record
        };
        let removed = record.seen(mib(288), mib(1536));
        assert_eq!(removed, Some(of_ram(1536, moved(1536, 288, false))));
        let plugged = record.seen(mib(1824), mib(3072));
        assert_eq!(plugged, Some(of_ram(3072, moved(3072, 1824, false))));
        // A VM that gets everything back has it all if it has what is left.
        let returned = MovedBalloon::moved(Some(record), mib(800), RAM, RAM);
        assert_eq!(
            returned
                .seen(mib(1535), mib(1536))
                .map(MovedBalloon::before),
            Some(mib(1536))
        );
        assert_eq!(returned.seen(mib(1536), mib(1536)), None);
        // An older daemon has not recorded the RAM.
        let old = MovedBalloon {
            ram_bytes: None,
            ..moved(1500, 800, false)
        };
        assert_eq!(old.for_ram(RAM), moved(1500, 800, false));
    }
}
