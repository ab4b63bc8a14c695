//! Durations of leases, and the time between renewals.

use std::time::{Duration, Instant};

use memfold_lend::Durability;
use memfold_lend::registry::MAX_TTL;

/// Time for which a lease holds without renewal: a borrower's daemon may be away this long.
const LEASE_TTL: Duration = Duration::from_secs(60);

/// Time for which a daemon that resumes an earlier daemon's leases tries to reach the registry.
/// After that, it moves data that only the lenders hold to a disk.
pub(crate) const RESUMED: Duration = Duration::from_secs(10);

/// Time between two renewals.
pub(crate) const RENEW: Duration = Duration::from_secs(1);

/// Duration of a lease: [`LEASE_TTL`], plus the time to copy twice `bytes` where the lender holds
/// the only copy. The data is moved to a disk when half of the duration has passed.
pub(crate) fn lease_ttl(durability: Durability, bytes: u64) -> Duration {
    let copying = durability.time_to_copy(bytes.saturating_mul(2));
    LEASE_TTL.saturating_add(copying).min(MAX_TTL)
}

/// Milliseconds since `since`.
pub(crate) fn ms(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_of_memory_without_a_disk_copy_lasts_long_enough_to_copy_its_data() {
        for (durability, bytes, seconds) in [
            (Durability::Disk, 1 << 40, 60),
            (Durability::Replica, 0, 60),
            (Durability::Replica, 1 << 30, 60 + 102),
            (Durability::None, 200 << 20, 80),
            (Durability::None, 1 << 40, 3600),
        ] {
            let ttl = lease_ttl(durability, bytes);
            assert_eq!(ttl.as_secs(), seconds, "{durability:?} {bytes}");
        }
    }
}
