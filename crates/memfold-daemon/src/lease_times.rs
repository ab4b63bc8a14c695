//! Durations of leases, and the time between renewals.

use std::time::{Duration, Instant};

use memfold_lend::Durability;
use memfold_lend::registry::MAX_TTL;

/// Duration of a lease without renewal: a borrower's daemon may be away this long.
const LEASE_TTL: Duration = Duration::from_secs(60);

/// Time for which a new daemon tries to reach the registry, to renew an earlier daemon's leases.
/// After that time, the daemon moves data that only lenders hold to a local disk.
pub(crate) const RESUMED: Duration = Duration::from_secs(10);

/// Time between two renewals of a lease.
pub(crate) const RENEW: Duration = Duration::from_secs(1);

/// Returns the duration of a lease. It is [`LEASE_TTL`], plus the time to copy `bytes` twice if the
/// lender holds the only copy: the data is moved to a local disk when half of the duration has
/// passed.
pub(crate) fn lease_ttl(durability: Durability, bytes: u64) -> Duration {
    let copying = durability.time_to_copy(bytes.saturating_mul(2));
    LEASE_TTL.saturating_add(copying).min(MAX_TTL)
}

/// Returns the milliseconds that have passed since `since`.
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
