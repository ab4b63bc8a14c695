//! Adds segments to a VM as devices. QEMU maps each segment's image file read-only and shared, and
//! the guest sees it as persistent memory (virtio-pmem).
//!
//! ```text
//!   memory-backend-file "segment0"  --->  virtio-pmem-pci "seg0"  in  pcie-root-port "segport0"        one for each slot
//! ```
//! QEMU can plug such a device into a running VM but cannot unplug it. So a segment stays in the VM
//! until the VM ends.

use std::os::fd::BorrowedFd;

use memfold_units::ByteSize;
use serde_json::json;

use super::qemu_line::Line;
use super::qmp::{Qmp, QmpError};
use super::segment_spec::SegmentSpec;
use super::spec::VmSpec;
use super::spec_error::{SpecError, require};

/// Most segment slots that a VM can have. Each slot is a PCI Express port.
pub const MAX_SLOTS: u32 = 16;

/// Guest-physical address space that a VM reserves for each segment slot, and thus the size of the
/// largest segment. An empty slot costs the guest nothing.
pub const SLOT_ROOM: ByteSize = ByteSize(8 << 30);

/// RAM size beyond which q35 puts the rest above 4 GiB (`pc_q35_init`).
const LOW_MEMORY: ByteSize = ByteSize(0xb000_0000);

/// Kernel parameter that makes a guest report free memory to the host in pieces of 64 KiB
/// (`mm/page_reporting.c`). With a small page cache, free memory is scattered, and whole huge pages
/// are seldom free.
pub const SMALL_REPORTS: &str = "page_reporting.page_reporting_order=4";

/// Validates the segments in a VM description.
pub(super) fn check(spec: &VmSpec) -> Result<(), SpecError> {
    let why = format!("{} slots are more than {MAX_SLOTS}", spec.slots());
    require(spec.slots() <= MAX_SLOTS, "segments", why)?;
    for (number, segment) in spec.segments.iter().enumerate() {
        let may_be_root = number == 0 && spec.boot.kernel.is_some();
        let why = format!(
            "'{}' can be the root only as the first segment, and only in a VM with boot.kernel",
            segment.name
        );
        require(!segment.root || may_be_root, "segments", why)?;
        check_one(segment)?;
        // Two generations of one segment are possible: a VM that moved to a newer one keeps both
        // devices.
        let mut before = spec.segments[..number].iter();
        let is_new = before.all(|other| other.name != segment.name);
        require(
            is_new,
            "segments",
            format!("'{}' is named twice", segment.name),
        )?;
    }
    Ok(())
}

/// Returns the name of a segment that a new VM's description names more than once (such as `a` and
/// `a@2`); `None` if there is no such segment.
#[must_use]
pub fn twice(spec: &VmSpec) -> Option<&str> {
    let names = || spec.segments.iter().map(SegmentSpec::base_name);
    let is_twice =
        |(number, name): &(usize, &str)| names().take(*number).any(|other| other == *name);
    names().enumerate().find(is_twice).map(|(_, name)| name)
}

/// Checks that a segment's image fits into a slot ([`SLOT_ROOM`]).
pub fn check_one(segment: &SegmentSpec) -> Result<(), SpecError> {
    let size = ByteSize(segment.bytes);
    let why = format!(
        "'{}' has {size}, and a slot holds at most {SLOT_ROOM}",
        segment.name
    );
    require(size <= SLOT_ROOM, "segments", why)
}

/// Adds the slots' ports and devices to QEMU's command line.
pub(super) fn arguments(line: &mut Line, spec: &VmSpec) {
    for slot in 0..spec.slots() {
        // These numbers are far from the numbers of other ports.
        let number = 100 + slot;
        line.add(
            "-device",
            format!("pcie-root-port,id=segport{slot},bus=pcie.0,chassis={number},slot={number}"),
        );
    }
    for (slot, segment) in spec.segments.iter().enumerate() {
        let Some(image) = &segment.image else {
            continue;
        };
        let backend = format!(
            "memory-backend-file,id=segment{slot},size={},share=on,readonly=on,merge=off,dump=off,mem-path=",
            segment.bytes
        );
        let address = segment.address.map(|address| format!(",memaddr={address}"));
        let address = address.unwrap_or_default();
        line.with_path("-object", &backend, image).add(
            "-device",
            format!("virtio-pmem-pci,id=seg{slot},memdev=segment{slot},bus=segport{slot}{address}"),
        );
    }
}

/// Returns the value of QEMU's `maxmem`: RAM reachable by hot-plug, plus address space for
/// segments.
pub(super) fn max_memory(spec: &VmSpec) -> Option<ByteSize> {
    let room = u64::from(spec.slots()) * SLOT_ROOM.0;
    let max = spec.memory_max.or((room > 0).then_some(spec.memory));
    max.map(|max| ByteSize(max.0 + room))
}

/// Returns the guest's kernel command line with the parameters that segments need:
///
/// - the root segment, if there is one,
/// - the segments that the guest mounts over its own files at boot,
/// - no bounce buffers, if all RAM is below 4 GiB: a kernel would otherwise reserve them, because
///   it sees device memory above 4 GiB,
/// - reports of free memory in small pieces.
#[must_use]
pub fn cmdline(spec: &VmSpec) -> Option<String> {
    let given = spec.boot.cmdline.as_deref();
    if spec.slots() == 0 {
        return given.map(str::to_owned);
    }
    spec.boot.kernel.as_ref()?;
    let root = spec.segments.iter().find(|segment| segment.root);
    let has = |words: &[String], key: &str| {
        let mut keys = words.iter().filter_map(|word| word.split_once('='));
        keys.any(|(before, _)| before == key)
    };
    let keys = ["root=", "rootfstype=", "rootflags="];
    let is_root = |word: &&str| keys.iter().any(|key| word.starts_with(key));
    // What follows `--` is not for the kernel, but for the program that it starts.
    let given: Vec<&str> = given.unwrap_or_default().split_ascii_whitespace().collect();
    let end = given.iter().position(|word| *word == "--");
    let (given, of_init) = given.split_at(end.unwrap_or(given.len()));
    let mut words: Vec<String> = given
        .iter()
        .copied()
        .filter(|word| root.is_none() || !is_root(word))
        .map(str::to_owned)
        .collect();
    if root.is_some() {
        words.push("root=/dev/pmem0 rootfstype=erofs rootflags=dax=always".into());
        if !has(&words, "memfold.upper") {
            let disk = spec.disks.iter().position(|disk| !disk.read_only);
            // From the 27th disk on, names have two letters; no upper layer is placed there.
            let letter = disk.and_then(|n| (b'a'..=b'z').nth(n)).map(char::from);
            words.push(letter.map_or_else(
                || "memfold.upper=tmpfs".to_owned(),
                |letter| format!("memfold.upper=/dev/vd{letter}"),
            ));
        }
    }
    let mut laid: Vec<&str> = Vec::new();
    for segment in spec.segments.iter().filter(|segment| !segment.root) {
        // The name without a generation is enough: the guest takes the newest generation that it
        // sees.
        if !laid.contains(&segment.base_name()) {
            laid.push(segment.base_name());
        }
    }
    if !laid.is_empty() {
        words.push(format!("memfold.lay={}", laid.join(",")));
    }
    // Plugged memory lies above 4 GiB.
    let is_low = spec.memory_max.is_none() && spec.memory <= LOW_MEMORY;
    for default in is_low
        .then_some("swiotlb=noforce")
        .into_iter()
        .chain([SMALL_REPORTS])
    {
        if !has(&words, default.split('=').next().unwrap_or_default()) {
            words.push(default.into());
        }
    }
    words.extend(of_init.iter().map(|word| (*word).to_owned()));
    Some(words.join(" "))
}

/// Plugs a segment with this image into slot `slot` of a running VM. After an error, QEMU has
/// neither the device nor its memory backend.
pub fn plug(
    qmp: &mut Qmp,
    slot: u32,
    segment: &SegmentSpec,
    image: BorrowedFd<'_>,
) -> Result<(), QmpError> {
    let backend = format!("segment{slot}");
    // The image is passed as a descriptor, because a QEMU without privileges cannot open its path.
    let place = qmp.lend(image)?;
    let added = qmp.execute(
        "object-add",
        json!({
            "qom-type": "memory-backend-file", "id": backend, "size": segment.bytes, "share": true, "readonly": true,
            "merge": false, "dump": false, "mem-path": place.plain_path(),
        }),
    );
    let taken_back = qmp.take_back(&place);
    added?;
    if let Err(error) = taken_back {
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            backend,
            "cannot close the segment's image in QEMU; no action is needed"
        );
    }
    let device = json!({
        "driver": "virtio-pmem-pci", "id": format!("seg{slot}"), "memdev": backend, "bus": format!("segport{slot}"),
    });
    if let Err(error) = qmp.execute("device_add", device) {
        if let Err(left) = qmp.execute("object-del", json!({ "id": backend })) {
            tracing::warn!(
                error = &left as &dyn std::error::Error,
                backend,
                "cannot remove the segment's memory backend from QEMU after a failed attachment; attach the segment again"
            );
        }
        return Err(error);
    }
    Ok(())
}

/// Removes the memory backend of slot `slot` that an interrupted attachment left, if no device uses
/// it. A missing backend is no error.
pub fn unplug_backend(qmp: &mut Qmp, slot: usize) {
    let backend = format!("segment{slot}");
    if qmp.execute("object-del", json!({ "id": backend })).is_ok() {
        tracing::info!(
            backend,
            "memory backend of an interrupted segment attachment removed"
        );
    }
}

/// Returns the guest-physical address of the segment in slot `slot`; `None`: the slot has no
/// device.
pub fn address(qmp: &mut Qmp, slot: usize) -> Result<Option<u64>, QmpError> {
    let devices = qmp.query("query-memory-devices")?;
    let id = format!("seg{slot}");
    let mut devices = devices.as_array().into_iter().flatten();
    let found = devices.find(|device| device["data"]["id"] == id.as_str());
    Ok(found.and_then(|device| device["data"]["memaddr"].as_u64()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DiskSpec;

    fn with(names: &[&str]) -> VmSpec {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        spec.boot.kernel = Some("/dev/null".into());
        spec.boot.cmdline = Some("root=/dev/vda rw quiet".into());
        spec.segments = names.iter().map(|name| SegmentSpec::new(*name)).collect();
        spec
    }

    #[test]
    fn the_kernel_command_line_of_a_guest_names_its_segments_and_keeps_user_settings() {
        assert_eq!(cmdline(&with(&[])).unwrap(), "root=/dev/vda rw quiet");
        assert_eq!(
            cmdline(&with(&["web@3", "office"])).unwrap(),
            format!(
                "root=/dev/vda rw quiet memfold.lay=web,office swiotlb=noforce {SMALL_REPORTS}"
            )
        );
        let mut large = with(&["web"]);
        large.memory = ByteSize(4 << 30);
        assert!(!cmdline(&large).unwrap().contains("swiotlb"));
        let mut asked = with(&["web"]);
        let own = "swiotlb=4096 page_reporting.page_reporting_order=9";
        asked.boot.cmdline = Some(own.into());
        assert_eq!(cmdline(&asked).unwrap(), format!("{own} memfold.lay=web"));
        asked.boot.cmdline = Some(format!("{own} -- single"));
        assert_eq!(
            cmdline(&asked).unwrap(),
            format!("{own} memfold.lay=web -- single")
        );
    }

    #[test]
    fn a_guest_boots_from_a_root_segment_and_its_disk_becomes_the_writable_overlay_layer() {
        let mut spec = with(&["debian@1"]);
        spec.segments[0].root = true;
        let root = "root=/dev/pmem0 rootfstype=erofs rootflags=dax=always";
        assert_eq!(
            cmdline(&spec).unwrap(),
            format!("rw quiet {root} memfold.upper=tmpfs swiotlb=noforce {SMALL_REPORTS}")
        );
        let mut read_only = DiskSpec::new("/dev/null");
        read_only.read_only = true;
        spec.disks = vec![read_only, DiskSpec::new("/dev/null")];
        assert!(cmdline(&spec).unwrap().contains("memfold.upper=/dev/vdb"));
    }

    #[test]
    fn contradicting_segment_options_of_a_vm_are_refused() {
        let refusal = |spec: &VmSpec| check(spec).unwrap_err().to_string();
        let same = refusal(&with(&["a@2", "a@2"]));
        assert!(same.contains("'a@2' is named twice"), "{same}");
        assert_eq!(twice(&with(&["a", "b", "a@2"])), Some("a"));
        assert_eq!(twice(&with(&["a", "b"])), None);
        // A VM that moved to a newer generation.
        let moved = with(&["a@1", "a@2"]);
        check(&moved).unwrap();
        assert!(cmdline(&moved).unwrap().contains("memfold.lay=a "));
        let mut late = with(&["a", "b"]);
        late.segments[1].root = true;
        assert!(refusal(&late).contains("'b' can be the root only as the first"));
        let mut bare = with(&["a"]);
        bare.segments[0].root = true;
        check(&bare).unwrap();
        bare.boot.kernel = None;
        assert!(refusal(&bare).contains("a VM with boot.kernel"));
        let mut many = with(&[]);
        many.segment_slots = MAX_SLOTS + 1;
        assert!(refusal(&many).contains("slots are more than"));
    }

    #[test]
    fn the_guest_address_space_has_room_for_every_segment_slot() {
        let mut spec = with(&["a"]);
        assert_eq!(spec.slots(), 1);
        assert_eq!(max_memory(&spec), Some(ByteSize((512 << 20) + SLOT_ROOM.0)));
        spec.segment_slots = 3;
        spec.memory_max = Some(ByteSize(1 << 30));
        assert_eq!(
            max_memory(&spec),
            Some(ByteSize((1 << 30) + 3 * SLOT_ROOM.0))
        );
        assert_eq!(max_memory(&VmSpec::new("a", ByteSize::mib(512))), None);
    }
}
