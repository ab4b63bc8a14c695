//! The study `memfold bench hints`, which repeats a published study (study C): measures how much
//! memory folding saves while two VMs compile, and how much CPU time it needs, compared with KSM.
//! The guests' hints say what to fold.
//!
//! Two VMs of 512 MiB boot from separately built images, and read and hash their files, so that
//! their page caches are full. At time 0, both begin to compile, and one mechanism begins to share
//! memory:
//!
//! | arm | mechanism |
//! |---|---|
//! | `none` | none; the agents still run |
//! | `fold_N` | folding, at most N pages a second |
//! | `fold_N_beside_none` | as `fold_N`, while two more VMs of the same images do the same work without memfold |
//! | `ksm_default` | KSM as a freshly booted kernel has it: 100 pages each 20 ms |
//! | `ksm_equal_cpu_N` | KSM with a rate that makes ksmd's CPU time follow that of folding in `fold_N` |
//!
//! Every arm has freshly booted VMs; each repeat runs all arms in turn. *Shared* is the memory
//! saved. For folding: guest pages that map a page of the store and were not copied since, minus
//! the pages of the store. For KSM: `pages_sharing`. Zero pages that folding frees are not counted
//! (KSM's are). Afterwards the guests hash all files again.
//!
//! The slowdown by folding is measured with VMs that work side by side, because a machine's speed
//! drifts by several times the slowdown, but equally for all four VMs.

mod arm;
mod results;

use std::time::Duration;

use anyhow::Context as _;
use memfold_host::files::data_disks;
use memfold_lab::{DiskMode, Lab};
use memfold_units::ByteSize;
use memfold_vm::VmSpec;
use serde_json::{Value, json};

use self::arm::{ArmRun, BUDGETS, Mechanism, Work};
use crate::record::Found;
use crate::study::Options;

pub use self::results::figures;

/// Name and image of each VM.
const VMS: [(&str, &str); 2] = [("a", "trixie-a"), ("b", "trixie-b")];

/// Name and image of each VM that is not folded, in the same order.
const BESIDE: [(&str, &str); 2] = [("plain-a", "trixie-a"), ("plain-b", "trixie-b")];

/// RAM of each VM.
const MEMORY: ByteSize = ByteSize::mib(512);

/// The measurements that the study makes.
#[derive(Clone, Debug)]
struct Plan {
    /// Number of repeats of every arm.
    repeats: usize,
    /// Number of runs of VMs side by side, half of which are folded with the first of [`BUDGETS`].
    beside: usize,
    /// Number of budgets among [`BUDGETS`] that have an arm of KSM at equal CPU.
    equal_cpu: usize,
    /// The software that the guests compile.
    work: Work,
    /// Names of the arms to run; `None` for all arms.
    only: Option<Vec<String>>,
}

impl Plan {
    /// Returns the plan of a quick study: Lua, without optimization (a minute in an emulated
    /// guest); one repeat of all arms, and three of the arm that measures how much folding slows
    /// guests down.
    fn quick() -> Self {
        Self {
            repeats: 1,
            beside: 3,
            equal_cpu: 1,
            work: Work {
                what: "Lua 5.4, make linux MYCFLAGS=-O0",
                build: "cp -r /usr/src/quick /var/tmp/work && make -s -C /var/tmp/work linux MYCFLAGS=-O0",
                output: "sha256sum < /var/tmp/work/src/lua",
                disk: None,
                timeout: Duration::from_secs(600),
            },
            only: None,
        }
    }

    /// Returns the plan of the full study: Debian's kernel source, tinyconfig; three repeats.
    fn full() -> anyhow::Result<Self> {
        let disk = data_disks()?.remove("linux-source").context(
            "no disk with the kernel's source; run 'scripts/setup images-full', or use --quick",
        )?;
        Ok(Self {
            repeats: 3,
            beside: 3,
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
            only: None,
        })
    }

    /// Leaves out all arms but the requested ones. For an arm of KSM at equal CPU, the folding arm
    /// whose CPU time it follows is kept, too.
    fn keep_arms(&mut self, options: &Options) -> anyhow::Result<()> {
        let known: Vec<String> = self.arms().iter().map(|arm| arm.name()).collect();
        options.check_arms("hints", &known)?;
        let names = options.arms.iter();
        let equal = names
            .clone()
            .filter_map(|n| n.strip_prefix("ksm_equal_cpu_"));
        let needed = equal.map(|rate| format!("fold_{rate}"));
        self.only = Some(names.cloned().chain(needed).collect());
        Ok(())
    }

    /// Returns all arms of the study.
    fn arms(&self) -> Vec<Mechanism> {
        let mut arms = vec![Mechanism::None];
        arms.extend(BUDGETS.map(Mechanism::Fold));
        arms.push(Mechanism::KsmDefault);
        let equal = &BUDGETS[..self.equal_cpu];
        arms.extend(equal.iter().copied().map(Mechanism::KsmEqualCpu));
        arms.push(Mechanism::FoldBesideNone(BUDGETS[0]));
        arms
    }

    /// Returns the arms to run, in the order of one repeat.
    fn arms_of(&self, repeat: usize) -> Vec<Mechanism> {
        let wanted = |arm: &Mechanism| {
            let repeats = match arm {
                Mechanism::FoldBesideNone(_) => self.beside,
                _ => self.repeats,
            };
            let only = self.only.as_ref();
            repeat < repeats && only.is_none_or(|only| only.contains(&arm.name()))
        };
        self.arms().into_iter().filter(wanted).collect()
    }

    fn specs(&self, mechanism: Mechanism) -> anyhow::Result<Vec<VmSpec>> {
        let spec = |(name, image): (&str, &str), fold| {
            let mut spec = Lab::spec(name, image, MEMORY, DiskMode::Buffered)?;
            spec.fold = fold;
            if let Some(path) = &self.work.disk {
                let mut disk = memfold_vm::DiskSpec::new(path);
                disk.snapshot = true;
                spec.disks.push(disk);
            }
            Ok(spec)
        };
        let mut vms: Vec<_> = VMS.into_iter().map(|vm| spec(vm, true)).collect();
        if matches!(mechanism, Mechanism::FoldBesideNone(_)) {
            vms.extend(BESIDE.into_iter().map(|vm| spec(vm, false)));
        }
        vms.into_iter().collect()
    }
}

/// Runs the study `hints`. Returns its JSON record, with the parts `results`, `samples` and `vms`.
/// A quick study takes about a quarter of an hour on two cores without hardware virtualization.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let mut plan = if options.quick {
        Plan::quick()
    } else {
        Plan::full()?
    };
    if !options.arms.is_empty() {
        plan.keep_arms(options)?;
    }
    let mut runs: Vec<ArmRun> = Vec::new();
    for repeat in 0..plan.repeats.max(plan.beside) {
        for mechanism in plan.arms_of(repeat) {
            let allowed = match mechanism {
                Mechanism::KsmEqualCpu(rate) => {
                    let is_same = |run: &&ArmRun| run.mechanism == Mechanism::Fold(rate);
                    let last = runs.iter().rfind(is_same);
                    Some(last.map(ArmRun::scanner_cpu).unwrap_or_default())
                }
                _ => None,
            };
            let name = mechanism.name();
            let specs = plan.specs(mechanism)?;
            let run = arm::run(specs, &plan.work, mechanism, allowed, repeat)
                .with_context(|| format!("arm '{name}' of the study failed"))?;
            eprintln!("{name}: {}", run.in_short());
            runs.push(run);
        }
    }
    let vms = VMS.map(|(name, image)| {
        json!({"name": name, "image": image, "memory_bytes": MEMORY.0, "vcpus": 1, "work": plan.work.what})
    });
    Ok(json!(Found {
        vms: vms.into(),
        samples: runs.iter().flat_map(ArmRun::samples_json).collect(),
        results: results::of(&runs),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(options: &Plan, repeat: usize) -> Vec<String> {
        let arms = options.arms_of(repeat);
        arms.iter().map(|arm| arm.name()).collect()
    }

    #[test]
    fn a_benchmark_variant_chosen_by_name_runs_with_the_variants_that_it_depends_on() {
        let mut options = Plan::quick();
        assert_eq!(names(&options, 0).len(), 7);
        assert_eq!(names(&options, 1), ["fold_5000_beside_none"]);
        let only = |name: &str| Options {
            arms: vec![name.into()],
            ..Options::default()
        };
        assert!(options.keep_arms(&only("fold_1")).is_err());
        options.keep_arms(&only("ksm_equal_cpu_5000")).unwrap();
        assert_eq!(names(&options, 0), ["fold_5000", "ksm_equal_cpu_5000"]);
        assert!(names(&options, 1).is_empty());
    }
}
