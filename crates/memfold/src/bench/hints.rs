//! Study C: what folding by the guests' hints shares while two VMs compile, and what it costs, next to KSM.
//!
//! Two VMs of 512 MiB boot from images that were built separately, and read and hash their files, so that their page caches
//! are full. Then, at time 0, both begin to compile and one mechanism begins to share:
//!
//! | arm | mechanism |
//! |---|---|
//! | `none` | none; the agents run all the same |
//! | `fold_N` | folding, at most N pages a second |
//! | `ksm_default` | KSM as a freshly booted kernel has it: 100 pages each 20 ms |
//! | `ksm_equal_cpu_N` | KSM with a rate that makes ksmd's CPU time follow that of folding in `fold_N` |
//!
//! Every arm has freshly booted VMs of its own; the arms are gone through in turn in each repeat. *Shared* is memory saved:
//! guest pages that map a page of the store and were not copied since, less the pages of the store; KSM's `pages_sharing`.
//! Pages of zeroes that folding gives back are not counted (KSM's are). Afterwards the guests hash all files again.

mod arm;
mod results;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use memfold_units::ByteSize;
use serde_json::{Value, json};

use self::arm::{ArmRun, Mechanism};
use super::lab::{DiskMode, Lab};
use crate::host::files::data_disks;
use crate::vm::VmSpec;

pub use self::results::figures;

/// The VMs: name and image.
const VMS: [(&str, &str); 2] = [("a", "trixie-a"), ("b", "trixie-b")];

/// RAM of each.
const MEMORY: ByteSize = ByteSize::mib(512);

/// Pages a second that folding may look at; the first is the one KSM is compared with: its default rate.
const BUDGETS: [u64; 3] = [5000, 1000, 500];

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Times that every arm is run.
    repeats: usize,
    /// Times that the arms without sharing and with folding at the first of [`BUDGETS`] are run.
    pairs: usize,
    /// Of [`BUDGETS`], how many have an arm of KSM at equal CPU.
    equal_cpu: usize,
    /// What the guests compile.
    work: Work,
}

#[derive(Clone, Debug)]
struct Work {
    what: &'static str,
    /// Compiles in a fresh `/var/tmp/work`.
    build: &'static str,
    /// Prints the hash of what was built.
    output: &'static str,
    /// A disk that the build needs, read-only.
    disk: Option<PathBuf>,
    timeout: Duration,
}

impl Options {
    /// Lua, without optimization: a minute in an emulated guest; one repeat of all arms, three of those
    /// that tell how much folding slows guests down.
    #[must_use]
    pub const fn quick() -> Self {
        Self {
            repeats: 1,
            pairs: 3,
            equal_cpu: 1,
            work: Work {
                what: "Lua 5.4, make linux MYCFLAGS=-O0",
                build: "cp -r /usr/src/quick /var/tmp/work && make -s -C /var/tmp/work linux MYCFLAGS=-O0",
                output: "sha256sum < /var/tmp/work/src/lua",
                disk: None,
                timeout: Duration::from_secs(600),
            },
        }
    }

    /// Debian's kernel source, tinyconfig; three repeats.
    pub fn full() -> anyhow::Result<Self> {
        let disk = data_disks()?.remove("linux-source").context(
            "no disk with the kernel's source; run 'scripts/setup images-full', or use --quick",
        )?;
        Ok(Self {
            repeats: 3,
            pairs: 3,
            equal_cpu: BUDGETS.len(),
            work: Work {
                what: "linux-source of Debian, make tinyconfig vmlinux",
                build: "mkdir -p /mnt /var/tmp/work && mount -o ro /dev/vdb /mnt && \
                    export KBUILD_BUILD_TIMESTAMP=@0 KBUILD_BUILD_USER=memfold KBUILD_BUILD_HOST=memfold && \
                    make -s -C /mnt/linux O=/var/tmp/work tinyconfig && make -s -C /mnt/linux O=/var/tmp/work vmlinux",
                output: "sha256sum < /var/tmp/work/vmlinux",
                disk: Some(disk),
                timeout: Duration::from_secs(4 * 3600),
            },
        })
    }

    fn specs(&self) -> anyhow::Result<Vec<VmSpec>> {
        VMS.iter()
            .map(|(name, image)| {
                let mut spec = Lab::spec(name, image, MEMORY, DiskMode::Buffered)?;
                if let Some(path) = &self.work.disk {
                    let mut disk = crate::vm::DiskSpec::new(path);
                    disk.snapshot = true;
                    spec.disks.push(disk);
                }
                Ok(spec)
            })
            .collect()
    }
}

/// Runs the study: `results`, `samples` and `vms`. Takes about twelve minutes with [`Options::quick`] on two cores without
/// hardware virtualization.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let mut runs: Vec<ArmRun> = Vec::new();
    for repeat in 0..options.repeats {
        let mut arms = vec![Mechanism::None];
        arms.extend(BUDGETS.map(|pages_per_second| Mechanism::Fold { pages_per_second }));
        arms.push(Mechanism::KsmDefault);
        for mechanism in arms {
            runs.push(one(options, mechanism, repeat)?);
        }
        for pages_per_second in BUDGETS.into_iter().take(options.equal_cpu) {
            let fold = Mechanism::Fold { pages_per_second };
            let cpu = runs
                .iter()
                .rfind(|run| run.mechanism == fold)
                .map(ArmRun::scanner_cpu)
                .unwrap_or_default();
            let equal = Mechanism::KsmEqualCpu {
                pages_per_second,
                cpu,
            };
            runs.push(one(options, equal, repeat)?);
        }
    }
    // The machine's own speed drifts by more than the slowdown that is looked for, so each order comes first in turn.
    for repeat in options.repeats..options.pairs {
        let fold = Mechanism::Fold {
            pages_per_second: BUDGETS[0],
        };
        let mut pair = [Mechanism::None, fold];
        if repeat % 2 == 1 {
            pair.reverse();
        }
        for mechanism in pair {
            runs.push(one(options, mechanism, repeat)?);
        }
    }
    let vms = VMS.map(|(name, image)| {
        json!({"name": name, "image": image, "memory_bytes": MEMORY.0, "vcpus": 1, "work": options.work.what})
    });
    Ok(json!({
        "vms": vms,
        "samples": runs.iter().flat_map(ArmRun::samples_json).collect::<Vec<_>>(),
        "results": results::of(&runs),
    }))
}

fn one(options: &Options, mechanism: Mechanism, repeat: usize) -> anyhow::Result<ArmRun> {
    let name = mechanism.name();
    let run = arm::run(options.specs()?, &options.work, mechanism, repeat)
        .with_context(|| format!("arm {name}"))?;
    eprintln!("{name}: {}", run.in_short());
    Ok(run)
}
