//! Advice from recorded history: what memory each VM should be given, and what one GiB less would
//! cost.

use std::time::Duration;

use memfold_units::ByteSize;

/// One GiB, the amount whose loss [`Advice`] prices.
const GIB: u64 = 1 << 30;

/// Sizes are advised in steps of this.
const STEP: u64 = 128 << 20;

/// One recorded working set of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkingSetSample {
    /// When it was recorded, since any moment.
    pub at: Duration,
    /// Memory that the guest would have missed at that time.
    pub working_set: ByteSize,
}

/// Advice for one VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Advice {
    /// Time that the samples cover.
    pub covered: Duration,
    /// The working set did not exceed this in 50 % of the time.
    pub p50: ByteSize,
    /// The same for 95 %.
    pub p95: ByteSize,
    /// The same for 99 %.
    pub p99: ByteSize,
    /// Largest recorded working set.
    pub largest: ByteSize,
    /// Size that the VM should be given: `p99` and the buffer, rounded up to 128 MiB.
    pub size: ByteSize,
    /// Share of the time in which the working set would not have fitted into `size` less one GiB
    /// (0 to 1).
    pub short_time_with_one_gib_less: f64,
    /// Memory that the working set would have lacked then, on average over that time.
    pub lack_with_one_gib_less: ByteSize,
}

/// Sums of the advice for all VMs of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostAdvice {
    /// Memory that the VMs have now.
    pub given: ByteSize,
    /// Memory that they should have.
    pub advised: ByteSize,
    /// Memory that all VMs together would leave free. 0 if more is advised than given.
    pub saved: ByteSize,
    /// Memory that all VMs together lack. 0 if less is advised than given.
    pub lacking: ByteSize,
}

/// Longest time for which one sample counts. After that, nothing is known until the next one.
const LONGEST: Duration = Duration::from_secs(3600);

/// Advises a size for one VM. `buffer_percent` is added to the working set. The samples may have
/// any order and any distances; each counts until the next one, but for at most an hour. Returns
/// `None` without two samples of different times.
#[must_use]
pub fn advice(samples: &[WorkingSetSample], buffer_percent: u16) -> Option<Advice> {
    let mut by_time = samples.to_vec();
    by_time.sort_by_key(|sample| sample.at);
    let mut weighted: Vec<(u64, Duration)> = by_time
        .windows(2)
        .map(|pair| {
            let time = pair[1].at.saturating_sub(pair[0].at).min(LONGEST);
            (pair[0].working_set.0, time)
        })
        .filter(|(_, time)| !time.is_zero())
        .collect();
    weighted.sort_unstable();
    let covered = weighted
        .iter()
        .fold(Duration::ZERO, |sum, (_, time)| sum.saturating_add(*time));
    let largest = by_time.iter().map(|sample| sample.working_set).max()?;
    let (last, _) = *weighted.last()?;
    let percentile = |share: f64| {
        let limit = covered.as_secs_f64() * share;
        let mut sum = 0.0;
        let found = weighted.iter().find(|(_, time)| {
            sum += time.as_secs_f64();
            sum >= limit
        });
        ByteSize(found.map_or(last, |(bytes, _)| *bytes))
    };
    let p99 = percentile(0.99);
    let buffer = u128::from(p99.0) * u128::from(buffer_percent) / 100;
    let with_buffer = p99
        .0
        .saturating_add(u64::try_from(buffer).unwrap_or(u64::MAX));
    let size = with_buffer
        .checked_next_multiple_of(STEP)
        .unwrap_or(u64::MAX);
    let less = size.saturating_sub(GIB);
    let (mut short_time, mut lack) = (0.0, 0.0);
    for (bytes, time) in weighted.iter().filter(|(bytes, _)| *bytes > less) {
        short_time += time.as_secs_f64();
        lack += (bytes - less) as f64 * time.as_secs_f64();
    }
    let mean_lack = if short_time > 0.0 {
        lack / short_time
    } else {
        0.0
    };
    Some(Advice {
        covered,
        p50: percentile(0.5),
        p95: percentile(0.95),
        p99,
        largest,
        size: ByteSize(size),
        short_time_with_one_gib_less: short_time / covered.as_secs_f64(),
        lack_with_one_gib_less: whole_bytes(mean_lack),
    })
}

/// Adds up the advice for the VMs of a host: for each VM the size that it has now, and the advice,
/// if there is any. A VM without advice keeps its size.
#[must_use]
pub fn host_advice(vms: &[(ByteSize, Option<Advice>)]) -> HostAdvice {
    let mut host = HostAdvice::default();
    for (given, advice) in vms {
        let advised = advice.map_or(*given, |advice| advice.size);
        host.given = ByteSize(host.given.0.saturating_add(given.0));
        host.advised = ByteSize(host.advised.0.saturating_add(advised.0));
    }
    host.saved = host.given - host.advised;
    host.lacking = host.advised - host.given;
    host
}

// Negative values do not occur, and values that are too large become the largest.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole_bytes(bytes: f64) -> ByteSize {
    ByteSize(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(minute: u64, mib: u64) -> WorkingSetSample {
        WorkingSetSample {
            at: Duration::from_secs(minute * 60),
            working_set: ByteSize::mib(mib),
        }
    }

    #[test]
    fn percentiles_weigh_samples_by_time_and_not_by_number() {
        // Ninety minutes at 1 GiB in two samples, ten minutes at 3 GiB in ten.
        let mut samples = vec![sample(0, 1024), sample(50, 1024)];
        samples.extend((90..100).map(|minute| sample(minute, 3072)));
        samples.push(sample(100, 3072));
        let advice = advice(&samples, 20).expect("samples of different times");
        assert_eq!(advice.p50, ByteSize::mib(1024));
        assert_eq!(advice.p95, ByteSize::mib(3072));
        assert_eq!(advice.p99, ByteSize::mib(3072));
        assert_eq!(advice.covered, Duration::from_secs(6000));
        // 3072 MiB and 20 % are 3686.4 MiB, rounded up to 29 times 128 MiB.
        assert_eq!(advice.size, ByteSize::mib(3712));
        assert!((advice.short_time_with_one_gib_less - 0.1).abs() < 1e-9);
        assert_eq!(advice.lack_with_one_gib_less, ByteSize::mib(3072 - 2688));
    }

    #[test]
    fn a_gap_in_the_history_counts_for_one_hour_only() {
        let samples = [sample(0, 100), sample(60 * 24, 200), sample(60 * 25, 200)];
        let advice = advice(&samples, 0).expect("samples of different times");
        assert_eq!(advice.covered, Duration::from_secs(2 * 3600));
        assert_eq!(advice.p50, ByteSize::mib(100));
    }

    #[test]
    fn there_is_no_advice_without_two_samples_of_different_times() {
        assert_eq!(advice(&[], 20), None);
        assert_eq!(advice(&[sample(1, 100)], 20), None);
        assert_eq!(advice(&[sample(1, 100), sample(1, 200)], 20), None);
    }

    #[test]
    fn a_host_saves_the_difference_between_given_and_advised_memory() {
        let small = advice(&[sample(0, 1000), sample(10, 1000)], 24);
        let host = host_advice(&[(ByteSize::mib(8192), small), (ByteSize::mib(2048), None)]);
        assert_eq!(host.given, ByteSize::mib(10240));
        assert_eq!(host.advised, ByteSize::mib(1280 + 2048));
        assert_eq!(host.saved, ByteSize::mib(10240 - 3328));
        assert_eq!(host.lacking, ByteSize(0));
    }

    #[test]
    fn extreme_samples_give_the_largest_size() {
        let extreme = |at| WorkingSetSample {
            at,
            working_set: ByteSize(u64::MAX),
        };
        let samples = [extreme(Duration::ZERO), extreme(Duration::MAX)];
        let advice = advice(&samples, u16::MAX).expect("samples of different times");
        assert_eq!(advice.size, ByteSize(u64::MAX));
    }
}
