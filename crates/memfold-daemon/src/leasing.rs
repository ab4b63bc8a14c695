//! Leases of what this host's VMs borrow: of how many lenders, taken all or none, renewed, released.

use std::time::{Duration, Instant};

use memfold_api::BorrowRequest;
use memfold_lend::graph::{Borrowing, Stripe};
use memfold_lend::registry::MAX_TTL;
use memfold_lend::relay::stripes::{MOST, Stripes};
use memfold_lend::wire::patience;
use memfold_lend::{Durability, Endpoint, Lease, LeaseId, RegistryError, Want};
use tracing::warn;

use super::borrowing::{Begun, lending};
use super::{Daemon, DaemonError};

/// How long a lease holds without being renewed: so long may a borrower's daemon be away.
const LEASE_TTL: Duration = Duration::from_secs(60);

/// How long a daemon that goes on with leases of the one before looks for the registry, before it moves what only they hold to a disk.
pub(super) const RESUMED: Duration = Duration::from_secs(10);

/// [`LEASE_TTL`], and where the lent bytes are the only ones twice the time that it takes to copy them: they are moved to a disk when half of
/// it is over.
pub(super) fn lease_ttl(durability: Durability, bytes: u64) -> Duration {
    let copying = durability.time_to_copy(bytes.saturating_mul(2));
    LEASE_TTL.saturating_add(copying).min(MAX_TTL)
}

/// How long a lender may take to export: at least, and for each GiB that it has to allocate.
const EXPORT_LEAST: Duration = Duration::from_secs(10);
const EXPORT_PER_GIB: Duration = Duration::from_secs(5);

/// Fewest lenders that have room for a disk between them, each the same; `free`: what each has.
fn fewest(bytes: u64, mut free: Vec<u64>) -> Option<u64> {
    free.sort_unstable_by(|a, b| b.cmp(a));
    let counts = (1..).zip(free).take_while(|(count, _)| *count <= MOST);
    let fits = |(count, least): &(u64, u64)| {
        let stripes = Stripes {
            count: *count,
            bytes,
        };
        *least >= stripes.of_each()
    };
    counts.into_iter().find(fits).map(|(count, _)| count)
}

impl Daemon {
    /// Takes leases for a disk of `bytes`, into `begun`: first all stripes of one copy, then those of the next. Gives how many stripes these are.
    pub(super) fn take_leases(
        &self,
        vm: &str,
        bytes: u64,
        request: &BorrowRequest,
        begun: &mut Begun,
    ) -> Result<u8, DaemonError> {
        let distrusted = self.lending.distrusted();
        let count = self.stripes(bytes, request)?;
        let stripes = Stripes {
            count: u64::from(count),
            bytes,
        };
        let copies = if request.durability == Durability::Replica {
            2
        } else {
            1
        };
        let ttl = lease_ttl(request.durability, bytes);
        for _ in 0..u64::from(count) * copies {
            let ours = begun.leases.iter().map(|lease| lease.lender.host.clone());
            let want = Want {
                borrower: self.lending.host.clone(),
                vm: vm.to_owned(),
                bytes: stripes.of_each(),
                durability: request.durability,
                apart_from: ours.chain(distrusted.clone()).collect(),
            };
            let taken = self.lending.registry.take(&want, ttl);
            let lease = taken.map_err(|error| match error {
                RegistryError::NothingToSpare { .. } if !distrusted.is_empty() => lending(
                    format!("{error}; not asked: {}", distrusted.join(", ")),
                    "they served wrong bytes: 'memfold leases' says which, 'memfold leases --trust HOST' believes one again",
                ),
                error => error.into(),
            })?;
            begun.leases.push(lease);
        }
        Ok(count)
    }

    /// Over how many lenders a disk is to be laid out.
    fn stripes(&self, bytes: u64, request: &BorrowRequest) -> Result<u8, DaemonError> {
        if let Some(count) = request.stripes {
            if !(1..=MOST).contains(&u64::from(count)) {
                return Err(DaemonError::BadRequest(format!(
                    "{count} stripes are not 1 to {MOST}"
                )));
            }
            if count > 1 && request.durability == Durability::Replica {
                return Err(DaemonError::BadRequest(
                    "a replica is of two whole lenders; give stripes a copy on disk (durability disk) instead".into(),
                ));
            }
            return Ok(count);
        }
        // More lenders, more that can fail: only where the disk has all bytes anyway.
        if request.durability != Durability::Disk {
            return Ok(1);
        }
        let picture = self.lending.registry.picture()?;
        let distrusted = self.lending.distrusted();
        let others = picture.lenders.iter().filter(|lender| {
            let host = &lender.lender.host;
            lender.left_ms > 0 && *host != self.lending.host && !distrusted.contains(host)
        });
        let free = others.map(|lender| lender.offered_bytes.saturating_sub(lender.lent_bytes));
        let fewest = fewest(bytes, free.collect());
        // If there is nobody, the registry says it in better words.
        Ok(fewest.and_then(|n| u8::try_from(n).ok()).unwrap_or(1))
    }

    /// Asks for more time for a lease. `alone`: the lent bytes are the only ones, whatever was said when it was taken; its lender is to know
    /// before it needs them.
    pub(super) fn renew_lease(
        &self,
        id: LeaseId,
        ttl: Duration,
        alone: bool,
    ) -> Result<Lease, RegistryError> {
        let (registry, host) = (&self.lending.registry, &self.lending.host);
        let lease = registry.renew(id, host, ttl)?;
        if !alone || lease.durability != Durability::Disk {
            return Ok(lease);
        }
        registry.sole_copy(id, host).or_else(|error| {
            // Said again with the next.
            warn!(lease = id.0, %error, "its lender doesn't know that there is no other copy");
            Ok(lease)
        })
    }

    /// Renews leases while something is done that takes long; why it had better be given up, if it had.
    pub(super) fn keep(
        &self,
        leases: impl Iterator<Item = LeaseId>,
        ttl: Duration,
        alone: bool,
    ) -> Option<String> {
        let mut why = None;
        for id in leases {
            match self.renew_lease(id, ttl, alone) {
                Ok(lease) if lease.recall_ms.is_some() => {
                    why = Some(format!(
                        "lender '{}' needs its memory itself",
                        lease.lender.host
                    ));
                }
                // Passing, or seen by the connection.
                Ok(_) | Err(_) => {}
            }
        }
        why
    }

    pub(super) fn wait_exported(&self, lease: &Lease) -> Result<Endpoint, DaemonError> {
        let gib = u32::try_from(lease.bytes >> 30).unwrap_or(u32::MAX);
        let patience = EXPORT_PER_GIB.saturating_mul(gib).max(EXPORT_LEAST);
        let end = Instant::now() + patience;
        loop {
            let failed = |why: &str| {
                lending(
                    format!("lender '{}' {why}", lease.lender.host),
                    "its daemon's log says why; 'memfold leases' shows what others offer",
                )
            };
            match self.lending.registry.endpoint(lease.id, &lease.borrower) {
                Ok(Some(endpoint)) => {
                    if self.lending.elsewhere {
                        endpoint.check_of_another_host()?;
                    }
                    endpoint.check()?;
                    return Ok(endpoint);
                }
                Ok(None) if Instant::now() < end => {
                    let ttl = lease_ttl(lease.durability, lease.bytes);
                    self.keep(std::iter::once(lease.id), ttl, false);
                    std::thread::sleep(Duration::from_millis(50));
                }
                Ok(None) => return Err(failed("has not exported what it offered in time")),
                Err(RegistryError::NoLease { .. }) => {
                    return Err(failed("could not export what it offered"));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(super) fn release(&self, leases: impl Iterator<Item = LeaseId>) {
        for id in leases {
            if let Err(error) = self.lending.registry.release(id, &self.lending.host) {
                warn!(lease = id.0, %error, "not released; its lender takes it back when it is over");
            }
        }
    }

    /// A part whose lender isn't heard of any more.
    pub(super) fn silent_part(&self, borrowing: &Borrowing) -> Option<usize> {
        // Unknown isn't silent; and after an outage of the registry all lenders were silent there.
        let (picture, heard) = self.lending.heard()?;
        // It may stand still, and the VM waits for it.
        let patience = patience(borrowing.durability_now());
        if heard <= patience {
            return None;
        }
        let is_silent = |stripe: &Stripe| {
            picture.lenders.iter().any(|lender| {
                lender.lender.host == stripe.lender
                    && u128::from(lender.silent_ms) > patience.as_millis()
            })
        };
        let mut reached = borrowing.reached();
        let (part, _) = reached.find(|(_, part)| part.stripes().any(is_silent))?;
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_of_the_only_bytes_hold_for_as_long_as_it_takes_to_copy_them() {
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

    #[test]
    fn a_disk_is_laid_out_over_as_few_lenders_as_have_room() {
        const MIB: u64 = 1 << 20;
        for (bytes, free, count) in [
            (64, vec![], None),
            (64, vec![63], None),
            (64, vec![1, 64], Some(1)),
            (64, vec![40, 1, 40], Some(2)),
            (64, vec![40, 31], None),
            (64, vec![40, 31, 31, 22], Some(3)),
            (64, vec![8; 8], Some(8)),
            (64, vec![7; 20], None),
        ] {
            let free = free.into_iter().map(|mib: u64| mib * MIB).collect();
            assert_eq!(fewest(bytes * MIB, free), count, "{bytes} {count:?}");
        }
    }
}
