//! Saves which features the VM's CPU has (CPUID), and checks before a restore that the host has all
//! of them. A guest's kernel detects CPU features only at boot. If one of them were missing after a
//! restore, the guest would fail with illegal instructions, or hang.
//!
//! QEMU reports the CPUID of a running VM's CPU, without features that the accelerator lacks, as
//! bits (`feature-words`) and by name (one property for each feature). The bits take one query, the
//! names take hundreds. So names are read only to save a VM, and to report missing features.

use std::collections::{BTreeMap, BTreeSet};

use memfold_vm::{Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::SnapshotError;

/// Boolean properties of a CPU that are states or settings of QEMU, and not features.
const NO_FEATURES: [&str; 9] = [
    "check",
    "enforce",
    "hotpluggable",
    "hotplugged",
    "migratable",
    "realized",
    "start-powered-off",
    "x-force-features",
    "x-migrate-smi-count",
];

/// Maximum number of features that an error message lists.
const NAMED: usize = 12;

/// CPUID registers with features: leaf, sub-leaf and register in QEMU's notation, and the set bits.
type Words = Vec<(String, u64)>;

/// Model and features of a guest's CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Model of the CPU in QEMU, such as `max-x86_64-cpu`.
    pub model: String,
    /// CPUID registers with features: leaf, sub-leaf and register in QEMU's notation, and the set
    /// bits.
    pub words: Words,
    /// QEMU's names of the enabled features.
    pub features: BTreeSet<String>,
}

impl Cpu {
    /// Reads model and features of a VM's CPU from QEMU. Returns `None` if QEMU does not report
    /// them.
    pub fn of(qmp: &mut Qmp) -> Result<Option<Self>, QmpError> {
        let Some((path, model, words)) = first(qmp)? else {
            return Ok(None);
        };
        let features = features(qmp, &path)?;
        Ok(Some(Self {
            model,
            words,
            features,
        }))
    }

    /// Compares the saved CPU with the CPU of the VM that `qmp` controls. Returns an error if
    /// features are missing, and lists them. `name` is the snapshot's name.
    pub fn check(&self, name: &str, qmp: &mut Qmp) -> Result<(), SnapshotError> {
        let Some((path, model, now)) = first(qmp)? else {
            return Ok(());
        };
        let lacks = lacking_bits(&self.words, &now);
        if lacks.is_empty() {
            return Ok(());
        }
        let now = features(qmp, &path)?;
        let mut missing: Vec<String> = self.features.difference(&now).cloned().collect();
        if missing.is_empty() {
            missing = lacks;
        }
        let more = missing.len().saturating_sub(NAMED);
        missing.truncate(NAMED);
        let more = match more {
            0 => String::new(),
            _ => format!(" and {more} more"),
        };
        let why = format!(
            "the saved guest's CPU ({}) has {}{more}, which this host's CPU ({model}) lacks; restore on a host with these features, or save a VM started with a model that all hosts have (--cpu)",
            self.model,
            missing.join(", ")
        );
        Err(SnapshotError::broken(name, why))
    }
}

/// Returns path, type and CPUID registers of the first CPU in QEMU's object tree.
fn first(qmp: &mut Qmp) -> Result<Option<(String, String, Words)>, QmpError> {
    let cpus = qmp.query("query-cpus-fast")?;
    let Some(path) = cpus[0]["qom-path"].as_str().map(str::to_owned) else {
        return Ok(None);
    };
    let model = get(qmp, &path, "type")?.as_str().map(str::to_owned);
    let words = words(qmp, &path)?;
    Ok(model.zip(words).map(|(model, words)| (path, model, words)))
}

/// Reads a property; the result is null if the property does not exist.
fn get(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value, QmpError> {
    match qmp.execute("qom-get", json!({ "path": path, "property": property })) {
        Err(QmpError::Refused { .. }) => Ok(Value::Null),
        other => other,
    }
}

fn words(qmp: &mut Qmp, path: &str) -> Result<Option<Words>, QmpError> {
    let word = |word: &Value| {
        let leaf = word["cpuid-input-eax"].as_u64()?;
        let sub = word["cpuid-input-ecx"].as_u64();
        let sub = sub.map_or(String::new(), |sub| format!(".{sub:x}"));
        let name = format!("{leaf:x}{sub} {}", word["cpuid-register"].as_str()?);
        Some((name, word["features"].as_u64().filter(|bits| *bits != 0)?))
    };
    let words = get(qmp, path, "feature-words")?;
    let words = words.as_array();
    Ok(words.map(|words| words.iter().filter_map(word).collect()))
}

fn features(qmp: &mut Qmp, path: &str) -> Result<BTreeSet<String>, QmpError> {
    let list = qmp.execute("qom-list", json!({ "path": path }))?;
    let mut found = BTreeSet::new();
    for property in list.as_array().into_iter().flatten() {
        let name = property["name"].as_str().unwrap_or_default();
        if property["type"] == "bool"
            && !NO_FEATURES.contains(&name)
            && get(qmp, path, name)? == true
        {
            found.insert(name.to_owned());
        }
    }
    Ok(found)
}

/// Returns as text the bits that are set in `then` but not in `now`.
fn lacking_bits(then: &[(String, u64)], now: &[(String, u64)]) -> Vec<String> {
    let now: BTreeMap<_, _> = now.iter().cloned().collect();
    let bits = |word| now.get(word).copied().unwrap_or(0);
    let lacking = then.iter().map(|(word, saved)| (word, saved & !bits(word)));
    lacking
        .filter(|(_, bits)| *bits != 0)
        .map(|(word, bits)| format!("CPUID {word} {bits:#x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restore_accepts_a_cpu_with_more_features_and_names_the_features_that_are_missing() {
        let words = |bits: &[u64]| -> Vec<(String, u64)> {
            let names = ["1 EDX", "7.0 EBX"].map(str::to_owned);
            names.into_iter().zip(bits.iter().copied()).collect()
        };
        assert!(lacking_bits(&words(&[3, 4]), &words(&[7, 5])).is_empty());
        assert_eq!(
            lacking_bits(&words(&[3, 4]), &words(&[1, 5])),
            ["CPUID 1 EDX 0x2"]
        );
        assert_eq!(
            lacking_bits(&words(&[3, 4]), &words(&[3])),
            ["CPUID 7.0 EBX 0x4"]
        );
    }
}
