//! Swap volumes of this host's LVM on lent RAM: put there, watched, taken off.
//!
//! As with VMs, everything can be cut off at any instant. What LVM says is the truth; notes name leases and targets, and are written before
//! anything is changed. [`Daemon::take_off`] undoes whatever it finds, and finds nothing the second time.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, Borrowed, SwapPlace};
use memfold_lend::lvm::tools::{self, Logical, Physical};
use memfold_lend::lvm::{self, Loan, LvmError, Phase, Volume, session};
use memfold_lend::{Address, Durability, Endpoint, Lease, RegistryError, Transport, Want};
use memfold_units::ByteSize;
use tracing::{info, warn};

use super::borrowing::lending;
use super::leasing::{RESUMED, lease_ttl};
use super::volume_keeper::Keeper;
use super::{Daemon, DaemonError, chain, write_json};

/// Time between two looks at a loan, and between two at a mirror's images, each of which is a process.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_AT_IMAGES: Duration = Duration::from_secs(5);

/// Time between two tries to take a volume off lent RAM by ourselves.
const RETRY: Duration = Duration::from_secs(15);

/// Time between two looks at how far a mirror is.
const LOOK_AT_SYNC: Duration = Duration::from_millis(500);

/// How the kernel says that an image has failed a request ([`tools::images`]).
const FAILED: char = 'D';

/// What the daemon has of volumes on lent RAM.
#[derive(Debug, Default)]
pub(super) struct Volumes {
    /// By volume group, held while LVM is told to change something there: its tools would wait for each other, and what one finds has to be so
    /// for the next.
    turns: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    keepers: Mutex<BTreeMap<Volume, Arc<Keeper>>>,
}

impl Volumes {
    /// What is held while a volume's group is changed.
    fn turn(&self, volume: &Volume) -> Arc<Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.entry(volume.group.clone()).or_default().clone()
    }

    fn keepers(&self) -> MutexGuard<'_, BTreeMap<Volume, Arc<Keeper>>> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is borrowed, for reports.
    pub fn borrowed(&self) -> Vec<Borrowed> {
        let keepers: Vec<Arc<Keeper>> = self.keepers().values().cloned().collect();
        keepers.iter().map(|keeper| keeper.borrowed()).collect()
    }

    /// The next daemon goes on.
    pub fn stop(&self) {
        self.keepers().values().for_each(|keeper| keeper.stop());
    }
}

/// What is known of a volume before anything is changed.
struct Fit {
    logical: Logical,
    /// Disks that have it.
    disks: Vec<String>,
    /// Bytes to borrow.
    wanted: u64,
}

impl Daemon {
    /// Puts a swap volume of this host on lent RAM.
    pub fn borrow_for_volume(
        self: &Arc<Self>,
        volume: &Volume,
        request: &BorrowRequest,
    ) -> Result<Borrowed, DaemonError> {
        let began = Instant::now();
        if request.durability == Durability::Replica || request.stripes.is_some_and(|n| n != 1) {
            return Err(DaemonError::BadRequest(
                "a volume is lent by one host: its durability is disk or none, and it has no stripes".into(),
            ));
        }
        super::lending::check_host(&self.lending.host)?;
        check_tools()?;
        let turn = self.lending.volumes.turn(volume);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.lending.volumes.keepers().get(volume).cloned();
        if let Some(keeper) = known {
            let now = keeper.borrowed();
            if now.place == SwapPlace::Lent && now.durability == Some(request.durability) {
                return Ok(now);
            }
            return Err(lending(
                format!(
                    "{volume} has borrowed already, with other durability, or was not taken off a lender that is gone"
                ),
                format!("give that back first: memfold return --lvm {volume}"),
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
            .keep_volume(&keeper)
            .and_then(|()| self.put_on(&keeper, &fit, &endpoint));
        if let Err(error) = done {
            warn!(%volume, error = chain(&error), "it stays where it is");
            if let Err(left) = self.take_off(&keeper) {
                warn!(%volume, error = chain(&left), "what was begun can't be undone; 'memfold return --lvm' tries again");
            }
            return Err(error);
        }
        info!(%volume, lender = lease.lender.host, "it is on lent RAM");
        Ok(Borrowed {
            changed: true,
            took_ms: ms(began),
            ..keeper.borrowed()
        })
    }

    /// Takes a volume off lent RAM; fine if it isn't there.
    pub fn return_volume(self: &Arc<Self>, volume: &Volume) -> Result<Borrowed, DaemonError> {
        let began = Instant::now();
        check_tools()?;
        let turn = self.lending.volumes.turn(volume);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.lending.volumes.keepers().get(volume).cloned();
        let mut changed = false;
        let bytes = if let Some(keeper) = known {
            changed = keeper.borrowed().place == SwapPlace::Lent;
            self.take_off(&keeper)?;
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
                borrower: self.lending.host.clone(),
                vm: volume.holder(),
                bytes,
                durability,
                apart_from: [self.lending.distrusted(), by_nbd.clone()].concat(),
            };
            let ttl = lease_ttl(durability, bytes);
            let lease = match self.lending.registry.take(&want, ttl) {
                Ok(lease) => lease,
                Err(error @ RegistryError::NothingToSpare { .. }) if !by_nbd.is_empty() => {
                    return Err(lending(
                        format!(
                            "{error}; not asked: {}, who export by NBD",
                            by_nbd.join(", ")
                        ),
                        "the kernel borrows by iSCSI: lend with 'memfold lend --transport iscsi' there",
                    ));
                }
                Err(error) => return Err(error.into()),
            };
            match self.wait_exported(&lease) {
                Ok(endpoint) if endpoint.transport == Transport::Iscsi => {
                    return Ok((lease, endpoint));
                }
                other => {
                    self.release(std::iter::once(lease.id));
                    other?;
                    by_nbd.push(lease.lender.host);
                }
            }
        }
    }

    /// Takes a loan on: from now on it is renewed.
    fn keep_volume(self: &Arc<Self>, keeper: &Arc<Keeper>) -> Result<(), DaemonError> {
        let volume = keeper.loan().volume;
        self.lending
            .volumes
            .keepers()
            .insert(volume, keeper.clone());
        self.note_volumes()?;
        let (daemon, keeper) = (Arc::downgrade(self), keeper.clone());
        std::thread::Builder::new()
            .name("volume".into())
            .spawn(move || keep_watch(&daemon, &keeper))
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
        self.note_volumes()?;
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
        self.note_volumes()
    }

    /// Undoes what was done for a loan, whatever that is, and lets go of it. The caller has the turn.
    fn take_off(&self, keeper: &Keeper) -> Result<(), DaemonError> {
        let loan = keeper.loan();
        off_lent(&loan.volume, &loan.uuid)?;
        // Undone, or over: a daemon that finds it now has less to do.
        keeper.change(|loan| loan.phase = Phase::Ending);
        self.note_volumes()?;
        if let Some(target) = &loan.target {
            session::log_out(target)?;
        }
        keeper.stop();
        self.release(std::iter::once(loan.lease));
        self.lending.volumes.keepers().remove(&loan.volume);
        self.note_volumes()?;
        info!(volume = %loan.volume, "it is on this host's disk");
        Ok(())
    }

    /// Goes on with what the daemon before has borrowed for volumes.
    pub(super) fn resume_volumes(self: &Arc<Self>) {
        let Ok(bytes) = std::fs::read(self.volumes_file()) else {
            return;
        };
        let loans: Vec<Loan> = match serde_json::from_slice(&bytes) {
            Ok(loans) => loans,
            Err(error) => {
                warn!(%error, "which volumes are on lent RAM can't be read; 'memfold return --lvm VG/LV' takes one off");
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
        self.lending.volumes.keepers().clone_from(&all);
        for (volume, keeper) in all {
            info!(%volume, "what it has borrowed is watched again");
            if let Err(error) = self.keep_volume(&keeper) {
                warn!(%volume, error = chain(&error), "it is not watched");
            }
        }
    }

    fn volumes_file(&self) -> PathBuf {
        self.options.state.join("volumes.json")
    }

    fn notes_failed(&self, source: std::io::Error) -> DaemonError {
        DaemonError::State {
            path: self.volumes_file(),
            source,
        }
    }

    fn note_volumes(&self) -> Result<(), DaemonError> {
        let keepers = self.lending.volumes.keepers();
        let loans: Vec<Loan> = keepers.values().map(|keeper| keeper.loan()).collect();
        write_json(&self.volumes_file(), &loans).map_err(|source| self.notes_failed(source))
    }

    /// Asks for more time, and hears what the lender wants.
    fn renew_volume(&self, keeper: &Keeper) {
        let loan = keeper.loan();
        let durability = keeper.durability_now();
        let ttl = lease_ttl(durability, loan.bytes);
        let alone = durability != loan.durability;
        match self.renew_lease(loan.lease, ttl, alone) {
            Ok(lease) => {
                *keeper.holds() = Instant::now() + Duration::from_millis(lease.left_ms);
                if lease.recall_ms.is_some() && !keeper.is_wanted.swap(true, Ordering::AcqRel) {
                    info!(volume = %keeper.loan().volume, "its lender needs the memory back");
                }
            }
            Err(error @ (RegistryError::NoLease { .. } | RegistryError::State { .. }))
                if durability == Durability::Disk =>
            {
                keeper.lose(error.to_string());
            }
            // It holds for a while yet; where nothing else has what lies there, it is taken off before that is over.
            Err(_) => {}
        }
    }

    /// Takes a volume off by ourselves, if it has to be: its lender wants it back or has gone, or the daemon before has left it half done.
    /// Whether that was tried.
    fn tend_volume(&self, keeper: &Keeper) -> bool {
        // Who has it may be putting this volume there, or taking it off.
        let turn = self.lending.volumes.turn(&keeper.loan().volume);
        let _turn = match turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if keeper.is_stopped() || !keeper.has_to_end() {
            return false;
        }
        if keeper.loan().phase == Phase::Lent && keeper.is_running_out() {
            let volume = keeper.loan().volume;
            warn!(%volume, "the registry can't be asked, and half of its lease's time is over: it is moved to this host's disk");
        }
        if let Err(error) = self.take_off(keeper) {
            let volume = keeper.loan().volume;
            warn!(%volume, error = chain(&error), "it can't be taken off lent RAM now");
        }
        true
    }
}

fn keep_watch(daemon: &Weak<Daemon>, keeper: &Arc<Keeper>) {
    let mut looked = Instant::now();
    let (mut tending, mut tried): (Option<JoinHandle<bool>>, Option<Instant>) = (None, None);
    while !keeper.is_stopped() {
        let Some(daemon) = daemon.upgrade() else {
            return;
        };
        daemon.renew_volume(keeper);
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
            let (daemon, keeper) = (daemon.clone(), keeper.clone());
            let spawned = std::thread::Builder::new()
                .name("volume-off".into())
                .spawn(move || daemon.tend_volume(&keeper));
            tending = spawned.ok();
        }
        drop(daemon);
        std::thread::sleep(LOOK);
    }
}

/// The states of a mirror's images, a letter each, this host's own first; `None` if it is none, or isn't said.
fn images(loan: &Loan) -> Option<String> {
    if loan.durability == Durability::None {
        return None;
    }
    tools::images(&loan.volume).ok()?
}

/// Why a lender that was there can't be used any more; `images`: their states, as far as they are known.
fn gone(loan: &Loan, images: Option<&str>) -> Option<String> {
    let session = loan.target.as_ref().and_then(session::of);
    if !session.is_some_and(|session| session.is_up) {
        return Some("the session with it has ended".into());
    }
    let failed = images.and_then(|images| images.chars().nth(1)) == Some(FAILED);
    failed.then(|| "a request to it has failed".into())
}

/// Before anything is changed: whether a volume can be put on lent RAM.
fn fit(volume: &Volume, request: &BorrowRequest) -> Result<Fit, DaemonError> {
    let logical = tools::logical(volume)?;
    let disks = tools::physical(&volume.group)?;
    let unfit = |why: String, fix: &str| LvmError::Unfit {
        volume: volume.clone(),
        why,
        fix: fix.to_owned(),
    };
    if disks
        .iter()
        .any(|disk| lvm::is_lent(&disk.uuid) && disk_has(disk, volume))
    {
        let fix = format!("take it off first: memfold return --lvm {volume}");
        return Err(unfit("is on lent RAM of before already".into(), &fix).into());
    }
    if let Some(missing) = disks.iter().find(|disk| disk.is_missing) {
        let why = format!("is in a group that lacks a disk (UUID {})", missing.uuid);
        return Err(unfit(
            why,
            "bring it back, or take it out: vgreduce --removemissing",
        )
        .into());
    }
    if logical.layout != "linear" {
        let why = format!(
            "is of layout '{}'; only linear volumes can be lent for",
            logical.layout
        );
        return Err(unfit(
            why,
            "make the swap volume linear (lvconvert), or use another",
        )
        .into());
    }
    if !logical.is_active {
        let fix = format!("activate it: lvchange -ay {volume}");
        return Err(unfit("is not active".into(), &fix).into());
    }
    let device = volume.device();
    let is_swap = lvm::is_swap(&device).map_err(|source| LvmError::Files {
        path: device.clone().into(),
        source,
    });
    if !is_swap? {
        let fix = format!(
            "only swap is put on others' RAM; mkswap {device} makes it that, and deletes what is there"
        );
        return Err(unfit("holds no swap space".into(), &fix).into());
    }
    let least = lvm::disk_bytes(logical.bytes, logical.extent, request.durability);
    if request.bytes.is_some_and(|bytes| bytes < logical.bytes) {
        let why = format!(
            "has {}, and {} of lent RAM can't hold it",
            ByteSize(logical.bytes),
            ByteSize(request.bytes.unwrap_or_default())
        );
        let fix = format!("borrow all of it: memfold borrow --lvm {volume}");
        return Err(unfit(why, &fix).into());
    }
    let own = disks.into_iter().filter(|disk| disk_has(disk, volume));
    let own: Vec<Physical> = own.collect();
    if request.durability == Durability::Disk && own.iter().all(|disk| disk.free < logical.extent) {
        let why = format!(
            "needs one free extent ({}) beside it, for what LVM notes about a mirror, and its disks have none",
            ByteSize(logical.extent)
        );
        return Err(unfit(
            why,
            "make another volume there smaller; or use --durability none, if all of it may be lost",
        )
        .into());
    }
    Ok(Fit {
        wanted: request.bytes.unwrap_or_default().max(least),
        disks: own.into_iter().map(|disk| disk.device).collect(),
        logical,
    })
}

/// Whether something of a volume, or of a hidden part of it, is on a disk.
fn disk_has(disk: &Physical, volume: &Volume) -> bool {
    disk.volumes.iter().any(|name| is_part(name, volume))
}

/// Whether this is a volume's name, or that of an image or of notes of it as a mirror.
fn is_part(name: &str, volume: &Volume) -> bool {
    let rest = name.strip_prefix(volume.name.as_str());
    rest.is_some_and(|rest| {
        rest.is_empty() || rest.starts_with("_rimage_") || rest.starts_with("_rmeta_")
    })
}

/// The lent disk that a volume is on, though no note says so.
fn forgotten(volume: &Volume) -> Result<Option<String>, DaemonError> {
    let disks = tools::physical(&volume.group)?;
    let lent = disks
        .into_iter()
        .find(|disk| lvm::is_lent(&disk.uuid) && disk_has(disk, volume));
    Ok(lent.map(|disk| disk.uuid))
}

/// Takes a volume off a lent disk, and the disk out of its group; whatever of it was done before.
fn off_lent(volume: &Volume, uuid: &str) -> Result<(), DaemonError> {
    let disks = tools::physical(&volume.group)?;
    let Some(disk) = disks.iter().find(|disk| disk.uuid == uuid) else {
        // It wasn't put into the group yet; or was taken out as missing, and its image has none below it.
        if let Some(device) = tools::orphan(uuid)? {
            tools::forget_disk(&device)?;
        }
        if tools::logical(volume).is_ok_and(|logical| logical.is_mirror()) {
            tools::remove_image(volume, None)?;
        }
        return Ok(());
    };
    is_ours_alone(volume, disk)?;
    let is_moving = |disk: &Physical| disk.volumes.iter().any(|name| name.starts_with("pvmove"));
    if disk.is_missing {
        off_missing(volume, &disks, disk, is_moving(disk))?;
        return Ok(());
    }
    if is_moving(disk) {
        for source in disks.iter().filter(|d| d.uuid != uuid && is_moving(d)) {
            tools::stop_move(&source.device)?;
        }
    }
    let logical = tools::logical(volume)?;
    if logical.is_mirror() && disk_has(disk, volume) {
        whole_here(volume, &logical)?;
        tools::remove_image(volume, Some(&disk.device))?;
    } else if tools::physical(&volume.group)?
        .iter()
        .any(|now| now.uuid == uuid && disk_has(now, volume))
    {
        tools::move_off(volume, &disk.device, None)?;
    }
    tools::remove_disk(&volume.group, &disk.device)?;
    Ok(())
}

/// The same, of a disk whose lender has gone.
fn off_missing(
    volume: &Volume,
    disks: &[Physical],
    disk: &Physical,
    is_moving: bool,
) -> Result<(), DaemonError> {
    // LVM takes all disks that are missing out, or none.
    if let Some(other) = disks
        .iter()
        .find(|other| other.is_missing && other.uuid != disk.uuid)
    {
        return Err(lending(
            format!(
                "group {} lacks another disk, too (UUID {}); taking missing disks out would hurt what lies there",
                volume.group, other.uuid
            ),
            "bring that disk back first (pvs)",
        ));
    }
    if is_moving {
        return Err(lending(
            format!(
                "the lender of {volume} has gone while it was moved there (durability none); it goes on, on this host's disk, and LVM can't undo a move to a disk that is missing"
            ),
            format!(
                "swapoff {}, then vgreduce --removemissing --force {}, which removes {volume}, and make it anew",
                volume.device(),
                volume.group
            ),
        ));
    }
    if disk_has(disk, volume) {
        let logical = tools::logical(volume)?;
        if !logical.is_mirror() {
            return Err(lost(volume));
        }
        whole_here(volume, &logical)?;
        // LVM changes nothing else in a group that lacks a disk.
        tools::remove_missing(&volume.group, true)?;
        return Ok(tools::remove_image(volume, None)?);
    }
    Ok(tools::remove_missing(&volume.group, false)?)
}

/// Whether a lent disk has this volume's parts and nothing else, which would be lost with it.
fn is_ours_alone(volume: &Volume, disk: &Physical) -> Result<(), DaemonError> {
    let is_its = |name: &&String| is_part(name, volume) || name.starts_with("pvmove");
    let Some(other) = disk.volumes.iter().find(|name| !is_its(name)) else {
        return Ok(());
    };
    Err(lending(
        format!(
            "{}/{other} lies on the disk that is lent for {volume}, too",
            volume.group
        ),
        format!(
            "move it off: pvmove --name {other} {}; or remove it",
            disk.device
        ),
    ))
}

fn lost(volume: &Volume) -> DaemonError {
    lending(
        format!("{volume} is lost with its lender (durability none)"),
        format!(
            "end what uses it (swapoff {device}; it may take programs with it, or a reboot), then lvremove {volume}, vgreduce --removemissing {group}, and make it anew",
            device = volume.device(),
            group = volume.group
        ),
    )
}

/// Whether the image on this host's disk has every write.
fn whole_here(volume: &Volume, logical: &Logical) -> Result<(), DaemonError> {
    if !logical.is_active {
        return Ok(());
    }
    let states = tools::images(volume)?.unwrap_or_default();
    if states.starts_with(FAILED) {
        return Err(lending(
            format!(
                "a request to the image of {volume} on this host's own disk has failed: only lent RAM has all of it"
            ),
            format!(
                "replace it while the lender is there: lvconvert --repair {volume}; or swapoff {} first",
                volume.device()
            ),
        ));
    }
    Ok(())
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
            return Err(lending(why, "'memfold leases' shows what others offer"));
        }
        std::thread::sleep(LOOK_AT_SYNC);
    }
}

/// Whether what was begun is of use yet.
fn still_good(keeper: &Keeper) -> Result<(), DaemonError> {
    let wanted = keeper.is_wanted.load(Ordering::Acquire);
    let why = keeper
        .lost()
        .or_else(|| wanted.then(|| "it needs its memory itself".into()));
    why.map_or(Ok(()), |why| {
        let lender = keeper.loan().lender;
        Err(lending(
            format!("lender '{lender}': {why}"),
            "'memfold leases' shows what others offer",
        ))
    })
}

fn check_tools() -> Result<(), DaemonError> {
    let lacks = |error: LvmError| {
        DaemonError::ImpossibleHere(format!(
            "volumes can't be put on lent RAM: {}",
            chain(&error)
        ))
    };
    tools::check().map_err(lacks)?;
    session::check().map_err(lacks)
}

fn random() -> [u8; 16] {
    use std::io::Read as _;
    let mut bytes = [0; 16];
    // Only so that it is another one each time; LVM refuses one that is there.
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if read.is_err() {
        let now = memfold_vm::overlay::unique();
        bytes[..8].copy_from_slice(&now.to_ne_bytes());
    }
    bytes
}

fn ms(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}
