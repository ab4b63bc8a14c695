//! Default of the CPU limit of folding: a share of the host's cores.

/// Smallest default, in percent of one core.
const LEAST_PERCENT: f64 = 5.0;

/// Largest default, in percent of one core: the fold engine is one thread.
const MOST_PERCENT: f64 = 100.0;

/// Returns the number of cores that this process may use (`sched_getaffinity(2)` and the CPU quota
/// of its control group).
#[must_use]
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the default CPU limit of folding on a host with `cores` cores, in percent of one core:
/// one percent of each core, but at least 5 and at most 100. The hosts with most cores have most
/// VMs.
#[must_use]
pub fn default_fold_cpu_percent(cores: usize) -> f64 {
    (cores as f64).clamp(LEAST_PERCENT, MOST_PERCENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_cpu_limit_of_folding_grows_with_the_cores_from_5_to_100_percent_of_one_core() {
        let limits = [1, 2, 5, 16, 64, 100, 256];
        let limits = limits.map(|cores| default_fold_cpu_percent(cores).to_string());
        assert_eq!(limits, ["5", "5", "5", "16", "64", "100", "100"]);
        assert!(cores() > 0);
    }
}
