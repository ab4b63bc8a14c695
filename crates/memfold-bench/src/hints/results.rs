//! Computes results and draws figures of the study `hints`, which compares folding with KSM.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::arm::{ArmRun, BUDGETS, Mechanism, PAGES_PER_MIB, VmWork};
use crate::figure::{self, Axis, Figure, Series, number};
use crate::record::{median, sorted, spread};

/// Computes the results as medians of the repeats. The headline figures are those of the first of
/// [`BUDGETS`].
pub(super) fn of(runs: &[ArmRun]) -> Value {
    let fold = arm(runs, Mechanism::Fold(BUDGETS[0]));
    let ksm = arm(runs, Mechanism::KsmDefault);
    let equal = arm(runs, Mechanism::KsmEqualCpu(BUDGETS[0]));
    let beside = arm(runs, Mechanism::FoldBesideNone(BUDGETS[0]));
    let slowdowns = slowdowns(&beside);
    let of_fold = |of: fn(&ArmRun) -> Option<f64>| median(fold.iter().filter_map(|r| of(r)));
    let cpu_s = |runs: &[&ArmRun]| median(runs.iter().map(|r| r.scanner_cpu_s()));
    let sum = |of: fn(&ArmRun) -> u64| runs.iter().map(of).sum::<u64>();
    let names: BTreeSet<String> = runs.iter().map(|r| r.mechanism.name()).collect();
    let arms = names.into_iter().map(|name| {
        let runs = runs.iter().filter(|r| r.mechanism.name() == name);
        let figures = arm_figures(&runs.collect::<Vec<_>>());
        (name, figures)
    });
    json!({
        "ratio_over_ksm_default": ratio(&fold, &ksm, end_pages),
        "ratio_over_ksm_equal_cpu": ratio(&fold, &equal, ArmRun::mean_shared),
        "ratio_over_ksm_default_mean": ratio(&fold, &ksm, ArmRun::mean_shared),
        "share_of_matched_folded_percent": of_fold(|r| Some(matched_folded_percent(r))),
        "p95_hint_to_fold_s": of_fold(|r| r.fold.hint_to_fold_p95_s),
        "p50_hint_to_fold_s": of_fold(|r| r.fold.hint_to_fold_p50_s),
        "guest_slowdown_percent": median(&slowdowns),
        "guest_slowdown_min_percent": slowdowns.first(),
        "guest_slowdown_max_percent": slowdowns.last(),
        "guest_slowdown_parts_percent": slowdown_parts(&beside),
        "guest_checksum_errors": sum(|r| r.differing_files),
        "guest_files_checked": sum(|r| r.checked_files),
        "guest_build_errors": build_errors(runs),
        "fold_cpu_s": cpu_s(&fold),
        "ksm_default_cpu_s": cpu_s(&ksm),
        "ksm_equal_cpu_s": cpu_s(&equal),
        "agent_cpu_percent": of_fold(|r| Some(agent_percent(r))),
        "arms": arms.collect::<Map<_, _>>(),
    })
}

fn arm_figures(runs: &[&ArmRun]) -> Value {
    let spread = |of: fn(&ArmRun) -> f64| spread(runs.iter().map(|r| of(r)));
    let last = runs.last();
    let fold = last.filter(|r| r.mechanism.fold_rate().is_some());
    let scanned = last.and_then(|r| Some(r.end().ksm_scanned_pages? as f64 / r.end().t_s));
    json!({
        "shared_at_end_mib": spread(|r| end_pages(r) / PAGES_PER_MIB),
        "shared_mean_mib": spread(|r| r.mean_shared() / PAGES_PER_MIB),
        "scanner_cpu_s": spread(ArmRun::scanner_cpu_s),
        "scanner_cpu_percent": spread(|r| r.scanner_cpu_s() / r.end().t_s.max(1e-3) * 100.0),
        "agent_cpu_percent": spread(agent_percent),
        "work_wall_s": spread(|r| r.mean(|w| w.wall_s)),
        "work_vcpu_s": spread(|r| r.mean(|w| w.vcpu_s)),
        "work_system_s": spread(|r| r.mean(|w| w.system_s)),
        "work_faults": spread(|r| r.mean(|w| w.faults)),
        "work_delayed_s": spread(|r| r.mean(|w| w.delay_s)),
        "ksm_scanned_pages_per_s": scanned,
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

fn arm(runs: &[ArmRun], mechanism: Mechanism) -> Vec<&ArmRun> {
    let runs = runs.iter().filter(|r| r.mechanism == mechanism);
    runs.collect()
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
        Mechanism::FoldBesideNone(_) => run.work.len() / 2,
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
fn slowdowns(runs: &[&ArmRun]) -> Vec<f64> {
    sorted(runs.iter().flat_map(|run| {
        pairs(run).map(|(folded, plain)| {
            let with = own_time(folded) + scanner_each(run);
            (with / own_time(plain) - 1.0) * 100.0
        })
    }))
}

/// Returns the parts of the slowdown, on average.
fn slowdown_parts(runs: &[&ArmRun]) -> Value {
    let part = |of: fn(&ArmRun, &VmWork, &VmWork) -> f64| {
        mean(runs.iter().flat_map(|run| {
            pairs(run).map(move |(folded, plain)| of(run, folded, plain) / own_time(plain) * 100.0)
        }))
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
    median(pairs.map(|(a, b)| of(a) / of(b))).into()
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(s, n), v| (s + v, n + 1.0));
    sum / count
}

/// Draws the figures of the study `hints` from its record: memory shared and CPU time over time, of
/// the first repeat.
pub fn figures(study: &Value) -> Vec<Figure> {
    let samples = figure::samples(study);
    let mut names: Vec<&str> = Vec::new();
    for name in samples.iter().filter_map(|s| s["arm"].as_str()) {
        if !names.contains(&name) && !name.ends_with("none") {
            names.push(name);
        }
    }
    let time = Axis::Linear("seconds since the compilers began");
    let drawn = |file, title, unit, key: &str, divisor: f64| {
        let line = |name: &&str| {
            let mine = samples
                .iter()
                .filter(|s| s["arm"] == **name && s["repeat"] == 0);
            let points = mine.map(|s| (number(&s["t_s"]), number(&s[key]) / divisor));
            Series {
                name: words(name),
                points: points.collect(),
                dashed: name.starts_with("ksm"),
            }
        };
        let series: Vec<Series> = names.iter().map(line).collect();
        figure::drawn(file, title, time, Axis::Linear(unit), &series)
    };
    let shared = "Memory saved while two VMs compile";
    let cpu = "CPU of what shares it (engine and library, or ksmd)";
    let figures = [
        drawn("hints-shared", shared, "MiB", "shared_pages", PAGES_PER_MIB),
        drawn("hints-cpu", cpu, "CPU seconds", "scanner_cpu_s", 1.0),
    ];
    figures.into_iter().flatten().collect()
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
        let fold = Mechanism::Fold(BUDGETS[0]);
        let equal = Mechanism::KsmEqualCpu(BUDGETS[0]);
        let beside = Mechanism::FoldBesideNone(BUDGETS[0]);
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
    fn the_hints_benchmark_computes_ratios_and_slowdowns_from_its_measured_runs() {
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
    fn if_one_guest_of_the_hints_benchmark_builds_other_output_one_build_error_is_counted() {
        let mut runs = runs();
        runs[3].work[1].output = "other".into();
        assert_eq!(of(&runs)["guest_build_errors"], 1);
    }

    #[test]
    fn the_charts_of_the_hints_benchmark_show_folding_and_ksm() {
        let runs = runs();
        let samples: Vec<Value> = runs.iter().flat_map(ArmRun::samples_json).collect();
        let drawn = figures(&json!({ "samples": samples }));
        assert_eq!(drawn.len(), 2);
        for (_, svg) in drawn {
            assert!(svg.contains("folding, 5000 pages/s") && svg.contains("KSM, kernel default"));
        }
    }
}
