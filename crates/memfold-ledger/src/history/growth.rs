//! Computes how fast a VM's memory use grows: the trend of its unshared memory over the samples in
//! the ledger's history.

use super::Series;

/// Most points of a trend; the cost grows with the square, since all pairs of points are compared.
const MOST: usize = 60;

/// Fewest points of a trend.
const LEAST: usize = 8;

/// Longest gap within a run of samples, in steps. After a longer one, the VM counts as another one.
const GAP: i64 = 4;

/// Growth of a VM's unshared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Bytes by which the memory grows per hour; negative if it shrinks.
    pub bytes_per_hour: i64,
    /// Time from the first to the last sample that were used, in seconds.
    pub over_s: i64,
}

/// Returns the growth of a VM's unshared (private and unfolded) memory in `series`: the median
/// slope of all pairs of samples (method of Theil and Sen), which peaks do not affect. Only the
/// samples after the last long gap are used, without their first quarter, in which the guest may
/// boot. `None`: too few samples.
#[must_use]
pub fn growth(series: &Series) -> Option<Growth> {
    let of = |name: &str| {
        let at = series.names.iter().position(|n| n == name)?;
        series.values.get(at)
    };
    let (private, unfolded) = (of("private_bytes")?, of("unfolded_bytes")?);
    let mut points: Vec<(i64, i64)> = Vec::new();
    for ((&t, private), unfolded) in series.t.iter().zip(private).zip(unfolded) {
        if let (Some(private), Some(unfolded)) = (private, unfolded) {
            points.push((t, private + unfolded));
        }
    }
    let mut steps: Vec<i64> = points.windows(2).map(|two| two[1].0 - two[0].0).collect();
    steps.sort_unstable();
    let step = steps.get(steps.len() / 2).copied()?;
    let gap = |two: &[(i64, i64)]| two[1].0 - two[0].0 > GAP * step;
    let begins = points.windows(2).rposition(gap).map_or(0, |at| at + 1);
    let run = &points[begins..];
    let run = &run[run.len() / 4..];
    if run.len() < LEAST {
        return None;
    }
    let means = run.chunks(run.len().div_ceil(MOST)).map(|piece| {
        let count = piece.len() as f64;
        let t: f64 = piece.iter().map(|(t, _)| *t as f64).sum();
        let bytes: f64 = piece.iter().map(|(_, bytes)| *bytes as f64).sum();
        (t / count, bytes / count)
    });
    let means: Vec<(f64, f64)> = means.collect();
    let mut slopes = Vec::with_capacity(means.len() * means.len() / 2);
    for (at, (t, bytes)) in means.iter().enumerate() {
        for (later, more) in &means[at + 1..] {
            slopes.push((more - bytes) / (later - t));
        }
    }
    slopes.sort_unstable_by(f64::total_cmp);
    let slope = slopes.get(slopes.len() / 2)?;
    // The memory that a host can take in an hour is far below 2^63 bytes.
    #[allow(clippy::cast_possible_truncation)]
    Some(Growth {
        bytes_per_hour: (slope * 3600.0).round() as i64,
        over_s: run.last()?.0 - run.first()?.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(points: &[(i64, i64)]) -> Series {
        Series {
            step_s: 30,
            t: points.iter().map(|(t, _)| *t).collect(),
            names: vec!["private_bytes".into(), "unfolded_bytes".into()],
            values: vec![
                points.iter().map(|(_, bytes)| Some(bytes / 2)).collect(),
                points
                    .iter()
                    .map(|(_, bytes)| Some(bytes - bytes / 2))
                    .collect(),
            ],
        }
    }

    #[test]
    fn the_memory_growth_of_a_vm_is_found_although_it_booted_and_its_memory_had_peaks() {
        // A VM that boots to 300 MiB in ten minutes and then grows by 10 MiB an hour. Each tenth
        // sample is a peak.
        let bytes = |n: i64| {
            let boot = (n * 15).min(300) << 20;
            let peak = if n % 10 == 0 { 80 << 20 } else { 0 };
            boot + peak + n * 30 * (10 << 20) / 3600
        };
        let points: Vec<(i64, i64)> = (0..400).map(|n| (1_000_000 + n * 30, bytes(n))).collect();
        let found = growth(&series(&points)).unwrap();
        let rate = found.bytes_per_hour as f64 / f64::from(10 << 20);
        assert!((0.9..1.1).contains(&rate), "{rate}");
        assert_eq!(found.over_s, 299 * 30);
        // Long before, another, larger VM had the same name.
        let mut two = vec![(0, 1 << 40); 3];
        two.iter_mut().zip(0..).for_each(|(p, n)| p.0 = n * 30);
        two.extend(points);
        assert_eq!(growth(&series(&two)), Some(found));
    }

    #[test]
    fn constant_vm_memory_gives_zero_growth_and_too_few_samples_give_no_growth() {
        let flat: Vec<(i64, i64)> = (0..40).map(|n| (n * 30, 7 << 20)).collect();
        assert_eq!(growth(&series(&flat)).unwrap().bytes_per_hour, 0);
        let less: Vec<(i64, i64)> = (0..40).map(|n| (n * 30, (100 - n) << 20)).collect();
        assert_eq!(growth(&series(&less)).unwrap().bytes_per_hour, -120 << 20);
        assert_eq!(growth(&series(&flat[..9])), None);
        assert_eq!(growth(&series(&[])), None);
        assert_eq!(growth(&Series::default()), None);
    }
}
