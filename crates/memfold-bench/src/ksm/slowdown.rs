//! The part `slowdown` of the study `ksm`: measures how much slower guests run while KSM's thread
//! (ksmd) scans memory, at different scan rates (figure 1 of study C, a published study). Two
//! guests, each on its own core, first run a program that computes, and then a program that writes
//! to its memory.

use std::time::Duration;

use memfold_fold::EngineSettings;
use memfold_ksm::Settings;
use memfold_lab::Lab;
use serde_json::{Value, json};

use super::guest::{self, Held};
use super::scale::{SPEEDS, Scale};
use crate::figure::{self, Axis, Figure, Series, number};
use crate::host::start_ksm;
use crate::record::{Found, median, spread};

const VMS: [&str; 2] = ["a", "b"];

/// Work of the guests: name of the result, request, and number of repetitions (5 to 10 s in an
/// emulated guest).
const WORK: [(&str, &str, u32); 2] = [("cpu", "primes", 500_000), ("memory", "write", 300)];

/// Time for which ksmd runs before the guests begin to work.
const HEAD_START: Duration = Duration::from_secs(3);

/// Seconds that the guests' work took, by round and speed.
type Rounds = Vec<Vec<f64>>;

pub(super) fn measure(scale: &Scale) -> anyhow::Result<Found> {
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
                start_ksm(&Settings {
                    pages_to_scan: Some(pages),
                    ..Settings::kernel_default()
                })
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
            let last = rows.each_ref().map(|row| row.last().copied());
            let [cpu, memory] = last.map(Option::unwrap_or_default);
            let pages = speed.unwrap_or(0);
            eprintln!("{pages} pages each 20 ms: cpu {cpu:.1} s, memory {memory:.1} s");
        }
        if round > 0 {
            for (all, row) in found.iter_mut().zip(rows) {
                all.push(row);
            }
        }
    }
    let mut all = Found::default();
    for (rounds, (work, ..)) in found.iter().zip(WORK) {
        for (key, percent) in slowdowns(work, rounds, speeds) {
            all.results[key] = spread(percent);
        }
        for (round, row) in rounds.iter().enumerate() {
            let each = speeds.iter().zip(row);
            all.samples.extend(each.map(|(speed, seconds)| {
                json!({ "part": "slowdown", "work": work, "round": round, "pages_to_scan": speed.unwrap_or(0), "seconds": seconds })
            }));
        }
    }
    Ok(all)
}

/// Returns the slowdown compared with KSM off in the same round, in percent, by key.
fn slowdowns(work: &str, rounds: &Rounds, speeds: &[Option<u64>]) -> Vec<(String, Vec<f64>)> {
    let of = |(at, speed): (usize, &Option<u64>)| {
        let percent = |row: &Vec<f64>| (row[at] / row[0] - 1.0) * 100.0;
        let key = format!("slowdown_{work}_{}_percent", (*speed)?);
        Some((key, rounds.iter().map(percent).collect()))
    };
    speeds.iter().enumerate().filter_map(of).collect()
}

/// Draws how much slower guests run over the scan rate of ksmd.
pub(super) fn figure(samples: &[Value]) -> Option<Figure> {
    let series = WORK.iter().filter_map(|(work, ..)| {
        let mine = samples.iter();
        let mine = mine.filter(|s| s["part"] == "slowdown" && s["work"] == *work);
        let median_at = |pages: u64| {
            let at = mine.clone().filter(|s| s["pages_to_scan"] == pages);
            median(at.map(|s| number(&s["seconds"])))
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
    let title = "How much ksmd slows two guests down on two cores";
    let x = Axis::Log("pages a second that ksmd is to scan");
    let y = Axis::Linear("% longer than with KSM off");
    figure::drawn("ksm-slowdown", title, x, y, &series.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ksm_benchmark_computes_slowdowns_relative_to_the_run_without_ksm_of_the_same_round() {
        let rounds = vec![vec![10.0, 11.0], vec![20.0, 30.0], vec![10.0, 10.0]];
        let found = slowdowns("cpu", &rounds, &SPEEDS[..2]);
        let [(key, percent)] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(key, "slowdown_cpu_100_percent");
        assert!((median(percent) - 10.0).abs() < 1e-9, "{percent:?}");
        let samples = [0, 100].map(|pages| {
            json!({ "part": "slowdown", "work": "cpu", "pages_to_scan": pages, "seconds": 10.0 + f64::from(pages) })
        });
        assert!(figure(&samples).unwrap().1.contains("cpu-bound"));
    }
}
