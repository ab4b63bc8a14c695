//! Known faults of the Linux kernel that memfold can meet, and whether a kernel has them.
//!
//! Each entry of [`FAULTS`] says in which versions the fault is, what it does, and what memfold
//! does about it. docs/operating/kernel-faults.md has the sources and the faults that were left
//! out; a test compares its table with this one.

use serde::Serialize;

use crate::kernel_release::{Numbering, Release, Version};

/// The worst that a fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Memory of a VM can get wrong content.
    LosesData,
    /// A live snapshot can hold pages from after its point in time. The VM is unharmed.
    WrongSnapshot,
    /// The kernel of the host can crash.
    Crash,
    /// A thread of QEMU can wait forever.
    Stall,
    /// The kernel needs much CPU for little.
    Slow,
}

impl Effect {
    /// Returns the effect as text for a message: "the host can crash".
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::LosesData => "a VM can lose data",
            Self::WrongSnapshot => "a live snapshot can hold newer pages",
            Self::Crash => "the host can crash",
            Self::Stall => "a VM can hang",
            Self::Slow => "ksmd can waste CPU",
        }
    }
}

/// What memfold does about a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Conduct {
    /// The fault does no harm with memfold.
    Avoids,
    /// memfold can trigger the fault.
    Meets,
    /// memfold can trigger the fault and a VM could lose data: `memfold serve` refuses.
    Refuses,
}

/// A known fault of the Linux kernel.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Number of the CVE; for a fault without one that we know of, the commit that fixes it.
    pub id: &'static str,
    /// What the kernel does wrong.
    pub what: &'static str,
    /// Mechanism of memfold that meets the fault.
    pub mechanism: &'static str,
    /// The worst that the fault does.
    pub effect: Effect,
    /// First version with the fault.
    pub since: Version,
    /// First version of each stable series that contains the fix, in ascending order. The last is
    /// the first mainline release with the fix.
    pub fixed: &'static [Version],
    /// What memfold does about the fault.
    pub conduct: Conduct,
    /// How memfold avoids the fault; if it does not: when it meets the fault.
    pub how: &'static str,
    /// What helps on a kernel that cannot be upgraded.
    pub workaround: Option<&'static str>,
}

/// Whether a kernel has a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// The kernel does not have the fault.
    Absent,
    /// The kernel has the fault.
    Present,
    /// The kernel's release does not say whether its distribution added the fix.
    Unknown,
}

const SWAP_WORKAROUND: &str = "swapoff -a, or 'memfold fold pause' while this host swaps";
const NO_HUGE_PAGES: &str =
    "echo never > /sys/kernel/mm/transparent_hugepage/enabled before VMs start";

/// The known faults, the oldest first.
pub const FAULTS: [Fault; 11] = [
    Fault {
        id: "CVE-2025-68211",
        what: "ksmd looks at every address of memory that a process does not use",
        mechanism: "KSM",
        effect: Effect::Slow,
        since: Version(2, 6, 32),
        fixed: &[
            Version(5, 10, 249),
            Version(5, 15, 199),
            Version(6, 1, 161),
            Version(6, 6, 121),
            Version(6, 12, 59),
            Version(6, 17, 9),
            Version(6, 18, 0),
        ],
        conduct: Conduct::Meets,
        how: "a pass over large VMs takes long; the CPU budget of 'memfold ksm' is kept",
        workaround: None,
    },
    Fault {
        id: "CVE-2024-46787",
        what: "UFFDIO_COPY runs into BUG_ON if huge pages come and go at its target",
        mechanism: "fold, fetched snapshots",
        effect: Effect::Crash,
        since: Version(4, 3, 0),
        fixed: &[Version(6, 6, 51), Version(6, 10, 10), Version(6, 11, 0)],
        conduct: Conduct::Meets,
        how: "a VM that runs while its snapshot is fetched; folding copies only as a last resort",
        workaround: Some(NO_HUGE_PAGES),
    },
    Fault {
        id: "CVE-2026-64514",
        what: "a thread that touches a page in transit can miss its wake-up",
        mechanism: "fold, live snapshots, fetched snapshots",
        effect: Effect::Stall,
        since: Version(4, 11, 0),
        fixed: &[
            Version(5, 10, 261),
            Version(5, 15, 212),
            Version(6, 1, 178),
            Version(6, 6, 145),
            Version(6, 12, 96),
            Version(6, 18, 39),
            Version(7, 1, 4),
            Version(7, 2, 0),
        ],
        conduct: Conduct::Avoids,
        how: "every freeze, copy and arrival ends with a wake-up of all threads that wait there",
        workaround: None,
    },
    Fault {
        id: "CVE-2024-27007",
        what: "UFFDIO_MOVE of a pinned huge page fails, but changes where the kernel looks for the page",
        mechanism: "fold of whole huge pages",
        effect: Effect::LosesData,
        since: Version(6, 8, 0),
        fixed: &[Version(6, 8, 8), Version(6, 9, 0)],
        conduct: Conduct::Refuses,
        how: "folding of a huge page that a device writes to",
        workaround: Some(NO_HUGE_PAGES),
    },
    Fault {
        id: "CVE-2025-21984",
        what: "UFFDIO_MOVE of a page that is being swapped out leaves the page's index wrong",
        mechanism: "fold",
        effect: Effect::Crash,
        since: Version(6, 8, 0),
        fixed: &[Version(6, 12, 20), Version(6, 13, 8), Version(6, 14, 0)],
        conduct: Conduct::Meets,
        how: "folding while this host swaps out memory of VMs",
        workaround: Some(SWAP_WORKAROUND),
    },
    Fault {
        id: "CVE-2025-38242",
        what: "UFFDIO_MOVE can move another process's page that took over a swap slot",
        mechanism: "fold",
        effect: Effect::Crash,
        since: Version(6, 8, 0),
        fixed: &[Version(6, 12, 37), Version(6, 15, 5), Version(6, 16, 0)],
        conduct: Conduct::Meets,
        how: "folding while this host swaps out memory of VMs, very rarely",
        workaround: Some(SWAP_WORKAROUND),
    },
    Fault {
        id: "CVE-2025-38686",
        what: "UFFDIO_MOVE takes a huge page that is being migrated for one in memory",
        mechanism: "fold of parts of huge pages",
        effect: Effect::Crash,
        since: Version(6, 8, 0),
        fixed: &[
            Version(6, 12, 43),
            Version(6, 15, 11),
            Version(6, 16, 2),
            Version(6, 17, 0),
        ],
        conduct: Conduct::Meets,
        how: "folding while the kernel migrates huge pages (NUMA balancing, for example)",
        workaround: Some(NO_HUGE_PAGES),
    },
    Fault {
        id: "commit 4165b7d1c45c",
        what: "UFFDIO_MOVE waits for a huge page that is being migrated with a wrong lock",
        mechanism: "fold of whole huge pages",
        effect: Effect::Crash,
        since: Version(6, 8, 0),
        fixed: &[Version(6, 18, 46), Version(7, 1, 8), Version(7, 2, 0)],
        conduct: Conduct::Meets,
        how: "folding while the kernel migrates huge pages (NUMA balancing, for example)",
        workaround: Some(NO_HUGE_PAGES),
    },
    Fault {
        id: "commit 9658d698a8a8",
        what: "splitting a huge page drops the write protection of its pages of zeroes",
        mechanism: "live snapshots",
        effect: Effect::WrongSnapshot,
        since: Version(6, 12, 0),
        fixed: &[Version(6, 12, 54), Version(6, 17, 4), Version(6, 18, 0)],
        conduct: Conduct::Meets,
        how: "'memfold snapshot save --live' of a VM with huge pages",
        workaround: Some("save without --live"),
    },
    Fault {
        id: "CVE-2026-31397",
        what: "UFFDIO_MOVE of the shared huge page of zeroes maps memory that does not exist",
        mechanism: "fold of whole huge pages",
        effect: Effect::LosesData,
        since: Version(6, 16, 0),
        fixed: &[Version(6, 18, 20), Version(6, 19, 10), Version(7, 0, 0)],
        conduct: Conduct::Avoids,
        how: "the library leaves a huge page of zeroes where it is, looking after the range is frozen",
        workaround: None,
    },
    Fault {
        id: "commit f025ca73decd",
        what: "UFFDIO_MOVE counts fewer pages than it has moved, after it had to try again",
        mechanism: "fold",
        effect: Effect::LosesData,
        since: Version(6, 18, 0),
        fixed: &[Version(6, 18, 51), Version(7, 2, 5), Version(7, 3, 0)],
        conduct: Conduct::Avoids,
        how: "where a move stops, the library asks the page map where the page is",
        workaround: None,
    },
];

impl Fault {
    /// Returns whether a kernel of this release has the fault.
    #[must_use]
    pub fn presence(&self, release: Release) -> Presence {
        let version = release.version;
        let is_edge = |edge: &Version| *edge == version;
        let unclear = match release.numbering {
            Numbering::Candidate => is_edge(&self.since) || self.fixed.iter().any(is_edge),
            Numbering::MoreCode => self.fixed.last().is_none_or(|fix| version < *fix),
            Numbering::MoreFixes => version >= self.since && !self.is_fixed(version),
            Numbering::Stable => false,
        };
        if unclear {
            Presence::Unknown
        } else if version < self.since || self.is_fixed(version) {
            Presence::Absent
        } else {
            Presence::Present
        }
    }

    fn is_fixed(&self, version: Version) -> bool {
        let mainline = self.fixed.last();
        let series = |fix: &Version| fix.series() == version.series();
        mainline.is_some_and(|fix| version >= *fix)
            || self.fixed.iter().any(|fix| series(fix) && version >= *fix)
    }

    /// Returns the smallest version after `version` that contains the fix.
    #[must_use]
    pub fn next_fix(&self, version: Version) -> Option<Version> {
        self.fixed.iter().copied().find(|fix| *fix > version)
    }
}

/// A fault that the running kernel has, or may have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    /// Number of the CVE, or the commit that fixes the fault.
    pub id: &'static str,
    /// Whether the kernel has the fault for certain.
    pub presence: Presence,
    /// What the kernel does wrong.
    pub what: &'static str,
    /// Mechanism of memfold that meets the fault.
    pub mechanism: &'static str,
    /// The worst that the fault does.
    pub effect: Effect,
    /// What memfold does about the fault.
    pub conduct: Conduct,
    /// How memfold avoids the fault, or when it meets the fault.
    pub how: &'static str,
    /// Version of Linux to upgrade to.
    pub fixed_in: Option<String>,
    /// What helps on a kernel that cannot be upgraded.
    pub workaround: Option<&'static str>,
}

/// Returns the known faults that a kernel has or may have; `None` if `release` (`uname -r`) is not
/// the release of a Linux kernel, so that nothing can be said.
#[must_use]
pub fn find(release: &str) -> Option<Vec<Found>> {
    let release = Release::parse(release)?;
    let found = FAULTS.iter().map(|fault| (fault, fault.presence(release)));
    let found = found.filter(|(_, presence)| *presence != Presence::Absent);
    Some(
        found
            .map(|(fault, presence)| Found {
                id: fault.id,
                presence,
                what: fault.what,
                mechanism: fault.mechanism,
                effect: fault.effect,
                conduct: fault.conduct,
                how: fault.how,
                fixed_in: fault.next_fix(release.version).map(|fix| fix.to_string()),
                workaround: fault.workaround,
            })
            .collect(),
    )
}

/// Returns why `memfold serve` must not run on a kernel of this release; `None` if it may. Only
/// faults that the kernel has for certain, and with which a VM could lose data, are a reason.
#[must_use]
pub fn refusal(release: &str) -> Option<String> {
    let found = find(release)?;
    let fatal =
        |found: &&Found| found.presence == Presence::Present && found.conduct == Conduct::Refuses;
    let found = found.iter().find(fatal)?;
    let upgrade = found.fixed_in.as_deref().unwrap_or("a newer version");
    Some(format!(
        "Linux {release} has a fault with which a VM can lose data ({}: {}); upgrade to Linux {upgrade}",
        found.id, found.what
    ))
}

#[cfg(test)]
mod tests;
