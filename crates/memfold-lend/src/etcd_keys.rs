//! Names of the keys under which the lease registry is stored in etcd, and the format of their
//! values.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::etcd_api::{Api, Grant, Kv, Txn};
use super::lease::{
    Durability, FORGOTTEN, Incarnation, Lease, LeaseId, LeaseState, LenderId, LenderView, ms,
};
use super::place::Member;
use super::registry_error::{RegistryError, Result, no_lease};
use super::tls::TlsFiles;

/// Prefix of all keys of memfold in etcd. The number is the version of the key layout.
const PREFIX: &str = "/memfold/lend/1/";

/// How long a transaction is retried while other clients change the same keys.
const CONTENTION: Duration = Duration::from_secs(5);

/// A lender's account: its offer and the bytes of its leases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Account {
    pub(super) incarnation: u64,
    /// Bytes that the lender offers, lent bytes included.
    pub(super) bytes: u64,
    /// How long an offer is valid after it was published, in milliseconds.
    pub(super) ttl_ms: u64,
    /// Bytes of each lease that has not ended, by lease number.
    pub(super) leases: BTreeMap<u64, u64>,
}

/// A lease without its times, as stored under `lease/ID/what`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct What {
    pub(super) lender: LenderId,
    pub(super) borrower: String,
    pub(super) vm: String,
    pub(super) bytes: u64,
    /// Size of the whole swap disk, in bytes; 0 in records of older versions.
    #[serde(default)]
    pub(super) disk_bytes: u64,
    pub(super) durability: Durability,
    pub(super) state: LeaseState,
}

/// Value of a key: how long the key holds after it was written, in milliseconds.
#[derive(Deserialize)]
struct Holds {
    ms: u64,
}

/// A value with the revision at which it was written.
#[derive(Clone, Debug)]
pub(super) struct At<T> {
    pub(super) value: T,
    pub(super) revision: u64,
}

/// What a process has seen of a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// Revision that this process last saw.
    revision: u64,
    /// When this process first saw that revision.
    at: Instant,
    /// Whether this process saw an earlier revision before. Otherwise, the revision may be much
    /// older than `at`.
    is_new: bool,
}

/// A registry of leases whose records are keys in an etcd. The module `etcd` describes the keys and
/// the transactions.
#[derive(Debug)]
pub struct EtcdRegistry {
    pub(super) api: Api,
    pub(super) place: String,
    pub(super) prefix: String,
    pub(super) begun: Instant,
    /// What this process has seen of each key.
    pub(super) seen: Mutex<HashMap<String, Seen>>,
    /// Time without a report after which a lender is forgotten; shorter in tests.
    pub(super) forgotten: Duration,
}

/// Keys of one lease.
pub(super) struct LeaseKeys {
    /// Prefix of the following three keys.
    pub(super) all: String,
    pub(super) what: String,
    pub(super) renewed: String,
    pub(super) recall: String,
    pub(super) endpoint: String,
}

impl EtcdRegistry {
    /// Creates a registry in the etcd cluster with these members. Error messages call this registry
    /// `place`. `tls`: certificates; `None`: connections without TLS.
    #[must_use]
    pub fn new(place: String, members: Vec<Member>, tls: Option<TlsFiles>) -> Self {
        Self {
            api: Api::new(members, tls),
            place,
            prefix: PREFIX.to_owned(),
            begun: Instant::now(),
            seen: Mutex::default(),
            forgotten: FORGOTTEN,
        }
    }

    pub(super) fn unusable(&self, why: impl Into<String>) -> RegistryError {
        RegistryError::Unusable {
            place: self.place.clone(),
            why: why.into(),
        }
    }

    pub(super) fn key(&self, name: impl fmt::Display) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(super) fn account_key(&self, host: &str) -> String {
        self.key(format_args!("lender/{host}/account"))
    }

    pub(super) fn heard_key(&self, host: &str) -> String {
        self.key(format_args!("lender/{host}/heard"))
    }

    pub(super) fn lease_keys(&self, id: LeaseId) -> LeaseKeys {
        let key = |name: &str| self.key(format_args!("lease/{id}/{name}"));
        LeaseKeys {
            all: key(""),
            what: key("what"),
            renewed: key("renewed"),
            recall: key("recall"),
            endpoint: self.key(format_args!("endpoint/{id}")),
        }
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, HashMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time since this process first saw the key at `revision`. `asked`: when the
    /// request began whose answer has this revision.
    ///
    /// Answers may arrive out of order, so an answer may have an older revision than the last one.
    /// But because reads are linearizable, a request that began after a revision was seen finds
    /// that revision or a later one. If it finds an earlier one, etcd was restored from a backup,
    /// and the time that has passed since the key was written is unknown, as for a new key.
    pub(super) fn since(&self, key: &str, revision: u64, asked: Instant) -> Duration {
        let now = Instant::now();
        let mut seen = self.seen();
        let first = Seen {
            revision,
            at: now,
            is_new: false,
        };
        let last = seen.entry(key.to_owned()).or_insert(first);
        let is_new = last.revision < revision;
        let is_restored = revision < last.revision && asked > last.at;
        if is_new || is_restored {
            *last = Seen { is_new, ..first };
        }
        last.at.elapsed()
    }

    /// Returns the time since this process first saw the revision of a key that it has read.
    pub(super) fn since_written(&self, kv: &Kv) -> Duration {
        self.since(&kv.key, kv.revision, kv.asked)
    }

    /// Returns whether this process saw the key before its present revision was written, so that
    /// [`Self::left`] is not too long.
    pub(super) fn saw_before(&self, key: &str) -> bool {
        self.seen().get(key).is_some_and(|seen| seen.is_new)
    }

    /// Returns the time left of the duration in a key, counted from when this process first saw the
    /// key's revision.
    pub(super) fn left(&self, kv: &Kv) -> Result<Duration> {
        let holds: Holds = self.read(kv)?;
        let holds = Duration::from_millis(holds.ms);
        Ok(holds.saturating_sub(self.since_written(kv)))
    }

    pub(super) fn read<T: DeserializeOwned>(&self, kv: &Kv) -> Result<T> {
        serde_json::from_slice(&kv.value).map_err(|error| {
            self.unusable(format!(
                "cannot parse the registry's key {} ({error})",
                kv.key
            ))
        })
    }

    pub(super) fn at<T: DeserializeOwned>(&self, kv: &Kv) -> Result<At<T>> {
        let (value, revision) = (self.read(kv)?, kv.revision);
        Ok(At { value, revision })
    }

    /// Runs a transaction of `N` range requests and returns their results.
    pub(super) fn ranges<const N: usize>(&self, txn: &Txn) -> Result<[Vec<Kv>; N]> {
        let done = self.api.txn(txn).map_err(|why| self.unusable(why))?;
        let other = |_| self.unusable("its answer does not match the request");
        done.ranges().try_into().map_err(other)
    }

    /// Reads the values of `keys` at one revision of etcd.
    pub(super) fn get<const N: usize>(&self, keys: [&str; N]) -> Result<[Option<Kv>; N]> {
        let txn = keys.iter().fold(Txn::default(), |txn, key| txn.get(key));
        Ok(self.ranges(&txn)?.map(|mut found| found.pop()))
    }

    /// Runs a transaction that depends on values read before. Returns `None` if those values have
    /// changed since.
    pub(super) fn commit(&self, txn: &Txn) -> Result<Option<()>> {
        let done = self.api.txn(txn).map_err(|why| self.unusable(why))?;
        if !done.succeeded {
            return Ok(None);
        }
        for key in &txn.held {
            self.since(key, done.revision(), done.asked);
        }
        Ok(Some(()))
    }

    /// Repeats `attempt` until no other client has changed the same keys, for at most
    /// [`CONTENTION`].
    pub(super) fn repeat<T>(&self, mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let end = Instant::now() + CONTENTION;
        for turn in 1.. {
            if let Some(done) = attempt()? {
                return Ok(done);
            }
            if Instant::now() > end {
                break;
            }
            // The wait is random, so that competing clients do not retry at the same time.
            let chance = memfold_vm::overlay::unique() / 1000 % 8 + 1;
            std::thread::sleep(Duration::from_millis(chance * turn.min(10)));
        }
        Err(self.unusable("other clients keep changing the same keys"))
    }

    /// Returns the lease in `kv`, if it belongs to the caller.
    pub(super) fn what(
        &self,
        id: LeaseId,
        who: &str,
        kv: Option<&Kv>,
        is_theirs: impl FnOnce(&What) -> bool,
    ) -> Result<At<What>> {
        let what: Option<At<What>> = kv.map(|kv| self.at(kv)).transpose()?;
        let theirs = what.filter(|what| is_theirs(&what.value));
        theirs.ok_or_else(|| no_lease(id, who))
    }

    pub(super) fn lease(
        &self,
        id: LeaseId,
        what: What,
        renewed: Option<&Kv>,
        recall: Option<&Kv>,
    ) -> Result<Lease> {
        let left = renewed.map_or(Ok(Duration::ZERO), |kv| self.left(kv))?;
        let recall = recall.map(|kv| self.left(kv)).transpose()?;
        Ok(Lease {
            id,
            lender: what.lender,
            borrower: what.borrower,
            vm: what.vm,
            bytes: what.bytes,
            disk_bytes: what.disk_bytes,
            durability: what.durability,
            state: what.state,
            left_ms: ms(left),
            recall_ms: recall.map(ms),
        })
    }

    /// Returns the lenders in `kvs`, which holds all keys of all lenders.
    pub(super) fn lenders(&self, kvs: &[Kv]) -> Result<Vec<(LenderView, At<Account>)>> {
        let prefix = self.key("lender/");
        let mut all = Vec::new();
        for kv in kvs {
            let name = kv.key.strip_prefix(&prefix);
            let Some(host) = name.and_then(|name| name.strip_suffix("/account")) else {
                continue;
            };
            let account: At<Account> = self.at(kv)?;
            let heard_key = self.heard_key(host);
            let heard = kvs.iter().find(|other| other.key == heard_key);
            let (left, silent) = if let Some(heard) = heard {
                (self.left(heard)?, self.since_written(heard))
            } else {
                let seen = self.seen().get(&heard_key).map(|seen| seen.at.elapsed());
                // The offer expired before this process first read it.
                let unseen = || Duration::from_millis(account.value.ttl_ms) + self.begun.elapsed();
                (Duration::ZERO, seen.unwrap_or_else(unseen))
            };
            let view = LenderView {
                lender: LenderId {
                    host: host.to_owned(),
                    incarnation: Incarnation(account.value.incarnation),
                },
                offered_bytes: account.value.bytes,
                lent_bytes: account.value.leases.values().sum(),
                silent_ms: ms(silent),
                left_ms: ms(left),
            };
            all.push((view, account));
        }
        all.sort_by(|(a, _), (b, _)| a.lender.host.cmp(&b.lender.host));
        Ok(all)
    }

    /// Returns how many leases in `kvs`, which holds all keys of leases, a borrower holds and has
    /// not released.
    pub(super) fn held_by(&self, borrower: &str, kvs: &[Kv]) -> Result<usize> {
        let mut count = 0;
        for kv in kvs.iter().filter(|kv| kv.key.ends_with("/what")) {
            let what: What = self.read(kv)?;
            let is_held = what.borrower == borrower && what.state != LeaseState::Released;
            count += usize::from(is_held);
        }
        Ok(count)
    }

    pub(super) fn grant(&self, ttl_ms: u64) -> Result<Grant> {
        let granted = self.api.grant(Duration::from_millis(ttl_ms));
        granted.map_err(|why| self.unusable(why))
    }

    /// Removes from `seen` the keys of leases that no longer exist. Keys of lenders stay, because
    /// they tell how long a lender has been silent.
    pub(super) fn forget(&self, leases: &[Kv]) {
        let prefix = self.key("lease/");
        let is_there = |key: &str| leases.iter().any(|kv| kv.key == key);
        self.seen()
            .retain(|key, _| !key.starts_with(&prefix) || is_there(key));
    }
}
