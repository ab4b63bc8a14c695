//! The part `speed` of the study `ksm`: measures how long KSM takes to merge all equal pages, and
//! how much CPU time. KSM's scan rate is set by the kernel's defaults, by memfold, or by the
//! kernel's advisor.

use std::time::{Duration, Instant};

use memfold_api::{KsmStartRequest, KsmStopRequest};
use memfold_fold::EngineSettings;
use memfold_ksm::{Controls, Settings, Status};
use memfold_lab::{Lab, wait_for};
use serde_json::{Value, json};

use super::guest::{self, Held};
use super::scale::Scale;
use crate::figure::{self, Axis, Figure, Series, number};
use crate::host::{ksmd, start_ksm};
use crate::record::{Found, median, ratios, spread};

const VMS: [&str; 2] = ["a", "b"];

/// Percent of the mergeable memory at which an arm ends.
const ENOUGH_PERCENT: u64 = 90;

/// Longest time of an arm.
const LIMIT: Duration = Duration::from_secs(900);

/// Time between two measurements of merged memory.
const INTERVAL: Duration = Duration::from_millis(500);

/// CPU limit of `memfold ksm start` by default, in percent of one core.
const CPU_PERCENT: f64 = 20.0;
const TARGET_S: f64 = 120.0;

/// Returns the settings of KSM with which ksmd scans as fast as it can.
pub(super) fn full_speed() -> Settings {
    Settings {
        pages_to_scan: Some(20_000),
        sleep_millisecs: Some(1),
        smart_scan: Some(0),
        ..Settings::kernel_default()
    }
}

/// Makes KSM merge all mergeable pages, until two full scans in a row have merged no further page.
/// Returns the number of merged pages.
pub(super) fn merge_all(lab: &Lab, names: &[&str], controls: &Controls) -> anyhow::Result<u64> {
    let scans = || guest::counter(Status::read(controls)?.full_scans, "full_scans");
    let (mut most, mut since) = (0, scans()?);
    wait_for("KSM did not merge all", (LIMIT, INTERVAL), || {
        let now = guest::merged_pages(lab, names)?;
        if now > most + most / 200 {
            (most, since) = (now, scans()?);
        }
        Ok((scans()? > since + 2).then_some(most.max(now)))
    })
}

/// The program that sets ksmd's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    Default,
    Steered,
    Advisor,
}

impl Arm {
    const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Steered => "steered",
            Self::Advisor => "advisor",
        }
    }
}

/// Result of one arm, which ends when enough memory is merged.
#[derive(Clone, Debug)]
struct Reached {
    arm: Arm,
    seconds: f64,
    cpu_s: f64,
    merged: u64,
    scanned: u64,
    /// Number of merged pages over seconds.
    curve: Vec<(f64, f64)>,
}

impl Reached {
    fn cpu_us_per_merged_page(&self) -> f64 {
        self.cpu_s * 1e6 / self.merged.max(1) as f64
    }

    fn cpu_us_per_scanned_page(&self) -> f64 {
        self.cpu_s * 1e6 / self.scanned.max(1) as f64
    }

    fn json(&self, round: usize) -> Value {
        json!({
            "part": "speed", "arm": self.arm.name(), "round": round, "seconds": self.seconds, "ksmd_cpu_s": self.cpu_s,
            "merged_pages": self.merged, "scanned_pages": self.scanned, "curve": self.curve,
        })
    }
}

/// Lets KSM merge `wanted` pages.
fn reach(lab: &Lab, arm: Arm, wanted: u64, controls: &Controls) -> anyhow::Result<Reached> {
    let ksmd = ksmd()?;
    let scanned = || guest::counter(Status::read(controls)?.pages_scanned, "pages_scanned");
    let (cpu, before) = (ksmd.cpu_time()?, scanned()?);
    let began = Instant::now();
    // KSM is run by the study itself, or by the daemon.
    let mut alone = None;
    if arm == Arm::Default {
        alone = Some(start_ksm(&Settings::kernel_default())?);
    } else {
        lab.daemon().ksm().start(&KsmStartRequest {
            domain: Some("lab".into()),
            cpu_percent: CPU_PERCENT,
            target_s: TARGET_S,
            advisor: arm == Arm::Advisor,
        })?;
    }
    let mut curve = Vec::new();
    let late = format!(
        "{}: {wanted} pages were not merged (do other programs set KSM, or is the host under pressure?)",
        arm.name()
    );
    let merged = wait_for(late, (LIMIT, INTERVAL), || {
        let merged = guest::merged_pages(lab, &VMS)?;
        curve.push((began.elapsed().as_secs_f64(), merged as f64));
        Ok((merged >= wanted).then_some(merged))
    })?;
    let reached = Reached {
        arm,
        seconds: began.elapsed().as_secs_f64(),
        cpu_s: ksmd.cpu_time()?.saturating_sub(cpu).as_secs_f64(),
        merged,
        scanned: scanned()?.saturating_sub(before),
        curve,
    };
    match alone {
        Some(run) => run.stop(true)?,
        None => drop(lab.daemon().ksm().stop(&KsmStopRequest { unmerge: true })?),
    }
    eprintln!(
        "{}: {merged} pages after {:.1} s, {:.1} us of ksmd's CPU each",
        arm.name(),
        reached.seconds,
        reached.cpu_us_per_merged_page()
    );
    Ok(reached)
}

/// Boots two guests with the same data, and measures how long KSM takes to merge them, with each
/// arm in turn.
pub(super) fn measure(scale: &Scale) -> anyhow::Result<Found> {
    let controls = Controls::default();
    let lab = Lab::new(EngineSettings::default())?;
    for name in VMS {
        guest::boot(&lab, name, scale.memory)?;
    }
    guest::hold(&lab, &VMS, Held::Identical, scale.data_mib)?;
    let run = start_ksm(&full_speed())?;
    let all = merge_all(&lab, &VMS, &controls)?;
    run.stop(true)?;
    eprintln!("{all} pages of {} VMs can be merged", VMS.len());
    let mut arms = vec![Arm::Default, Arm::Steered];
    if controls.text("advisor_mode")?.is_some() {
        arms.push(Arm::Advisor);
    }
    let wanted = all * ENOUGH_PERCENT / 100;
    let mut rounds: Vec<Vec<Reached>> = Vec::new();
    for _ in 0..scale.rounds {
        let reached = arms.iter().map(|&arm| reach(&lab, arm, wanted, &controls));
        rounds.push(reached.collect::<anyhow::Result<_>>()?);
        // The state of the machine changes, so the arms run first in turn.
        arms.reverse();
    }
    let samples = rounds.iter().enumerate();
    let samples = samples.flat_map(|(round, all)| all.iter().map(move |one| one.json(round)));
    Ok(Found {
        samples: samples.collect(),
        results: results(&rounds, &arms),
        ..Found::default()
    })
}

/// A figure of an arm.
type Of = fn(&Reached) -> f64;

fn results(rounds: &[Vec<Reached>], arms: &[Arm]) -> Value {
    let figures: [(&str, Of); 3] = [
        ("time_to_90_percent", |one| one.seconds),
        ("cpu_per_merged_page_us", Reached::cpu_us_per_merged_page),
        ("cpu_per_scanned_page_us", Reached::cpu_us_per_scanned_page),
    ];
    let mut results = json!({});
    for (key, of) in figures {
        let each = |arm: Arm| -> Vec<f64> {
            let all = rounds.iter().flatten().filter(|one| one.arm == arm);
            all.map(of).collect()
        };
        for &arm in arms {
            let name = arm.name();
            results[format!("{name}_{key}")] = spread(each(arm));
            if arm != Arm::Default {
                let ratios = ratios(&each(arm), &each(Arm::Default));
                results[format!("{name}_vs_default_{key}")] = median(ratios).into();
            }
        }
    }
    results
}

/// Draws the memory that KSM has merged over time, in the first round.
pub(super) fn figure(samples: &[Value]) -> Option<Figure> {
    let first = samples.iter();
    let first = first.filter(|s| s["part"] == "speed" && s["round"] == 0);
    let series = first.map(|sample| {
        let curve = sample["curve"].as_array().into_iter().flatten();
        let points = curve.map(|p| (number(&p[0]), number(&p[1]) / 256.0));
        Series {
            name: sample["arm"].as_str().unwrap_or_default().to_owned(),
            points: points.collect(),
            dashed: sample["arm"] == "default",
        }
    });
    let title = "KSM: merged memory of two VMs, until 90 % of all that can be";
    let (x, y) = (Axis::Linear("s"), Axis::Linear("MiB merged"));
    figure::drawn("ksm-speed", title, x, y, &series.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ksm_benchmark_reports_the_median_of_the_ratios_of_all_rounds() {
        let one = |arm, seconds| Reached {
            arm,
            seconds,
            cpu_s: seconds / 10.0,
            merged: 1000,
            scanned: 2000,
            curve: vec![(0.0, 0.0), (seconds, 1000.0)],
        };
        let round = |default, steered| vec![one(Arm::Default, default), one(Arm::Steered, steered)];
        let rounds = [round(100.0, 10.0), round(50.0, 10.0), round(100.0, 30.0)];
        let found = results(&rounds, &[Arm::Steered, Arm::Default]);
        let near = |key: &str, value: f64| {
            let is = found[key].as_f64().unwrap();
            assert!((is - value).abs() < 1e-9, "{key}: {is}");
        };
        near("steered_vs_default_time_to_90_percent", 0.2);
        near("steered_vs_default_cpu_per_merged_page_us", 0.2);
        assert_eq!(found["default_time_to_90_percent"]["median"], 100.0);
        assert_eq!(found["default_cpu_per_merged_page_us"]["min"], 5000.0);
        assert!(found["default_vs_default_time_to_90_percent"].is_null());
        let samples: Vec<Value> = rounds[0].iter().map(|one| one.json(0)).collect();
        assert!(figure(&samples).unwrap().1.contains("steered"));
        assert!(figure(&[]).is_none());
    }
}
