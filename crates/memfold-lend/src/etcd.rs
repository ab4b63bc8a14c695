//! The registry in an etcd, for clusters. Every host sends its requests directly to etcd, so no
//! memfold daemon has to run for the other hosts.
//!
//! | key | contents | how it changes |
//! |---|---|---|
//! | `lender/HOST/account` | run of the daemon, bytes offered, bytes of each lease that has not ended | if its revision is unchanged |
//! | `lender/HOST/heard` | how long the offer holds | expires with an etcd lease |
//! | `lease/ID/what` | lender, borrower, VM, bytes, state | if its revision is unchanged |
//! | `lease/ID/renewed` | how long the lease holds | expires with an etcd lease |
//! | `lease/ID/recall` | time within which the lender wants the lease back | |
//! | `endpoint/ID` | address and key of the export | |
//! | `last` | number of the last lease | if its revision is unchanged |
//!
//! **Why no byte is lent twice.** Every request that creates or ends a lease changes the lender's
//! account. etcd executes the transaction only if the account is unchanged since it was read. So if
//! two hosts have read the same account, only the first can change it, and the other must read
//! again. A host that is cut off from most members can neither read (reads are linearizable) nor
//! change anything. If etcd receives a request late, it still compares the account. A request
//! without an answer may have been executed: then the borrower does not know its lease and never
//! renews it, and the lender ends it.
//!
//! **Time.** Hosts need not agree on the time of day. A key says for how long it holds. Each reader
//! counts from the time at which the *reader* first saw that revision, which is later than the
//! write. A lender looks twice a second, so it ends an export at its deadline even while etcd is
//! unreachable. For a key that a reader has never seen, etcd's own clock decides: etcd removes the
//! key.

use std::collections::HashMap;
use std::time::Duration;

use memfold_units::ByteSize;

use super::endpoint::Endpoint;
use super::etcd_api::{Grant, Kv, Txn};
use super::etcd_keys::{Account, At, EtcdRegistry, Holds, KnownLender, What, ms};
use super::lease::{
    Durability, Incarnation, Lease, LeaseId, LeaseState, LenderId, LenderView, Picture,
};
use super::offer::{Offer, Want};
use super::registry::Registry;
use super::registry_error::{RegistryError, check_bytes, check_name, check_ttl};

/// Time after which an unchanged offer is written again. An offer is not written at each round,
/// because each write costs an etcd revision.
const SAY_AGAIN: Duration = Duration::from_secs(1);

/// Maximum number of leases that one transaction ends; etcd allows 128 operations.
const ENDED_AT_ONCE: usize = 50;

impl EtcdRegistry {
    /// Tries once to publish a lender's offer. Returns `None` if another client changed the keys
    /// meanwhile.
    fn try_offer(&self, offer: &Offer, ttl_ms: u64) -> Result<Option<bool>, RegistryError> {
        let lender = &offer.lender;
        let (account, heard) = self.lender(&lender.host)?;
        let revision = account.as_ref().map_or(0, |account| account.revision);
        let before = account.map(|account| account.value);
        let incarnation = lender.incarnation.0;
        let known = before.as_ref().map_or(0, |account| account.incarnation);
        if known > incarnation {
            let lender = lender.host.clone();
            return Err(RegistryError::Superseded { lender });
        }
        let mut leases = before.clone().unwrap_or_default().leases;
        // Leases of the previous run have ended with that run. Remove as many as one transaction
        // can.
        let old: Vec<u64> = if known < incarnation {
            leases.keys().copied().take(ENDED_AT_ONCE).collect()
        } else {
            Vec::new()
        };
        leases.retain(|id, _| !old.contains(id));
        let is_whole = known == incarnation || leases.is_empty();
        let after = if is_whole {
            Account {
                incarnation,
                bytes: offer.bytes,
                ttl_ms,
                leases,
            }
        } else {
            Account {
                leases,
                ..before.clone().unwrap_or_default()
            }
        };
        let account_key = self.account_key(&lender.host);
        let heard_key = self.heard_key(&lender.host);
        let mut txn = Txn::default().when_at(&account_key, revision);
        if before.as_ref() == Some(&after) {
            let said = heard.map(|kv| self.since(&heard_key, kv.revision));
            if said.is_some_and(|said| said < SAY_AGAIN) {
                return Ok(Some(true));
            }
        } else {
            txn = txn.put(&account_key, &after);
        }
        for id in &old {
            txn = txn
                .delete_all(&self.lease_keys(*id))
                .delete(&self.endpoint_key(*id));
        }
        let grant = self.grant(ttl_ms)?;
        let holds = Holds { ms: ttl_ms };
        let done = self.commit(&txn.put_for(&heard_key, &holds, grant))?;
        Ok(done.map(|revision| {
            self.since(&heard_key, revision);
            is_whole
        }))
    }

    /// Tries once to reserve bytes for a lease. Returns `None` if another client changed the keys
    /// meanwhile.
    fn try_take(
        &self,
        want: &Want,
        ttl_ms: u64,
        grant: Grant,
    ) -> Result<Option<Lease>, RegistryError> {
        let read = Txn::default()
            .get_all(&self.all_lenders())
            .get(&self.last_key());
        let [lenders, last] = self.ranges(&read)?;
        let mut lenders = self.lenders(&lenders)?;
        lenders.retain(|lender| {
            !lender.left.is_zero()
                && lender.host != want.borrower
                && !want.apart_from.contains(&lender.host)
        });
        let looked = lenders.len();
        // A lender that now offers less than it has lent has no free bytes.
        let free = |lender: &KnownLender| {
            let account = &lender.account.value;
            account.bytes.saturating_sub(account.lent())
        };
        // If several lenders have the most free bytes, take the first by name.
        let best = lenders.into_iter().rev().max_by_key(free);
        let largest = best.as_ref().map_or(0, free);
        let Some(mut best) = best.filter(|_| largest >= want.bytes) else {
            return Err(RegistryError::NothingToSpare {
                wanted: ByteSize(want.bytes),
                borrower: want.borrower.clone(),
                largest,
                lenders: looked,
            });
        };
        let last: Option<At<u64>> = last.first().map(|kv| self.at(kv)).transpose()?;
        let (last, last_revision) = last.map_or((0, 0), |last| (last.value, last.revision));
        let id = last + 1;
        let account = &mut best.account.value;
        account.leases.insert(id, want.bytes);
        let what = What {
            lender: LenderId {
                host: best.host.clone(),
                incarnation: Incarnation(account.incarnation),
            },
            borrower: want.borrower.clone(),
            vm: want.vm.clone(),
            bytes: want.bytes,
            durability: want.durability,
            state: LeaseState::Taken,
        };
        let account_key = self.account_key(&best.host);
        let txn = Txn::default()
            .when_at(&account_key, best.account.revision)
            .when_at(&self.last_key(), last_revision)
            .put(&account_key, account)
            .put(&self.last_key(), &id)
            .put(&self.what_key(id), &what)
            .put_for(&self.renewed_key(id), &Holds { ms: ttl_ms }, grant);
        let Some(revision) = self.commit(&txn)? else {
            return Ok(None);
        };
        self.since(&self.renewed_key(id), revision);
        let mut lease = self.lease(LeaseId(id), what, None, None)?;
        lease.left_ms = ttl_ms;
        Ok(Some(lease))
    }

    /// Tries once to renew a lease. Returns `None` if another client changed the keys meanwhile.
    fn try_renew(
        &self,
        id: LeaseId,
        borrower: &str,
        ttl_ms: u64,
    ) -> Result<Option<Lease>, RegistryError> {
        let (what_key, renewed_key) = (self.what_key(id.0), self.renewed_key(id.0));
        let [what, renewed, recall] =
            self.get([&what_key, &renewed_key, &self.recall_key(id.0)])?;
        let what = self.what(id, borrower, what.as_ref(), |w| w.borrower == borrower)?;
        if what.value.state == LeaseState::Released {
            return Err(state(id, what.value.state, "renewed"));
        }
        let mut lease = self.lease(id, what.value, renewed.as_ref(), recall.as_ref())?;
        // A lease that has enough time left is not written, because each write costs an etcd
        // revision.
        if lease.left_ms >= ttl_ms / 4 * 3 && lease.left_ms > 0 {
            return Ok(Some(lease));
        }
        let txn = Txn::default().when_at(&what_key, what.revision).put_for(
            &renewed_key,
            &Holds { ms: ttl_ms },
            self.grant(ttl_ms)?,
        );
        let done = self.commit(&txn)?;
        Ok(done.map(|revision| {
            self.since(&renewed_key, revision);
            lease.left_ms = ttl_ms;
            lease
        }))
    }

    /// Tries once to record that the lent bytes are the only copy. Returns `None` if another client
    /// changed the keys meanwhile.
    fn try_sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Option<Lease>, RegistryError> {
        let (what_key, recall_key) = (self.what_key(id.0), self.recall_key(id.0));
        let [what, renewed, recall] =
            self.get([&what_key, &self.renewed_key(id.0), &recall_key])?;
        let At {
            value: mut what,
            revision,
        } = self.what(id, borrower, what.as_ref(), |w| w.borrower == borrower)?;
        let known = what.durability != Durability::Disk;
        if !known {
            what.durability = Durability::None;
        }
        let mut lease = self.lease(id, what.clone(), renewed.as_ref(), recall.as_ref())?;
        if known {
            return Ok(Some(lease));
        }
        let mut txn = Txn::default()
            .when_at(&what_key, revision)
            .put(&what_key, &what);
        let time = check_ttl(what.durability.time_to_give_back(what.bytes))?;
        let is_asked_for_sooner = lease.recall_ms.is_some_and(|left| left < time);
        if is_asked_for_sooner {
            txn = txn.put(&recall_key, &Holds { ms: time });
            lease.recall_ms = Some(time);
        }
        let done = self.commit(&txn)?;
        Ok(done.map(|revision| {
            if is_asked_for_sooner {
                self.since(&recall_key, revision);
            }
            lease
        }))
    }

    /// Tries once to end a lease. Returns `None` if another client changed the keys meanwhile.
    fn try_end(&self, id: LeaseId, lender: &LenderId) -> Result<Option<()>, RegistryError> {
        let (what_key, account_key) = (self.what_key(id.0), self.account_key(&lender.host));
        let [Some(what), Some(account)] = self.get([&what_key, &account_key])? else {
            return Ok(Some(()));
        };
        let what: At<What> = self.at(&what)?;
        if what.value.lender != *lender {
            return Ok(Some(()));
        }
        let mut account: At<Account> = self.at(&account)?;
        account.value.leases.remove(&id.0);
        let txn = Txn::default()
            .when_at(&what_key, what.revision)
            .when_at(&account_key, account.revision)
            .put(&account_key, &account.value)
            .delete_all(&self.lease_keys(id.0))
            .delete(&self.endpoint_key(id.0));
        Ok(self.commit(&txn)?.map(drop))
    }
}

fn state(id: LeaseId, state: LeaseState, wanted: &str) -> RegistryError {
    RegistryError::State {
        id,
        state,
        wanted: wanted.to_owned(),
    }
}

impl Registry for EtcdRegistry {
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<(), RegistryError> {
        check_name("host", &offer.lender.host)?;
        check_bytes(offer.bytes, 0)?;
        let ttl = check_ttl(ttl)?;
        while !self.repeat(|| self.try_offer(offer, ttl))? {}
        Ok(())
    }

    fn withdraw(&self, lender: &LenderId) -> Result<(), RegistryError> {
        let key = self.account_key(&lender.host);
        self.repeat(|| {
            let (account, _) = self.lender(&lender.host)?;
            let is_ours = |account: &At<Account>| account.value.incarnation == lender.incarnation.0;
            let Some(mut account) = account.filter(is_ours) else {
                return Ok(Some(()));
            };
            // The account stays, because its incarnation keeps an older daemon from lending again.
            account.value.bytes = 0;
            let txn = Txn::default()
                .when_at(&key, account.revision)
                .put(&key, &account.value)
                .delete(&self.heard_key(&lender.host));
            Ok(self.commit(&txn)?.map(drop))
        })
    }

    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease, RegistryError> {
        want.check()?;
        let ttl = check_ttl(ttl)?;
        let grant = self.grant(ttl)?;
        self.repeat(|| self.try_take(want, ttl, grant))
    }

    fn publish(
        &self,
        id: LeaseId,
        lender: &LenderId,
        endpoint: &Endpoint,
    ) -> Result<(), RegistryError> {
        endpoint.check()?;
        let key = self.what_key(id.0);
        self.repeat(|| {
            let [found] = self.get([&key])?;
            let mut what = self.what(id, &lender.host, found.as_ref(), |w| w.lender == *lender)?;
            if what.value.state != LeaseState::Taken {
                return Err(state(id, what.value.state, "exported"));
            }
            what.value.state = LeaseState::Exported;
            let txn = Txn::default()
                .when_at(&key, what.revision)
                .put(&key, &what.value)
                .put(&self.endpoint_key(id.0), endpoint);
            Ok(self.commit(&txn)?.map(drop))
        })
    }

    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>, RegistryError> {
        let [what, endpoint] = self.get([&self.what_key(id.0), &self.endpoint_key(id.0)])?;
        let what = self.what(id, borrower, what.as_ref(), |w| w.borrower == borrower)?;
        if what.value.state != LeaseState::Exported {
            return Ok(None);
        }
        let endpoint: Option<Endpoint> = endpoint.as_ref().map(|kv| self.read(kv)).transpose()?;
        if let Some(endpoint) = &endpoint {
            endpoint.check()?;
        }
        Ok(endpoint)
    }

    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease, RegistryError> {
        let ttl = check_ttl(ttl)?;
        self.repeat(|| self.try_renew(id, borrower, ttl))
    }

    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease, RegistryError> {
        self.repeat(|| self.try_sole_copy(id, borrower))
    }

    fn recall(
        &self,
        id: LeaseId,
        lender: &LenderId,
        within: Duration,
    ) -> Result<(), RegistryError> {
        check_ttl(within)?;
        let (what_key, recall_key) = (self.what_key(id.0), self.recall_key(id.0));
        self.repeat(|| {
            let [what, recall] = self.get([&what_key, &recall_key])?;
            let At { value, revision } =
                self.what(id, &lender.host, what.as_ref(), |w| w.lender == *lender)?;
            let lease = self.lease(id, value, None, recall.as_ref())?;
            let within = check_ttl(lease.within(within))?;
            if lease.recall_ms.is_some_and(|left| left <= within) {
                return Ok(Some(()));
            }
            let txn = Txn::default()
                .when_at(&what_key, revision)
                .put(&recall_key, &Holds { ms: within });
            let done = self.commit(&txn)?;
            Ok(done.map(|revision| _ = self.since(&recall_key, revision)))
        })
    }

    fn release(&self, id: LeaseId, borrower: &str) -> Result<(), RegistryError> {
        let key = self.what_key(id.0);
        self.repeat(|| {
            let [Some(what)] = self.get([&key])? else {
                return Ok(Some(()));
            };
            let mut what: At<What> = self.at(&what)?;
            if what.value.borrower != borrower || what.value.state == LeaseState::Released {
                return Ok(Some(()));
            }
            what.value.state = LeaseState::Released;
            let txn = Txn::default()
                .when_at(&key, what.revision)
                .put(&key, &what.value)
                .delete(&self.endpoint_key(id.0));
            Ok(self.commit(&txn)?.map(drop))
        })
    }

    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<(), RegistryError> {
        self.repeat(|| self.try_end(id, lender))
    }

    fn picture(&self) -> Result<Picture, RegistryError> {
        let read = Txn::default()
            .get_all(&self.all_lenders())
            .get_all(&self.all_leases());
        let [lenders, keys] = self.ranges(&read)?;
        self.forget(&keys);
        let by_name: HashMap<&str, &Kv> = keys.iter().map(|kv| (kv.key.as_str(), kv)).collect();
        let prefix = self.all_leases();
        let mut leases = Vec::new();
        for kv in &keys {
            let name = kv.key.strip_prefix(&prefix);
            let id = name.and_then(|name| name.strip_suffix("/what"));
            let Some(id) = id.and_then(|id| id.parse().ok()) else {
                continue;
            };
            let other = |key: String| by_name.get(key.as_str()).copied();
            let (renewed, recall) = (self.renewed_key(id), self.recall_key(id));
            leases.push(self.lease(LeaseId(id), self.read(kv)?, other(renewed), other(recall))?);
        }
        leases.sort_by_key(|lease| lease.id);
        let lenders = self
            .lenders(&lenders)?
            .into_iter()
            .map(|lender| LenderView {
                lender: LenderId {
                    incarnation: Incarnation(lender.account.value.incarnation),
                    host: lender.host,
                },
                offered_bytes: lender.account.value.bytes,
                lent_bytes: lender.account.value.lent(),
                silent_ms: ms(lender.silent),
                left_ms: ms(lender.left),
            });
        Ok(Picture {
            lenders: lenders.collect(),
            leases,
        })
    }
}
