//! The figures of `bench snapshots`: times and sizes, by memory size and by used memory.

use serde_json::Value;

use crate::figure::{self, Axis, Figure, Series};

/// The study's figures, by name.
#[must_use]
pub fn figures(study: &Value) -> Vec<Figure> {
    let empty = Vec::new();
    let samples = study["samples"].as_array().unwrap_or(&empty);
    let series = |x: &str, way: &str, key: &str, step: &str, divisor: f64| {
        let of_sweep = samples.iter().filter(|s| match x {
            "memory_mib" => s["used_mib"] == 200,
            _ => s["memory_mib"] == 2048,
        });
        let of_sweep = of_sweep.filter(|s| s["study_disk"] != true);
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let mut points: Vec<(f64, f64)> = of_sweep
            .map(|s| (number(&s[x]), number(&s["ways"][way][key]) / divisor))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let who = match way {
            "qemu" => "QEMU, mapped-ram",
            "qemu_stream" => "QEMU, stream",
            "qemu_savevm" => "QEMU, savevm",
            _ => "memfold",
        };
        Series {
            name: format!("{who}: {step}"),
            points,
            dashed: way != "auto",
        }
    };
    let times = |x| {
        vec![
            series(x, "qemu", "save_s", "save", 1.0),
            series(x, "qemu", "restore_s", "restore", 1.0),
            series(x, "qemu_stream", "save_s", "save", 1.0),
            series(x, "qemu_savevm", "save_s", "save", 1.0),
            series(x, "auto", "save_s", "save", 1.0),
            series(x, "auto", "restore_s", "restore", 1.0),
        ]
    };
    let sizes = |x| {
        let mib = f64::from(1 << 20);
        vec![
            series(x, "qemu", "bytes", "size", mib),
            series(x, "auto", "bytes", "size", mib),
        ]
    };
    let memory = Axis::log("MiB of memory, 200 used by programs");
    let used = Axis::linear("MiB used by programs, of 2048");
    let seconds = Axis::log("seconds");
    let mib = Axis::log("MiB");
    let mut figures = vec![
        (
            "snapshots-time",
            figure::lines(
                "Saving and restoring by memory size",
                &memory,
                &seconds,
                &times("memory_mib"),
            ),
        ),
        (
            "snapshots-size",
            figure::lines(
                "Size of a snapshot by memory size",
                &memory,
                &mib,
                &sizes("memory_mib"),
            ),
        ),
    ];
    if samples.iter().any(|s| s["used_mib"] != 200) {
        figures.push((
            "snapshots-used-time",
            figure::lines(
                "Saving and restoring by used memory",
                &used,
                &seconds,
                &times("used_mib"),
            ),
        ));
        figures.push((
            "snapshots-used-size",
            figure::lines(
                "Size of a snapshot by used memory",
                &used,
                &mib,
                &sizes("used_mib"),
            ),
        ));
    }
    let named = figures.into_iter();
    named.map(|(name, svg)| (name.to_owned(), svg)).collect()
}
