//! The JSON record that every study writes: its results, and the version and host that they were
//! measured with.

use std::path::Path;

use serde_json::{Map, Value, json};

use memfold_api::DEFAULT_STATE;
use memfold_host::{HostFacts, guest_images};

/// Makes the record of a study:
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

/// Returns facts about the host, without names and paths, because results are shown to others.
fn host() -> Value {
    let facts = HostFacts::probe(DEFAULT_STATE.as_ref());
    let qemu = facts.qemu.facts.as_ref().map(|q| {
        let (major, minor, micro) = q.version;
        format!("{major}.{minor}.{micro}")
    });
    let images: Map<String, Value> = guest_images()
        .unwrap_or_default()
        .into_iter()
        .map(|(name, image)| (name, image.kernel_version.into()))
        .collect();
    json!({
        "kernel": facts.kernel,
        "cpu": field(Path::new("/proc/cpuinfo"), "model name"),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_kib": field(Path::new("/proc/meminfo"), "MemTotal")
            .and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok()),
        "qemu": qemu,
        "accelerator": if facts.kvm.is_usable() { "kvm" } else { "tcg" },
        "transparent_hugepage": facts.transparent_hugepage,
        "max_map_count": facts.max_map_count,
        "guest_kernels": images,
    })
}

/// Returns the value of the first line `name : value` of a file in `/proc`.
fn field(path: &Path, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Returns the results as text, one per line; nested results have their full key path.
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
            for (key, part) in parts {
                let name = if name.is_empty() {
                    key.clone()
                } else {
                    format!("{name}.{key}")
                };
                flatten(&name, part, lines);
            }
        }
        // Lists are shown only in the JSON output.
        Value::Array(_) => {}
        Value::Number(number) if number.is_f64() => {
            lines.push((
                name.into(),
                format!("{:.3}", number.as_f64().unwrap_or(f64::NAN)),
            ));
        }
        other => lines.push((name.into(), other.to_string())),
    }
}

/// Returns the median of values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns minimum, median and maximum of values.
pub fn spread(values: &[f64]) -> Value {
    json!({
        "min": values.iter().copied().fold(f64::INFINITY, f64::min),
        "median": median(values),
        "max": values.iter().copied().fold(0.0, f64::max),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_file_has_every_required_key_and_contains_no_local_path() {
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
}
