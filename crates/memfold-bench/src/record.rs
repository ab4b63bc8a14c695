//! Makes the JSON record that every study writes: the study's results, and the version of memfold
//! and the host with which they were measured.

use std::borrow::Borrow;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use memfold_api::DEFAULT_STATE;
use memfold_host::{HostFacts, guest_images};

use crate::figure;

/// Makes the JSON record of a study:
/// `{"study", "version", "git", "quick", "host", "vms", "samples", "results"}`. `measured`: an
/// object with `results`, `samples` and, if the study had VMs, `vms`. Names of keys contain the
/// units.
#[must_use]
pub fn envelope(study: &str, quick: bool, mut measured: Value) -> Value {
    let mut take = |key: &str, otherwise: Value| match measured[key].take() {
        Value::Null => otherwise,
        value => value,
    };
    json!({
        "study": study,
        "version": env!("CARGO_PKG_VERSION"),
        "git": memfold_host::commit(),
        "quick": quick,
        "host": host(),
        "vms": take("vms", json!([])),
        "samples": take("samples", json!([])),
        "results": take("results", Value::Object(Map::new())),
    })
}

/// Returns facts about the host. They contain no names or paths, because the results are published.
pub fn host() -> Value {
    let facts = HostFacts::probe(DEFAULT_STATE.as_ref());
    let version = facts.qemu.facts.as_ref().map(|qemu| qemu.version);
    let qemu = version.map(|(major, minor, micro)| format!("{major}.{minor}.{micro}"));
    let images = guest_images().unwrap_or_default().into_iter();
    let images = images.map(|(name, image)| (name, image.kernel_version.into()));
    json!({
        "kernel": facts.kernel,
        "cpu": field("/proc/cpuinfo", "model name"),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_kib": field("/proc/meminfo", "MemTotal")
            .and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok()),
        "qemu": qemu,
        "accelerator": if facts.kvm.is_usable() { "kvm" } else { "tcg" },
        "transparent_hugepage": facts.transparent_hugepage,
        "max_map_count": facts.max_map_count,
        "guest_kernels": images.collect::<Map<String, Value>>(),
    })
}

/// Returns the value of the first line `name : value` of a file in `/proc`.
fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Returns the results in a study's record as text, one a line. A nested result is named by all its
/// keys.
pub fn summary(study: &Value) -> String {
    let mut lines = Vec::new();
    flatten("", &study["results"], &mut lines);
    let width = lines.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    let line = |(key, value): &(String, String)| format!("{key:width$}  {value}");
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn flatten(name: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    match value {
        Value::Object(parts) => {
            let dot = if name.is_empty() { "" } else { "." };
            for (key, part) in parts {
                flatten(&format!("{name}{dot}{key}"), part, lines);
            }
        }
        // Lists are shown only in the JSON output.
        Value::Array(_) => {}
        Value::Number(number) if number.is_f64() => {
            lines.push((name.into(), format!("{:.3}", figure::number(value))));
        }
        other => lines.push((name.into(), other.to_string())),
    }
}

/// Measurements of a study, or of a part of a study. The names of keys contain the units.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Found {
    pub vms: Vec<Value>,
    pub samples: Vec<Value>,
    /// JSON object with the results computed from the samples.
    pub results: Value,
}

impl Found {
    /// Adds the measurements of another part of the study.
    pub fn add(&mut self, other: Self) {
        self.vms.extend(other.vms);
        self.samples.extend(other.samples);
        for (key, value) in other.results.as_object().into_iter().flatten() {
            self.results[key] = value.clone();
        }
    }
}

/// Returns the median of the values. If their number is even, it is the mean of the middle two;
/// without values, it is NaN.
pub fn median(values: impl IntoIterator<Item: Borrow<f64>>) -> f64 {
    let sorted = sorted(values);
    match sorted.len() {
        0 => f64::NAN,
        n => f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
    }
}

/// Returns minimum, median and maximum of the values, as a JSON object.
pub fn spread(values: impl IntoIterator<Item: Borrow<f64>>) -> Value {
    let sorted = sorted(values);
    json!({"min": sorted.first(), "median": median(&sorted), "max": sorted.last()})
}

pub fn sorted(values: impl IntoIterator<Item: Borrow<f64>>) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.into_iter().map(|value| *value.borrow()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Returns each value of `ours` divided by the value of `theirs` from the same round.
pub fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(a, b)| a / b).collect()
}

pub fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_benchmark_result_file_has_every_required_key_and_contains_no_local_path() {
        let value = envelope(
            "fold",
            true,
            json!({"results": {"a_us": 1}, "samples": [1]}),
        );
        for key in [
            "study", "version", "git", "host", "vms", "samples", "results",
        ] {
            assert!(!value[key].is_null(), "{key}");
        }
        assert_eq!(value["results"]["a_us"], 1);
        assert_eq!(value["vms"], json!([]));
        assert!(value["host"]["memory_kib"].as_u64().unwrap() > 1 << 16);
        let text = value["host"].to_string();
        assert!(!text.contains('/') || !text.contains("/usr"), "{text}");
    }

    #[test]
    fn the_median_of_an_even_number_of_values_is_the_mean_of_the_two_middle_values() {
        let all = spread([-4.0, -1.0, -3.0, -2.0]);
        assert_eq!(all, json!({"min": -4.0, "median": -2.5, "max": -1.0}));
        assert!(spread([0.0; 0])["median"].is_null());
    }
}
