//! Draws the figures of the study `snapshots`: times and sizes, by memory size and by used memory.

use serde_json::Value;

use crate::figure::{self, Axis, Figure, Series, number};

/// Lines in the figures of times: way to save, key of the sample, and label of the line.
const TIMES: &[(&str, &str, &str)] = &[
    ("qemu", "save_s", "save"),
    ("qemu", "restore_s", "restore"),
    ("qemu_stream", "save_s", "save"),
    ("qemu_savevm", "save_s", "save"),
    ("auto", "save_s", "save"),
    ("auto", "restore_s", "restore"),
];

const SIZES: &[(&str, &str, &str)] = &[("qemu", "bytes", "size"), ("auto", "bytes", "size")];

/// Draws the figures of the study `snapshots` from its record `study`.
pub fn figures(study: &Value) -> Vec<Figure> {
    let samples = figure::samples(study);
    let drawn = |name: &str, title: &str, (x, x_axis), is_size| {
        let of_sweep = samples.iter().filter(|s| match x {
            "memory_mib" => s["used_mib"] == 200,
            _ => s["memory_mib"] == 2048,
        });
        let of_sweep = of_sweep.filter(|s| s["study_disk"] != true);
        let (keys, y_axis, divisor) = if is_size {
            (SIZES, Axis::Log("MiB"), f64::from(1 << 20))
        } else {
            (TIMES, Axis::Log("seconds"), 1.0)
        };
        let series = keys.iter().map(|(way, key, what)| {
            let point = |s: &Value| (number(&s[x]), number(&s["ways"][way][key]) / divisor);
            let mut points: Vec<(f64, f64)> = of_sweep.clone().map(point).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let who = match *way {
                "qemu" => "QEMU, mapped-ram",
                "qemu_stream" => "QEMU, stream",
                "qemu_savevm" => "QEMU, savevm",
                _ => "memfold",
            };
            Series {
                name: format!("{who}: {what}"),
                points,
                dashed: *way != "auto",
            }
        });
        let title = format!(
            "{title} by {}",
            if x == "used_mib" {
                "used memory"
            } else {
                "memory size"
            }
        );
        figure::drawn(name, &title, x_axis, y_axis, &series.collect::<Vec<_>>())
    };
    let (times, sizes) = ("Saving and restoring", "Size of a snapshot");
    let by = (
        "memory_mib",
        Axis::Log("MiB of memory, 200 used by programs"),
    );
    let mut figures = vec![
        drawn("snapshots-time", times, by, false),
        drawn("snapshots-size", sizes, by, true),
    ];
    if samples.iter().any(|s| s["used_mib"] != 200) {
        let by = ("used_mib", Axis::Linear("MiB used by programs, of 2048"));
        figures.push(drawn("snapshots-used-time", times, by, false));
        figures.push(drawn("snapshots-used-size", sizes, by, true));
    }
    figures.into_iter().flatten().collect()
}
