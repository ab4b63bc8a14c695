//! Advice from the recorded history: what memory each VM should be given. Right-sizing records the
//! working sets.

use std::time::Duration;

use memfold_api::{AdviceReport, SizeAdvice, VmAdvice};
use memfold_ledger::history::{KEEP_FINE_S, Series};
use memfold_rightsize::{Limits, WorkingSetSample, advice};
use memfold_units::ByteSize;

use crate::error::{DaemonError, check};
use crate::mechanisms::Mechanisms;
use crate::sampling::Sampling;

/// Number of days that are looked back by default, and the most.
const DAYS: (u32, u32) = (7, 90);

/// Most points of a series: more than the history has.
const POINTS: i64 = 10_000;

/// Recorded working sets of one VM, and for each, the percent of its time in which it was measured.
#[derive(Debug, Default)]
struct Recorded {
    samples: Vec<WorkingSetSample>,
    probed_percent: Vec<i64>,
}

impl Recorded {
    /// Adds the working sets of a series before the time `until` (seconds since 1970).
    fn add(&mut self, series: &Series, until: i64) {
        let of = |name: &str| {
            let index = series.names.iter().position(|known| known == name)?;
            series.values.get(index)
        };
        let Some(sets) = of("working_set_bytes") else {
            return;
        };
        let probed = of("working_set_probed_percent");
        for (index, at) in series.t.iter().enumerate().filter(|(_, at)| **at < until) {
            let bytes = sets.get(index).copied().flatten();
            let seconds = u64::try_from(*at).ok();
            let (Some(bytes), Some(seconds)) = (bytes, seconds) else {
                continue;
            };
            self.samples.push(WorkingSetSample {
                at: Duration::from_secs(seconds),
                working_set: ByteSize(u64::try_from(bytes).unwrap_or(0)),
            });
            let probed = probed.and_then(|values| values.get(index).copied().flatten());
            self.probed_percent.push(probed.unwrap_or(0));
        }
    }

    /// Returns the advice; `None`: there are too few working sets.
    fn advice(&self, buffer_percent: u16) -> Option<SizeAdvice> {
        let found = advice(&self.samples, buffer_percent)?;
        let probed: i64 = self.probed_percent.iter().sum();
        Some(SizeAdvice {
            covered_s: found.covered.as_secs(),
            probed_percent: probed as f64 / self.probed_percent.len() as f64,
            p50_bytes: found.p50.0,
            p95_bytes: found.p95.0,
            p99_bytes: found.p99.0,
            largest_bytes: found.largest.0,
            advised_bytes: found.size.0,
            short_time_with_one_gib_less: found.short_time_with_one_gib_less,
            lack_with_one_gib_less_bytes: found.lack_with_one_gib_less.0,
        })
    }
}

/// Advises what memory each running VM should be given. `days`: how far to look back.
///
/// # Errors
///
/// [`DaemonError::NoHistory`] if no history is kept; [`DaemonError::BadRequest`] for a wrong number
/// of days.
pub(crate) fn advise(
    below: &Mechanisms,
    sampling: &Sampling,
    days: Option<u32>,
) -> Result<AdviceReport, DaemonError> {
    let days = days.unwrap_or(DAYS.0);
    check("days", days, (1..=DAYS.1).contains(&days), "1 to 90")?;
    let mut report = AdviceReport {
        days,
        ..AdviceReport::default()
    };
    for machine in below.registry.machines() {
        let mut recorded = Recorded::default();
        let name = machine.name();
        let fine = sampling.history_of(Some(name), KEEP_FINE_S, POINTS)?;
        if days > 1 {
            // Means over half an hour, which hide short peaks, count only where nothing better is
            // kept.
            let seconds = i64::from(days) * 24 * 3600;
            let coarse = sampling.history_of(Some(name), seconds, POINTS)?;
            let until = fine.t.first().copied().unwrap_or(i64::MAX);
            recorded.add(&coarse, until);
        }
        recorded.add(&fine, i64::MAX);
        let buffer = below.rightsizing.sizing(&machine).buffer_percent;
        let given = below.rightsizing.given(&machine).0;
        let advice = recorded.advice(buffer.unwrap_or(Limits::BUFFER_PERCENT));
        let advised = advice.as_ref().map_or(given, |advice| advice.advised_bytes);
        report.given_bytes = report.given_bytes.saturating_add(given);
        report.advised_bytes = report.advised_bytes.saturating_add(advised);
        report.vms.push(VmAdvice {
            vm: name.to_owned(),
            given_bytes: given,
            advice,
        });
    }
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    report.saved_bytes = signed(report.given_bytes) - signed(report.advised_bytes);
    report.vms.sort_by(|a, b| a.vm.cmp(&b.vm));
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(first: i64, step_s: i64, mib: &[Option<i64>], probed: i64) -> Series {
        let count = i64::try_from(mib.len()).unwrap();
        Series {
            step_s,
            t: (0..count).map(|n| first + n * step_s).collect(),
            names: vec![
                "working_set_bytes".into(),
                "working_set_probed_percent".into(),
            ],
            values: vec![
                mib.iter().map(|mib| mib.map(|mib| mib << 20)).collect(),
                vec![Some(probed); mib.len()],
            ],
        }
    }

    #[test]
    fn advice_uses_half_hour_means_only_from_before_the_fine_samples() {
        let begin = 1_800_000_000;
        let coarse = series(begin, 1800, &[Some(1000), Some(1000), Some(9000)], 0);
        let fine = series(begin + 3600, 30, &[Some(2000), None, Some(2000)], 100);
        let mut recorded = Recorded::default();
        recorded.add(&coarse, fine.t[0]);
        recorded.add(&fine, i64::MAX);
        let advice = recorded.advice(20).unwrap();
        assert_eq!(advice.covered_s, 3660);
        assert_eq!(advice.p50_bytes, 1000 << 20);
        assert_eq!(advice.largest_bytes, 2000 << 20);
        assert!((advice.probed_percent - 50.0).abs() < 1e-9);
    }

    #[test]
    fn there_is_no_advice_for_a_vm_whose_working_set_was_never_recorded() {
        let mut recorded = Recorded::default();
        recorded.add(&Series::default(), i64::MAX);
        recorded.add(&series(1_800_000_000, 30, &[None; 50], 0), i64::MAX);
        assert_eq!(recorded.advice(20), None);
    }
}
