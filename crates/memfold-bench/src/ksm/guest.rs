//! Controls, from the host, the test program `guest.py` in the guests of the study `ksm`. The
//! program fills memory with data and measures its speed.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use memfold_ksm::ProcessStatus;
use memfold_lab::{DiskMode, Lab};
use memfold_units::ByteSize;
use serde::Serialize;

use crate::host::Stat;
use crate::segments::booted;
use crate::wait::wait_steady;

const PROGRAM: &str = include_str!("guest.py");

/// Time limit of one operation in a guest, which is emulated and slowed down by ksmd.
const LIMIT: Duration = Duration::from_secs(600);

/// Time for which memory must not change before it is measured.
const REST: Duration = Duration::from_secs(3);

/// What a guest of the study keeps in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// No data: the program `guest.py` does not run.
    Nothing,
    /// No data: the program `guest.py` searches for prime numbers.
    Busy,
    /// Random bytes, different in each VM.
    Random,
    /// The same data as in all other VMs; within a VM, no page is like another.
    Identical,
}

impl Held {
    pub(super) const ALL: [Self; 4] = [Self::Nothing, Self::Busy, Self::Random, Self::Identical];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "idle",
            Self::Busy => "busy",
            Self::Random => "random",
            Self::Identical => "identical",
        }
    }

    /// Returns whether the guest keeps data that it can read and write.
    pub(super) const fn is_data(self) -> bool {
        matches!(self, Self::Random | Self::Identical)
    }
}

/// Time and page faults of one operation of the program in a guest.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Took {
    pub(super) seconds: f64,
    /// Minor page faults of the program, as the guest's kernel counts them. The next field: major
    /// page faults.
    pub(super) minor_faults: u64,
    pub(super) major_faults: u64,
    /// Minor page faults of the VM's QEMU, as the host's kernel counts them. The next field: major
    /// page faults.
    pub(super) host_minor_faults: u64,
    pub(super) host_major_faults: u64,
}

/// Boots a VM and waits until its guest is idle.
pub(super) fn boot(lab: &Lab, name: &str, memory: ByteSize) -> anyhow::Result<()> {
    lab.start(Lab::spec(name, "trixie-a", memory, DiskMode::Buffered)?)?;
    booted(lab, name)
}

/// Makes the guests of all VMs in `names` keep data in memory, `mib` MiB in each.
pub(super) fn hold(lab: &Lab, names: &[&str], held: Held, mib: u64) -> anyhow::Result<()> {
    if held == Held::Nothing {
        return Ok(());
    }
    let mib = if held.is_data() { mib } else { 0 };
    let script = format!(
        "cat > /run/work.py <<'END-OF-FILE'\n{PROGRAM}\nEND-OF-FILE\n\
         systemd-run -q --unit=work python3 /run/work.py {} {mib}\n\
         until [ -e /run/held ]; do systemctl is-active -q work || exit 1; sleep 0.2; done",
        held.name()
    );
    lab.exec_all(names, &script, LIMIT)?;
    Ok(())
}

/// Makes the guests of all VMs in `names` free the memory of their data.
pub(super) fn let_go(lab: &Lab, names: &[&str], held: Held) -> anyhow::Result<()> {
    if held != Held::Nothing {
        let script = "systemctl stop work; rm -f /run/held /run/ask /run/answer";
        lab.exec_all(names, script, LIMIT)?;
    }
    Ok(())
}

/// Makes all guests carry out the operation `what` at the same time, `times` times each. Returns
/// the time and the page faults of each guest.
pub(super) fn ask(lab: &Lab, names: &[&str], what: &str, times: u32) -> anyhow::Result<Vec<Took>> {
    let script = format!("echo {what} {times} > /run/ask; cat /run/answer");
    let faults = || -> anyhow::Result<Vec<(u64, u64)>> {
        names.iter().map(|name| host_faults(lab, name)).collect()
    };
    let before = faults()?;
    let said = lab.exec_all(names, &script, LIMIT)?;
    let all = said.iter().zip(before).zip(faults()?);
    all.map(|((said, before), after)| {
        let words: Vec<&str> = said.split_ascii_whitespace().collect();
        let [seconds, minor, major] = words[..] else {
            bail!("cannot parse the output of the workload in a guest: {said}");
        };
        Ok(Took {
            seconds: seconds.parse()?,
            minor_faults: minor.parse()?,
            major_faults: major.parse()?,
            host_minor_faults: after.0 - before.0,
            host_major_faults: after.1 - before.1,
        })
    })
    .collect()
}

/// Returns minor and major page faults of a VM's QEMU.
fn host_faults(lab: &Lab, name: &str) -> anyhow::Result<(u64, u64)> {
    let stat = Stat::read(format!("/proc/{}/stat", lab.pid(name)?).as_ref())?;
    Ok((stat.field(10), stat.field(12)))
}

/// Returns the number of pages of these VMs that KSM has merged, zero pages included.
pub(super) fn merged_pages(lab: &Lab, names: &[&str]) -> anyhow::Result<u64> {
    let mut sum = 0;
    for name in names {
        let status = ProcessStatus::read(Path::new("/proc"), lab.pid(name)?)?;
        let merging = status.ksm_merging_pages;
        sum += merging.context(
            "this kernel does not count merged pages for each process; use Linux 6.1 or newer",
        )?;
        sum += status.ksm_zero_pages.unwrap_or(0);
    }
    Ok(sum)
}

/// Waits until the RAM of all VMs takes a steady amount of the host's memory, and returns this
/// amount in bytes.
pub(super) fn ram_bytes(lab: &Lab) -> anyhow::Result<f64> {
    let now = || {
        let vms = lab.report()?.ledger.vms;
        Ok(vms.iter().map(|vm| vm.ram_pss_bytes.0 as f64).sum())
    };
    let (found, _) = wait_steady((REST, 20, 0.005), now, |bytes| *bytes)?;
    Ok(found)
}

/// Returns the value of a KSM counter that every kernel has. An error names the counter if its
/// value is missing.
pub(super) fn counter(value: Option<u64>, name: &str) -> anyhow::Result<u64> {
    value.with_context(|| format!("/sys/kernel/mm/ksm/{name} is missing"))
}
