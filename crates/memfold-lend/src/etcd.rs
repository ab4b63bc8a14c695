//! Keeps the registry of leases in an etcd cluster. Every host sends its requests directly to etcd,
//! so no host depends on the daemon of another host.
//!
//! | key | contents | how it changes |
//! |---|---|---|
//! | `lender/HOST/account` | number of the lender's start, bytes offered, bytes of each lease that has not ended | if its revision is unchanged |
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
//! again. A host that is cut off from most etcd members can neither read (reads are linearizable)
//! nor change anything. If etcd receives a request late, it still compares the account. A request
//! without an answer may have been executed. The borrower then does not know its lease and never
//! renews it, and the lender ends the lease.
//!
//! **Time.** Hosts need not agree on the time of day. A key says for how long its contents hold.
//! Each reader counts from the time at which the *reader* first saw that revision of the key, which
//! is later than the write. A lender reads the registry twice a second, so it ends an export at the
//! deadline of the lease even while etcd is unreachable. For a key that a reader has never seen,
//! etcd's own clock decides: etcd removes the key. If etcd was restored from a backup, a key's
//! revision is lower than before, and the reader counts anew. A reader that has heard nothing of a
//! lender for 30 days, counted since the reader's own start at the earliest, removes its keys.

use std::collections::HashMap;
use std::time::Duration;

use super::endpoint::Endpoint;
use super::etcd_api::{Kv, Txn};
use super::etcd_keys::{Account, At, EtcdRegistry, What};
use super::files;
use super::lease::{Durability, Lease, LeaseId, LeaseState, LenderId, LenderView, Picture};
use super::registry::{Offer, Registry, Want};
use super::registry_error::{
    RegistryError, Result, check_bytes, check_leases, check_name, check_ttl, wrong_state,
};

/// Time after which an unchanged offer is written again. An offer is not written at each round,
/// because each write costs an etcd revision.
const SAY_AGAIN: Duration = Duration::from_secs(1);

/// Maximum number of leases that one transaction ends; etcd allows 128 operations.
const ENDED_AT_ONCE: usize = 50;

impl EtcdRegistry {
    /// Tries once to publish a lender's offer. Returns `None` if another client changed the keys
    /// meanwhile.
    fn try_offer(&self, offer: &Offer, ttl_ms: u64) -> Result<Option<bool>> {
        let lender = &offer.lender;
        let (account_key, heard_key) =
            (self.account_key(&lender.host), self.heard_key(&lender.host));
        let [account, heard] = self.get([&account_key, &heard_key])?;
        let account: Option<At<Account>> = account.map(|kv| self.at(&kv)).transpose()?;
        let revision = account.as_ref().map_or(0, |account| account.revision);
        let before = account.map(|account| account.value);
        let mut after = before.clone().unwrap_or_default();
        let (known, incarnation) = (after.incarnation, lender.incarnation.0);
        if known > incarnation {
            let lender = lender.host.clone();
            return Err(RegistryError::Superseded { lender });
        }
        let mut txn = Txn::default().when_at(&account_key, revision);
        // Leases of the previous run have ended with that run. Remove as many as one transaction
        // can.
        if known < incarnation {
            for _ in 0..ENDED_AT_ONCE {
                let Some((id, _)) = after.leases.pop_first() else {
                    break;
                };
                let keys = self.lease_keys(LeaseId(id));
                txn = txn.delete(&keys.all).delete(&keys.endpoint);
            }
        }
        let is_whole = known == incarnation || after.leases.is_empty();
        if is_whole {
            after.incarnation = incarnation;
            after.bytes = offer.bytes;
            after.ttl_ms = ttl_ms;
        }
        if before.as_ref() == Some(&after) {
            let said = heard.map(|kv| self.since_written(&kv));
            if said.is_some_and(|said| said < SAY_AGAIN) {
                return Ok(Some(true));
            }
        } else {
            txn = txn.put(&account_key, &after);
        }
        let txn = txn.hold(&heard_key, ttl_ms, self.grant(ttl_ms)?);
        Ok(self.commit(&txn)?.map(|()| is_whole))
    }

    /// Removes a lender that will not return, and its leases, which only their lender would end.
    /// `leases`: all keys of leases. Leases that are still renewed stay, and their lender with
    /// them: their borrowers may have bytes there. Other leases have no export any more, because a
    /// lender that is cut off ends its exports at their deadlines. If other clients change the keys
    /// meanwhile, nothing is removed, and the next reader tries again.
    fn forget_lender(&self, view: &LenderView, account: &At<Account>, leases: &[Kv]) -> Result<()> {
        let host = &view.lender.host;
        let is_renewed = |id: u64| {
            let renewed = self.lease_keys(LeaseId(id)).renewed;
            leases.iter().any(|kv| kv.key == renewed)
        };
        let mut left = account.value.clone();
        let lost = account.value.leases.keys().copied();
        let lost = lost.filter(|id| !is_renewed(*id)).take(ENDED_AT_ONCE);
        let account_key = self.account_key(host);
        let mut txn = Txn::default()
            .when_at(&account_key, account.revision)
            .when_at(&self.heard_key(host), 0);
        for id in lost {
            left.leases.remove(&id);
            let keys = self.lease_keys(LeaseId(id));
            txn = txn.when_at(&keys.renewed, 0);
            txn = txn.delete(&keys.all).delete(&keys.endpoint);
        }
        if left.leases.is_empty() {
            txn = txn.delete(&account_key);
        } else if left == account.value {
            return Ok(());
        } else {
            txn = txn.put(&account_key, &left);
        }
        self.commit(&txn)?;
        Ok(())
    }
}

impl Registry for EtcdRegistry {
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<()> {
        check_name("host", &offer.lender.host)?;
        check_bytes(offer.bytes, 0)?;
        let ttl = check_ttl(ttl)?;
        while !self.repeat(|| self.try_offer(offer, ttl))? {}
        Ok(())
    }

    fn withdraw(&self, lender: &LenderId) -> Result<()> {
        let key = self.account_key(&lender.host);
        self.repeat(|| {
            let [account] = self.get([&key])?;
            let account: Option<At<Account>> = account.map(|kv| self.at(&kv)).transpose()?;
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
            self.commit(&txn)
        })
    }

    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease> {
        want.check()?;
        let ttl = check_ttl(ttl)?;
        let grant = self.grant(ttl)?;
        // A lender may still export leases of data that etcd has lost. Their numbers must not be
        // used again, so the first number is random.
        let first = files::random().map_err(|error| self.unusable(error.to_string()))?;
        let first = u64::from(u32::from_le_bytes(first) >> 1);
        self.repeat(|| {
            let last_key = self.key("last");
            let read = Txn::default()
                .get(&self.key("lender/"))
                .get(&last_key)
                .get(&self.key("lease/"));
            let [lenders, last, leases] = self.ranges(&read)?;
            // No other host can take a lease meanwhile, because that would change `last`.
            check_leases(&want.borrower, self.held_by(&want.borrower, &leases)?)?;
            let lenders = self.lenders(&lenders)?;
            let leases = |(_, account): &(_, At<Account>)| account.value.leases.len();
            let (view, mut account) = want.choose(lenders, |(view, _)| view, leases)?;
            let last: Option<At<u64>> = last.first().map(|kv| self.at(kv)).transpose()?;
            let (last, last_revision) = match last {
                Some(last) => (last.value, last.revision),
                None => (first, 0),
            };
            let next = LeaseId::after(last);
            let LeaseId(id) = next.map_err(|error| self.unusable(error.to_string()))?;
            account.value.leases.insert(id, want.bytes);
            let account_key = self.account_key(&view.lender.host);
            let what = What {
                lender: view.lender,
                borrower: want.borrower.clone(),
                vm: want.vm.clone(),
                bytes: want.bytes,
                disk_bytes: want.disk_bytes,
                durability: want.durability,
                state: LeaseState::Taken,
            };
            let keys = self.lease_keys(LeaseId(id));
            let txn = Txn::default()
                .when_at(&account_key, account.revision)
                .when_at(&last_key, last_revision)
                .put(&account_key, &account.value)
                .put(&last_key, &id)
                .put(&keys.what, &what)
                .hold(&keys.renewed, ttl, grant);
            let mut lease = self.lease(LeaseId(id), what, None, None)?;
            lease.left_ms = ttl;
            Ok(self.commit(&txn)?.map(|()| lease))
        })
    }

    fn publish(&self, id: LeaseId, lender: &LenderId, endpoint: &Endpoint) -> Result<()> {
        endpoint.check()?;
        let keys = self.lease_keys(id);
        self.repeat(|| {
            let [found] = self.get([&keys.what])?;
            let mut what = self.what(id, &lender.host, found.as_ref(), |w| w.lender == *lender)?;
            if what.value.state != LeaseState::Taken {
                return Err(wrong_state(id, what.value.state, "exported"));
            }
            what.value.state = LeaseState::Exported;
            let txn = Txn::default()
                .when_at(&keys.what, what.revision)
                .put(&keys.what, &what.value)
                .put(&keys.endpoint, endpoint);
            self.commit(&txn)
        })
    }

    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>> {
        let keys = self.lease_keys(id);
        let [what, endpoint] = self.get([&keys.what, &keys.endpoint])?;
        let what = self.what(id, borrower, what.as_ref(), |w| w.borrower == borrower)?;
        if what.value.state != LeaseState::Exported {
            return Ok(None);
        }
        let endpoint: Option<Endpoint> = endpoint.as_ref().map(|kv| self.read(kv)).transpose()?;
        endpoint.iter().try_for_each(Endpoint::check)?;
        Ok(endpoint)
    }

    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease> {
        let ttl = check_ttl(ttl)?;
        self.repeat(|| {
            let keys = self.lease_keys(id);
            let [what, renewed, recall] = self.get([&keys.what, &keys.renewed, &keys.recall])?;
            let what = self.what(id, borrower, what.as_ref(), |w| w.borrower == borrower)?;
            if what.value.state == LeaseState::Released {
                return Err(wrong_state(id, what.value.state, "renewed"));
            }
            let mut lease = self.lease(id, what.value, renewed.as_ref(), recall.as_ref())?;
            // A lease that has enough time left is not written, because each write costs an etcd
            // revision. A process that has just started does not know when the lease was renewed.
            let is_known = self.saw_before(&keys.renewed);
            if is_known && lease.left_ms >= ttl / 4 * 3 && lease.left_ms > 0 {
                return Ok(Some(lease));
            }
            lease.left_ms = ttl;
            let txn = Txn::default().when_at(&keys.what, what.revision).hold(
                &keys.renewed,
                ttl,
                self.grant(ttl)?,
            );
            Ok(self.commit(&txn)?.map(|()| lease))
        })
    }

    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease> {
        self.repeat(|| {
            let keys = self.lease_keys(id);
            let [what, renewed, recall] = self.get([&keys.what, &keys.renewed, &keys.recall])?;
            let At { value, revision } =
                self.what(id, borrower, what.as_ref(), |w| w.borrower == borrower)?;
            let mut lease = self.lease(id, value.clone(), renewed.as_ref(), recall.as_ref())?;
            if lease.durability != Durability::Disk {
                return Ok(Some(lease));
            }
            lease.durability = Durability::None;
            let what = What {
                durability: lease.durability,
                ..value
            };
            let mut txn = Txn::default()
                .when_at(&keys.what, revision)
                .put(&keys.what, &what);
            let time = check_ttl(lease.time_to_give_back())?;
            let is_asked_for_sooner = lease.recall_ms.is_some_and(|left| left < time);
            if is_asked_for_sooner {
                txn = txn.hold(&keys.recall, time, None);
                lease.recall_ms = Some(time);
            }
            Ok(self.commit(&txn)?.map(|()| lease))
        })
    }

    fn recall(&self, id: LeaseId, lender: &LenderId, within: Duration) -> Result<()> {
        check_ttl(within)?;
        let keys = self.lease_keys(id);
        self.repeat(|| {
            let [what, recall] = self.get([&keys.what, &keys.recall])?;
            let At { value, revision } =
                self.what(id, &lender.host, what.as_ref(), |w| w.lender == *lender)?;
            let lease = self.lease(id, value, None, recall.as_ref())?;
            let within = check_ttl(lease.within(within))?;
            if lease.recall_ms.is_some_and(|left| left <= within) {
                return Ok(Some(()));
            }
            let txn = Txn::default()
                .when_at(&keys.what, revision)
                .hold(&keys.recall, within, None);
            self.commit(&txn)
        })
    }

    fn release(&self, id: LeaseId, borrower: &str) -> Result<()> {
        let keys = self.lease_keys(id);
        self.repeat(|| {
            let [Some(what)] = self.get([&keys.what])? else {
                return Ok(Some(()));
            };
            let mut what: At<What> = self.at(&what)?;
            if what.value.borrower != borrower || what.value.state == LeaseState::Released {
                return Ok(Some(()));
            }
            what.value.state = LeaseState::Released;
            let txn = Txn::default()
                .when_at(&keys.what, what.revision)
                .put(&keys.what, &what.value)
                .delete(&keys.endpoint);
            self.commit(&txn)
        })
    }

    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<()> {
        self.repeat(|| {
            let (keys, account_key) = (self.lease_keys(id), self.account_key(&lender.host));
            let [Some(what), Some(account)] = self.get([&keys.what, &account_key])? else {
                return Ok(Some(()));
            };
            let what: At<What> = self.at(&what)?;
            if what.value.lender != *lender {
                return Ok(Some(()));
            }
            let mut account: At<Account> = self.at(&account)?;
            account.value.leases.remove(&id.0);
            let txn = Txn::default()
                .when_at(&keys.what, what.revision)
                .when_at(&account_key, account.revision)
                .put(&account_key, &account.value)
                .delete(&keys.all)
                .delete(&keys.endpoint);
            self.commit(&txn)
        })
    }

    fn picture(&self) -> Result<Picture> {
        let prefix = self.key("lease/");
        let read = Txn::default().get(&self.key("lender/")).get(&prefix);
        let [lenders, all] = self.ranges(&read)?;
        self.forget(&all);
        let by_name: HashMap<&str, &Kv> = all.iter().map(|kv| (kv.key.as_str(), kv)).collect();
        let mut leases = Vec::new();
        for kv in &all {
            let name = kv.key.strip_prefix(&prefix);
            let id = name.and_then(|name| name.strip_suffix("/what"));
            let Some(id) = id.and_then(|id| id.parse().ok()).map(LeaseId) else {
                continue;
            };
            let keys = self.lease_keys(id);
            let other = |key: &str| by_name.get(key).copied();
            let (renewed, recall) = (other(&keys.renewed), other(&keys.recall));
            leases.push(self.lease(id, self.read(kv)?, renewed, recall)?);
        }
        leases.sort_by_key(|lease| lease.id);
        let lenders = self.lenders(&lenders)?;
        let is_gone = |view: &LenderView| {
            view.left_ms == 0 && u128::from(view.silent_ms) >= self.forgotten.as_millis()
        };
        for (view, account) in lenders.iter().filter(|(view, _)| is_gone(view)) {
            self.forget_lender(view, account, &all)?;
        }
        Ok(Picture {
            lenders: lenders.into_iter().map(|(view, _)| view).collect(),
            leases,
        })
    }
}
