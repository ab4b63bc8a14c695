//! Computes study C's results and figures from its arms.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::arm::{ArmRun, BUDGETS, Mechanism, VmWork};
use crate::figure::{self, Axis, Figure, Series};

/// Number of pages in a MiB.
const PAGES_PER_MIB: f64 = 256.0;

/// Computes the results as medians of the repeats. The headline figures are those of the first of
/// [`BUDGETS`].
pub(super) fn of(runs: &[ArmRun]) -> Value {
    let mut results = Map::new();
    let headline = BUDGETS[0];
    let fold = arm(runs, &fold_name(headline));
    let ksm = arm(runs, "ksm_default");
    let equal = arm(runs, &format!("ksm_equal_cpu_{headline}"));
    let mut put = |key: &str, value: Value| {
        results.insert(key.into(), value);
    };
    put("ratio_over_ksm_default", ratio(&fold, &ksm, end_pages));
    put(
        "ratio_over_ksm_equal_cpu",
        ratio(&fold, &equal, ArmRun::mean_shared),
    );
    put(
        "ratio_over_ksm_default_mean",
        ratio(&fold, &ksm, ArmRun::mean_shared),
    );
    put(
        "share_of_matched_folded_percent",
        median(&fold, matched_folded_percent).into(),
    );
    put(
        "p95_hint_to_fold_s",
        median(&fold, |r| r.fold.hint_to_fold_p95_s.unwrap_or(f64::NAN)).into(),
    );
    put(
        "p50_hint_to_fold_s",
        median(&fold, |r| r.fold.hint_to_fold_p50_s.unwrap_or(f64::NAN)).into(),
    );

    let slowdowns = slowdowns(runs);
    put("guest_slowdown_percent", middle(&slowdowns).into());
    put(
        "guest_slowdown_min_percent",
        slowdowns.first().copied().into(),
    );
    put(
        "guest_slowdown_max_percent",
        slowdowns.last().copied().into(),
    );
    let beside = arm(runs, &beside_name(headline));
    put("guest_slowdown_parts_percent", slowdown_parts(&beside));
    put(
        "guest_checksum_errors",
        runs.iter().map(|r| r.differing_files).sum::<u64>().into(),
    );
    put(
        "guest_files_checked",
        runs.iter().map(|r| r.checked_files).sum::<u64>().into(),
    );
    put("guest_build_errors", build_errors(runs).into());
    put("fold_cpu_s", median(&fold, ArmRun::scanner_cpu_s).into());
    put(
        "ksm_default_cpu_s",
        median(&ksm, ArmRun::scanner_cpu_s).into(),
    );
    put(
        "ksm_equal_cpu_s",
        median(&equal, ArmRun::scanner_cpu_s).into(),
    );
    put("agent_cpu_percent", median(&fold, agent_percent).into());

    let names: BTreeSet<String> = runs.iter().map(|r| r.mechanism.name()).collect();
    let arms: Map<String, Value> = names
        .into_iter()
        .map(|name| (name.clone(), arm_figures(&arm(runs, &name))))
        .collect();
    put("arms", arms.into());
    Value::Object(results)
}

fn arm_figures(runs: &[&ArmRun]) -> Value {
    let spread = |of: fn(&ArmRun) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(|r| of(r)).collect();
        values.sort_by(f64::total_cmp);
        json!({"min": values.first(), "median": middle(&values), "max": values.last()})
    };
    let folds = |r: &&&ArmRun| {
        matches!(
            r.mechanism,
            Mechanism::Fold { .. } | Mechanism::FoldBesideNone { .. }
        )
    };
    let fold = runs.last().filter(folds);
    json!({
        "shared_at_end_mib": spread(|r| end_pages(r) / PAGES_PER_MIB),
        "shared_mean_mib": spread(|r| r.mean_shared() / PAGES_PER_MIB),
        "scanner_cpu_s": spread(ArmRun::scanner_cpu_s),
        "scanner_cpu_percent": spread(|r| r.scanner_cpu_s() / r.end().t_s.max(1e-3) * 100.0),
        "agent_cpu_percent": spread(agent_percent),
        "work_wall_s": spread(|r| mean(r.work.iter().map(|w| w.wall_s))),
        "work_vcpu_s": spread(|r| mean(r.work.iter().map(|w| w.vcpu_s))),
        "work_system_s": spread(|r| mean(r.work.iter().map(|w| w.system_s))),
        "work_faults": spread(|r| mean(r.work.iter().map(|w| w.faults))),
        "work_delayed_s": spread(|r| mean(r.work.iter().map(|w| w.delay_s))),
        "ksm_scanned_pages_per_s": runs
            .last()
            .and_then(|r| Some(r.end().ksm_scanned_pages? as f64 / r.end().t_s)),
        "other_load_percent": spread(|r| r.other_load_percent),
        "fold": fold.map(|r| json!({
            "share_of_matched_folded_percent": matched_folded_percent(r),
            "p95_hint_to_fold_s": r.fold.hint_to_fold_p95_s,
            "engine_cpu_s": r.fold.engine_cpu_s,
            "library_cpu_s": r.fold.library_cpu_s,
            "report_cpu_s": r.fold.report_cpu_s,
            "vms": r.fold.vms,
        })),
    })
}

fn fold_name(pages_per_second: u64) -> String {
    Mechanism::Fold { pages_per_second }.name()
}

fn beside_name(pages_per_second: u64) -> String {
    Mechanism::FoldBesideNone { pages_per_second }.name()
}

fn arm<'a>(runs: &'a [ArmRun], name: &str) -> Vec<&'a ArmRun> {
    runs.iter().filter(|r| r.mechanism.name() == name).collect()
}

fn end_pages(run: &ArmRun) -> f64 {
    run.end().shared_pages as f64
}

/// Returns the part of the foldable pages that were folded at the end of the work, in percent.
fn matched_folded_percent(run: &ArmRun) -> f64 {
    let end = run.end();
    end.matched_folded_pages as f64 / (end.matched_pages as f64).max(1.0) * 100.0
}

/// Returns the CPU time of the agents in percent of a guest's vCPU.
fn agent_percent(run: &ArmRun) -> f64 {
    let with_agent = match run.mechanism {
        Mechanism::FoldBesideNone { .. } => run.work.len() / 2,
        _ => run.work.len(),
    };
    let work = &run.work[..with_agent];
    mean(work.iter().map(|w| w.agent_s / w.wall_s.max(1e-3) * 100.0))
}

/// Returns the VMs of a run that were folded, each with the VM of the same image that was not.
fn pairs(run: &ArmRun) -> impl Iterator<Item = (&VmWork, &VmWork)> {
    let (folded, plain) = run.work.split_at(run.work.len() / 2);
    folded.iter().zip(plain)
}

/// Returns the time of a VM's work without the time that it waited for a core.
fn own_time(work: &VmWork) -> f64 {
    work.wall_s - work.delay_s
}

/// Returns the CPU time of a guest's agent. The guest counts all time as its own, even if its vCPU
/// waits for a core, so this is corrected.
fn agent_time(work: &VmWork) -> f64 {
    work.agent_s * work.vcpu_s / work.wall_s.max(1e-3)
}

/// Returns the CPU time of the mechanism for each VM that it worked on.
fn scanner_each(run: &ArmRun) -> f64 {
    run.scanner_cpu_s() / pairs(run).count().max(1) as f64
}

/// Returns by how much longer folded guests worked than the guests beside them, in percent, sorted.
/// The CPU time of the mechanism is counted in full, in equal parts.
fn slowdowns(runs: &[ArmRun]) -> Vec<f64> {
    let mut all = Vec::new();
    for run in arm(runs, &beside_name(BUDGETS[0])) {
        let percent = pairs(run).map(|(folded, plain)| {
            let with = own_time(folded) + scanner_each(run);
            (with / own_time(plain) - 1.0) * 100.0
        });
        all.extend(percent);
    }
    all.sort_by(f64::total_cmp);
    all
}

/// Returns the parts of the slowdown, on average.
fn slowdown_parts(runs: &[&ArmRun]) -> Value {
    let part = |of: fn(&ArmRun, &VmWork, &VmWork) -> f64| {
        let of_run = |run: &&ArmRun| -> Vec<f64> {
            let percent =
                pairs(run).map(|(folded, plain)| of(run, folded, plain) / own_time(plain) * 100.0);
            percent.collect()
        };
        mean(runs.iter().flat_map(of_run))
    };
    json!({
        "scanner": part(|run, _, _| scanner_each(run)),
        "agent": part(|_, folded, plain| agent_time(folded) - agent_time(plain)),
        "rest_of_vcpu": part(|_, folded, plain| {
            folded.vcpu_s - agent_time(folded) - plain.vcpu_s + agent_time(plain)
        }),
        "waiting": part(|_, folded, plain| own_time(folded) - folded.vcpu_s - own_time(plain) + plain.vcpu_s),
    })
}

/// Returns the number of guests whose compiled program differs from that of most guests.
fn build_errors(runs: &[ArmRun]) -> usize {
    let outputs = || runs.iter().flat_map(|r| &r.work).map(|w| &w.output);
    let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
    for output in outputs() {
        *counts.entry(output).or_default() += 1;
    }
    outputs().count() - counts.values().max().copied().unwrap_or(0)
}

/// Returns the median of the repeats' ratios. If the other arm shared less than a page in a repeat,
/// returns a text instead, because a ratio over almost nothing means nothing.
fn ratio(one: &[&ArmRun], other: &[&ArmRun], of: fn(&ArmRun) -> f64) -> Value {
    if other.iter().any(|run| of(run) < 1.0) {
        return "no ratio: KSM shared nothing".into();
    }
    let pairs = one.iter().zip(other);
    let mut ratios: Vec<f64> = pairs.map(|(a, b)| of(a) / of(b)).collect();
    ratios.sort_by(f64::total_cmp);
    middle(&ratios).into()
}

fn median(runs: &[&ArmRun], of: fn(&ArmRun) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(|r| of(r)).collect();
    values.sort_by(f64::total_cmp);
    middle(&values)
}

/// Returns the median of sorted values.
fn middle(values: &[f64]) -> f64 {
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(s, n), v| (s + v, n + 1.0));
    sum / count
}

/// Draws the study's figures: memory shared and CPU used over time, of the first repeat.
#[must_use]
pub fn figures(study: &Value) -> Vec<Figure> {
    let empty = Vec::new();
    let samples = study["samples"].as_array().unwrap_or(&empty);
    let mut names: Vec<&str> = Vec::new();
    for name in samples.iter().filter_map(|s| s["arm"].as_str()) {
        if !names.contains(&name) && !name.ends_with("none") {
            names.push(name);
        }
    }
    let series = |value: fn(&Value) -> f64| {
        let line = |name: &&str| Series {
            name: words(name),
            points: samples
                .iter()
                .filter(|s| s["arm"] == **name && s["repeat"] == 0)
                .map(|s| (s["t_s"].as_f64().unwrap_or(f64::NAN), value(s)))
                .collect(),
            dashed: name.starts_with("ksm"),
        };
        names.iter().map(line).collect::<Vec<_>>()
    };
    let time = Axis::linear("seconds since the compilers began");
    let shared = figure::lines(
        "Memory saved while two VMs compile",
        &time,
        &Axis::linear("MiB"),
        &series(|s| s["shared_pages"].as_f64().unwrap_or(f64::NAN) / PAGES_PER_MIB),
    );
    let cpu = figure::lines(
        "CPU of what shares it (engine and library, or ksmd)",
        &time,
        &Axis::linear("CPU seconds"),
        &series(|s| s["scanner_cpu_s"].as_f64().unwrap_or(f64::NAN)),
    );
    vec![("hints-shared".into(), shared), ("hints-cpu".into(), cpu)]
}

/// Returns an arm's name for people.
fn words(name: &str) -> String {
    match name.rsplit_once('_') {
        Some(("fold", rate)) => format!("folding, {rate} pages/s"),
        Some(("ksm_equal_cpu", rate)) => format!("KSM, CPU of folding {rate}/s"),
        _ => "KSM, kernel default".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hints::arm::Sample;
    use memfold_fold::EngineStats;

    fn run(mechanism: Mechanism, shared_pages: u64, wall_s: f64) -> ArmRun {
        let work = VmWork {
            wall_s,
            delay_s: 10.0,
            vcpu_s: wall_s - 10.0,
            system_s: 0.0,
            faults: 0.0,
            agent_s: 1.0,
            output: "same".into(),
        };
        let sample = |t_s, shared_pages| Sample {
            t_s,
            shared_pages,
            scanner_cpu_s: t_s / 50.0,
            matched_pages: 200,
            matched_folded_pages: 190,
            ..Sample::default()
        };
        ArmRun {
            mechanism,
            repeat: 0,
            samples: vec![sample(0.0, 0), sample(100.0, shared_pages)],
            work: vec![work.clone(), work],
            checked_files: 10,
            differing_files: 0,
            other_load_percent: 0.0,
            fold: EngineStats::default(),
        }
    }

    fn runs() -> Vec<ArmRun> {
        let fold = Mechanism::Fold {
            pages_per_second: BUDGETS[0],
        };
        let equal = Mechanism::KsmEqualCpu {
            pages_per_second: BUDGETS[0],
            cpu: Vec::new(),
        };
        let beside = Mechanism::FoldBesideNone {
            pages_per_second: BUDGETS[0],
        };
        let mut beside = run(beside, 6000, 113.0);
        beside.work[1].wall_s = 110.0;
        beside.work[1].vcpu_s = 100.0;
        beside.work[1].agent_s = 0.0;
        vec![
            beside,
            run(Mechanism::None, 0, 111.0),
            run(fold, 6000, 113.0),
            run(Mechanism::KsmDefault, 500, 112.0),
            run(equal, 0, 112.0),
        ]
    }

    fn near(value: &Value, wanted: f64) -> bool {
        value.as_f64().is_some_and(|v| (v - wanted).abs() < 1e-6)
    }

    #[test]
    fn headline_results_of_the_hints_study_are_computed_from_its_arms() {
        let results = of(&runs());
        assert!(near(&results["ratio_over_ksm_default"], 12.0));
        assert_eq!(
            results["ratio_over_ksm_equal_cpu"],
            "no ratio: KSM shared nothing"
        );
        assert!(near(&results["share_of_matched_folded_percent"], 95.0));
        // The expected slowdown compares (113 - 10 + 2) with (110 - 10).
        assert!(near(&results["guest_slowdown_percent"], 5.0));
        let parts = &results["guest_slowdown_parts_percent"];
        let agent = 103.0 / 113.0;
        for (part, percent) in [
            ("scanner", 2.0),
            ("agent", agent),
            ("rest_of_vcpu", 3.0 - agent),
            ("waiting", 0.0),
        ] {
            assert!(near(&parts[part], percent), "{part}: {parts}");
        }
        assert_eq!(results["guest_checksum_errors"], 0);
        assert_eq!(results["guest_build_errors"], 0);
        assert!(near(
            &results["arms"]["fold_5000"]["shared_at_end_mib"]["median"],
            6000.0 / 256.0
        ));
    }

    #[test]
    fn a_guest_with_a_different_build_output_counts_as_a_build_error() {
        let mut runs = runs();
        runs[3].work[1].output = "other".into();
        assert_eq!(of(&runs)["guest_build_errors"], 1);
    }

    #[test]
    fn figures_of_the_hints_study_show_folding_and_ksm() {
        let runs = runs();
        let samples: Vec<Value> = runs.iter().flat_map(ArmRun::samples_json).collect();
        let drawn = figures(&json!({ "samples": samples }));
        assert_eq!(drawn.len(), 2);
        for (_, svg) in drawn {
            assert!(svg.contains("folding, 5000 pages/s") && svg.contains("KSM, kernel default"));
        }
    }
}
