//! Swap volumes of this host's LVM on lent RAM: put there, watched, taken off.
//!
//! As with VMs, everything can be cut off at any instant. What LVM says is the truth; notes name
//! leases and targets, and are written before anything is changed. [`SwapVolumes::take_off`] undoes
//! whatever it finds, and finds nothing the second time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, Borrowed, SwapPlace};
use memfold_host::chain;
use memfold_lend::lvm::{self, Loan, Phase, Volume, session, tools};
use memfold_lend::{Address, Durability, Endpoint, Lease, RegistryError, Transport, Want};
use parking_lot::{Mutex, MutexGuard};
use tracing::{info, warn};

use self::keeper::Keeper;
use self::on_lvm::{FAILED, Fit, check_tools, fit, forgotten, gone, images, off_lent, random};
use crate::error::{DaemonError, lending};
use crate::json_file::write_json;
use crate::lease_times::{RESUMED, lease_ttl, ms};
use crate::leases::Leases;
use crate::locks::{Rank, Ranked};

mod keeper;
mod on_lvm;

/// Time between two looks at a loan, and between two at a mirror's images, each of which is a
/// process.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_AT_IMAGES: Duration = Duration::from_secs(5);

/// Time between two tries to take a volume off lent RAM by ourselves.
const RETRY: Duration = Duration::from_secs(15);

/// Time between two looks at how far a mirror is.
const LOOK_AT_SYNC: Duration = Duration::from_millis(500);

/// Volumes of this host on lent RAM.
#[derive(Debug)]
pub struct SwapVolumes {
    leases: Arc<Leases>,
    /// What the next daemon goes on with.
    notes: PathBuf,
    /// By volume group, held while LVM is told to change something there: its tools would wait for
    /// each other, and what one finds has to be so for the next.
    turns: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    keepers: Mutex<BTreeMap<Volume, Arc<Keeper>>>,
}

/// The right to change something in a volume group, as long as this is kept.
struct Turn<'a> {
    _right: MutexGuard<'a, ()>,
    _rank: Ranked,
}

impl<'a> Turn<'a> {
    fn take(group: &'a Mutex<()>) -> Self {
        Self {
            _rank: Ranked::begin(Rank::VolumeGroup),
            _right: group.lock(),
        }
    }

    /// `None`: somebody else has it.
    fn take_now(group: &'a Mutex<()>) -> Option<Self> {
        Some(Self {
            _rank: Ranked::begin(Rank::VolumeGroup),
            _right: group.try_lock()?,
        })
    }
}

impl SwapVolumes {
    pub(crate) fn new(leases: Arc<Leases>, state: &Path) -> Self {
        Self {
            leases,
            notes: state.join("volumes.json"),
            turns: Mutex::default(),
            keepers: Mutex::default(),
        }
    }

    /// What is held while a volume's group is changed.
    fn group(&self, volume: &Volume) -> Arc<Mutex<()>> {
        let mut turns = self.turns.lock();
        turns.entry(volume.group.clone()).or_default().clone()
    }

    fn keepers(&self) -> MutexGuard<'_, BTreeMap<Volume, Arc<Keeper>>> {
        self.keepers.lock()
    }

    /// What is borrowed, for reports.
    pub(crate) fn borrowed(&self) -> Vec<Borrowed> {
        let keepers: Vec<Arc<Keeper>> = self.keepers().values().cloned().collect();
        keepers.iter().map(|keeper| keeper.borrowed()).collect()
    }

    /// The next daemon goes on.
    pub(crate) fn stop(&self) {
        self.keepers().values().for_each(|keeper| keeper.stop());
    }

    /// Puts a swap volume of this host on lent RAM.
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
        let turn = Turn::take(&group);
        let known = self.keepers().get(volume).cloned();
        if let Some(keeper) = known {
            let now = keeper.borrowed();
            if now.place == SwapPlace::Lent && now.durability == Some(request.durability) {
                return Ok(now);
            }
            return Err(lending(
                format!(
                    "{volume} has already borrowed, with other durability, or was not taken off a lender that is gone"
                ),
                format!("return the loan first: memfold return --lvm {volume}"),
            ));
        }
        let fit = fit(volume, request)?;
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
        let done = self
            .keep(&keeper)
            .and_then(|()| self.put_on(&keeper, &fit, &endpoint));
        if let Err(error) = done {
            warn!(%volume, error = chain(&error), "volume not moved to a lender");
            if let Err(left) = self.take_off(&keeper, &turn) {
                warn!(%volume, error = chain(&left), "cannot undo the failed borrow of the volume; run 'memfold return --lvm'");
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

    /// Takes a volume off lent RAM; fine if it isn't there.
    pub fn give_back(self: &Arc<Self>, volume: &Volume) -> Result<Borrowed, DaemonError> {
        let began = Instant::now();
        check_tools()?;
        let group = self.group(volume);
        let turn = Turn::take(&group);
        let known = self.keepers().get(volume).cloned();
        let mut changed = false;
        let bytes = if let Some(keeper) = known {
            changed = keeper.borrowed().place == SwapPlace::Lent;
            self.take_off(&keeper, &turn)?;
            keeper.loan().bytes
        } else {
            let logical = tools::logical(volume)?;
            if let Some(uuid) = forgotten(volume)? {
                // Of before a boot, or of a state directory that is gone.
                off_lent(volume, &uuid)?;
                changed = true;
            }
            logical.bytes
        };
        Ok(Borrowed {
            vm: volume.to_string(),
            place: SwapPlace::OnDisk,
            bytes,
            durability: None,
            lenders: Vec::new(),
            stripes: None,
            waits: None,
            changed,
            took_ms: ms(began),
        })
    }

    /// A lease of a lender that exports by iSCSI. Which one does is seen when it has.
    fn take_disk(
        &self,
        volume: &Volume,
        bytes: u64,
        durability: Durability,
    ) -> Result<(Lease, Endpoint), DaemonError> {
        let mut by_nbd: Vec<String> = Vec::new();
        loop {
            let want = Want {
                borrower: self.leases.host().to_owned(),
                vm: volume.holder(),
                bytes,
                durability,
                apart_from: [self.leases.distrusted(), by_nbd.clone()].concat(),
            };
            let ttl = lease_ttl(durability, bytes);
            let lease = match self.leases.take(&want, ttl) {
                Ok(lease) => lease,
                Err(error @ RegistryError::NothingToSpare { .. }) if !by_nbd.is_empty() => {
                    return Err(lending(
                        format!(
                            "{error}; not asked: {}, because they export by NBD",
                            by_nbd.join(", ")
                        ),
                        "volumes borrow by iSCSI: lend with 'memfold lend --transport iscsi' there",
                    ));
                }
                Err(error) => return Err(error.into()),
            };
            match self.leases.wait_exported(&lease) {
                Ok(endpoint) if endpoint.transport == Transport::Iscsi => {
                    return Ok((lease, endpoint));
                }
                other => {
                    self.leases.release(std::iter::once(lease.id));
                    other?;
                    by_nbd.push(lease.lender.host);
                }
            }
        }
    }

    /// Takes a loan on: from now on it is renewed.
    fn keep(self: &Arc<Self>, keeper: &Arc<Keeper>) -> Result<(), DaemonError> {
        let volume = keeper.loan().volume;
        self.keepers().insert(volume, keeper.clone());
        self.note()?;
        let (volumes, keeper) = (Arc::downgrade(self), keeper.clone());
        std::thread::Builder::new()
            .name("volume".into())
            .spawn(move || keep_watch(&volumes, &keeper))
            .map(drop)
            .map_err(|source| self.notes_failed(source))
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

    /// Undoes what was done for a loan, whatever that is, and lets go of it.
    fn take_off(&self, keeper: &Keeper, _: &Turn<'_>) -> Result<(), DaemonError> {
        let loan = keeper.loan();
        off_lent(&loan.volume, &loan.uuid)?;
        // Undone, or over: a daemon that finds it now has less to do.
        keeper.change(|loan| loan.phase = Phase::Ending);
        self.note()?;
        if let Some(target) = &loan.target {
            session::log_out(target)?;
        }
        keeper.stop();
        self.leases.release(std::iter::once(loan.lease));
        self.keepers().remove(&loan.volume);
        self.note()?;
        info!(volume = %loan.volume, "volume returned to this host's disk");
        Ok(())
    }

    /// Goes on with what the daemon before has borrowed for volumes.
    pub(crate) fn resume(self: &Arc<Self>) {
        let Ok(bytes) = std::fs::read(&self.notes) else {
            return;
        };
        let loans: Vec<Loan> = match serde_json::from_slice(&bytes) {
            Ok(loans) => loans,
            Err(error) => {
                warn!(%error, "cannot read volumes.json; run 'memfold return --lvm VG/LV' for each volume on lent RAM");
                return;
            }
        };
        let all = loans.into_iter().map(|loan| {
            // Who knows when it was renewed last.
            let ttl = lease_ttl(loan.durability, loan.bytes);
            let holds = Instant::now() + ttl / 2 + RESUMED;
            (loan.volume.clone(), Keeper::new(loan, holds))
        });
        let all: BTreeMap<Volume, Arc<Keeper>> = all.collect();
        // All of them, before the first one is noted.
        self.keepers().clone_from(&all);
        for (volume, keeper) in all {
            info!(%volume, "loan of an earlier daemon is watched again");
            if let Err(error) = self.keep(&keeper) {
                warn!(%volume, error = chain(&error), "cannot watch the volume's loan; run 'memfold return --lvm' or restart the daemon");
            }
        }
    }

    fn notes_failed(&self, source: std::io::Error) -> DaemonError {
        DaemonError::State {
            path: self.notes.clone(),
            source,
        }
    }

    fn note(&self) -> Result<(), DaemonError> {
        let keepers = self.keepers();
        let loans: Vec<Loan> = keepers.values().map(|keeper| keeper.loan()).collect();
        write_json(&self.notes, &loans).map_err(|source| self.notes_failed(source))
    }

    /// Asks for more time, and hears what the lender wants.
    fn renew(&self, keeper: &Keeper) {
        let loan = keeper.loan();
        let durability = keeper.durability_now();
        let ttl = lease_ttl(durability, loan.bytes);
        let alone = durability != loan.durability;
        match self.leases.renew_lease(loan.lease, ttl, alone) {
            Ok(lease) => {
                *keeper.holds() = Instant::now() + Duration::from_millis(lease.left_ms);
                if lease.recall_ms.is_some() && !keeper.is_wanted.swap(true, Ordering::AcqRel) {
                    info!(volume = %keeper.loan().volume, "lender needs its memory back");
                }
            }
            Err(error @ (RegistryError::NoLease { .. } | RegistryError::State { .. }))
                if durability == Durability::Disk =>
            {
                keeper.lose(error.to_string());
            }
            // It holds for a while yet; where nothing else has what lies there, it is taken off
            // before that is over.
            Err(_) => {}
        }
    }

    /// Takes a volume off by ourselves, if it has to be: its lender wants it back or has gone, or
    /// the daemon before has left it half done. Whether that was tried.
    fn tend(&self, keeper: &Keeper) -> bool {
        // Who has it may be putting this volume there, or taking it off.
        let group = self.group(&keeper.loan().volume);
        let Some(turn) = Turn::take_now(&group) else {
            return false;
        };
        if keeper.is_stopped() || !keeper.has_to_end() {
            return false;
        }
        if keeper.loan().phase == Phase::Lent && keeper.is_running_out() {
            let volume = keeper.loan().volume;
            warn!(%volume, "registry unreachable and half of the lease over; moving the volume to this host's disk");
        }
        if let Err(error) = self.take_off(keeper, &turn) {
            let volume = keeper.loan().volume;
            warn!(%volume, error = chain(&error), "cannot take the volume off lent RAM; retrying in 15 s");
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
                keeper.own_image_failed(images.starts_with(FAILED));
            }
            if let Some(why) = gone(&loan, images.as_deref()) {
                keeper.lose(why);
            }
        }
        // A volume that is lost can only be taken off by who has let go of what lies there.
        let is_hopeless = keeper.durability_now() == Durability::None && keeper.lost().is_some();
        if tending.as_ref().is_some_and(JoinHandle::is_finished) {
            let ended = tending.take().map(JoinHandle::join);
            if !matches!(ended, Some(Ok(false))) {
                tried = Some(Instant::now());
            }
        }
        let is_due = tending.is_none() && tried.is_none_or(|tried| tried.elapsed() >= RETRY);
        if !is_hopeless && is_due && keeper.has_to_end() {
            // The lease is renewed meanwhile.
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
    let volume = keeper.loan().volume;
    loop {
        still_good(keeper)?;
        let logical = tools::logical(&volume)?;
        if logical.synced.is_some_and(|percent| percent >= 100.0) {
            return Ok(());
        }
        let loan = keeper.loan();
        if let Some(why) = gone(&loan, images(&loan).as_deref()) {
            return Err(lending(why, "'memfold leases' shows other offers"));
        }
        std::thread::sleep(LOOK_AT_SYNC);
    }
}

/// Whether what was begun is of use yet.
fn still_good(keeper: &Keeper) -> Result<(), DaemonError> {
    let wanted = keeper.is_wanted.load(Ordering::Acquire);
    let why = keeper
        .lost()
        .or_else(|| wanted.then(|| "the lender needs its own memory".into()));
    why.map_or(Ok(()), |why| {
        let lender = keeper.loan().lender;
        Err(lending(
            format!("lender '{lender}': {why}"),
            "'memfold leases' shows other offers",
        ))
    })
}
