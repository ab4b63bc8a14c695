//! The figures of the report: where each is found in the results of its part, its unit, its target,
//! and the verdict. Targets are those of the pages in docs/results; figures without one are told
//! for comparison.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::parts::{Dose, Part};
use crate::record::{median, sorted};

/// Limit that a figure's median must keep.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Goal {
    /// There is no target.
    Free,
    AtMost(f64),
    AtLeast(f64),
    /// At least so much, but only in full doses, for which the target was set.
    AtLeastInFull(f64),
}

use Goal::{AtLeast, AtLeastInFull, AtMost, Free};

/// A line of the report that is filled from the results of a part.
struct Definition {
    part: Part,
    key: &'static str,
    what: &'static str,
    unit: &'static str,
    /// JSON pointers to values in the part's results, in the order of preference.
    at: &'static str,
    goal: Goal,
}

const fn define(
    part: Part,
    key: &'static str,
    (what, unit): (&'static str, &'static str),
    at: &'static str,
    goal: Goal,
) -> Definition {
    Definition {
        part,
        key,
        what,
        unit,
        at,
        goal,
    }
}

const ALL: &[Definition] = &[
    define(
        Part::Proof,
        "freeze_median_us",
        ("freeze of a page while it is folded, median", "µs"),
        "/guests/freeze_median_us",
        Free,
    ),
    define(
        Part::Proof,
        "freeze_max_us",
        ("freeze of a page while it is folded, longest", "µs"),
        "/guests/freeze_max_us",
        Free,
    ),
    define(
        Part::Fold,
        "fold_us_per_page",
        ("CPU to fold a page, runs of 64", "µs"),
        "/fold_us_per_page/64",
        Free,
    ),
    define(
        Part::Fold,
        "fold_us_per_single_page",
        ("CPU to fold a page, single pages", "µs"),
        "/fold_us_per_page/1",
        Free,
    ),
    define(
        Part::Fold,
        "ratio_fold_over_compare",
        ("CPU to fold, over that of a bare comparison", "times"),
        "/ratio_fold_over_compare",
        AtMost(3.0),
    ),
    define(
        Part::Fold,
        "ksm_us_per_page",
        ("CPU of KSM for a merged page", "µs"),
        "/ksm_us_per_merged_page",
        Free,
    ),
    define(
        Part::Fold,
        "ratio_ksm_over_fold",
        ("CPU of KSM for a page, over that of folding", "times"),
        "/ratio_ksm_over_fold",
        AtLeast(15.0),
    ),
    define(
        Part::HugePages,
        "huge_left_percent",
        ("huge pages left when an eighth of each is folded", "%"),
        "/huge_left_percent",
        Free,
    ),
    define(
        Part::HugePages,
        "huge_fold_us_per_page",
        ("CPU to fold a page of a huge page (split)", "µs"),
        "/fold_us_per_page",
        Free,
    ),
    define(
        Part::HugePages,
        "huge_refilled_percent",
        (
            "huge pages that khugepaged makes again after unfolding",
            "%",
        ),
        "/huge_refilled_percent",
        Free,
    ),
    define(
        Part::HugePages,
        "huge_refill_s",
        ("time of it, or limit of the wait", "s"),
        "/refill_s",
        Free,
    ),
    define(
        Part::Guests,
        "slowdown_percent",
        (
            "slowdown of a guest program while its pages are folded",
            "%",
        ),
        "/slowdown_percent",
        AtMost(3.0),
    ),
    define(
        Part::Guests,
        "slowdown_after_percent",
        ("slowdown of the program on folded pages", "%"),
        "/slowdown_after_percent",
        Free,
    ),
    define(
        Part::Guests,
        "write_us",
        ("guest writes to an unfolded page", "µs"),
        "/write_us",
        Free,
    ),
    define(
        Part::Guests,
        "write_folded_us",
        ("guest writes to a folded page (copy)", "µs"),
        "/write_folded_us",
        Free,
    ),
    define(
        Part::Guests,
        "copy_fault_us",
        ("of it: the fault that copies the page", "µs"),
        "/copy_fault_us",
        Free,
    ),
    define(
        Part::Guests,
        "read_us",
        ("guest reads an unfolded page", "µs"),
        "/read_us",
        Free,
    ),
    define(
        Part::Guests,
        "read_folded_us",
        ("guest reads a page the first time after its fold", "µs"),
        "/read_folded_us",
        Free,
    ),
    define(
        Part::Guests,
        "guest_huge_percent",
        ("guest RAM in huge pages, before folding", "%"),
        "/huge_percent",
        Free,
    ),
    define(
        Part::Guests,
        "guest_huge_folded_percent",
        ("guest RAM in huge pages, folded", "%"),
        "/huge_folded_percent",
        Free,
    ),
    define(
        Part::Snapshots,
        "save_s",
        ("save, 'auto'", "s"),
        "/auto_save_s",
        Free,
    ),
    define(
        Part::Snapshots,
        "qemu_save_s",
        ("save by QEMU's mapped-ram", "s"),
        "/qemu_save_s",
        Free,
    ),
    define(
        Part::Snapshots,
        "save_reduction_percent",
        ("save: less time than QEMU", "%"),
        "/save_reduction_percent",
        AtLeastInFull(40.0),
    ),
    define(
        Part::Snapshots,
        "restore_s",
        ("restore until the VM runs, 'auto'", "s"),
        "/auto_restore_s",
        Free,
    ),
    define(
        Part::Snapshots,
        "restore_reduction_percent",
        ("restore: less time than QEMU", "%"),
        "/restore_reduction_percent",
        AtLeastInFull(95.0),
    ),
    define(
        Part::Snapshots,
        "size_reduction_percent",
        ("size: less than QEMU's", "%"),
        "/size_reduction_percent",
        AtLeastInFull(82.0),
    ),
    define(
        Part::Snapshots,
        "save_none_s",
        ("save without page cache, '--keep none'", "s"),
        "/none_save_s",
        Free,
    ),
    define(
        Part::Snapshots,
        "drop_us_per_page",
        ("guest drops a page of its page cache", "µs"),
        "/drop_us_per_page",
        Free,
    ),
    define(
        Part::Snapshots,
        "host_drop_us_per_page",
        ("host drops a page of its own, for comparison", "µs"),
        "/host_drop_us_per_page",
        Free,
    ),
    define(
        Part::Snapshots,
        "pause_live_ms",
        ("pause of a live save", "ms"),
        "/pause_live_ms",
        Free,
    ),
    define(
        Part::Snapshots,
        "memory_errors",
        ("restored programs whose memory was wrong", ""),
        "/memory_errors",
        AtMost(0.0),
    ),
    define(
        Part::Clones,
        "clone_ms",
        ("start of a clone", "ms"),
        "/start_ms",
        Free,
    ),
    define(
        Part::Clones,
        "clone_p95_ms",
        ("start of a clone, 95th percentile", "ms"),
        "/p95_ms",
        AtMost(300.0),
    ),
    define(
        Part::Clones,
        "clone_burst_ms",
        ("start of a clone right after another", "ms"),
        "/burst_start_ms",
        Free,
    ),
    define(
        Part::Clones,
        "clone_burst_p95_ms",
        (
            "start of a clone right after another, 95th percentile",
            "ms",
        ),
        "/burst/p95_ms",
        Free,
    ),
    define(
        Part::Clones,
        "clone_pss_mib",
        ("memory of a clone (PSS)", "MiB"),
        "/pss_mib",
        Free,
    ),
    define(
        Part::Clones,
        "clone_pss_percent",
        ("memory of a clone, of a booted VM's", "%"),
        "/pss_percent_of_booted",
        AtMost(20.0),
    ),
    define(
        Part::Clones,
        "clone_freed_percent",
        ("memory that the host has back 6 s after a drop", "%"),
        "/freed_back_percent",
        AtLeast(80.0),
    ),
    define(
        Part::Clones,
        "clones_wrong",
        ("clones with wrong memory or the identity of another", ""),
        "/clones_wrong",
        AtMost(0.0),
    ),
    define(
        Part::Fork,
        "fork_pause_ms",
        ("pause of a VM for its fork, 57 MiB written", "ms"),
        "/dirty_57/pause_ms",
        AtMost(30.0),
    ),
    define(
        Part::Fork,
        "fork_returns_ms",
        ("time until 'fork' returns", "ms"),
        "/dirty_57/returns_ms",
        AtMost(100.0),
    ),
    define(
        Part::Fork,
        "fork_child_runs_ms",
        ("time until the fork runs", "ms"),
        "/dirty_57/child_runs_ms",
        AtMost(300.0),
    ),
    define(
        Part::Fork,
        "fork_written_over_changed",
        ("bytes written to disk, over bytes changed", "times"),
        "/dirty_57/written_over_changed",
        AtMost(1.1),
    ),
    define(
        Part::Fork,
        "fork_pss_over_before",
        ("memory of both, over that of the VM before", "times"),
        "/dirty_57/pss_over_before",
        AtMost(1.05),
    ),
    define(
        Part::Fork,
        "fork_fan_out_p95_ms",
        ("start of one of many forks, 95th percentile", "ms"),
        "/fan_out/p95_ms",
        AtMost(300.0),
    ),
    define(
        Part::Fork,
        "forks_wrong",
        ("forks with wrong memory", ""),
        "/forks_wrong",
        AtMost(0.0),
    ),
    define(
        Part::Lending,
        "lent_read_us",
        ("4 KiB at random of lent RAM, QD1, no guest", "µs"),
        "/block_path/read_us",
        Free,
    ),
    define(
        Part::Lending,
        "lent_read_p99_us",
        ("of it: 99th percentile", "µs"),
        "/block_path/read_p99_us",
        Free,
    ),
    define(
        Part::Lending,
        "lent_read_ratio",
        ("such a read, over that of a bare client", "times"),
        "/block_path/read_ratio",
        AtMost(1.3),
    ),
    define(
        Part::Lending,
        "lent_write_ratio",
        ("such a write, over that of a bare client", "times"),
        "/block_path/write_ratio",
        AtMost(1.3),
    ),
    define(
        Part::Lending,
        "guest_swap_read_p50_us",
        ("guest reads a page from lent swap at random, median", "µs"),
        "/randread_p50_us",
        Free,
    ),
    define(
        Part::Lending,
        "guest_swap_read_p99_us",
        (
            "guest reads a page from lent swap at random, 99th percentile",
            "µs",
        ),
        "/randread_p99_us",
        Free,
    ),
    define(
        Part::Lending,
        "seqread_ratio",
        (
            "guest reads lent swap in sequence, over a disk of 150 requests/s",
            "times",
        ),
        "/seqread_ratio_spread",
        AtLeast(3.0),
    ),
    define(
        Part::Lending,
        "randread_ratio",
        (
            "guest reads lent swap at random, over a disk of 150 requests/s",
            "times",
        ),
        "/randread_ratio_spread",
        AtLeast(15.0),
    ),
    define(
        Part::Lending,
        "lend_switch_ms",
        ("swap disk moves to lent RAM", "ms"),
        "/switch_ms",
        Free,
    ),
    define(
        Part::Lending,
        "lend_back_ms",
        ("swap disk moves back", "ms"),
        "/give_back_ms",
        Free,
    ),
    define(
        Part::Lending,
        "wrong_words",
        ("wrong words in the guest's memory", ""),
        "/wrong_words",
        AtMost(0.0),
    ),
];

/// Whether a figure keeps its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Met,
    Missed,
    /// The figure has no target, or none for these doses.
    NoTarget,
    NotMeasured,
}

impl Outcome {
    /// Returns the outcome as text for people.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "**missed**",
            Self::NoTarget => "",
            Self::NotMeasured => "not measured",
        }
    }
}

/// Measured values of a figure. A figure that was measured once has the same value three times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReportFigure {
    /// Name of the figure, unique in a report and the same in all reports of a schema version.
    pub key: String,
    /// Part of the self-test that measures the figure.
    pub part: String,
    /// Meaning of the figure, for people.
    pub what: String,
    pub unit: String,
    /// `None` if the figure was not measured.
    pub values: Option<Spread>,
    /// Target of the median, such as `<= 300`.
    pub target: Option<String>,
    pub outcome: Outcome,
    /// Why the figure was not measured.
    pub why: Option<String>,
}

/// Reads values of a study's record: a number, `{min, median, max}`, or a list of numbers.
fn spread_of(value: &Value) -> Option<Spread> {
    let all = match value {
        Value::Array(numbers) => numbers.iter().filter_map(Value::as_f64).collect(),
        Value::Object(parts) => {
            let part = |name: &str| parts.get(name).and_then(Value::as_f64);
            let (min, median, max) = (part("min")?, part("median")?, part("max")?);
            return Some(Spread { min, median, max });
        }
        number => vec![number.as_f64()?],
    };
    let sorted = sorted(&all);
    Some(Spread {
        min: *sorted.first()?,
        median: median(&sorted),
        max: *sorted.last()?,
    })
}

impl Goal {
    const fn in_dose(self, dose: Dose) -> Self {
        match (self, dose) {
            (AtLeastInFull(least), Dose::Full) => AtLeast(least),
            (AtLeastInFull(_), Dose::Small) => Free,
            (other, _) => other,
        }
    }

    fn target(self) -> Option<String> {
        match self {
            AtMost(most) => Some(format!("<= {most}")),
            AtLeast(least) => Some(format!(">= {least}")),
            Free | AtLeastInFull(_) => None,
        }
    }

    fn outcome(self, median: f64) -> Outcome {
        let is_met = match self {
            AtMost(most) => median <= most,
            AtLeast(least) => median >= least,
            Free | AtLeastInFull(_) => return Outcome::NoTarget,
        };
        if is_met {
            Outcome::Met
        } else {
            Outcome::Missed
        }
    }
}

/// Returns the figures of a part. `measured`: the results of the part, or why there are none. A
/// part may say in its result `not_measured` why it has no value for a key.
pub fn of_part(part: Part, dose: Dose, measured: Result<&Value, &str>) -> Vec<ReportFigure> {
    let mine = ALL.iter().filter(|definition| definition.part == part);
    mine.map(|definition| {
        let goal = definition.goal.in_dose(dose);
        let values = measured
            .ok()
            .and_then(|results| results.pointer(definition.at));
        let values = values.and_then(spread_of);
        let why = || match measured {
            Err(why) => why.to_owned(),
            Ok(results) => results["not_measured"][definition.key]
                .as_str()
                .unwrap_or("the part has no value for it")
                .to_owned(),
        };
        ReportFigure {
            key: definition.key.into(),
            part: part.name().into(),
            what: definition.what.into(),
            unit: definition.unit.into(),
            values,
            target: goal.target(),
            outcome: values.map_or(Outcome::NotMeasured, |found| goal.outcome(found.median)),
            why: values.is_none().then(why),
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    #[test]
    fn each_figure_of_the_report_has_a_unique_key_and_each_part_has_a_figure() {
        let keys: BTreeSet<_> = ALL.iter().map(|definition| definition.key).collect();
        assert_eq!(keys.len(), ALL.len());
        for part in Part::ALL {
            assert!(ALL.iter().any(|of| of.part == part), "{}", part.name());
        }
    }

    #[test]
    fn a_figure_is_met_missed_or_not_measured_by_the_median_of_its_values() {
        let results = json!({
            "ratio_fold_over_compare": 2.5,
            "ratio_ksm_over_fold": null,
            "fold_us_per_page": { "64": { "min": 1.0, "median": 2.0, "max": 4.0 }, "1": [3.0, 1.0] },
            "not_measured": { "ratio_ksm_over_fold": "KSM runs" },
        });
        let figures = of_part(Part::Fold, Dose::Full, Ok(&results));
        let figure = |key: &str| figures.iter().find(|of| of.key == key).unwrap();
        let met = figure("ratio_fold_over_compare");
        assert_eq!(
            (met.outcome, met.target.as_deref()),
            (Outcome::Met, Some("<= 3"))
        );
        let ksm = figure("ratio_ksm_over_fold");
        assert_eq!(
            (ksm.outcome, ksm.why.as_deref()),
            (Outcome::NotMeasured, Some("KSM runs"))
        );
        let free = figure("fold_us_per_page");
        assert_eq!(free.outcome, Outcome::NoTarget);
        assert_eq!(free.values.unwrap().max.to_string(), "4");
        assert_eq!(
            figure("fold_us_per_single_page")
                .values
                .unwrap()
                .median
                .to_string(),
            "2"
        );
        let slow = json!({ "ratio_fold_over_compare": 3.5 });
        let slow = of_part(Part::Fold, Dose::Full, Ok(&slow));
        assert!(
            slow.iter().any(|of| of.outcome == Outcome::Missed),
            "{slow:?}"
        );
        let none = of_part(Part::Fold, Dose::Full, Err("no time left"));
        assert!(
            none.iter()
                .all(|of| of.why.as_deref() == Some("no time left"))
        );
    }

    #[test]
    fn a_target_of_full_doses_is_left_out_if_doses_are_small() {
        let results =
            json!({ "save_reduction_percent": { "min": 1.0, "median": 1.0, "max": 1.0 } });
        for (dose, outcome) in [
            (Dose::Small, Outcome::NoTarget),
            (Dose::Full, Outcome::Missed),
        ] {
            let figures = of_part(Part::Snapshots, dose, Ok(&results));
            let found = figures.iter().find(|of| of.key == "save_reduction_percent");
            assert_eq!(found.unwrap().outcome, outcome);
        }
    }
}
