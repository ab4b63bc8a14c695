//! Moves swap volumes (LVM logical volumes of this host) to RAM that other hosts lend, watches the
//! lenders, and moves the volumes back.
//!
//! The daemon may be killed at any instant, so the next daemon must be able to undo each operation.
//! LVM's metadata show where a volume really is. A file of the daemon names the leases and iSCSI
//! targets, and is written before any change. [`SwapVolumes::take_off`] undoes every step that was
//! done, and may be repeated.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, Borrowed, SwapPlace};
use memfold_host::chain;
use memfold_host::progress::Step;
use memfold_lend::graph::Copying;
use memfold_lend::lvm::{self, Loan, Phase, Volume, session, tools};
use memfold_lend::{Address, Durability, Endpoint, Lease, RegistryError, Transport, Want};
use parking_lot::Mutex;
use tracing::{info, warn};

use self::keeper::Keeper;
use self::on_lvm::{
    Fit, check_tools, fit, forgotten, gone, images, off_lent, own_lacks_writes, random,
};
use crate::error::{DaemonError, refused, state_error};
use crate::json_file::write_json;
use crate::leases::{Leases, LenderFault, RESUMED, lease_ttl, ms, no_lender_left, returned};
use crate::locks::GroupRight;
use crate::move_progress::{MoveProgress, Moves};
use crate::threads;

mod keeper;
mod on_lvm;

/// Time between two checks of a loan. The next constant: time between two checks of mirror images,
/// each of which starts a process.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_AT_IMAGES: Duration = Duration::from_secs(5);

/// Pause before another automatic attempt to take a volume off lent RAM.
const RETRY: Duration = Duration::from_secs(15);

/// Time between two checks of a mirror's synchronization.
const LOOK_AT_SYNC: Duration = Duration::from_millis(500);

/// Service that moves LVM volumes of this host to lent RAM and back.
#[derive(Debug)]
pub struct SwapVolumes {
    leases: Arc<Leases>,
    /// File of the loans, for the next daemon.
    notes: PathBuf,
    /// Locks by volume group, held while LVM changes the group. Without these locks, LVM's tools
    /// would wait for each other, and the state that one step finds could change before the next.
    turns: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    keepers: Mutex<BTreeMap<Volume, Arc<Keeper>>>,
    /// Progress of the moves that are under way.
    moves: Moves,
    /// When LVM was asked last how far a move has come. The lock is held while LVM is asked.
    asked: Mutex<Option<Instant>>,
}

impl SwapVolumes {
    pub(crate) fn new(leases: Arc<Leases>, state: &Path) -> Self {
        Self {
            leases,
            notes: state.join("volumes.json"),
            turns: Mutex::default(),
            keepers: Mutex::default(),
            moves: Moves::default(),
            asked: Mutex::default(),
        }
    }

    /// Returns how far the move of a volume to lent RAM or back has come; `None` if the volume is
    /// not being moved. LVM copies the bytes, and is asked at most once a second, by one caller at
    /// a time: LVM waits if a lender's disk does not answer.
    #[must_use]
    pub fn progress(&self, volume: &Volume) -> Option<Step> {
        let name = volume.to_string();
        let keeper = self.keepers.lock().get(volume).cloned();
        let is_moved = self.moves.lock().contains_key(&name);
        let asked = self.asked.try_lock().filter(|_| is_moved);
        if let (Some(mut asked), Some(keeper)) = (asked, keeper) {
            if asked.is_none_or(|asked| asked.elapsed() >= LOOK) {
                let copied = tools::copied(volume).ok().flatten();
                *asked = Some(Instant::now());
                if let (Some(copied), Some(step)) = (copied, self.moves.lock().get_mut(&name)) {
                    step.total_bytes = keeper.loan().bytes;
                    step.done_bytes = step.total_bytes / 10_000 * copied.min(10_000);
                }
            }
        }
        self.moves.lock().get(&name).cloned()
    }

    /// Returns the lock of a volume's group.
    fn group(&self, volume: &Volume) -> Arc<Mutex<()>> {
        let mut turns = self.turns.lock();
        turns.entry(volume.group.clone()).or_default().clone()
    }

    /// Returns all loans of volumes.
    pub(crate) fn borrowed(&self) -> Vec<Borrowed> {
        let keepers: Vec<Arc<Keeper>> = self.keepers.lock().values().cloned().collect();
        keepers.iter().map(|keeper| keeper.borrowed()).collect()
    }

    /// Stops watching the loans of volumes; the next daemon continues.
    pub(crate) fn stop(&self) {
        self.keepers
            .lock()
            .values()
            .for_each(|keeper| keeper.stop());
    }

    /// Puts a swap volume of this host on lent RAM.
    ///
    /// # Errors
    ///
    /// Among others: [`DaemonError::Lvm`] if the volume cannot be moved;
    /// [`DaemonError::BadRequest`] if the request asks for durability `replica` or stripes.
    pub fn borrow(
        self: &Arc<Self>,
        volume: &Volume,
        request: &BorrowRequest,
    ) -> Result<Borrowed, DaemonError> {
        let began = Instant::now();
        if request.durability == Durability::Replica || request.stripes.is_some_and(|n| n != 1) {
            return Err(DaemonError::BadRequest(
                "a volume uses one lender: its durability is disk or none, and stripes are not possible".into(),
            ));
        }
        self.leases.check_host()?;
        check_tools()?;
        let group = self.group(volume);
        let turn = GroupRight::take(|| group.lock());
        let known = self.keepers.lock().get(volume).cloned();
        if let Some(keeper) = known {
            let now = keeper.borrowed();
            if now.place == SwapPlace::Lent && now.durability == Some(request.durability) {
                return Ok(now);
            }
            return Err(refused(
                format!(
                    "{volume} has already borrowed, with other durability, or was not taken off a lender that is gone"
                ),
                format!("return the loan first: memfold return --lvm {volume}"),
            ));
        }
        let fit = fit(volume, request)?;
        let name = volume.to_string();
        let progress = MoveProgress::begin(&self.moves, &name, "lender prepares its memory");
        let (lease, endpoint) = self.take_disk(volume, fit.wanted, request.durability)?;
        let loan = Loan {
            volume: volume.clone(),
            bytes: fit.logical.bytes,
            durability: request.durability,
            lease: lease.id,
            lender: lease.lender.host.clone(),
            target: None,
            uuid: lvm::new_uuid(random()),
            phase: Phase::Beginning,
        };
        let ttl = lease_ttl(loan.durability, loan.bytes);
        let keeper = Keeper::new(loan, Instant::now() + ttl);
        progress.show("volume copied to the lender", &Copying::default());
        let done = self
            .keep(&keeper)
            .and_then(|()| self.put_on(&keeper, &fit, &endpoint));
        if let Err(error) = done {
            warn!(%volume, error = chain(&error), "volume not moved to a lender; fix the cause and repeat 'memfold borrow --lvm'");
            if let Err(left) = self.take_off(&keeper, &turn) {
                warn!(%volume, error = chain(&left), "cannot undo the volume's failed move to a lender; run 'memfold return --lvm'");
            }
            return Err(error);
        }
        info!(%volume, lender = lease.lender.host, "volume moved to a lender");
        Ok(Borrowed {
            changed: true,
            took_ms: ms(began),
            ..keeper.borrowed()
        })
    }

    /// Takes an LVM volume off lent RAM. This also succeeds if the volume is not on lent RAM.
    pub fn give_back(self: &Arc<Self>, volume: &Volume) -> Result<Borrowed, DaemonError> {
        let began = Instant::now();
        check_tools()?;
        let group = self.group(volume);
        let turn = GroupRight::take(|| group.lock());
        let known = self.keepers.lock().get(volume).cloned();
        let mut changed = false;
        let bytes = if let Some(keeper) = known {
            changed = keeper.borrowed().place == SwapPlace::Lent;
            self.take_off(&keeper, &turn)?;
            keeper.loan().bytes
        } else {
            let logical = tools::logical(volume)?;
            if let Some(uuid) = forgotten(volume)? {
                // There is no note: the loan is from before a boot, or its state directory is gone.
                off_lent(volume, &uuid)?;
                changed = true;
            }
            logical.bytes
        };
        Ok(returned(volume.to_string(), bytes, changed, began))
    }

    /// Takes a lease of a lender that exports by iSCSI. A lender's transport is known only after
    /// its export; leases of other lenders are released again.
    fn take_disk(
        &self,
        volume: &Volume,
        bytes: u64,
        durability: Durability,
    ) -> Result<(Lease, Endpoint), DaemonError> {
        let mut by_nbd: Vec<String> = Vec::new();
        let mut faults: Vec<LenderFault> = Vec::new();
        loop {
            let failed = faults.iter().map(|fault| fault.lender.clone());
            let want = Want {
                borrower: self.leases.host.clone(),
                vm: volume.holder(),
                bytes,
                disk_bytes: bytes,
                durability,
                apart_from: [self.leases.distrusted(), by_nbd.clone(), failed.collect()].concat(),
            };
            let ttl = lease_ttl(durability, bytes);
            let lease = match self.leases.registry.take(&want, ttl) {
                Ok(lease) => lease,
                Err(error @ RegistryError::NothingToSpare { .. }) if !by_nbd.is_empty() => {
                    let error = no_lender_left(error, &[], &faults);
                    return Err(refused(
                        format!(
                            "{error}; not asked: {}, because they export by NBD",
                            by_nbd.join(", ")
                        ),
                        "volumes borrow by iSCSI: lend with 'memfold lend --transport iscsi' there",
                    ));
                }
                Err(error) => return Err(no_lender_left(error, &[], &faults)),
            };
            match self
                .leases
                .wait_exported(&lease, std::slice::from_ref(&lease))
            {
                Ok(endpoint) if endpoint.transport == Transport::Iscsi => {
                    return Ok((lease, endpoint));
                }
                other => {
                    self.leases.release(std::iter::once(lease.id));
                    match other {
                        Ok(_) => by_nbd.push(lease.lender.host),
                        Err(error) => faults.push(LenderFault::of(&error).ok_or(error)?),
                    }
                }
            }
        }
    }

    /// Records a loan, after the thread was started that renews the loan: if the record cannot be
    /// written, this thread undoes the loan as soon as that is possible.
    fn keep(self: &Arc<Self>, keeper: &Arc<Keeper>) -> Result<(), DaemonError> {
        let mut keepers = self.keepers.lock();
        keepers.insert(keeper.volume.clone(), keeper.clone());
        drop(keepers);
        self.watch(keeper)?;
        self.note()
    }

    /// Starts the thread that renews a loan and ends it.
    fn watch(self: &Arc<Self>, keeper: &Arc<Keeper>) -> Result<(), DaemonError> {
        let (volumes, keeper) = (Arc::downgrade(self), keeper.clone());
        threads::begin("volume", move || keep_watch(&volumes, &keeper))
            .map_err(state_error(&self.notes))
    }

    fn put_on(&self, keeper: &Keeper, fit: &Fit, endpoint: &Endpoint) -> Result<(), DaemonError> {
        let (Address::Tcp { ip, port }, Some(key)) = (&endpoint.address, &endpoint.key) else {
            return Err(DaemonError::Internal(
                "an export by iSCSI without address or key",
            ));
        };
        let target = session::Target::new((*ip, *port).into(), key);
        let loan = keeper.change(|loan| loan.target = Some(target.clone()));
        self.note()?;
        let device = session::log_in(&target, key, loan.durability)?;
        let device = device.display().to_string();
        tools::add_disk(&loan.volume.group, &device, &loan.uuid)?;
        if loan.durability == Durability::None {
            for disk in &fit.disks {
                still_good(keeper)?;
                tools::move_off(&loan.volume, disk, Some(&device))?;
            }
        } else {
            tools::add_image(&loan.volume, &device)?;
            tools::hurry(&loan.volume)?;
            wait_synced(keeper)?;
            tools::write_mostly(&loan.volume, &fit.disks)?;
        }
        still_good(keeper)?;
        keeper.change(|loan| loan.phase = Phase::Lent);
        self.note()
    }

    /// Undoes all steps of a loan, and releases its lease.
    fn take_off(&self, keeper: &Keeper, _: &GroupRight<'_>) -> Result<(), DaemonError> {
        let loan = keeper.loan();
        let name = loan.volume.to_string();
        let _progress = MoveProgress::begin(&self.moves, &name, "volume taken off the lender");
        off_lent(&loan.volume, &loan.uuid)?;
        // The phase is recorded now, so that a later daemon has fewer steps to do.
        keeper.change(|loan| loan.phase = Phase::Ending);
        self.note()?;
        if let Some(target) = &loan.target {
            session::log_out(target)?;
        }
        keeper.stop();
        self.leases.release(std::iter::once(loan.lease));
        self.keepers.lock().remove(&loan.volume);
        self.note()?;
        info!(volume = %loan.volume, "volume returned to this host's disk");
        Ok(())
    }

    /// Continues loans of the earlier daemon for volumes.
    pub(crate) fn resume(self: &Arc<Self>) {
        let Ok(bytes) = std::fs::read(&self.notes) else {
            return;
        };
        let loans: Vec<Loan> = match serde_json::from_slice(&bytes) {
            Ok(loans) => loans,
            Err(error) => {
                warn!(%error, "cannot read volumes.json, the list of volumes on lent RAM; run 'memfold return --lvm VG/LV' for each of these volumes");
                return;
            }
        };
        let all = loans.into_iter().map(|loan| {
            // The time of the last renewal is unknown, so half of the lease's duration is assumed
            // to be left.
            let ttl = lease_ttl(loan.durability, loan.bytes);
            let holds = Instant::now() + ttl / 2 + RESUMED;
            (loan.volume.clone(), Keeper::new(loan, holds))
        });
        let all: BTreeMap<Volume, Arc<Keeper>> = all.collect();
        self.keepers.lock().clone_from(&all);
        for (volume, keeper) in all {
            info!(%volume, "daemon restarted; it watches the lease of the volume's borrowed memory again");
            if let Err(error) = self.watch(&keeper) {
                warn!(%volume, error = chain(&error), "cannot renew the lease of the volume's borrowed memory; run 'memfold return --lvm' or restart the daemon within a minute");
            }
        }
    }

    fn note(&self) -> Result<(), DaemonError> {
        let keepers = self.keepers.lock();
        let loans: Vec<Loan> = keepers.values().map(|keeper| keeper.loan()).collect();
        write_json(&self.notes, &loans).map_err(state_error(&self.notes))
    }

    /// Renews the lease, and records whether the lender recalls its memory.
    fn renew(&self, keeper: &Keeper) {
        let loan = keeper.loan();
        let durability = keeper.durability_now();
        let ttl = lease_ttl(durability, loan.bytes);
        let alone = durability != loan.durability;
        match self.leases.renew_lease(loan.lease, ttl, alone) {
            Ok(lease) => {
                *keeper.holds.lock() = Instant::now() + Duration::from_millis(lease.left_ms);
                if lease.recall_ms.is_some() && !keeper.is_wanted.swap(true, Ordering::AcqRel) {
                    info!(volume = %keeper.volume, "lender needs its memory back; moving the volume to this host's disk");
                }
            }
            Err(error @ (RegistryError::NoLease { .. } | RegistryError::State { .. }))
                if durability == Durability::Disk =>
            {
                keeper.lose(error.to_string());
            }
            // The lease still holds for a while. If lent RAM has the only copy, the volume is taken
            // off before the lease ends.
            Err(_) => {}
        }
    }

    /// Takes a volume off lent RAM automatically if its lender recalls the memory or has gone, or
    /// if the earlier daemon left the removal half done. Returns whether this was attempted.
    fn tend(&self, keeper: &Keeper) -> bool {
        // If the lock is held, its holder may be putting this volume on lent RAM, or taking it off.
        let group = self.group(&keeper.volume);
        let Some(turn) = GroupRight::try_take(|| group.try_lock()) else {
            return false;
        };
        if keeper.is_stopped() || !keeper.has_to_end() {
            return false;
        }
        if keeper.loan().phase == Phase::Lent && keeper.is_running_out() {
            let volume = &keeper.volume;
            warn!(%volume, "registry unreachable, and half of the lease's time is over; moving the volume to this host's disk");
        }
        if let Err(error) = self.take_off(keeper, &turn) {
            let volume = &keeper.volume;
            warn!(%volume, error = chain(&error), "cannot move the volume from lent RAM to this host's disk; retrying in 15 s");
        }
        true
    }
}

fn keep_watch(volumes: &Weak<SwapVolumes>, keeper: &Arc<Keeper>) {
    let mut looked = Instant::now();
    let (mut tending, mut tried): (Option<JoinHandle<bool>>, Option<Instant>) = (None, None);
    while !keeper.is_stopped() {
        let Some(volumes) = volumes.upgrade() else {
            return;
        };
        volumes.renew(keeper);
        let loan = keeper.loan();
        if loan.phase == Phase::Lent && keeper.lost().is_none() {
            let images = (looked.elapsed() >= LOOK_AT_IMAGES).then(|| {
                looked = Instant::now();
                images(&loan)
            });
            let images = images.flatten();
            if let Some(images) = &images {
                keeper.own_image_lacks_writes(own_lacks_writes(images));
            }
            if let Some(why) = gone(&loan, images.as_deref()) {
                keeper.lose(why);
            }
        }
        // The data of this volume is lost, and only an operator can take the volume off, after its
        // users have ended.
        let is_hopeless = keeper.durability_now() == Durability::None && keeper.lost().is_some();
        if tending.as_ref().is_some_and(JoinHandle::is_finished) {
            let ended = tending.take().map(JoinHandle::join);
            if !matches!(ended, Some(Ok(false))) {
                tried = Some(Instant::now());
            }
        }
        let is_due = tending.is_none() && tried.is_none_or(|tried| tried.elapsed() >= RETRY);
        if !is_hopeless && is_due && keeper.has_to_end() {
            // Meanwhile this thread renews the lease.
            let (volumes, keeper) = (volumes.clone(), keeper.clone());
            let spawned = std::thread::Builder::new()
                .name("volume-off".into())
                .spawn(move || volumes.tend(&keeper));
            tending = spawned.ok();
        }
        drop(volumes);
        std::thread::sleep(LOOK);
    }
}

fn wait_synced(keeper: &Keeper) -> Result<(), DaemonError> {
    loop {
        still_good(keeper)?;
        let logical = tools::logical(&keeper.volume)?;
        if logical.synced.is_some_and(|percent| percent >= 100.0) {
            return Ok(());
        }
        let loan = keeper.loan();
        if let Some(why) = gone(&loan, images(&loan).as_deref()) {
            return Err(refused(why, "'memfold leases' shows other offers"));
        }
        std::thread::sleep(LOOK_AT_SYNC);
    }
}

/// Checks that a loan's lender can still be used.
///
/// # Errors
///
/// [`DaemonError::Refused`] if the lender is lost or recalls its memory.
fn still_good(keeper: &Keeper) -> Result<(), DaemonError> {
    let wanted = keeper.is_wanted.load(Ordering::Acquire);
    let why = keeper
        .lost()
        .or_else(|| wanted.then(|| "the lender needs its own memory".into()));
    why.map_or(Ok(()), |why| {
        let lender = keeper.loan().lender;
        Err(refused(
            format!("lender '{lender}': {why}"),
            "'memfold leases' shows other offers",
        ))
    })
}

#[cfg(test)]
mod tests {
    use memfold_lend::{Incarnation, LenderId, Offer, Registry, SqliteRegistry};

    use super::*;

    #[test]
    fn the_progress_of_a_move_of_an_lvm_volume_is_shown_until_the_move_has_ended() {
        let directory = tempfile::tempdir().unwrap();
        let registry = SqliteRegistry::open(&directory.path().join("registry.db")).unwrap();
        let leases = Leases::of_registry("b", Arc::new(registry), directory.path());
        let volumes = SwapVolumes::new(Arc::new(leases), directory.path());
        let [moved, other] = ["vg/swap", "vg/other"].map(|name| name.parse::<Volume>().unwrap());
        let name = moved.to_string();
        let progress = MoveProgress::begin(&volumes.moves, &name, "volume copied");
        assert_eq!(volumes.progress(&moved).unwrap().step, "volume copied");
        assert_eq!(volumes.progress(&other), None);
        drop(progress);
        assert_eq!(volumes.progress(&moved), None);
    }

    #[test]
    fn a_loan_that_cannot_be_recorded_is_renewed_until_it_was_undone() {
        let directory = tempfile::tempdir().unwrap();
        let registry = SqliteRegistry::open(&directory.path().join("registry.db")).unwrap();
        let registry = Arc::new(registry);
        let minute = Duration::from_secs(60);
        let lender = LenderId {
            host: "a".into(),
            incarnation: Incarnation(1),
        };
        let bytes = 1 << 20;
        registry.offer(&Offer { lender, bytes }, minute).unwrap();
        let volume: Volume = "vg/swap".parse().unwrap();
        let want = Want {
            borrower: "b".into(),
            vm: volume.holder(),
            bytes,
            disk_bytes: bytes,
            durability: Durability::Disk,
            apart_from: Vec::new(),
        };
        let lease = registry.take(&want, Duration::from_secs(1)).unwrap().id;
        let loan = Loan {
            volume: volume.clone(),
            bytes,
            durability: Durability::Disk,
            lease,
            lender: "a".into(),
            target: None,
            uuid: lvm::new_uuid(random()),
            phase: Phase::Beginning,
        };
        let leases = Leases::of_registry("b", registry.clone(), directory.path());
        // The record's directory does not exist.
        let volumes = SwapVolumes::new(Arc::new(leases), &directory.path().join("missing"));
        let volumes = Arc::new(volumes);
        // While the borrow runs, the thread does not undo the loan.
        let group = volumes.group(&volume);
        let _turn = group.lock();
        let keeper = Keeper::new(loan, Instant::now() + minute);
        volumes.keep(&keeper).unwrap_err();
        memfold_testkit::wait_until("the lease is renewed", minute, || {
            registry.picture().unwrap().leases[0].left_ms > 30_000
        });
        assert!(keeper.has_to_end());
        keeper.stop();
    }
}
