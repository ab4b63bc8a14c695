//! Counts how long a guest has waited for its swap disk, which may be in RAM of another host.
//! QEMU's latency histograms have the times: `block-latency-histogram-set` and `query-blockstats`
//! (`qapi/block-core.json`).

use memfold_vm::{Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::graph::swap_device;

/// Bounds of the latency histogram in nanoseconds. They match the fields of [`Waits`].
const BOUNDS: [u64; 3] = [100_000_000, 1_000_000_000, 5_000_000_000];

/// How long a guest has waited for answers of its swap disk since its first borrowing. Requests
/// without an answer yet are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Waits {
    /// Number of the guest's requests to its swap disk that were answered.
    pub requests: u64,
    /// Number of the guest's requests to its swap disk that were answered after more than 0.1 s.
    pub over_100_ms: u64,
    /// Number of the guest's requests to its swap disk that were answered after more than 1 s.
    pub over_1_s: u64,
    /// Number of the guest's requests to its swap disk that were answered after more than 5 s.
    pub over_5_s: u64,
}

/// Reads from QEMU how long the guest has waited for its swap disk. If QEMU does not count yet,
/// starts the counting and returns `None`. Also `None` if the VM has no swap disk.
pub fn look(qmp: &mut Qmp) -> Result<Option<Waits>, QmpError> {
    let all = qmp.query("query-blockstats")?;
    let Some(device) = swap_device(&all) else {
        return Ok(None);
    };
    let counted = read(&device["stats"]);
    if counted.is_none() {
        // Writes count like reads, because a guest that swaps out waits for memory to become free.
        let histogram = json!({ "id": device["qdev"], "boundaries": BOUNDS });
        qmp.execute("block-latency-histogram-set", histogram)?;
    }
    Ok(counted)
}

/// Returns the sums of the histograms in a device's `stats`; `None` if QEMU does not count with
/// [`BOUNDS`].
fn read(stats: &Value) -> Option<Waits> {
    let mut waits = Waits::default();
    for kind in ["rd_latency_histogram", "wr_latency_histogram"] {
        let histogram = &stats[kind];
        if histogram["boundaries"] != json!(BOUNDS) {
            return None;
        }
        let bins = histogram["bins"].as_array()?;
        // A guest may have taken over its QEMU, which then answers with any numbers.
        let add = |to: &mut u64, bin: usize| {
            let counts = bins.iter().skip(bin).filter_map(Value::as_u64);
            *to = counts.fold(*to, u64::saturating_add);
        };
        add(&mut waits.requests, 0);
        add(&mut waits.over_100_ms, 1);
        add(&mut waits.over_1_s, 2);
        add(&mut waits.over_5_s, 3);
    }
    Some(waits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_disk_requests_are_counted_by_latency_from_qemus_histogram() {
        let histogram = |bins: [u64; 4]| json!({ "boundaries": BOUNDS, "bins": bins });
        let stats = json!({
            "rd_latency_histogram": histogram([100, 10, 2, 1]),
            "wr_latency_histogram": histogram([50, 0, 0, 3]),
        });
        let waits = Waits {
            requests: 166,
            over_100_ms: 16,
            over_1_s: 6,
            over_5_s: 4,
        };
        assert_eq!(read(&stats), Some(waits));
        // No QEMU has counted so far.
        let stats = json!({
            "rd_latency_histogram": histogram([u64::MAX, 1, 1, 1]),
            "wr_latency_histogram": histogram([u64::MAX, 1, 1, 1]),
        });
        assert_eq!(read(&stats).unwrap().requests, u64::MAX);
        // The counting has not begun, or somebody else has set other bounds.
        assert_eq!(read(&json!({})), None);
        let other = json!({ "boundaries": [1, 2], "bins": [1, 2, 3] });
        assert_eq!(
            read(&json!({ "rd_latency_histogram": other, "wr_latency_histogram": other })),
            None
        );
    }
}
