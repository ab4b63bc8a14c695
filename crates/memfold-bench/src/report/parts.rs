//! The parts of the report: what each needs, its doses, and the study that it runs. A part runs in
//! a process of its own, so that it can be ended at its time limit.

use anyhow::Context as _;
use clap::ValueEnum;
use memfold_ksm as ksm;
use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{huge_pages, two_guests};
use crate::fork::{self, Scale};
use crate::{clones, fold, remote, selftest, snapshots};

/// MiB that the guest writes before a fork, for which the targets were set.
const DIRTY_MIB: u64 = 57;

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Dose {
    /// For hosts with KVM: the sizes for which the targets were set.
    Full,
    /// For emulated guests, whose figures are not a KVM host's: shows only that all parts run.
    Small,
}

impl Dose {
    const fn pick<T: Copy>(self, full: T, small: T) -> T {
        match self {
            Self::Full => full,
            Self::Small => small,
        }
    }
}

/// A part of the report, which can be measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Two guests are folded while they write and check their files
    Proof,
    /// CPU time of folding and of KSM
    Fold,
    /// Huge pages that are split by folding, and made again
    HugePages,
    /// Cost of folding to a guest: faults, and the speed of a program
    Guests,
    /// Saves and restores of a VM
    Snapshots,
    /// Clones of a saved VM
    Clones,
    /// Forks of a running VM
    Fork,
    /// Memory lent over the loopback interface
    Lending,
}

/// What a part needs of the host.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    pub memory: ByteSize,
    /// Room on the disk of temporary files.
    pub disk: ByteSize,
    /// Time that the part usually takes, in seconds. A part does not begin with less time left.
    pub usual_s: u64,
    /// Time after which the part is ended, in seconds.
    pub limit_s: u64,
}

impl Part {
    pub const ALL: [Self; 8] = [
        Self::Proof,
        Self::Fold,
        Self::HugePages,
        Self::Guests,
        Self::Snapshots,
        Self::Clones,
        Self::Fork,
        Self::Lending,
    ];

    /// Returns the name of the part, as on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Proof => "proof",
            Self::Fold => "fold",
            Self::HugePages => "huge-pages",
            Self::Guests => "guests",
            Self::Snapshots => "snapshots",
            Self::Clones => "clones",
            Self::Fork => "fork",
            Self::Lending => "lending",
        }
    }

    /// Returns what the part needs. Small doses are for emulated guests, which take longer.
    pub const fn needs(self, dose: Dose) -> Needs {
        // MiB of memory and of disk, usual and longest seconds: first in full doses.
        let [full, small] = match self {
            Self::Proof => [(1200, 256, 90, 300), (1200, 256, 150, 480)],
            Self::Fold => [(400, 0, 30, 120), (200, 0, 30, 180)],
            Self::HugePages => [(600, 0, 45, 120), (200, 0, 30, 120)],
            Self::Guests => [(1400, 256, 75, 240), (1400, 256, 150, 480)],
            Self::Snapshots => [(3072, 12288, 90, 300), (1400, 4096, 120, 480)],
            Self::Clones => [(3072, 2048, 60, 240), (1400, 1024, 90, 360)],
            Self::Fork => [(3072, 4096, 60, 240), (1400, 2048, 90, 360)],
            Self::Lending => [(2300, 2048, 90, 300), (1900, 2048, 150, 480)],
        };
        let (memory, disk, usual_s, limit_s) = match dose {
            Dose::Full => full,
            Dose::Small => small,
        };
        Needs {
            memory: ByteSize::mib(memory),
            disk: ByteSize::mib(disk),
            usual_s,
            limit_s,
        }
    }

    /// Runs the part in this process, and returns its results. `images`: guest images that the
    /// part's VMs boot; a part with one VM boots the first, and the second if it compiles in its
    /// guest.
    pub fn run(self, dose: Dose, images: [&'static str; 2]) -> anyhow::Result<Value> {
        // Also parts without a lab must not leave settings of KSM behind.
        memfold_lab::clean_up_at_interrupt();
        let [first, second] = images;
        match self {
            Self::Proof => {
                let churn_s = dose.pick(45, 15);
                let proof = selftest::run(images, churn_s, &|step| {
                    memfold_host::say!("  {step}");
                })?;
                Ok(serde_json::to_value(proof)?)
            }
            Self::Fold => fold_and_ksm(dose),
            Self::HugePages => huge_pages::measure(dose.pick(128, 24), dose.pick(25, 5)),
            Self::Guests => two_guests::measure(
                images,
                dose.pick(2048, 512),
                (dose.pick(3, 1), dose.pick(3, 1)),
            ),
            Self::Snapshots => {
                let size = dose.pick((2048, 200), (512, 100));
                results(snapshots::measure_briefly(first, size, dose.pick(3, 1))?)
            }
            Self::Clones => {
                let mut record = clones::measure(first, dose.pick(20, 3))?;
                let times = ["start_ms", "burst_start_ms"].map(|key| record["samples"][key].take());
                let mut results = results(record)?;
                [results["start_ms"], results["burst_start_ms"]] = times;
                let wrong = missing(&results, "clones", "clones_ok")?;
                results["clones_wrong"] = wrong.into();
                Ok(results)
            }
            Self::Fork => {
                let scale = Scale {
                    image: first.into(),
                    memory: ByteSize::mib(dose.pick(2048, 512)),
                    dirty_mib: vec![DIRTY_MIB],
                    rounds: dose.pick(5, 2),
                    fan_out: dose.pick(10, 2),
                    generations: 0,
                };
                let mut results = results(fork::measure_all(&scale)?)?;
                let wrong = missing(&results["fan_out"], "forks", "forks_ok")?;
                results["forks_wrong"] = wrong.into();
                Ok(results)
            }
            Self::Lending => {
                let ram = ByteSize::mib(dose.pick(320, 256));
                let doses = dose.pick((3, 4), (1, 2));
                results(remote::measure_over_loopback(second, ram, doses)?)
            }
        }
    }
}

/// Takes the results out of a study's record.
fn results(mut record: Value) -> anyhow::Result<Value> {
    let results = record["results"].take();
    let is_there = results.is_object().then_some(results);
    is_there.context("the study has no results")
}

/// Returns how many of the guests counted as `all` are not counted as `ok`.
fn missing(results: &Value, all: &str, ok: &str) -> anyhow::Result<u64> {
    let number = |key: &str| results[key].as_u64().with_context(|| format!("no '{key}'"));
    Ok(number(all)?.saturating_sub(number(ok)?))
}

/// Measures the CPU time of folding, and that of KSM if KSM is off and would merge no memory but
/// that of the measurement.
fn fold_and_ksm(dose: Dose) -> anyhow::Result<Value> {
    let pages = dose.pick(16384, 4096);
    let obstacle = ksm_obstacle();
    let ksm_pages = if obstacle.is_none() { pages } else { 0 };
    let found = fold::measure_all(dose.pick(5, 3), pages, ksm_pages)?;
    let mut results = found.results;
    if let Some(why) = obstacle {
        results["not_measured"] = json!({ "ksm_us_per_page": why, "ratio_ksm_over_fold": why });
    }
    Ok(results)
}

/// Returns why KSM cannot be started for a measurement; `None` if it can.
fn ksm_obstacle() -> Option<String> {
    let controls = ksm::Controls::default();
    match controls.number::<u64>("run") {
        Ok(Some(0)) => {}
        Ok(None) | Err(_) => return Some("this host has no KSM, or it cannot be read".into()),
        Ok(Some(_)) => return Some("KSM is in use on this host".into()),
    }
    match ksm::processes::mergeable("/proc".as_ref()) {
        Ok(others) if others.is_empty() => None,
        Ok(others) => Some(format!(
            "KSM would also merge memory that other processes offer to it, such as QEMUs without mem-merge=off ({})",
            others.len()
        )),
        Err(error) => Some(format!(
            "processes that KSM may merge cannot be read: {error}"
        )),
    }
}
