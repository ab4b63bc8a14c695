//! Asks LVM about swap volumes, and moves volumes off lent disks. A lent disk is an iSCSI disk in
//! the RAM of another host.

use memfold_api::BorrowRequest;
use memfold_host::chain;
use memfold_lend::Durability;
use memfold_lend::lvm::tools::{self, Logical, Physical};
use memfold_lend::lvm::{self, Loan, LvmError, Volume, session};
use memfold_units::ByteSize;

use crate::error::{DaemonError, refused};

/// Letter with which the kernel reports a failed mirror image ([`tools::images`]).
pub(super) const FAILED: char = 'D';

/// States of the images while this host's is copied from the lender's, after `lvconvert --repair`.
/// In the first copy of a new mirror, which goes the other way, they are `aa`.
const REBUILT: &str = "aA";

/// Returns whether this host's image lacks writes, so that the lender has the only copy.
pub(super) fn own_lacks_writes(images: &str) -> bool {
    images.starts_with(FAILED) || images.starts_with(REBUILT)
}

/// Facts about a volume, read before the volume is moved to lent RAM.
pub(super) struct Fit {
    pub logical: Logical,
    /// Devices on which the volume's data is.
    pub disks: Vec<String>,
    /// Number of bytes to borrow for the volume.
    pub wanted: u64,
}

/// Returns the states of a mirror's images, one letter each, this host's image first; `None` if the
/// volume is no mirror or the states are unknown.
pub(super) fn images(loan: &Loan) -> Option<String> {
    if loan.durability == Durability::None {
        return None;
    }
    tools::images(&loan.volume).ok()?
}

/// Returns the reason why a lender can no longer be used; `None` if it can. `images`: the states of
/// the mirror images, if known.
pub(super) fn gone(loan: &Loan, images: Option<&str>) -> Option<String> {
    let session = loan.target.as_ref().and_then(session::of);
    if !session.is_some_and(|session| session.is_up) {
        return Some("the iSCSI session with the lender has ended".into());
    }
    let failed = images.and_then(|images| images.chars().nth(1)) == Some(FAILED);
    failed.then(|| "a request to the lender has failed".into())
}

/// Checks, before anything is changed, whether a volume can be put on lent RAM.
///
/// # Errors
///
/// [`LvmError::Unfit`] if it cannot, with the reason and the fix.
pub(super) fn fit(volume: &Volume, request: &BorrowRequest) -> Result<Fit, DaemonError> {
    let logical = tools::logical(volume)?;
    let disks = tools::physical(&volume.group)?;
    let unfit = |why: &str, fix: &str| {
        DaemonError::from(LvmError::Unfit {
            volume: volume.clone(),
            why: why.to_owned(),
            fix: fix.to_owned(),
        })
    };
    let is_lent = |disk: &Physical| lvm::is_lent(&disk.uuid) && disk_has(disk, volume);
    if disks.iter().any(is_lent) {
        let fix = format!("take the volume off first: memfold return --lvm {volume}");
        return Err(unfit("is already on lent RAM of an earlier loan", &fix));
    }
    if let Some(missing) = disks.iter().find(|disk| disk.is_missing) {
        let why = format!("is in a group that lacks a disk (UUID {})", missing.uuid);
        let fix = "bring the disk back, or remove it: vgreduce --removemissing";
        return Err(unfit(&why, fix));
    }
    if logical.layout != "linear" {
        let why = format!(
            "has layout '{}'; only linear volumes can be put on lent RAM",
            logical.layout
        );
        let fix = "make the swap volume linear (lvconvert), or use another volume";
        return Err(unfit(&why, fix));
    }
    if !logical.is_active {
        let fix = format!("activate the volume: lvchange -ay {volume}");
        return Err(unfit("is not active", &fix));
    }
    let device = volume.device();
    let is_swap = lvm::is_swap(&device).map_err(|source| LvmError::Files {
        path: device.clone().into(),
        source,
    });
    if !is_swap? {
        let fix = format!(
            "only swap volumes are put on lent RAM; mkswap {device} makes this volume swap and deletes its content"
        );
        return Err(unfit("holds no swap space", &fix));
    }
    let least = lvm::disk_bytes(logical.bytes, logical.extent, request.durability);
    if let Some(bytes) = request.bytes.filter(|bytes| *bytes < logical.bytes) {
        let (whole, lent) = (ByteSize(logical.bytes), ByteSize(bytes));
        let why = format!("has {whole}, and {lent} of lent RAM cannot hold it");
        let fix = format!("borrow the whole size: memfold borrow --lvm {volume}");
        return Err(unfit(&why, &fix));
    }
    let own = disks.into_iter().filter(|disk| disk_has(disk, volume));
    let own: Vec<Physical> = own.collect();
    if request.durability == Durability::Disk && own.iter().all(|disk| disk.free < logical.extent) {
        let why = format!(
            "needs one free extent ({}) beside it, for LVM's notes about a mirror, and its disks have none",
            ByteSize(logical.extent)
        );
        let fix = "make another volume there smaller; or use --durability none, if the content may be lost";
        return Err(unfit(&why, fix));
    }
    Ok(Fit {
        wanted: request.bytes.unwrap_or_default().max(least),
        disks: own.into_iter().map(|disk| disk.device).collect(),
        logical,
    })
}

/// Returns whether a disk holds a part of the volume, hidden parts included.
fn disk_has(disk: &Physical, volume: &Volume) -> bool {
    disk.volumes.iter().any(|name| is_part(name, volume))
}

/// Returns whether `name` is the volume, or an image or metadata volume of its mirror.
fn is_part(name: &str, volume: &Volume) -> bool {
    let rest = name.strip_prefix(volume.name.as_str());
    rest.is_some_and(|rest| {
        rest.is_empty() || rest.starts_with("_rimage_") || rest.starts_with("_rmeta_")
    })
}

/// Returns the UUID of a lent disk that holds the volume although no note says so.
pub(super) fn forgotten(volume: &Volume) -> Result<Option<String>, DaemonError> {
    let disks = tools::physical(&volume.group)?;
    let lent = disks
        .into_iter()
        .find(|disk| lvm::is_lent(&disk.uuid) && disk_has(disk, volume));
    Ok(lent.map(|disk| disk.uuid))
}

/// Takes a volume off a lent disk, and the disk out of its volume group. Steps that were done
/// before are skipped.
pub(super) fn off_lent(volume: &Volume, uuid: &str) -> Result<(), DaemonError> {
    let disks = tools::physical(&volume.group)?;
    let Some(disk) = disks.iter().find(|disk| disk.uuid == uuid) else {
        // The disk was not added to the group yet, or was removed as missing, so that its mirror
        // image has no device.
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
        return off_missing(volume, &disks, disk, is_moving(disk));
    }
    if is_moving(disk) {
        end_moves(volume, disk)?;
    }
    let logical = tools::logical(volume)?;
    if logical.is_mirror() && disk_has(disk, volume) {
        whole_here(volume, &logical)?;
        tools::remove_image(volume, Some(&disk.device))?;
    } else {
        let now = tools::physical(&volume.group)?;
        if now.iter().any(|d| d.uuid == uuid && disk_has(d, volume)) {
            tools::move_off(volume, &disk.device, None)?;
        }
    }
    Ok(tools::remove_disk(&volume.group, &disk.device)?)
}

/// Ends unfinished moves of extents to or from a lent disk: continues those off the disk, and
/// undoes those onto it.
fn end_moves(volume: &Volume, disk: &Physical) -> Result<(), DaemonError> {
    let moves = tools::moves(&volume.group)?;
    for unfinished in moves.iter().filter(|m| disk.volumes.contains(&m.name)) {
        if unfinished.source == disk.device {
            tools::resume_move(&disk.device)?;
        } else {
            tools::stop_move(&unfinished.source)?;
        }
    }
    Ok(())
}

/// Takes a volume off a lent disk that is missing because its lender does not answer.
fn off_missing(
    volume: &Volume,
    disks: &[Physical],
    disk: &Physical,
    is_moving: bool,
) -> Result<(), DaemonError> {
    // LVM removes all missing disks or none.
    let mut missing = disks.iter().filter(|other| other.is_missing);
    if let Some(other) = missing.find(|other| other.uuid != disk.uuid) {
        return Err(refused(
            format!(
                "group {} also lacks another disk (UUID {}); removing missing disks would lose the volumes on it",
                volume.group, other.uuid
            ),
            "bring that disk back first (pvs)",
        ));
    }
    if is_moving {
        return Err(refused(
            format!(
                "the lender of {volume} was lost while the volume was moved there (durability none); the volume continues on this host's disk, but LVM cannot undo a move to a missing disk"
            ),
            format!(
                "swapoff {}, then vgreduce --removemissing --force {}, which removes {volume}, and create the volume again",
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
        // LVM makes no other change in a group with a missing disk.
        tools::remove_missing(&volume.group, true)?;
        return Ok(tools::remove_image(volume, None)?);
    }
    Ok(tools::remove_missing(&volume.group, false)?)
}

/// Checks that a lent disk holds parts of this volume only; other volumes on the disk would be
/// lost.
fn is_ours_alone(volume: &Volume, disk: &Physical) -> Result<(), DaemonError> {
    let is_its = |name: &&String| is_part(name, volume) || name.starts_with("pvmove");
    let Some(other) = disk.volumes.iter().find(|name| !is_its(name)) else {
        return Ok(());
    };
    Err(refused(
        format!(
            "{}/{other} also lies on the disk that is lent for {volume}",
            volume.group
        ),
        format!(
            "move that volume: pvmove --name {other} {}; or remove it",
            disk.device
        ),
    ))
}

fn lost(volume: &Volume) -> DaemonError {
    refused(
        format!("{volume} is lost with its lender (durability none)"),
        format!(
            "stop using the volume (swapoff {device}, which may end programs, or reboot), then lvremove {volume}, vgreduce --removemissing {group}, and create the volume again",
            device = volume.device(),
            group = volume.group
        ),
    )
}

/// Checks that the mirror image on this host's disk has every write.
fn whole_here(volume: &Volume, logical: &Logical) -> Result<(), DaemonError> {
    if !logical.is_active {
        return Ok(());
    }
    let states = tools::images(volume)?.unwrap_or_default();
    if states.starts_with(REBUILT) {
        return Err(refused(
            format!(
                "the image of {volume} on this host's disk is being rebuilt from the lender, which holds the only copy until then"
            ),
            format!(
                "wait until 'lvs -o sync_percent {volume}' says 100; or swapoff {} first",
                volume.device()
            ),
        ));
    }
    if states.starts_with(FAILED) {
        return Err(refused(
            format!(
                "a request to the image of {volume} on this host's disk has failed: the lender holds the only copy"
            ),
            format!(
                "replace the image while the lender runs: lvconvert --repair {volume}; or swapoff {} first",
                volume.device()
            ),
        ));
    }
    Ok(())
}

pub(super) fn check_tools() -> Result<(), DaemonError> {
    let lacks = |error: LvmError| {
        DaemonError::ImpossibleHere(format!("cannot put volumes on lent RAM: {}", chain(&error)))
    };
    tools::check().map_err(lacks)?;
    session::check().map_err(lacks)
}

pub(super) fn random() -> [u8; 16] {
    use std::io::Read as _;
    let mut bytes = [0; 16];
    // The value only needs to be different each time; LVM refuses one that exists.
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if read.is_err() {
        let now = memfold_vm::overlay::unique();
        bytes[..8].copy_from_slice(&now.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn an_image_that_failed_or_is_rebuilt_from_the_lenders_lacks_writes() {
        assert!(["DA", "aA"].into_iter().all(own_lacks_writes));
        assert!(!["AA", "Aa", "aa", "AD"].into_iter().any(own_lacks_writes));
    }

    /// Imitates the group `vg` with the disks /dev/own and /dev/lent. Files say which moves are
    /// unfinished (`moving`: the source) and on which disk the volume is (`place`). Like LVM, the
    /// imitation continues or aborts a move only for the disk that the move comes from.
    const LVM: &str = r#"#!/bin/sh
cd "${0%/*}"
echo "$*" >> calls
source=$(cat moving)
row() { printf '{"pv_name":"%s","pv_uuid":"%s","pv_missing":"","pv_free":"4096","lv_name":"%s"}' "$@"; }
on() {
    if [ -n "$source" ]; then echo '[pvmove0]'
    elif [ "$(cat place)" = "$1" ]; then echo swap
    fi
}
case "$*" in
pvs*)
    printf '{"report":[{"pvseg":[%s,%s]}]}' "$(row /dev/own own "$(on /dev/own)")" "$(row /dev/lent UUID "$(on /dev/lent)")" ;;
"lvs --all"*)
    printf '{"report":[{"lv":[{"lv_name":"swap","move_pv":""},{"lv_name":"[pvmove0]","move_pv":"%s"}]}]}' "$source" ;;
lvs*)
    printf '{"report":[{"lv":[{"lv_name":"swap","lv_layout":"linear","lv_size":"4096","vg_extent_size":"4096","lv_active":"active","sync_percent":""}]}]}' ;;
"pvmove --abort /dev/"*)
    [ "$source" != "$3" ] || { echo "$source" > place; : > moving; } ;;
"pvmove "*/dev/lent)
    if [ -n "$source" ] && [ "$source" != /dev/lent ]; then exit 5; fi
    echo /dev/own > place; : > moving ;;
"vgreduce vg /dev/lent")
    [ -z "$source" ] && [ "$(cat place)" = /dev/own ] || { echo "in use" >&2; exit 5; } ;;
esac
"#;

    const ENVIRONMENT: &str = "MEMFOLD_TEST_LVM_SOURCE";
    const TEST: &str =
        "swap_volumes::on_lvm::tests::an_interrupted_move_home_continues_and_a_move_out_is_undone";

    #[test]
    fn an_interrupted_move_home_continues_and_a_move_out_is_undone() {
        if std::env::var_os(ENVIRONMENT).is_some() {
            // This process has the imitation as its LVM.
            off_lent(&"vg/swap".parse().unwrap(), "memfLd-test").unwrap();
            return;
        }
        for (source, wanted) in [
            ("/dev/lent", "pvmove --yes --interval 1 /dev/lent"),
            ("/dev/own", "pvmove --abort /dev/own"),
            (
                "",
                "pvmove --yes --interval 1 --atomic --name swap /dev/lent",
            ),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let path = |name: &str| directory.path().join(name);
            for (name, text) in [
                ("lvm", &*LVM.replace("UUID", "memfLd-test")),
                ("dmsetup", "#!/bin/sh\n"),
                ("moving", source),
                ("place", "/dev/lent"),
            ] {
                std::fs::write(path(name), text).unwrap();
            }
            for program in ["lvm", "dmsetup"] {
                let mode = std::fs::Permissions::from_mode(0o755);
                std::fs::set_permissions(path(program), mode).unwrap();
            }
            let programs = std::env::var("PATH").unwrap();
            let programs = format!("{}:{programs}", directory.path().display());
            let done = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", TEST])
                .env("PATH", programs)
                .env(ENVIRONMENT, source)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&done.stdout);
            let calls = std::fs::read_to_string(path("calls")).unwrap();
            assert!(done.status.success(), "{source}: {said}\n{calls}");
            let moves: Vec<&str> = calls.lines().filter(|c| c.starts_with("pvmove")).collect();
            assert_eq!(moves, [wanted], "{source}");
            assert!(calls.contains("vgreduce vg /dev/lent"), "{calls}");
        }
    }
}
