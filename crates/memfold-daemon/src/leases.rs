//! Takes, renews and releases leases. A lease is an entry in the lease registry. It says that one
//! host lends RAM to a swap disk of another host.
//!
//! A swap disk needs a lease for each part of its memory. This host takes all leases of a disk or
//! none, renews them while the disk is in use, and releases them in the end. It takes no lease from
//! a lender that has returned wrong bytes before.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, Borrowed, SwapPlace, registry_at};
use memfold_lend::calls::{Answer, Call, CallRegistry, answer};
use memfold_lend::distrust::{Distrust, Distrusted};
use memfold_lend::graph::{Borrowing, Stripe};
use memfold_lend::registry::check_name;
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

/// Time without a report after which a lender that has not exported a new lease is given up. A
/// lender reports about once a second, also while it allocates memory.
const SILENT: Duration = Duration::from_secs(5);

/// Time after which a lender that has not exported a lease in time is asked like others again.
const LATE: Duration = Duration::from_secs(600);

/// Time for which a new daemon tries to reach the registry, to renew an earlier daemon's leases.
/// After that time, the daemon moves data that only lenders hold to a local disk.
pub(crate) const RESUMED: Duration = Duration::from_secs(10);

/// What an operator can do about a lender that does not serve its memory.
const LENDERS_LOG: &str =
    "the log of the lender's daemon says why; 'memfold leases' shows other offers";

/// Longest wait for lenders to free the memory of returned leases, so that it can be borrowed
/// again. A lender looks for such leases twice a second.
const FREED: Duration = Duration::from_secs(3);

/// Time between two renewals of a lease.
pub(crate) const RENEW: Duration = Duration::from_secs(1);

/// Returns the duration of a lease without renewal. `bytes`: size of the whole disk.
pub(crate) fn lease_ttl(durability: Durability, bytes: u64) -> Duration {
    durability.lease_time(bytes)
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

/// A lender that could not serve memory which it had offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LenderFault {
    /// Host name of the lender.
    pub lender: String,
    /// What the lender failed to do, as text that names the lender.
    pub why: String,
}

impl LenderFault {
    /// Returns the fault of the lender to which an error is due; `None` if no lender is at fault.
    pub(crate) fn of(error: &DaemonError) -> Option<Self> {
        let DaemonError::LenderFailed { lender, why, .. } = error else {
            return None;
        };
        Some(Self {
            lender: lender.clone(),
            why: why.clone(),
        })
    }
}

/// Returns the error of a request for memory after the registry's refusal `error`. If the request
/// was also refused because lenders are distrusted or have failed, the error names them.
pub(crate) fn no_lender_left(
    error: RegistryError,
    distrusted: &[String],
    faults: &[LenderFault],
) -> DaemonError {
    let RegistryError::NothingToSpare { lenders, .. } = error else {
        return error.into();
    };
    if distrusted.is_empty() && faults.is_empty() {
        return error.into();
    }
    let mut reasons: Vec<String> = faults.iter().map(|fault| fault.why.clone()).collect();
    if faults.is_empty() {
        reasons.push(error.to_string());
    } else if lenders > 0 {
        reasons.push(format!("and of the other lenders, {error}"));
    }
    if !distrusted.is_empty() {
        reasons.push(format!("not asked: {}", distrusted.join(", ")));
    }
    let fix = if faults.is_empty() {
        "these lenders served wrong bytes: 'memfold leases' names them, 'memfold leases --trust HOST' trusts one again"
    } else {
        LENDERS_LOG
    };
    refused(reasons.join("; "), fix)
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
    /// Lenders that have not exported a lease in time, and when that was noticed.
    late: Mutex<BTreeMap<String, Instant>>,
    /// Least time that a lender has to export a lease; shorter in tests.
    export_least: Duration,
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
            late: Mutex::default(),
            export_least: EXPORT_LEAST,
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
            late: Mutex::default(),
            export_least: EXPORT_LEAST,
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
        self.registry
            .recall(id, &lease.lender, lease.time_to_give_back())?;
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
    /// copy, then those of the second. `faults`: lenders that have failed, and are not asked.
    /// Lenders that have not exported another lease in time are asked only if the others do not
    /// suffice. Returns the number of stripes of a copy.
    pub(crate) fn take_leases(
        &self,
        vm: &str,
        bytes: u64,
        request: &BorrowRequest,
        faults: &[LenderFault],
        taken: &mut Vec<Lease>,
    ) -> Result<u8, DaemonError> {
        let late = self.late_lenders();
        if !late.is_empty() {
            let done = self.take_apart_from(&late, vm, bytes, request, faults, taken);
            if done.is_ok() {
                return done;
            }
            let some: Vec<LeaseId> = taken.drain(..).map(|lease| lease.id).collect();
            self.release(some.iter().copied());
            self.wait_freed(&some);
        }
        self.take_apart_from(&[], vm, bytes, request, faults, taken)
    }

    /// Returns the host names of lenders that have not exported a lease in time, for [`LATE`].
    fn late_lenders(&self) -> Vec<String> {
        let mut late = self.late.lock();
        late.retain(|_, since| since.elapsed() < LATE);
        late.keys().cloned().collect()
    }

    fn take_apart_from(
        &self,
        late: &[String],
        vm: &str,
        bytes: u64,
        request: &BorrowRequest,
        faults: &[LenderFault],
        taken: &mut Vec<Lease>,
    ) -> Result<u8, DaemonError> {
        let distrusted = self.distrusted();
        let failed = faults.iter().map(|fault| &fault.lender).chain(late);
        let avoided: Vec<String> = distrusted.iter().chain(failed).cloned().collect();
        let count = self.stripes(bytes, request, &avoided)?;
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
                disk_bytes: bytes,
                durability: request.durability,
                apart_from: ours.chain(avoided.iter().cloned()).collect(),
            };
            let lease = self.registry.take(&want, ttl);
            taken.push(lease.map_err(|error| no_lender_left(error, &distrusted, faults))?);
        }
        Ok(count)
    }

    /// Returns the number of lenders over which a disk is striped. `avoided`: lenders that are not
    /// used.
    fn stripes(
        &self,
        bytes: u64,
        request: &BorrowRequest,
        avoided: &[String],
    ) -> Result<u8, DaemonError> {
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
        let others = picture.lenders.iter().filter(|lender| {
            let host = &lender.lender.host;
            lender.left_ms > 0 && *host != self.host && !avoided.contains(host)
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

    /// Waits until a lease's lender exports the memory. Meanwhile, renews `held`: all leases of the
    /// same disk.
    ///
    /// # Errors
    ///
    /// [`DaemonError::LenderFailed`] if the lender does not, or in a way that this host cannot use;
    /// [`DaemonError::Registry`] if the registry cannot be used.
    pub(crate) fn wait_exported(
        &self,
        lease: &Lease,
        held: &[Lease],
    ) -> Result<Endpoint, DaemonError> {
        let gib = u32::try_from(lease.bytes >> 30).unwrap_or(u32::MAX);
        let patience = EXPORT_PER_GIB.saturating_mul(gib).max(self.export_least);
        let end = Instant::now() + patience;
        let lender = &lease.lender.host;
        let failed = |why: &str| DaemonError::LenderFailed {
            lender: lender.clone(),
            why: format!("lender '{lender}' {why}"),
            fix: LENDERS_LOG.into(),
        };
        let unusable = |error: &RegistryError| {
            failed(&format!(
                "exports memory in a way that this host cannot use ({error})"
            ))
        };
        let ttl = lease_ttl(lease.durability, lease.bytes_to_copy());
        let keep = || self.keep(held.iter().map(|lease| lease.id), ttl, false);
        // The caller may have waited for other lenders of the disk before.
        let mut renewed: Option<Instant> = None;
        loop {
            match self.registry.endpoint(lease.id, &lease.borrower) {
                Ok(Some(endpoint)) => {
                    let checked = if self.elsewhere {
                        endpoint.check_of_another_host()
                    } else {
                        endpoint.check()
                    };
                    checked.map_err(|error| unusable(&error))?;
                    self.late.lock().remove(lender);
                    return Ok(endpoint);
                }
                Ok(None) if Instant::now() >= end => {
                    self.late.lock().insert(lender.clone(), Instant::now());
                    return Err(failed("has not exported the offered memory in time"));
                }
                Ok(None) => {
                    if renewed.is_none_or(|renewed| renewed.elapsed() >= RENEW) {
                        renewed = Some(Instant::now());
                        keep();
                        if self.silent_lenders(SILENT).contains(lender) {
                            return Err(failed("does not report to the registry"));
                        }
                    }
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(RegistryError::NoLease { .. }) => {
                    return Err(failed("could not export the offered memory"));
                }
                // A registry in another process checks the endpoint itself.
                Err(error @ RegistryError::Value { .. }) => return Err(unusable(&error)),
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

    /// Waits until the lenders of returned leases have freed the memory, or until [`FREED`] has
    /// passed.
    pub(crate) fn wait_freed(&self, leases: &[LeaseId]) {
        let end = Instant::now() + FREED;
        let is_left = || {
            let picture = self.registry.picture();
            picture.is_ok_and(|now| now.leases.iter().any(|lease| leases.contains(&lease.id)))
        };
        while !leases.is_empty() && Instant::now() < end && is_left() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Returns the indexes of those parts of `borrowing` whose lender has been silent for longer
    /// than `patience`.
    pub(crate) fn silent_parts(&self, borrowing: &Borrowing, patience: Duration) -> Vec<usize> {
        let lenders = self.silent_lenders(patience);
        let is_silent = |stripe: &Stripe| lenders.contains(&stripe.lender);
        let silent = borrowing.reached();
        let silent = silent.filter(|(_, part)| part.stripes().any(is_silent));
        silent.map(|(part, _)| part).collect()
    }

    /// Returns the host names of lenders that have been silent for longer than `patience`.
    fn silent_lenders(&self, patience: Duration) -> Vec<String> {
        // While the registry is away, lenders cannot report to it, so all lenders look silent for a
        // while afterwards.
        let Some((picture, _)) = self.heard().filter(|(_, heard)| *heard > patience) else {
            return Vec::new();
        };
        let silent = picture.lenders.into_iter();
        let silent = silent.filter(|view| u128::from(view.silent_ms) > patience.as_millis());
        silent.map(|view| view.lender.host).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use memfold_lend::{Address, Incarnation, LenderId, Offer, Transport};

    use super::*;

    const MIB: u64 = 1 << 20;
    const MINUTE: Duration = Duration::from_secs(60);

    /// Returns the access of host `b` to a registry in which `a` and `c` offer memory.
    fn two_lenders(state: &std::path::Path) -> Leases {
        let registry = SqliteRegistry::open(&state.join("registry.db")).unwrap();
        for (host, mib) in [("a", 512), ("c", 128)] {
            let lender = LenderId {
                host: host.into(),
                incarnation: Incarnation(1),
            };
            let bytes = mib * MIB;
            registry.offer(&Offer { lender, bytes }, MINUTE).unwrap();
        }
        Leases::of_registry("b", Arc::new(registry), state)
    }

    #[test]
    fn after_a_lender_has_failed_others_are_asked_and_the_last_error_names_each_failure() {
        let directory = tempfile::tempdir().unwrap();
        let leases = two_lenders(directory.path());
        let take = |mib: u64, failed: &[&str]| {
            let fault = |lender: &&str| LenderFault {
                lender: (*lender).to_owned(),
                why: format!("lender '{lender}' failed"),
            };
            let faults: Vec<LenderFault> = failed.iter().map(fault).collect();
            let (request, mut taken) = (BorrowRequest::default(), Vec::new());
            let done = leases.take_leases("v", mib * MIB, &request, &faults, &mut taken);
            done.map(|_| taken[0].lender.host.clone())
        };
        assert_eq!(take(64, &[]).unwrap(), "a");
        assert_eq!(take(64, &["a"]).unwrap(), "c");
        let error = take(64, &["a", "c"]).unwrap_err();
        assert_eq!(error.to_string(), "lender 'a' failed; lender 'c' failed");
        assert!(error.hint().unwrap().contains("log of the lender's daemon"));
        let error = take(256, &["a"]).unwrap_err().to_string();
        for word in ["lender 'a' failed", "no lender has 256 MiB"] {
            assert!(error.contains(word), "{error}");
        }
        let error = take(1024, &[]).unwrap_err().to_string();
        assert!(error.starts_with("no lender has"), "{error}");
    }

    #[test]
    fn a_lender_that_ends_a_new_lease_or_exports_it_unusably_is_at_fault() {
        let directory = tempfile::tempdir().unwrap();
        let mut leases = two_lenders(directory.path());
        leases.elsewhere = true;
        let (request, mut taken) = (BorrowRequest::default(), Vec::new());
        for _ in 0..2 {
            let done = leases.take_leases("v", 64 * MIB, &request, &[], &mut taken);
            done.unwrap();
        }
        let ended = &taken[0];
        leases.registry.ended(ended.id, &ended.lender).unwrap();
        let fault = LenderFault::of(&leases.wait_exported(ended, &taken).unwrap_err()).unwrap();
        assert_eq!(fault.lender, "a");
        assert!(fault.why.contains("'a' could not export"), "{}", fault.why);
        let on_socket = &taken[1];
        let endpoint = Endpoint {
            address: Address::Unix("/run/x".into()),
            key: None,
            transport: Transport::Nbd,
        };
        let published = leases
            .registry
            .publish(on_socket.id, &on_socket.lender, &endpoint);
        published.unwrap();
        let fault = LenderFault::of(&leases.wait_exported(on_socket, &taken).unwrap_err()).unwrap();
        assert_eq!(fault.lender, "c");
        assert!(fault.why.contains("Unix socket"), "{}", fault.why);
        leases.release(taken.iter().map(|lease| lease.id));
        let began = Instant::now();
        leases.wait_freed(&[ended.id]);
        assert!(began.elapsed() < FREED);
    }

    #[test]
    fn a_lender_that_reports_but_has_not_exported_in_time_is_asked_last_until_it_exports_again() {
        let directory = tempfile::tempdir().unwrap();
        let mut leases = two_lenders(directory.path());
        leases.export_least = Duration::ZERO;
        let take = |mib: u64| {
            let (request, mut taken) = (BorrowRequest::default(), Vec::new());
            let done = leases.take_leases("v", mib * MIB, &request, &[], &mut taken);
            done.unwrap();
            taken.remove(0)
        };
        let wait = |lease: &Lease| leases.wait_exported(lease, std::slice::from_ref(lease));
        let late = take(64);
        let fault = LenderFault::of(&wait(&late).unwrap_err()).unwrap();
        assert_eq!(fault.lender, "a");
        assert!(fault.why.contains("has not exported"), "{}", fault.why);
        assert_eq!(take(64).lender.host, "c");
        // The other lender does not suffice.
        let other = take(256);
        assert_eq!(other.lender.host, "a");
        let endpoint = Endpoint {
            address: Address::Unix("/run/x".into()),
            key: None,
            transport: Transport::Nbd,
        };
        let published = leases.registry.publish(other.id, &other.lender, &endpoint);
        published.unwrap();
        wait(&other).unwrap();
        assert_eq!(take(64).lender.host, "a");
    }

    #[test]
    fn a_lender_that_falls_silent_before_its_export_is_given_up_and_all_leases_are_renewed() {
        let directory = tempfile::tempdir().unwrap();
        let clock = Arc::new(AtomicI64::new(1));
        let now = clock.clone();
        let registry = SqliteRegistry::open_at(
            &directory.path().join("registry.db"),
            Arc::new(move || now.load(Ordering::Relaxed)),
            "boot",
        );
        let registry = Arc::new(registry.unwrap());
        for host in ["a", "c"] {
            let lender = LenderId {
                host: host.into(),
                incarnation: Incarnation(1),
            };
            let bytes = 64 * MIB;
            registry.offer(&Offer { lender, bytes }, MINUTE).unwrap();
        }
        let leases = Leases::of_registry("b", registry.clone(), directory.path());
        let request = BorrowRequest {
            stripes: Some(2),
            ..BorrowRequest::default()
        };
        let mut taken = Vec::new();
        let done = leases.take_leases("v", 64 * MIB, &request, &[], &mut taken);
        assert_eq!((done.unwrap(), taken.len()), (2, 2));
        // The registry answers all the time, and no lender reports for 6 s.
        clock.fetch_add(6000, Ordering::Relaxed);
        leases.heard_for(MINUTE);
        let began = Instant::now();
        let fault = LenderFault::of(&leases.wait_exported(&taken[0], &taken).unwrap_err());
        assert!(began.elapsed() < EXPORT_LEAST);
        let fault = fault.unwrap();
        assert_eq!(fault.lender, taken[0].lender.host);
        assert!(fault.why.contains("does not report"), "{}", fault.why);
        let renewed = registry.picture().unwrap().leases;
        assert!(renewed.iter().all(|lease| lease.left_ms == 60_000));
    }

    #[test]
    fn a_striped_disk_without_a_copy_is_recalled_with_the_time_to_copy_all_its_stripes() {
        let directory = tempfile::tempdir().unwrap();
        let registry = SqliteRegistry::open(&directory.path().join("registry.db")).unwrap();
        for host in ["a", "b"] {
            let lender = LenderId {
                host: host.into(),
                incarnation: Incarnation(1),
            };
            let bytes = 2000 * MIB;
            registry
                .offer(&Offer { lender, bytes }, Duration::from_secs(60))
                .unwrap();
        }
        let leases = Leases::of_registry("borrower", Arc::new(registry), directory.path());
        let request = BorrowRequest {
            durability: Durability::None,
            stripes: Some(2),
            ..BorrowRequest::default()
        };
        let mut taken = Vec::new();
        let count = leases.take_leases("v", 2000 * MIB, &request, &[], &mut taken);
        assert_eq!((count.unwrap(), taken.len()), (2, 2));
        for lease in &taken {
            assert!(lease.bytes < 1001 * MIB);
            // 10 s, and a second for each 20 MiB of the disk.
            assert_eq!(lease.time_to_give_back().as_secs(), 110);
        }
    }

    #[test]
    fn a_swap_disk_is_split_over_the_fewest_lenders_with_enough_room() {
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
