//! Measures how much ksmd slows guests down, by its scan rate (study C's figure 1). Two guests,
//! each on its own core, run a program that computes, then one that writes to its memory.

use std::time::Duration;

use memfold_fold::EngineSettings;
use memfold_ksm::{Controls, NOTES, Run, Settings};
use memfold_lab::Lab;
use serde_json::{Map, Value, json};

use super::super::figure::{self, Axis, Series};
use super::super::record::{median, spread};
use super::guest::{self, Held};
use super::scale::{SPEEDS, Scale};

const VMS: [&str; 2] = ["a", "b"];

/// Work of the guests: name of the result, request, and number of repetitions (5 to 10 s in an
/// emulated guest).
const WORK: [(&str, &str, u32); 2] = [("cpu", "primes", 500_000), ("memory", "write", 300)];

/// Time for which ksmd runs before the guests begin to work.
const HEAD_START: Duration = Duration::from_secs(3);

/// Seconds that the guests' work took, by round and speed.
type Rounds = Vec<Vec<f64>>;

pub(super) fn measure(scale: &Scale) -> anyhow::Result<(Map<String, Value>, Vec<Value>)> {
    let controls = Controls::default();
    let lab = Lab::new(EngineSettings::default())?;
    for name in VMS {
        guest::boot(&lab, name, scale.memory)?;
    }
    guest::hold(&lab, &VMS, Held::Identical, scale.data_mib)?;
    let speeds = &SPEEDS[..scale.speeds];
    let mut found: [Rounds; WORK.len()] = Default::default();
    // The first round warms up the emulator, which translates the guests' code.
    for round in 0..=scale.rounds {
        let mut rows: [Vec<f64>; WORK.len()] = Default::default();
        for &speed in speeds {
            let run = speed.map(|pages| {
                let settings = Settings {
                    pages_to_scan: Some(pages),
                    ..Settings::kernel_default()
                };
                Run::start(&controls, NOTES.as_ref(), &settings)
            });
            let run = run.transpose()?;
            std::thread::sleep(HEAD_START);
            for (row, (_, what, times)) in rows.iter_mut().zip(WORK) {
                let took = guest::ask(&lab, &VMS, what, times)?;
                row.push(took.iter().map(|one| one.seconds).fold(0.0, f64::max));
            }
            if let Some(run) = run {
                run.stop(true)?;
            }
            let last = rows
                .each_ref()
                .map(|row| row.last().copied().unwrap_or(0.0));
            eprintln!(
                "{}: cpu {:.1} s, memory {:.1} s",
                name_of(speed),
                last[0],
                last[1]
            );
        }
        if round > 0 {
            for (all, row) in found.iter_mut().zip(rows) {
                all.push(row);
            }
        }
    }
    let mut results = Map::new();
    let mut samples = Vec::new();
    for (rounds, (work, ..)) in found.iter().zip(WORK) {
        results.extend(slowdowns(work, rounds, speeds));
        for (round, row) in rounds.iter().enumerate() {
            let each = speeds.iter().zip(row);
            samples.extend(each.map(|(speed, seconds)| {
                json!({ "part": "slowdown", "work": work, "round": round, "pages_to_scan": speed.unwrap_or(0), "seconds": seconds })
            }));
        }
    }
    Ok((results, samples))
}

fn name_of(speed: Option<u64>) -> String {
    speed.map_or_else(
        || "off".to_owned(),
        |pages| format!("{pages} pages each 20 ms"),
    )
}

/// Returns the slowdown compared with KSM off in the same round, in percent.
fn slowdowns(work: &str, rounds: &Rounds, speeds: &[Option<u64>]) -> Map<String, Value> {
    let mut results = Map::new();
    for (at, speed) in speeds.iter().enumerate() {
        if let Some(pages) = speed {
            let percent: Vec<f64> = rounds
                .iter()
                .map(|row| (row[at] / row[0] - 1.0) * 100.0)
                .collect();
            let key = format!("slowdown_{work}_{pages}_percent");
            results.insert(key, spread(&percent));
        }
    }
    results
}

/// Draws the slowdown by ksmd's speed.
pub(super) fn figure(samples: &[Value]) -> Option<(String, String)> {
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let series = WORK.iter().filter_map(|(work, ..)| {
        let mine: Vec<&Value> = samples
            .iter()
            .filter(|s| s["part"] == "slowdown" && s["work"] == *work)
            .collect();
        let median_at = |pages: u64| {
            let at = mine.iter().filter(|s| s["pages_to_scan"] == pages);
            median(&at.map(|s| number(&s["seconds"])).collect::<Vec<_>>())
        };
        let off = median_at(0);
        let points = SPEEDS.iter().flatten().map(|&pages| {
            let rate = pages as f64 * 50.0;
            (rate, (median_at(pages) / off - 1.0) * 100.0)
        });
        let points: Vec<(f64, f64)> = points.filter(|point| point.1.is_finite()).collect();
        (!points.is_empty()).then(|| Series {
            name: format!("{work}-bound"),
            points,
            dashed: false,
        })
    });
    let series: Vec<Series> = series.collect();
    (!series.is_empty()).then(|| {
        let svg = figure::lines(
            "How much ksmd slows two guests down on two cores",
            &Axis::log("pages a second that ksmd is to scan"),
            &Axis::linear("% longer than with KSM off"),
            &series,
        );
        ("ksm-slowdown".to_owned(), svg)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowdowns_are_relative_to_ksm_off_in_the_same_round() {
        let rounds = vec![vec![10.0, 11.0], vec![20.0, 30.0], vec![10.0, 10.0]];
        let found = slowdowns("cpu", &rounds, &SPEEDS[..2]);
        let spread = &found["slowdown_cpu_100_percent"];
        let median = spread["median"].as_f64().unwrap();
        assert!((median - 10.0).abs() < 1e-9, "{spread}");
        assert_eq!(found.len(), 1);
        let samples = [0, 100].map(|pages| {
            json!({ "part": "slowdown", "work": "cpu", "pages_to_scan": pages, "seconds": 10.0 + f64::from(pages) })
        });
        assert!(figure(&samples).unwrap().1.contains("cpu-bound"));
    }
}
