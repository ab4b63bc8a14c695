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

use crate::error::{DaemonError, refused, state_error};
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

/// Sizes that differ by less are the same: QEMU and guests count in pages, which can be large.
const SLACK: u64 = 1 << 20;

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
    /// Whether right-sizing has nothing more to give back: its last order was to give everything
    /// back, for which the guest may take a while, or another program has set the size.
    #[serde(default)]
    is_returned: bool,
    /// Size of the last order; unset in records of older daemons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    target_bytes: Option<u64>,
    /// Whether the VM has had that size since.
    #[serde(default)]
    is_reached: bool,
}

impl MovedBalloon {
    /// Size of the VM before right-sizing moved its balloon.
    pub const fn before(self) -> ByteSize {
        ByteSize(self.before_bytes)
    }

    /// Whether right-sizing has nothing more to give back.
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
            target_bytes: self.target_bytes.map(now),
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
            target_bytes: Some(target.0),
            is_reached: false,
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
    /// everything back. `is_shared`: other programs may move the balloon, too. If they have made
    /// the VM smaller, its size counts from now on.
    ///
    /// A larger VM says nothing: a guest empties its balloon when it boots, and takes memory from
    /// it before its OOM killer runs.
    pub fn seen(self, now: ByteSize, ram: ByteSize, is_shared: bool) -> Option<Self> {
        let record = self.for_ram(ram);
        if record.is_returned && now.0 >= record.before_bytes {
            return None;
        }
        if is_shared && record.is_undercut(now) {
            return Some(Self {
                before_bytes: now.0,
                lowest_bytes: now.0,
                is_returned: true,
                target_bytes: None,
                is_reached: false,
                ..record
            });
        }
        let is_there = |target| now.0.abs_diff(target) < SLACK;
        Some(Self {
            is_reached: record.is_reached || record.target_bytes.is_some_and(is_there),
            ..record
        })
    }

    /// Returns whether a VM of the size `now` is smaller than right-sizing has made it. On the way
    /// to its target, a VM can have each size down to the smallest one that was ordered.
    fn is_undercut(self, now: ByteSize) -> bool {
        let reached = self.target_bytes.filter(|_| self.is_reached);
        let is_below = |target| now.0.saturating_add(SLACK) <= target;
        now.0 < self.lowest_bytes || reached.is_some_and(is_below)
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
        let mut all = self.attached_to_rewrite()?;
        let has_ended = |of: &Attached| {
            let opened = Process::open(of.process);
            opened.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        all.retain(|of| of.process != process && !has_ended(of));
        all.push(Attached { process, record });
        write_json(&self.file, &all).map_err(state_error(&self.file))
    }

    /// Returns the records of VMs that have no directory. If their file cannot be read, it must not
    /// be replaced: it may be all that is known of other VMs.
    fn attached_to_rewrite(&self) -> Result<Vec<Attached>, DaemonError> {
        match self.attached() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(refused(
                format!(
                    "cannot record the size of a VM, because {} cannot be read: {error}",
                    self.file.display()
                ),
                "repair the file and restart the daemon; or move the file away, set limits and pins of VMs that memfold did not start again, and empty their balloons with the program that manages them",
            )),
            Ok(all) => Ok(all),
        }
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
            target_bytes: None,
            is_reached: false,
        }
    }

    /// The same, after an order to reach `target_mib`.
    fn ordered(target_mib: u64, record: MovedBalloon) -> MovedBalloon {
        MovedBalloon {
            target_bytes: Some(target_mib << 20),
            ..record
        }
    }

    fn reached(record: MovedBalloon) -> MovedBalloon {
        MovedBalloon {
            is_reached: true,
            ..record
        }
    }

    /// Returns what `record` becomes when the VM, which other programs size, too, has `now_mib`.
    fn seen(record: MovedBalloon, now_mib: u64) -> Option<MovedBalloon> {
        record.seen(ByteSize::mib(now_mib), RAM, true)
    }

    #[test]
    fn a_vm_gets_back_the_size_that_it_had_before_its_balloon_was_first_moved() {
        let mib = ByteSize::mib;
        let then = |record, now, target| MovedBalloon::moved(record, mib(now), mib(target), RAM);
        // libvirt has given the VM 1500 MiB of 2048 MiB (currentMemory).
        let first = then(None, 1500, 1200);
        assert_eq!(first, ordered(1200, moved(1500, 1200, false)));
        let second = then(Some(first), 1200, 800);
        assert_eq!(second, ordered(800, moved(1500, 800, false)));
        let third = then(Some(second), 800, 1000);
        assert_eq!(third, ordered(1000, moved(1500, 800, false)));
        let last = then(Some(third), 1000, 1500);
        assert_eq!(last, ordered(1500, moved(1500, 800, true)));
        // The record stays until the guest has taken everything.
        assert_eq!(seen(last, 1400), Some(last));
        assert_eq!(seen(last, 1500), None);
        let again = then(Some(last), 1200, 1100);
        assert_eq!(again, ordered(1100, moved(1500, 800, false)));
    }

    #[test]
    fn a_size_to_which_another_program_has_moved_the_balloon_is_the_one_that_counts() {
        let record = moved(1500, 800, false);
        for between in [800, 1000, 1500] {
            assert_eq!(seen(record, between), Some(record));
        }
        assert_eq!(seen(record, 600), Some(moved(600, 600, true)));
        // While the guest boots, its balloon is empty.
        assert_eq!(record.seen(RAM, RAM, true), Some(record));
        let taken = MovedBalloon::moved(Some(record), RAM, ByteSize::mib(1900), RAM);
        assert_eq!(taken, ordered(1900, moved(2048, 800, false)));
        // No other program sizes a VM that memfold started: its balloon still gets larger.
        let alone = record.seen(ByteSize::mib(600), RAM, false);
        assert_eq!(alone, Some(record));
    }

    #[test]
    fn a_size_between_the_smallest_and_the_last_order_counts_once_the_last_order_was_carried_out() {
        let mib = ByteSize::mib;
        let taken = MovedBalloon::moved(None, mib(1500), mib(800), RAM);
        let given = MovedBalloon::moved(Some(taken), mib(800), mib(1200), RAM);
        // The balloon is on its way.
        assert_eq!(seen(given, 1000), Some(given));
        let there = reached(given);
        assert_eq!(seen(given, 1200), Some(there));
        // The guest takes memory from its balloon before its OOM killer runs, and returns it.
        assert_eq!(seen(there, 1300), Some(there));
        assert_eq!(seen(there, 1200), Some(there));
        // Another program sets 1000 MiB, which the balloon reaches slowly.
        let (passing, set) = (moved(1100, 1100, true), moved(1000, 1000, true));
        assert_eq!(seen(there, 1100), Some(passing));
        assert_eq!(seen(passing, 1000), Some(set));
        assert_eq!(seen(set, 1000), None);
        // After a new order, the VM passes other sizes again.
        let again = MovedBalloon::moved(Some(there), mib(1200), mib(900), RAM);
        assert_eq!(seen(again, 1000), Some(again));
    }

    #[test]
    fn records_of_other_vms_that_cannot_be_read_are_not_replaced_and_the_error_names_file_and_fix()
    {
        let directory = tempfile::tempdir().unwrap();
        let records = SizeRecords::open(directory.path());
        assert!(records.attached_to_rewrite().unwrap().is_empty());
        for text in ["", "[{\"process\": 1", "{}"] {
            std::fs::write(&records.file, text).unwrap();
            let error = records.attached_to_rewrite().unwrap_err();
            let file = records.file.display().to_string();
            assert!(error.to_string().contains(&file), "{text}: {error}");
            let fix = error.hint().unwrap_or_default();
            assert!(fix.contains("move the file away"), "{text}: {fix}");
        }
    }

    #[test]
    fn a_record_of_a_balloon_that_an_older_daemon_wrote_is_read() {
        let text = r#"{"before_bytes": 1572864000, "lowest_bytes": 838860800}"#;
        let record: MovedBalloon = serde_json::from_str(text).unwrap();
        assert_eq!(record.for_ram(RAM), moved(1500, 800, false));
    }

    #[test]
    fn a_vm_that_another_program_has_enlarged_loses_nothing_when_it_gets_its_balloon_back() {
        let mib = ByteSize::mib;
        let record = moved(1500, 800, false);
        let smaller = record.given_back(mib(900), RAM);
        assert_eq!(smaller, ordered(1500, moved(1500, 800, true)));
        let larger = record.given_back(mib(1800), RAM);
        assert_eq!(larger, ordered(1800, moved(1800, 800, true)));
        assert_eq!(seen(larger, 1800), None);
        // A DIMM was plugged since.
        let plugged = record.given_back(mib(2000), mib(3072));
        assert_eq!(plugged.before(), mib(2524));
    }

    #[test]
    fn a_dimm_changes_what_the_vm_gets_back_by_its_size_and_leaves_the_balloon_alone() {
        let mib = ByteSize::mib;
        // The balloon holds 1248 MiB of 2048 MiB.
        let record = MovedBalloon::moved(None, RAM, mib(800), RAM);
        let of_ram = |ram_mib: u64, record: MovedBalloon| MovedBalloon {
            ram_bytes: Some(ram_mib << 20),
            ..record
        };
        let removed = record.seen(mib(288), mib(1536), true);
        let expected = reached(ordered(288, moved(1536, 288, false)));
        assert_eq!(removed, Some(of_ram(1536, expected)));
        let plugged = record.seen(mib(1824), mib(3072), true);
        let expected = reached(ordered(1824, moved(3072, 1824, false)));
        assert_eq!(plugged, Some(of_ram(3072, expected)));
        // A VM that gets everything back has it all if it has what is left.
        let returned = MovedBalloon::moved(Some(record), mib(800), RAM, RAM);
        assert_eq!(
            returned
                .seen(mib(1535), mib(1536), true)
                .map(MovedBalloon::before),
            Some(mib(1536))
        );
        assert_eq!(returned.seen(mib(1536), mib(1536), true), None);
        // An older daemon has not recorded the RAM.
        let old = MovedBalloon {
            ram_bytes: None,
            ..moved(1500, 800, false)
        };
        assert_eq!(old.for_ram(RAM), moved(1500, 800, false));
    }
}
