//! What the controller answers: orders for VMs, each with a reason in one plain sentence.

use std::fmt;
use std::time::Duration;

use memfold_units::ByteSize;

use crate::check::Contradiction;
use crate::input::VmId;
use crate::ladder::{Rung, RungReason};

/// The answer of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// How short the host is of memory.
    pub rung: Rung,
    /// Why the host is on this rung.
    pub why: RungReason,
    /// RAM lent to other hosts that should be called back now. Not zero only from [`Rung::Lent`]
    /// on.
    pub recall_lent: ByteSize,
    /// One entry for each VM, in the order of the input.
    pub vms: Vec<VmDecision>,
}

/// What the controller thinks of one VM, and what should be done.
#[derive(Clone, Debug, PartialEq)]
pub struct VmDecision {
    /// The VM.
    pub vm: VmId,
    /// Memory that the guest may use now.
    pub size: ByteSize,
    /// Memory that the guest would miss, as far as takes and `order` have shown it.
    pub working_set: ByteSize,
    /// What `working_set` is based on.
    pub basis: Basis,
    /// Size that the VM should have: working set and buffer, within the VM's limits.
    pub target: ByteSize,
    /// Share of time in which a task of the guest waited for memory, over the last readings (0 to
    /// 1). `None` if the guest does not say it.
    pub pressure: Option<f64>,
    /// What to do now.
    pub order: Option<Order>,
    /// Why the VM has got this order, or none.
    pub reason: Reason,
}

/// What a working set is based on, from the best to the weakest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// Page cache was taken until the guest read it again.
    Probed,
    /// All memory that is not free, but only a half of the page cache if the guest is not trimmed.
    /// An upper bound.
    UpperBound,
    /// There is no believable report; the VM's size is shown.
    Unknown,
}

/// One thing to do to one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// What to do.
    pub action: Action,
    /// Memory that the VM gains (a give) or loses (a take) by it.
    pub bytes: ByteSize,
}

impl Order {
    /// Says whether the order gives the VM memory.
    #[must_use]
    pub fn is_give(&self, size: ByteSize) -> bool {
        match self.action {
            Action::Trim { .. } | Action::Unplug { .. } => false,
            Action::Balloon { target } => target > size,
            Action::Plug { .. } => true,
        }
    }
}

/// How a VM's memory is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The agent reclaims clean page cache. The freed pages go to the host by free page reporting,
    /// and the guest can use them again at any time.
    Trim {
        /// How much to reclaim.
        bytes: ByteSize,
        /// Files that are folded may be dropped, too. They cost the host almost nothing.
        may_drop_folded: bool,
    },
    /// The balloon is set (QEMU's `balloon` command).
    Balloon {
        /// Memory that the guest has afterwards, plugged memory included.
        target: ByteSize,
    },
    /// virtio-mem plugs this much in addition.
    Plug {
        /// A multiple of the device's block size.
        bytes: ByteSize,
    },
    /// virtio-mem unplugs this much.
    Unplug {
        /// A multiple of the device's block size.
        bytes: ByteSize,
    },
}

impl Action {
    /// Returns the kind of the action in one word, for counts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Trim { .. } => "trim",
            Self::Balloon { .. } => "balloon",
            Self::Plug { .. } => "plug",
            Self::Unplug { .. } => "unplug",
        }
    }
}

/// Why a VM got an order, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reason {
    /// The operator pinned the VM.
    Pinned,
    /// The guest has not reported for too long.
    Silent {
        /// Time since the last report, if there was one.
        since: Option<Duration>,
    },
    /// The guest's figures cannot be true.
    Distrusted(Contradiction),
    /// The guest's counters began again: it booted again, or was restored.
    Restarted,
    /// The first report; the second one will show rates.
    FirstReport,
    /// Neither the agent nor a balloon can change the VM's size.
    NoMeans,
    /// The balloon cannot be used: the guest would not take memory back before its OOM killer runs.
    NoDeflateOnOom,
    /// The host would get no memory back: the VM's RAM is pinned for a device or locked, or has
    /// huge pages.
    KeepsFreedRam,
    /// The guest needs memory that virtio-mem could plug, but it has no driver for that.
    NoPlugDriver {
        /// How much more the guest would get.
        needs: ByteSize,
    },
    /// Page cache is trimmed because earlier trims were not missed.
    CacheNotMissed {
        /// How much is trimmed now.
        bytes: ByteSize,
    },
    /// Page cache that has grown beyond the working set is trimmed.
    CacheGrewBack {
        /// How much is trimmed now.
        bytes: ByteSize,
    },
    /// Folded page cache is dropped because the host is short, and the guest has no other page
    /// cache to give.
    DropFolded {
        /// How much may be dropped.
        bytes: ByteSize,
    },
    /// The guest read trimmed files again.
    Missed {
        /// How much it read again since the last report.
        bytes: ByteSize,
        /// Time until the next trim.
        wait: Duration,
    },
    /// Tasks of the guest wait for memory, so nothing is taken.
    UnderPressure {
        /// Share of time, 0 to 1.
        pressure: f64,
    },
    /// The guest waits for memory although much is available; more memory would not help.
    PressureNotCured {
        /// Memory that is available in the guest.
        available: ByteSize,
    },
    /// The guest may still boot, so nothing is trimmed.
    Young {
        /// Time until the first trim.
        wait: Duration,
    },
    /// The last order had no effect yet.
    Ineffective {
        /// Time until the next try.
        wait: Duration,
    },
    /// The time between two orders has not passed.
    Waiting {
        /// Time that is left.
        wait: Duration,
    },
    /// The page cache that is left is working set.
    AtWorkingSet,
    /// The VM has its target size.
    AtTarget,
    /// The guest needs memory that it had to give away earlier.
    GiveNeeded {
        /// How much the VM gets.
        bytes: ByteSize,
    },
    /// The VM is smaller than its minimum, although the guest needs no more. Another program may
    /// have taken memory from it, or the operator has set the minimum.
    BelowMinimum {
        /// How much the VM gets.
        bytes: ByteSize,
    },
    /// Tasks of the guest wait for memory, or it swaps.
    GivePressure {
        /// How much the VM gets.
        bytes: ByteSize,
        /// Share of time, 0 to 1.
        pressure: f64,
    },
    /// The host has room, so the VM gets memory back.
    GiveBack {
        /// How much the VM gets.
        bytes: ByteSize,
    },
    /// The guest needs memory, but the host has too little left for the smallest give.
    HostExhausted {
        /// How much the guest lacks.
        needs: ByteSize,
        /// What the host could give: its available memory without a quarter of its reserve, and
        /// without what other VMs are given.
        left: ByteSize,
    },
    /// The host is short, and this VM is hurt least.
    HostShort {
        /// How much the VM loses.
        bytes: ByteSize,
        /// How much the host lacks.
        shortage: ByteSize,
    },
    /// The VM is larger than the operator allows.
    AboveMaximum {
        /// How much the VM loses.
        bytes: ByteSize,
    },
    /// Plugged memory has been idle.
    IdleMemory {
        /// How much is unplugged.
        bytes: ByteSize,
    },
}

impl Reason {
    /// Returns the reason in one or a few words, without its figures, for counts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Silent { .. } => "silent",
            Self::Distrusted(_) => "distrusted",
            Self::Restarted => "restarted",
            Self::FirstReport => "first_report",
            Self::NoMeans => "no_means",
            Self::NoDeflateOnOom => "no_deflate_on_oom",
            Self::KeepsFreedRam => "keeps_freed_ram",
            Self::NoPlugDriver { .. } => "no_plug_driver",
            Self::CacheNotMissed { .. } => "cache_not_missed",
            Self::CacheGrewBack { .. } => "cache_grew_back",
            Self::DropFolded { .. } => "drop_folded",
            Self::Missed { .. } => "missed",
            Self::UnderPressure { .. } => "under_pressure",
            Self::PressureNotCured { .. } => "pressure_not_cured",
            Self::Young { .. } => "young",
            Self::Ineffective { .. } => "ineffective",
            Self::Waiting { .. } => "waiting",
            Self::AtWorkingSet => "at_working_set",
            Self::AtTarget => "at_target",
            Self::GiveNeeded { .. } => "give_needed",
            Self::BelowMinimum { .. } => "below_minimum",
            Self::GivePressure { .. } => "give_pressure",
            Self::GiveBack { .. } => "give_back",
            Self::HostExhausted { .. } => "host_exhausted",
            Self::HostShort { .. } => "host_short",
            Self::AboveMaximum { .. } => "above_maximum",
            Self::IdleMemory { .. } => "idle_memory",
        }
    }

    /// Says it in one sentence without a full stop. `acts`: orders are carried out, and not only
    /// shown.
    #[must_use]
    pub fn sentence(self, acts: bool) -> String {
        let of_order = self.sentence_of_order(acts);
        of_order.unwrap_or_else(|| self.to_string())
    }

    /// The same for a reason that comes with an order.
    fn sentence_of_order(self, acts: bool) -> Option<String> {
        let (are, gets, gives) = if acts {
            ("are", "gets", "gives")
        } else {
            ("would be", "would get", "would give")
        };
        Some(match self {
            Self::CacheNotMissed { bytes } => format!(
                "the guest has not missed page cache that was trimmed, so {bytes} more {are} \
                 trimmed"
            ),
            Self::CacheGrewBack { bytes } => {
                format!("page cache grew beyond the working set, so {bytes} {are} trimmed")
            }
            Self::DropFolded { bytes } => format!(
                "the host is short and the guest has no other page cache to give, so {bytes} of \
                 folded page cache {are} dropped"
            ),
            Self::GiveNeeded { bytes } => {
                format!("the working set and its buffer no longer fit, so the VM {gets} {bytes}")
            }
            Self::BelowMinimum { bytes } => {
                format!("the VM is smaller than its minimum, so it {gets} {bytes}")
            }
            Self::GivePressure { bytes, pressure } => format!(
                "the guest lacks memory (its tasks wait {:.2} % of the time), so the VM {gets} \
                 {bytes}",
                pressure * 100.0
            ),
            Self::GiveBack { bytes } => {
                format!("the host has room again, so the VM {gets} {bytes} back")
            }
            Self::HostShort { bytes, shortage } => format!(
                "the host lacks {shortage}, and this VM is hurt least, so it {gives} {bytes}"
            ),
            Self::AboveMaximum { bytes } => {
                format!("the VM is larger than its maximum, so it {gives} {bytes}")
            }
            Self::IdleMemory { bytes } => {
                format!("plugged memory has been idle, so {bytes} {are} unplugged")
            }
            _ => return None,
        })
    }
}

impl fmt::Display for Reason {
    /// Writes the [`sentence`](Self::sentence) of a controller whose orders are carried out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Pinned => f.write_str("the VM is pinned, so its size does not change"),
            Self::Silent { since: Some(time) } => write!(
                f,
                "the guest has not reported for {}, so the VM keeps its size",
                seconds(time)
            ),
            Self::Silent { since: None } => {
                f.write_str("the guest has never reported, so the VM keeps its size")
            }
            Self::Distrusted(what) => write!(f, "{what}, so the VM keeps its size"),
            Self::Restarted => f.write_str("the guest booted again, so its estimate starts again"),
            Self::FirstReport => f.write_str("the guest reported for the first time"),
            Self::NoMeans => f.write_str(
                "the VM keeps its size because it has no agent that trims and no balloon; start it \
                 with balloon = true (libvirt: <memballoon model='virtio' autodeflate='on'/>)",
            ),
            Self::NoDeflateOnOom => f.write_str(
                "the balloon is not used because the guest would not deflate it before its OOM \
                 killer runs; start the VM with deflate-on-oom=on (libvirt: <memballoon \
                 model='virtio' autodeflate='on'/>)",
            ),
            Self::KeepsFreedRam => f.write_str(
                "nothing is taken because the host would get no memory back: a device pins the \
                 VM's RAM (VFIO), QEMU has locked it, or it has huge pages (hugetlbfs)",
            ),
            Self::NoPlugDriver { needs } => write!(
                f,
                "the guest needs {needs} that could be plugged, but has no driver for that; load \
                 the module virtio_mem in the guest"
            ),
            Self::Missed { bytes, wait } => write!(
                f,
                "the guest read {bytes} of reclaimed files again, so trimming pauses for {}",
                seconds(wait)
            ),
            Self::UnderPressure { pressure } => write!(
                f,
                "tasks of the guest wait for memory {:.2} % of the time, so nothing is taken",
                pressure * 100.0
            ),
            Self::PressureNotCured { available } => write!(
                f,
                "tasks of the guest wait for memory although {available} are available, so more \
                 memory would not help"
            ),
            Self::Young { wait } => write!(
                f,
                "the guest may still boot, so nothing is trimmed for {}",
                seconds(wait)
            ),
            Self::Ineffective { wait } => write!(
                f,
                "the last order had no effect, so the next one waits for {}",
                seconds(wait)
            ),
            Self::Waiting { wait } => write!(f, "the next change is due in {}", seconds(wait)),
            Self::AtWorkingSet => f.write_str("the page cache that is left is working set"),
            Self::AtTarget => f.write_str("the VM has the size that it needs"),
            Self::HostExhausted { needs, left } => write!(
                f,
                "the guest lacks {needs}, but the host has {left} left to give (its available \
                 memory less a quarter of its reserve and less other gives), and the smallest give \
                 is 16 MiB or one block of virtio-mem; end or move VMs, or lower --reserve"
            ),
            Self::CacheNotMissed { .. }
            | Self::CacheGrewBack { .. }
            | Self::DropFolded { .. }
            | Self::GiveNeeded { .. }
            | Self::BelowMinimum { .. }
            | Self::GivePressure { .. }
            | Self::GiveBack { .. }
            | Self::HostShort { .. }
            | Self::AboveMaximum { .. }
            | Self::IdleMemory { .. } => {
                f.write_str(&self.sentence_of_order(true).unwrap_or_default())
            }
        }
    }
}

/// Formats a time in whole seconds, at least one.
fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_cannot_be_sized_or_given_memory_is_told_the_condition_and_the_fix() {
        let says = |reason: Reason, all: &[&str]| {
            let text = reason.to_string();
            for words in all {
                assert!(text.contains(words), "'{text}' lacks '{words}'");
            }
        };
        let libvirt = "<memballoon model='virtio' autodeflate='on'/>";
        says(Reason::NoMeans, &["balloon = true", libvirt]);
        says(Reason::NoDeflateOnOom, &["deflate-on-oom=on", libvirt]);
        let exhausted = Reason::HostExhausted {
            needs: ByteSize::mib(464),
            left: ByteSize::mib(8),
        };
        let condition = "lacks 464 MiB, but the host has 8.00 MiB left to give";
        let least = "the smallest give is 16 MiB or one block of virtio-mem";
        let reserve = "quarter of its reserve";
        says(exhausted, &[condition, reserve, least, "--reserve"]);
    }

    #[test]
    fn the_reason_of_an_order_that_is_only_shown_says_what_would_be_done() {
        let (bytes, shortage) = (ByteSize::mib(8), ByteSize::mib(100));
        let pressure = 0.1;
        for reason in [
            Reason::CacheNotMissed { bytes },
            Reason::CacheGrewBack { bytes },
            Reason::DropFolded { bytes },
            Reason::GiveNeeded { bytes },
            Reason::BelowMinimum { bytes },
            Reason::GivePressure { bytes, pressure },
            Reason::GiveBack { bytes },
            Reason::HostShort { bytes, shortage },
            Reason::AboveMaximum { bytes },
            Reason::IdleMemory { bytes },
        ] {
            let done = reason.to_string();
            let would_be_done = done
                .replace(" are ", " would be ")
                .replace(" gets ", " would get ")
                .replace(" gives ", " would give ");
            assert_ne!(would_be_done, done);
            assert_eq!(reason.sentence(false), would_be_done);
        }
    }
}
