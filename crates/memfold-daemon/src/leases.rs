//! Takes, renews and releases leases. A lease is an entry in the lease registry. It says that one
//! host lends RAM to a swap disk of another host.
//!
//! A swap disk needs a lease for each part of its memory. This host takes all leases of a disk or
//! none, renews them while the disk is in use, and releases them in the end. It takes no lease from
//! a lender that has returned wrong bytes before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, Borrowed, SwapPlace, registry_at};
use memfold_lend::calls::{Answer, Call, CallRegistry, answer};
use memfold_lend::distrust::{Distrust, Distrusted};
use memfold_lend::graph::{Borrowing, Stripe};
use memfold_lend::registry::{MAX_TTL, check_name};
use memfold_lend::relay::stripes::{MOST, Stripes};
use memfold_lend::{
    Durability, Endpoint, Lease, LeaseId, Picture, Registry, RegistryAt, RegistryError,
    SqliteRegistry, Want,
};
use parking_lot::{Mutex, MutexGuard};
use tracing::warn;

use crate::error::{DaemonError, refused};
use crate::options::DaemonOptions;

/// Time without a call to the registry after which the connection to the registry counts as
/// interrupted.
const GAP: Duration = Duration::from_secs(3);

/// Least time that a lender has to export a lease: on a busy host, an iSCSI target of 64 MiB took
/// more than 10 s. The next constant: additional time for each GiB.
const EXPORT_LEAST: Duration = Duration::from_secs(30);
const EXPORT_PER_GIB: Duration = Duration::from_secs(5);

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

/// Returns the answer to a request, made at `began`, after which nothing of a disk is lent.
pub(crate) fn returned(vm: String, bytes: u64, changed: bool, began: Instant) -> Borrowed {
    Borrowed {
        vm,
        place: SwapPlace::OnDisk,
        bytes,
        durability: None,
        lenders: Vec::new(),
        stripes: None,
        waits: None,
        changed,
        took_ms: ms(began),
    }
}

/// Returns the smallest number of lenders over which a disk of `bytes` can be striped in equal
/// parts. `free`: bytes that each lender can still lend.
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

/// This host's access to the lease registry, as a borrower and as a lender.
#[derive(Debug)]
pub struct Leases {
    /// Name of this host among lenders and borrowers.
    pub(crate) host: String,
    pub(crate) registry: Arc<dyn Registry>,
    /// Address or path of the registry, as text.
    pub(crate) place: String,
    /// Whether this daemon serves the registry itself.
    own: bool,
    /// Whether other hosts can write to the registry.
    pub(crate) elsewhere: bool,
    /// Time since which the registry has answered without interruption, and time of its last
    /// answer.
    heard: Mutex<Option<(Instant, Instant)>>,
    distrust: Mutex<Distrust>,
}

impl Leases {
    pub(crate) fn open(options: &DaemonOptions) -> Result<Self, DaemonError> {
        let kernel = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = options.host.clone();
        let path = options.state.join("registry.db");
        let own = || path.display().to_string();
        let place = options
            .registry
            .as_ref()
            .map_or_else(own, ToString::to_string);
        let registry: Arc<dyn Registry> = match &options.registry {
            Some(at) => registry_at(at),
            None => match SqliteRegistry::open(&path) {
                Ok(registry) => Arc::new(registry),
                // VMs must be served even if the registry's file cannot be used.
                Err(error) => {
                    warn!(%error, "cannot open the lease registry, lending and borrowing are off; fix the cause and restart the daemon");
                    let refuse = move |_: &Call| Err(error.to_string());
                    Arc::new(CallRegistry::new(place.clone(), refuse))
                }
            },
        };
        let leases = Self {
            host: host.unwrap_or_else(|| kernel().trim().to_owned()),
            registry,
            place,
            own: options.registry.is_none(),
            // A daemon behind a Unix socket runs on this host, and does not accept sockets of other
            // hosts.
            elsewhere: matches!(
                options.registry,
                Some(RegistryAt::Daemon { .. } | RegistryAt::Etcd { .. })
            ),
            heard: Mutex::default(),
            distrust: Mutex::new(Distrust::open(&options.state.join("distrusted.json"))),
        };
        // The kernel may have a host name that memfold does not accept. The first request to lend
        // or borrow reports that, and --host changes the name.
        if options.host.is_some() {
            leases.check_host()?;
        }
        Ok(leases)
    }

    /// Returns the access of host `host` to `registry`, for tests. `state`: an empty directory.
    #[cfg(test)]
    pub(crate) fn of_registry(
        host: &str,
        registry: Arc<dyn Registry>,
        state: &std::path::Path,
    ) -> Self {
        Self {
            host: host.to_owned(),
            registry,
            place: "test".into(),
            own: true,
            elsewhere: false,
            heard: Mutex::default(),
            distrust: Mutex::new(Distrust::open(&state.join("distrusted.json"))),
        }
    }

    /// Makes the registry count as heard without interruption for the time `since`, for tests.
    #[cfg(test)]
    pub(crate) fn heard_for(&self, since: Duration) {
        let now = Instant::now();
        *self.heard.lock() = now.checked_sub(since).map(|before| (before, now));
    }

    /// Checks this host's name.
    ///
    /// # Errors
    ///
    /// [`DaemonError::BadRequest`] if the name cannot be used in the registry.
    pub(crate) fn check_host(&self) -> Result<(), DaemonError> {
        let host = &self.host;
        check_name("host", host).map_err(|error| {
            DaemonError::BadRequest(format!(
                "'{host}' cannot be this host's name among lenders and borrowers ({error}); pass another name with 'memfold serve --host'"
            ))
        })
    }

    /// Returns all lenders and leases, and for how long the registry has answered without
    /// interruption; `None` if the registry does not answer.
    fn heard(&self) -> Option<(Picture, Duration)> {
        let picture = self.registry.picture();
        let mut heard = self.heard.lock();
        let Ok(picture) = picture else {
            *heard = None;
            return None;
        };
        let now = Instant::now();
        let before = heard.filter(|(_, last)| now.duration_since(*last) < GAP);
        let since = before.map_or(now, |(since, _)| since);
        *heard = Some((since, now));
        Some((picture, now.duration_since(since)))
    }

    pub(crate) fn distrust(&self) -> MutexGuard<'_, Distrust> {
        self.distrust.lock()
    }

    /// Returns the names of lenders that have served wrong bytes and are not used.
    pub(crate) fn distrusted(&self) -> Vec<String> {
        let now = self.distrust().now();
        now.into_iter().map(|one| one.lender).collect()
    }

    /// Recalls a lease by which this host lends memory. Returns the lease as it was before the
    /// recall.
    pub fn recall(&self, id: LeaseId) -> Result<Lease, DaemonError> {
        let who = self.host.clone();
        let mut leases = self.registry.picture()?.leases.into_iter();
        let lease = leases.find(|lease| lease.id == id && lease.lender.host == who);
        let lease = lease.ok_or(RegistryError::NoLease { id, who })?;
        let within = lease.durability.time_to_give_back(lease.bytes);
        self.registry.recall(id, &lease.lender, within)?;
        Ok(lease)
    }

    /// Makes a lender usable again that was distrusted because it had served wrong bytes. Returns
    /// whether the lender was distrusted.
    pub fn trust(&self, lender: &str) -> bool {
        self.distrust().trust(lender)
    }

    /// Returns the lenders that are distrusted now, and how many times lenders have served wrong
    /// bytes since the daemon's start.
    pub fn lies(&self) -> (Vec<Distrusted>, u64) {
        let mut distrust = self.distrust();
        (distrust.now(), distrust.lies())
    }

    /// Carries out a request of another daemon to the lease registry, which this daemon serves.
    ///
    /// # Errors
    ///
    /// [`DaemonError::BadRequest`] if this daemon serves no registry.
    pub fn call(&self, call: &Call) -> Result<Answer, DaemonError> {
        if !self.own {
            return Err(DaemonError::BadRequest(format!(
                "this daemon serves no registry and uses that of {}; pass that address as --registry",
                self.place
            )));
        }
        Ok(answer(&*self.registry, call))
    }

    /// Takes leases for a disk of `bytes` and adds them to `taken`: first all stripes of the first
    /// copy, then those of the second. Returns the number of stripes of a copy.
    pub(crate) fn take_leases(
        &self,
        vm: &str,
        bytes: u64,
        request: &BorrowRequest,
        taken: &mut Vec<Lease>,
    ) -> Result<u8, DaemonError> {
        let distrusted = self.distrusted();
        let count = self.stripes(bytes, request)?;
        let stripes = Stripes {
            count: u64::from(count),
            bytes,
        };
        let copies = u64::from(request.durability == Durability::Replica) + 1;
        let ttl = lease_ttl(request.durability, bytes);
        for _ in 0..u64::from(count) * copies {
            let ours = taken.iter().map(|lease| lease.lender.host.clone());
            let want = Want {
                borrower: self.host.clone(),
                vm: vm.to_owned(),
                bytes: stripes.of_each(),
                durability: request.durability,
                apart_from: ours.chain(distrusted.clone()).collect(),
            };
            let lease = self.registry.take(&want, ttl).map_err(|error| match error {
                RegistryError::NothingToSpare { .. } if !distrusted.is_empty() => refused(
                    format!("{error}; not asked: {}", distrusted.join(", ")),
                    "these lenders served wrong bytes: 'memfold leases' names them, 'memfold leases --trust HOST' trusts one again",
                ),
                error => error.into(),
            })?;
            taken.push(lease);
        }
        Ok(count)
    }

    /// Returns the number of lenders over which a disk is striped.
    fn stripes(&self, bytes: u64, request: &BorrowRequest) -> Result<u8, DaemonError> {
        if let Some(count) = request.stripes {
            if !(1..=MOST).contains(&u64::from(count)) {
                let why = format!("{count} stripes are not 1 to {MOST}");
                return Err(DaemonError::BadRequest(why));
            }
            if count > 1 && request.durability == Durability::Replica {
                return Err(DaemonError::BadRequest(
                    "a replica needs two whole lenders and no stripes; use durability disk with stripes".into(),
                ));
            }
            return Ok(count);
        }
        // Each further lender can fail, so several lenders are used only if a local disk has all
        // bytes anyway.
        if request.durability != Durability::Disk {
            return Ok(1);
        }
        let picture = self.registry.picture()?;
        let distrusted = self.distrusted();
        let others = picture.lenders.iter().filter(|lender| {
            let host = &lender.lender.host;
            lender.left_ms > 0 && *host != self.host && !distrusted.contains(host)
        });
        let free = others.map(|lender| lender.offered_bytes.saturating_sub(lender.lent_bytes));
        let fewest = fewest(bytes, free.collect());
        // If there is no lender at all, the registry's own error explains it better.
        Ok(fewest.and_then(|n| u8::try_from(n).ok()).unwrap_or(1))
    }

    /// Renews a lease. With `alone`, the registry also records that the lender holds the only copy,
    /// so that the lender knows this before it recalls the memory.
    pub(crate) fn renew_lease(
        &self,
        id: LeaseId,
        ttl: Duration,
        alone: bool,
    ) -> Result<Lease, RegistryError> {
        let (registry, host) = (&self.registry, &self.host);
        let lease = registry.renew(id, host, ttl)?;
        if !alone || lease.durability != Durability::Disk {
            return Ok(lease);
        }
        registry.sole_copy(id, host).or_else(|error| {
            // The next renewal repeats this.
            warn!(lease = id.0, %error, "cannot tell the registry that the lender has the only copy of the data; retrying at the lease's renewal");
            Ok(lease)
        })
    }

    /// Renews leases during a long operation. Returns the reason why the operation should be
    /// abandoned, if a lender recalls its memory; else `None`.
    pub(crate) fn keep(
        &self,
        leases: impl Iterator<Item = LeaseId>,
        ttl: Duration,
        alone: bool,
    ) -> Option<String> {
        // A failure is temporary, or the connection to the lender reveals it.
        let renewed = leases.filter_map(|id| self.renew_lease(id, ttl, alone).ok());
        let recalled = renewed.filter(|lease| lease.recall_ms.is_some());
        let lender = recalled.last()?.lender.host;
        Some(format!("lender '{lender}' needs its own memory"))
    }

    pub(crate) fn wait_exported(&self, lease: &Lease) -> Result<Endpoint, DaemonError> {
        let gib = u32::try_from(lease.bytes >> 30).unwrap_or(u32::MAX);
        let patience = EXPORT_PER_GIB.saturating_mul(gib).max(EXPORT_LEAST);
        let end = Instant::now() + patience;
        let failed = |why: &str| {
            refused(
                format!("lender '{}' {why}", lease.lender.host),
                "the log of the lender's daemon says why; 'memfold leases' shows other offers",
            )
        };
        loop {
            match self.registry.endpoint(lease.id, &lease.borrower) {
                Ok(Some(endpoint)) => {
                    if self.elsewhere {
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
                Ok(None) => return Err(failed("has not exported the offered memory in time")),
                Err(RegistryError::NoLease { .. }) => {
                    return Err(failed("could not export the offered memory"));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(crate) fn release(&self, leases: impl Iterator<Item = LeaseId>) {
        for id in leases {
            if let Err(error) = self.registry.release(id, &self.host) {
                warn!(lease = id.0, %error, "cannot release the lease in the registry; the lender ends the lease at its deadline");
            }
        }
    }

    /// Returns the indexes of those parts of `borrowing` whose lender has been silent for longer
    /// than `patience`.
    pub(crate) fn silent_parts(&self, borrowing: &Borrowing, patience: Duration) -> Vec<usize> {
        // While the registry is away, lenders cannot report to it, so all lenders look silent for a
        // while afterwards.
        let Some((picture, _)) = self.heard().filter(|(_, heard)| *heard > patience) else {
            return Vec::new();
        };
        let is_silent = |stripe: &Stripe| {
            picture.lenders.iter().any(|lender| {
                lender.lender.host == stripe.lender
                    && u128::from(lender.silent_ms) > patience.as_millis()
            })
        };
        let silent = borrowing.reached();
        let silent = silent.filter(|(_, part)| part.stripes().any(is_silent));
        silent.map(|(part, _)| part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_disk_is_split_over_the_fewest_lenders_with_enough_room() {
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

    #[test]
    fn if_lent_memory_has_no_disk_copy_its_lease_lasts_long_enough_to_copy_the_data() {
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
