//! The thread that lends this host's RAM. Twice a second it decides how much RAM this host can
//! spare, publishes the offer in the lease registry, serves leased RAM to borrowers, and takes RAM
//! back.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::endpoint::Endpoint;
use super::export::{Export, ExportError, Health};
use super::lease::{Durability, Lease, LeaseId, LeaseState, LenderId};
use super::lender_status::{LenderOptions, LenderStatus};
use super::pressure::Sample;
use super::registry::Offer;
use super::registry::Registry;
use super::registry_error::RegistryError;
use super::surplus::{Hurry, Judge, Verdict};

/// Time between two rounds of the lender.
const TICK: Duration = Duration::from_millis(500);

/// Time between two checks of only the available memory, while there is an export that can be ended
/// at once.
const GLANCE: Duration = Duration::from_millis(50);

/// How long an offer is valid unless the lender repeats it.
const OFFER_TTL: Duration = Duration::from_secs(10);

/// Time without a repetition after which the offer of another daemon under this host's name counts
/// as that of an earlier daemon of this host, which has ended. Lenders repeat their offers about
/// once a second, unless the registry is slow.
const OTHER_SILENT: Duration = Duration::from_secs(3);

/// How long to wait for a killed export to free its memory.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Time limit of a recall when almost no memory is left and the borrower has a copy. The borrower
/// learns of the recall within a second, and needs 0.1 s to stop using the lent RAM.
const HURRY: Duration = Duration::from_secs(2);

/// A running export, and the state of its lease.
#[derive(Debug)]
pub(super) struct Lent {
    pub(super) export: Export,
    /// Whether the registry gives the export's address to the borrower.
    pub(super) published: bool,
    /// Latest time at which the lease expires, by the registry's answers so far.
    pub(super) deadline: Instant,
    /// Whether the registry no longer knows the lease.
    pub(super) orphaned: bool,
    pub(super) durability: Durability,
    /// Whether the log says that the export's process is stopped and was resumed.
    is_stop_told: bool,
}

impl Lent {
    /// Returns whether the export must end because its process has ended or is stopped. If the
    /// borrower has no copy on its disk, the process may hold the only copy of the lent bytes. A
    /// stopped process is then resumed instead, and keeps the bytes until the lease is over.
    fn has_failed(&mut self, id: LeaseId, health: Health) -> bool {
        if health != Health::Stopped || has_copy(self.durability) {
            self.is_stop_told = false;
            return health != Health::Serving;
        }
        self.export.resume();
        if !std::mem::replace(&mut self.is_stop_told, true) {
            warn!(
                lease = id.0,
                "export of lent memory was stopped (SIGSTOP), and was resumed because it may hold the only copy of a VM's bytes; do not stop or debug exports"
            );
        }
        false
    }
}

#[derive(Debug)]
pub(super) struct Work {
    pub(super) options: LenderOptions,
    /// Path of `/proc`; another directory in tests.
    pub(super) proc: PathBuf,
    pub(super) registry: Arc<dyn Registry>,
    pub(super) lender: LenderId,
    /// Whether this lender's incarnation is known to be later than all others in the registry.
    pub(super) announced: bool,
    /// Whether another daemon has begun to lend under this host's name.
    pub(super) is_superseded: bool,
    /// When this lender first found another daemon's offer under this host's name.
    pub(super) name_taken_since: Option<Instant>,
    pub(super) judge: Judge,
    pub(super) begun: Instant,
    pub(super) exports: BTreeMap<LeaseId, Lent>,
    /// Exports that were killed and have not ended yet. Freeing much memory takes a while, and the
    /// lender must not block meanwhile.
    pub(super) dying: BTreeMap<LeaseId, Export>,
    /// Status for the operator, who sets the maximum to lend, and that the lender is ending.
    pub(super) status: Arc<Mutex<LenderStatus>>,
}

impl Work {
    /// Does one round. Returns whether the lender is done, which can be only while it is ending or
    /// superseded.
    pub(super) fn tick(&mut self) -> bool {
        self.bury();
        if self.is_superseded {
            return self.run_out();
        }
        let problem = match self.keep_up() {
            Ok(true) => {
                self.set(|status| status.lent_bytes = 0);
                return true;
            }
            Ok(false) => None,
            Err(error @ RegistryError::Superseded { .. }) => {
                warn!(%error, "lender offers nothing more: another daemon lends under this host name; give each host its own --host");
                self.is_superseded = true;
                self.set(|status| {
                    status.problem = Some(error.to_string());
                    status.is_ending = true;
                    status.offer_bytes = 0;
                });
                return self.run_out();
            }
            Err(error) => {
                self.end_overdue();
                Some(error.to_string())
            }
        };
        let lent = self.lent_bytes();
        self.set(|status| {
            if problem.is_some() && status.problem != problem {
                warn!(
                    problem,
                    "lender cannot use the lease registry; retrying (leases stay valid until their deadlines)"
                );
            }
            status.problem = problem;
            status.lent_bytes = lent;
        });
        false
    }

    /// Offers nothing more, and serves what is exported until the leases' deadlines: the registry
    /// no longer knows these leases, but the memory may be the only copy of a VM's bytes. Returns
    /// whether nothing is exported any more.
    fn run_out(&mut self) -> bool {
        let verdict = self.judge();
        if verdict.hurry == Hurry::Now {
            self.cut(verdict.recall_bytes);
        }
        self.end_what_is_over(&[]);
        let lent = self.lent_bytes();
        self.set(|status| status.lent_bytes = lent);
        self.exports.is_empty() && self.dying.is_empty()
    }

    pub(super) fn set<T>(&self, change: impl FnOnce(&mut LenderStatus) -> T) -> T {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn lent_bytes(&self) -> u64 {
        self.bytes_of(|_| true) + self.dying_bytes()
    }

    fn dying_bytes(&self) -> u64 {
        self.dying.values().map(|export| export.bytes).sum()
    }

    fn bytes_of(&self, which: impl Fn(&Lent) -> bool) -> u64 {
        let exports = self.exports.values().filter(|lent| which(lent));
        exports.map(|lent| lent.export.bytes).sum()
    }

    /// Returns the size in bytes of the exports that are still being allocated.
    pub(super) fn beginning_bytes(&self) -> u64 {
        self.bytes_of(|lent| !lent.published)
    }

    /// Cleans up exports whose process has ended or is stopped. A stopped process that may hold the
    /// only copy of a borrower's bytes is resumed.
    pub(super) fn bury(&mut self) {
        let mut dead = Vec::new();
        let mut refused = 0;
        for (id, lent) in &mut self.exports {
            let strangers = lent.export.refused();
            if strangers > 0 {
                refused += strangers;
                warn!(
                    lease = id.0,
                    strangers,
                    "connections to an export (server of lent memory) were refused or aborted; let only borrowers reach the ports of --ports"
                );
            }
            let health = lent.export.health();
            if lent.has_failed(*id, health) {
                dead.push((*id, health));
            }
        }
        if refused > 0 {
            self.set(|status| status.refused += refused);
        }
        let gone = |(id, export): (&LeaseId, &mut Export)| {
            (export.health() == Health::Ended).then_some(*id)
        };
        let gone: Vec<LeaseId> = self.dying.iter_mut().filter_map(gone).collect();
        for id in gone {
            self.buried(id);
        }
        for (id, health) in dead {
            warn!(
                lease = id.0,
                ?health,
                "export of lent memory failed or its borrower disconnected, lease ended; see the borrower's log"
            );
            self.end_export(id, true);
        }
    }

    /// Chooses an incarnation later than that of the previous daemon, even if the clock was set
    /// back. Returns `false` while another daemon lends under this host's name: an offer of this
    /// daemon would end the other one's leases.
    pub(super) fn follow_on(&mut self) -> Result<bool, RegistryError> {
        if self.announced {
            return Ok(true);
        }
        let known = self.ask(|registry| registry.picture())?.lenders;
        let mut known = known.into_iter();
        if let Some(before) = known.find(|known| known.lender.host == self.lender.host) {
            let is_heard = u128::from(before.silent_ms) < OTHER_SILENT.as_millis();
            if before.left_ms > 0 && is_heard {
                self.wait_for_name();
                return Ok(false);
            }
            let next = before.lender.incarnation.0.saturating_add(1);
            self.lender.incarnation.0 = self.lender.incarnation.0.max(next);
        }
        self.announced = true;
        Ok(true)
    }

    /// Says why nothing is lent yet. The offer of an earlier daemon of this host ends within
    /// [`OFFER_TTL`]. An offer that is still repeated after that comes from another daemon.
    fn wait_for_name(&mut self) {
        let since = *self.name_taken_since.get_or_insert_with(Instant::now);
        let is_other = since.elapsed() >= OFFER_TTL;
        let host = &self.options.host;
        let why = if is_other {
            format!(
                "another daemon lends under the host name '{host}'; give each host its own name (memfold serve --host)"
            )
        } else {
            "waiting for the end of an earlier daemon's offer".to_owned()
        };
        let before = self.set(|status| std::mem::replace(&mut status.why, why.clone()));
        if before != why && is_other {
            warn!(
                host,
                "another daemon lends under this host's name, so this one lends nothing; give each host its own --host"
            );
        }
    }

    /// Does the part of a round that needs the registry. Returns whether the lender is done.
    pub(super) fn keep_up(&mut self) -> Result<bool, RegistryError> {
        let ending = self.set(|status| status.is_ending);
        let verdict = self.judge();
        // This step comes first, because the registry may be slow or unreachable.
        if verdict.hurry == Hurry::Now {
            self.cut(verdict.recall_bytes);
        }
        if !self.follow_on()? {
            return Ok(ending);
        }
        // Bytes of leases that the registry no longer knows are lent nevertheless.
        let orphaned = self.bytes_of(|lent| lent.orphaned);
        let offered = verdict.offer_bytes.saturating_sub(orphaned);
        let (bytes, wanted) = if ending {
            (0, u64::MAX)
        } else {
            (offered, verdict.recall_bytes)
        };
        let lender = self.lender.clone();
        let offer = Offer { lender, bytes };
        self.ask(|registry| registry.offer(&offer, OFFER_TTL))?;
        let mut leases = self.ask(|registry| registry.picture())?.leases;
        leases.retain(|lease| lease.lender == self.lender);
        // This step comes before new exports, because ended exports free memory.
        self.end_what_is_over(&leases);
        let room = if ending { 0 } else { verdict.room_bytes };
        let begun = self.begin_all(&leases, room);
        // An export that cannot be published must not keep lent memory from being taken back.
        self.recall(&leases, wanted)?;
        if verdict.hurry > Hurry::No {
            // The deadline of borrowers that were asked in this round is shortened in the next.
            for lease in leases.iter().filter(|lease| has_to_hurry(lease)) {
                self.ask_of_lease(|registry| registry.recall(lease.id, &lease.lender, HURRY))?;
            }
        }
        self.set(|status| {
            status.offer_bytes = offer.bytes;
            status.why = verdict.why;
            let recalled = leases.iter().filter(|lease| lease.recall_ms.is_some());
            status.recalled_bytes = recalled.map(|lease| lease.bytes).sum();
        });
        begun?;
        Ok(ending && leases.is_empty() && self.exports.is_empty() && self.dying.is_empty())
    }

    pub(super) fn judge(&mut self) -> Verdict {
        let lent = self.lent_bytes();
        self.judge.max_bytes = self.set(|status| status.max_bytes);
        match Sample::read(&self.proc, self.begun.elapsed()) {
            Ok(mut sample) => {
                sample.owed_bytes = self.options.owed.load(Ordering::Relaxed);
                sample.short_guests = self.options.short_guests.load(Ordering::Relaxed);
                sample.wanted_back_bytes = self.options.wanted_back.load(Ordering::Relaxed);
                sample.kept_bytes = self.options.kept.load(Ordering::Relaxed);
                sample.beginning_bytes = self.beginning_bytes();
                self.judge.judge(sample, lent)
            }
            // If the free memory is unknown, no more is offered.
            Err(error) => Verdict {
                offer_bytes: lent,
                why: format!("cannot read this host's free memory: {error}"),
                ..Verdict::default()
            },
        }
    }

    /// Ends exports whose lease has expired, was returned, or is unknown to the registry.
    pub(super) fn end_what_is_over(&mut self, leases: &[Lease]) {
        for lease in leases {
            if self.must_end(lease) {
                if lease.state != LeaseState::Released {
                    warn!(
                        lease = lease.id.0,
                        borrower = lease.borrower,
                        vm = lease.vm,
                        "borrower did not return the lent memory in time, export ended; see the borrower's log"
                    );
                }
                self.end_export(lease.id, false);
            } else if let Some(lent) = self.exports.get_mut(&lease.id) {
                let deadline = Instant::now() + Duration::from_millis(lease.left_ms);
                lent.deadline = lent.deadline.max(deadline);
                lent.orphaned = false;
                // The borrower's copy may have failed since the last round.
                lent.durability = lease.durability;
                // The lease may be exported although the answer to `publish` was lost.
                lent.published |= lease.state == LeaseState::Exported;
            }
        }
        // Only this lender ends a lease. A registry that no longer knows a lease was replaced, and
        // the borrower needs time to react.
        let is_known = |id: LeaseId| leases.iter().any(|lease| lease.id == id);
        let mut over = Vec::new();
        for (id, lent) in self.exports.iter_mut().filter(|(id, _)| !is_known(**id)) {
            if !lent.published || lent.deadline <= Instant::now() {
                over.push(*id);
            } else if !lent.orphaned {
                lent.orphaned = true;
                warn!(
                    lease = id.0,
                    "lease registry no longer knows the lease; the export of its memory ends at the lease's deadline"
                );
            }
        }
        for id in over {
            warn!(
                lease = id.0,
                "lease unknown to the lease registry, so the export of its memory ended; no action is needed"
            );
            self.end_export(id, false);
        }
    }

    /// Returns whether the export of a lease must end now. If the lease has only expired, the
    /// export is kept until the latest deadline that this lender has known: a registry that was
    /// restored from a backup has lost renewals, and the borrower renews the lease within a second.
    fn must_end(&self, lease: &Lease) -> bool {
        let is_due = lease.state == LeaseState::Released || lease.recall_ms == Some(0);
        let is_kept = |lent: &Lent| !is_due && lent.deadline > Instant::now();
        is_over(lease) && !self.exports.get(&lease.id).is_some_and(is_kept)
    }

    /// Ends exports whose deadline has passed, while the registry cannot be reached.
    pub(super) fn end_overdue(&mut self) {
        let now = Instant::now();
        let over = |(id, lent): (&LeaseId, &Lent)| (lent.deadline <= now).then_some(*id);
        let over: Vec<LeaseId> = self.exports.iter().filter_map(over).collect();
        for id in over {
            warn!(
                lease = id.0,
                "lease expired while the lease registry was unreachable, export of its memory ended; check the registry"
            );
            self.end_export(id, false);
        }
    }

    /// Starts the export of a lease if there is none. Returns the endpoint when the export is
    /// ready, until the endpoint is published.
    fn exported(&mut self, lease: &Lease) -> Result<Option<Endpoint>, ExportError> {
        let lent = match self.exports.entry(lease.id) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(entry) => {
                let (place, listen) = (&self.options.directory, self.options.listen);
                entry.insert(Lent {
                    export: Export::start(place, listen, lease.id, lease.bytes)?,
                    published: false,
                    deadline: Instant::now() + Duration::from_millis(lease.left_ms),
                    orphaned: false,
                    durability: lease.durability,
                    is_stop_told: false,
                })
            }
        };
        let is_new = lent.export.is_ready()? && !lent.published;
        Ok(is_new.then(|| lent.export.endpoint.clone()))
    }

    /// Starts the exports of new leases, and publishes those that are ready. Ends new leases for
    /// which `room` bytes do not suffice, so that their borrowers can ask other lenders at once. An
    /// error of one lease does not keep the other leases waiting, unless the registry cannot be
    /// used. Returns the first error.
    fn begin_all(&mut self, leases: &[Lease], mut room: u64) -> Result<(), RegistryError> {
        let mut first = Ok(());
        for lease in leases {
            if self.is_new(lease) {
                if lease.bytes > room || lease.recall_ms.is_some() {
                    self.refuse(lease);
                    continue;
                }
                room -= lease.bytes;
            }
            let begun = self.begin(lease);
            let is_away = matches!(begun, Err(RegistryError::Unusable { .. }));
            first = first.and(begun);
            if is_away {
                break;
            }
        }
        first
    }

    /// Returns whether the lease needs an export and has none.
    fn is_new(&self, lease: &Lease) -> bool {
        let has_export = self.exports.contains_key(&lease.id) || self.dying.contains_key(&lease.id);
        lease.state == LeaseState::Taken && !is_over(lease) && !has_export
    }

    /// Ends a lease that has no export: since the registry has granted it, this host has begun to
    /// need the memory itself.
    fn refuse(&mut self, lease: &Lease) {
        info!(
            lease = lease.id.0,
            borrower = lease.borrower,
            vm = lease.vm,
            bytes = lease.bytes,
            "lease ended before its export: this host lends no more, or needs the memory itself"
        );
        self.end_export(lease.id, false);
    }

    pub(super) fn begin(&mut self, lease: &Lease) -> Result<(), RegistryError> {
        let is_dying = self.dying.contains_key(&lease.id);
        if lease.state != LeaseState::Taken || is_over(lease) || is_dying {
            return Ok(());
        }
        match self.exported(lease) {
            Ok(Some(endpoint)) => {
                let lender = self.lender.clone();
                let publish =
                    |registry: &dyn Registry| registry.publish(lease.id, &lender, &endpoint);
                if !self.ask_of_lease(publish)? {
                    return Ok(());
                }
                // The export may have ended during the call.
                if let Some(lent) = self.exports.get_mut(&lease.id) {
                    lent.published = true;
                }
                info!(
                    lease = lease.id.0,
                    borrower = lease.borrower,
                    vm = lease.vm,
                    bytes = lease.bytes,
                    "memory of the lease is exported to its borrower"
                );
            }
            Ok(None) => {}
            Err(error) => {
                warn!(lease = lease.id.0, error = %memfold_host::chain(&error), "cannot export the lease, so the borrower gets no memory; fix the cause on this host");
                self.end_export(lease.id, true);
            }
        }
        Ok(())
    }

    /// Kills the export of a lease, if there is one, and tells the registry as soon as the memory
    /// is free.
    pub(super) fn end_export(&mut self, id: LeaseId, failed: bool) {
        if self.dying.contains_key(&id) {
            return;
        }
        let was = self.exports.remove(&id);
        self.set(|status| {
            status.ended += u64::from(was.is_some());
            status.failed += u64::from(was.is_some() && failed);
        });
        if let Some(Lent { mut export, .. }) = was {
            if !export.kill(AT_ONCE) {
                self.dying.insert(id, export);
                return;
            }
        }
        self.buried(id);
    }

    /// Tells the registry that the memory of a lease is free.
    pub(super) fn buried(&mut self, id: LeaseId) {
        self.dying.remove(&id);
        // If the registry does not receive this, the next round finds the lease without an export.
        let lender = self.lender.clone();
        if let Err(error) = self.ask(|registry| registry.ended(id, &lender)) {
            warn!(lease = id.0, %error, "cannot tell the lease registry that the export of the lease's memory ended; retrying");
        }
    }

    /// Sleeps until the next round. If almost no memory is left and an export can be ended at once,
    /// the next round starts immediately.
    pub(super) fn rest(&self) {
        let end = Instant::now() + TICK;
        let can_cut = self.can_cut();
        loop {
            let begin = Instant::now();
            let left = end.saturating_duration_since(begin);
            let nap = if can_cut { left.min(GLANCE) } else { left };
            std::thread::park_timeout(nap);
            let woken = begin.elapsed() < nap;
            if woken || nap == left || self.is_pressed() {
                return;
            }
        }
    }

    /// Returns whether an export can be ended at once: its borrower has a copy.
    pub(super) fn can_cut(&self) -> bool {
        self.exports.values().any(|lent| has_copy(lent.durability))
    }

    /// Returns whether almost no memory is left.
    pub(super) fn is_pressed(&self) -> bool {
        Sample::glance(&self.proc).is_ok_and(|sample| Hurry::by(&sample) == Hurry::Now)
    }

    /// Asks the registry to change a lease. Returns `false` if the lease is over, or if its
    /// borrower has changed it meanwhile, which the next round sees.
    fn ask_of_lease<T: Send>(
        &mut self,
        call: impl FnOnce(&dyn Registry) -> Result<T, RegistryError> + Send,
    ) -> Result<bool, RegistryError> {
        match self.ask(call) {
            Ok(_) => Ok(true),
            Err(RegistryError::NoLease { .. } | RegistryError::State { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Calls the registry. While the registry does not answer, this thread still watches the
    /// available memory.
    pub(super) fn ask<T: Send>(&mut self, call: impl FnOnce(&dyn Registry) -> T + Send) -> T {
        let registry = self.registry.clone();
        if !self.can_cut() {
            return call(&*registry);
        }
        let call = Mutex::new(Some(call));
        let run = || {
            let call = call.lock().unwrap_or_else(PoisonError::into_inner).take();
            call.map(|call| call(&*registry))
        };
        std::thread::scope(|scope| {
            let (done, is_done) = std::sync::mpsc::channel::<()>();
            let run = &run;
            let asked = std::thread::Builder::new().spawn_scoped(scope, move || {
                // The channel ends when the call has returned or panicked.
                let _done = done;
                run()
            });
            while is_done.recv_timeout(GLANCE) == Err(RecvTimeoutError::Timeout) {
                if self.is_pressed() {
                    let verdict = self.judge();
                    self.cut(verdict.recall_bytes);
                }
            }
            let answer = match asked {
                // If the call panicked, the panic continues in this thread.
                Ok(asked) => asked
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                // Without another thread, this one calls.
                Err(_) => run(),
            };
            answer.expect("one thread has made the call")
        })
    }

    /// Ends exports whose borrowers have a copy, the largest first, until `wanted` bytes are being
    /// freed. There is no time to ask the borrowers. They lose no data, and react as to the
    /// lender's death.
    pub(super) fn cut(&mut self, wanted: u64) {
        let mut coming = self.dying_bytes();
        while coming < wanted {
            let copied = self.exports.iter().rev();
            let copied = copied.filter(|(_, lent)| has_copy(lent.durability));
            let largest = copied.max_by_key(|(_, lent)| lent.export.bytes);
            let largest = largest.map(|(id, _)| *id);
            let Some((id, mut lent)) = largest.and_then(|id| self.exports.remove_entry(&id)) else {
                break;
            };
            let bytes = lent.export.bytes;
            warn!(
                lease = id.0,
                bytes,
                "host almost out of memory: ended the export of a lease whose borrower has a copy; to prevent this, lower 'memfold lend --max'"
            );
            // The registry is told when the export's process has ended.
            lent.export.kill(Duration::ZERO);
            self.dying.insert(id, lent.export);
            self.set(|status| status.ended += 1);
            coming = coming.saturating_add(bytes);
        }
    }

    /// Asks borrowers to give back `wanted` bytes in all. Borrowers with a copy come first, because
    /// they only have to stop using the lent RAM; then the largest leases, so that few VMs are
    /// affected.
    pub(super) fn recall(&mut self, leases: &[Lease], wanted: u64) -> Result<(), RegistryError> {
        let (recalled, mut others): (Vec<&Lease>, Vec<&Lease>) =
            leases.iter().partition(|lease| lease.recall_ms.is_some());
        let mut coming: u64 = recalled.iter().map(|lease| lease.bytes).sum();
        // The registry no longer knows leases that ended in this round.
        others.retain(|lease| !is_over(lease));
        others.sort_by_key(|lease| hurt(lease.durability, lease.bytes));
        for lease in others {
            if coming >= wanted {
                break;
            }
            let within = lease.time_to_give_back();
            let recall = |registry: &dyn Registry| registry.recall(lease.id, &lease.lender, within);
            if !self.ask_of_lease(recall)? {
                continue;
            }
            info!(
                lease = lease.id.0,
                borrower = lease.borrower,
                vm = lease.vm,
                bytes = lease.bytes,
                "lease recalled from its borrower: this host needs the memory"
            );
            coming = coming.saturating_add(lease.bytes);
        }
        Ok(())
    }
}

/// Returns whether a borrower that was asked for its memory and has a copy has more time than
/// [`HURRY`].
fn has_to_hurry(lease: &Lease) -> bool {
    let left = lease.recall_ms.map(Duration::from_millis);
    has_copy(lease.durability) && !is_over(lease) && left.is_some_and(|left| left > HURRY)
}

/// Returns whether the borrower has a copy of the lent bytes on its disk.
const fn has_copy(durability: Durability) -> bool {
    matches!(durability, Durability::Disk)
}

/// Returns whether a lease is over, by the registry's answer.
fn is_over(lease: &Lease) -> bool {
    lease.state == LeaseState::Released || lease.left_ms == 0 || lease.recall_ms == Some(0)
}

/// Returns the sort key for the order in which leases are taken back.
fn hurt(durability: Durability, bytes: u64) -> (bool, Reverse<u64>) {
    (!has_copy(durability), Reverse(bytes))
}

#[cfg(test)]
#[path = "lender_tests.rs"]
mod tests;
