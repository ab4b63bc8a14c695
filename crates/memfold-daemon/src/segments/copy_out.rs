//! Copies files of a running guest to a disk image that the host reads, for `segment build --from
//! vm:NAME`.
//!
//! ```text
//!   guest: cp -a  ->  ext4 on a virtio-blk disk in a free slot for segments  ->  file of the host  ->  unpacked like any image
//! ```
//! The disk is removed from the VM when the copy is complete or has failed. The guest may have put
//! anything on this disk, so the programs that read it run in a sandbox (`segment::ext`).

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use memfold_api::BuildRequest;
use memfold_host::progress::Progress;
use memfold_segment::{self as segment, Draft, PROGRAMS, SegmentError};
use memfold_units::ByteSize;
use memfold_vm::{Qmp, QmpError, VmSpec};
use memfold_wire::order::{COPY_SERIAL, GuestOrder};
use serde_json::{Value, json};

use crate::error::{DaemonError, impossible, segment_files};
use crate::machine::{Machine, text};
use crate::segments::{Segments, directory, noted};

/// Maximum size of the disk image, in bytes. The image is sparse: only written parts take space.
const ROOM: u64 = 16 << 30;

/// Minimum size of the disk image, in bytes. Also the unit of its size.
const LEAST_ROOM: u64 = 64 << 20;

/// QEMU's name of the disk for the copy.
const NODE: &str = "copy-out";

/// Time limit for the guest's copy.
const COPY_TIMEOUT: Duration = Duration::from_secs(3600);

/// Time limit for the guest to release the disk.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(30);

/// Name of the image file in the draft (the directory in which a segment is built).
pub(crate) const IMAGE: &str = "image.ext4";

impl Segments {
    /// Copies all files of a guest that the build's glob patterns may match, to [`IMAGE`] in a
    /// draft. Dropping the draft removes the copy.
    pub(crate) fn copy_out(
        &self,
        vm: &str,
        request: &BuildRequest,
        progress: &Progress,
    ) -> Result<Draft, DaemonError> {
        let machine = self.registry.machine(vm)?;
        let refuse = |why: String| SegmentError::Source {
            from: format!("vm:{vm}"),
            why,
        };
        if machine.domain() != Some(&request.domain) {
            let why = format!(
                "the VM does not belong to trust domain '{}'",
                request.domain
            );
            return Err(refuse(why).into());
        }
        if request.root {
            let why = "a root file system is built from a disk image, not from a running VM, whose root is overlaid";
            return Err(refuse(why.into()).into());
        }
        let directory = directory(&machine)?;
        let slots = machine.vm().spec().map_or(0, VmSpec::slots);
        // Until the copy ends, this right prevents saves of the VM, and segments that would take
        // the slot.
        let _alone = machine.save_right_soon()?;
        let slot = u32::try_from(noted(&machine, directory)?.len()).unwrap_or(slots);
        if slot >= slots {
            let why = format!(
                "the VM has no free slot for the disk that its guest copies to ({slots} in all); start it with --segment-slots {}",
                slot + 1
            );
            return Err(refuse(why).into());
        }
        let copy = self.shelf.draft(&format!("{}@copy", request.name))?;
        let image = copy.path().join(IMAGE);
        make(&image)?;
        progress.begin("guest's files copied", 0);
        // An earlier daemon may have left its disk.
        unplug(&machine);
        let copied = copy_to(&machine, slot, &image, request);
        unplug(&machine);
        copied?;
        Ok(copy)
    }
}

fn copy_to(
    machine: &Machine,
    slot: u32,
    image: &Path,
    request: &BuildRequest,
) -> Result<(), DaemonError> {
    let file = File::options().read(true).write(true).open(image);
    let file = file.map_err(segment_files(image))?;
    plug(&mut machine.monitor(), slot, file.as_fd())?;
    run(machine, &tops(&request.include))?;
    all_written(machine)
}

fn make(image: &Path) -> Result<(), DaemonError> {
    let failed = segment_files(image);
    let file = File::create(image).map_err(failed)?;
    let free = segment::free_above_reserve(image).map_err(failed)?;
    file.set_len(disk_size(free)?).map_err(failed)?;
    let mke2fs = segment::tool("mke2fs", "makes ext4 file systems", "e2fsprogs")?;
    let mut command = Command::new(mke2fs);
    command
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal"])
        .args(["-E", "nodiscard,lazy_itable_init=1"])
        .arg(image);
    segment::run_tool("mke2fs", &mut command)?;
    Ok(())
}

/// Returns the size of the disk image in bytes, so that a guest that fills the disk leaves the
/// reserve of the host's file system free. `free`: free bytes of that file system above the
/// reserve.
///
/// # Errors
///
/// [`SegmentError::Impossible`] if too little is free.
fn disk_size(free: u64) -> Result<u64, DaemonError> {
    let size = ROOM.min(free - free % LEAST_ROOM);
    if size == 0 {
        return Err(impossible(format!(
            "the file system of segments has {} free above its reserve, and a copy of a guest's files needs at least {}; free some space, or use a larger file system for segments",
            ByteSize(free),
            ByteSize(LEAST_ROOM)
        )));
    }
    Ok(size)
}

fn plug(qmp: &mut Qmp, slot: u32, image: BorrowedFd<'_>) -> Result<(), QmpError> {
    // The file is passed as a descriptor, because a QEMU without privileges cannot open the path.
    let place = qmp.lend(image)?;
    let added = qmp.execute(
        "blockdev-add",
        json!({
            "driver": "raw", "node-name": NODE, "discard": "unmap",
            "cache": { "direct": false, "no-flush": true },
            "file": { "driver": "file", "filename": place.path() },
        }),
    );
    // QEMU keeps its own duplicate of the descriptor while the node exists.
    qmp.take_back(&place)?;
    added?;
    // If the host's disk is full, the copy must fail; by default QEMU would stop the VM instead.
    let device = json!({
        "driver": "virtio-blk-pci", "id": NODE, "drive": NODE, "serial": COPY_SERIAL, "bus": format!("segport{slot}"),
        "werror": "report", "rerror": "report",
    });
    qmp.execute("device_add", device).map(drop)
}

/// Checks that no write to the disk failed: the guest may have ignored errors, and files would be
/// incomplete.
///
/// # Errors
///
/// [`SegmentError::Impossible`] if a write or flush failed.
fn all_written(machine: &Machine) -> Result<(), DaemonError> {
    let stats = machine.monitor().execute("query-blockstats", json!({}))?;
    let disks = stats.as_array().into_iter().flatten();
    let mut ours = disks.filter(|disk| disk["node-name"] == NODE);
    let failed = ours.next().and_then(|disk| {
        let count = |name: &str| disk["stats"][name].as_u64();
        Some(count("failed_wr_operations")? + count("failed_flush_operations")?)
    });
    match failed {
        Some(0) => Ok(()),
        _ => Err(impossible(
            "writes of the copy failed on this host: check whether the file system of segments is full",
        )),
    }
}

/// Removes the disk for the copy and its block node from QEMU, if they exist.
pub(crate) fn unplug(machine: &Machine) {
    let peripherals = json!({ "path": "/machine/peripheral" });
    let is_there = || {
        let list = machine.monitor().execute("qom-list", peripherals.clone());
        let list = list.ok();
        let mut all = list.iter().filter_map(Value::as_array).flatten();
        all.any(|device| device["name"] == NODE)
    };
    let end = Instant::now() + UNPLUG_TIMEOUT;
    let mut asked: Option<Instant> = None;
    while is_there() {
        if Instant::now() > end {
            tracing::warn!(
                vm = machine.name(),
                "guest did not release the disk of a segment build; the next build from this guest removes the disk"
            );
            return;
        }
        // A guest that was still booting may have missed the request to release the disk.
        if asked.is_none_or(|asked| asked.elapsed() > UNPLUG_TIMEOUT / 4) {
            asked = Some(Instant::now());
            let device = json!({ "id": NODE });
            let _ = machine.monitor().execute("device_del", device);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // This fails if the node does not exist.
    let node = json!({ "node-name": NODE });
    let _ = machine.monitor().execute("blockdev-del", node);
}

fn run(machine: &Machine, tops: &[String]) -> Result<(), DaemonError> {
    let order = GuestOrder::CopyToDisk {
        tops: tops.to_vec(),
    };
    let done = machine.run(order, COPY_TIMEOUT)?;
    if done.code == 0 {
        return Ok(());
    }
    Err(impossible(format!(
        "the guest of VM '{}' cannot copy its files: {}",
        machine.name(),
        text(&done.stderr)
    )))
}

/// Returns directories and files that together contain all matches of the glob patterns. None of
/// them is below another.
fn tops(include: &[String]) -> Vec<String> {
    let programs = PROGRAMS.map(String::from);
    let globs = if include.is_empty() {
        &programs[..]
    } else {
        include
    };
    let mut tops: Vec<String> = globs
        .iter()
        .map(|glob| {
            let plain = glob.find(['*', '?', '[', '{', '\\']);
            let end = plain.and_then(|at| glob[..at].rfind('/'));
            let top = if plain.is_some() {
                &glob[..end.unwrap_or(0)]
            } else {
                glob
            };
            if top.is_empty() { "/" } else { top }.to_owned()
        })
        .collect();
    tops.sort();
    tops.dedup();
    let all = tops.clone();
    tops.retain(|top| {
        let below = |other: &&String| {
            top.len() > other.len()
                && top.starts_with(other.trim_end_matches('/'))
                && (other.len() == 1 || top.as_bytes()[other.len()] == b'/')
        };
        !all.iter().any(|other| below(&other))
    });
    tops
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_for_a_guests_files_takes_no_more_than_what_is_free_above_the_reserve() {
        assert_eq!(disk_size(1 << 40).unwrap(), ROOM);
        assert_eq!(disk_size((1 << 30) + 5).unwrap(), 1 << 30);
        let error = disk_size(LEAST_ROOM - 1).unwrap_err().to_string();
        assert!(error.contains("needs at least 64.0 MiB"), "{error}");
    }

    #[test]
    fn the_directories_copied_for_a_segment_are_the_distinct_literal_prefixes_of_its_globs() {
        let of = |globs: &[&str]| tops(&globs.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(of(&[]), ["/opt", "/usr"]);
        assert_eq!(
            of(&["/usr/bin/**", "/usr/lib/x/*.so*", "/usr/bin/a?"]),
            ["/usr/bin", "/usr/lib/x"]
        );
        assert_eq!(of(&["/usr/bin/perl"]), ["/usr/bin/perl"]);
        assert_eq!(of(&["/usr/**", "/usr/bin/*", "/usr2/*"]), ["/usr", "/usr2"]);
        assert_eq!(of(&["/**", "/usr/*"]), ["/"]);
    }
}
