//! Test of state files that a daemon of commit c2105ba wrote for its VMs, snapshots and segments:
//! the present version reads them correctly. That daemon had two folded VMs (a, b), one whose swap
//! disk was on lent RAM (c), one with a segment (g), and a clone (k-1). The files are in
//! tests/recorded; only paths were changed.

use std::path::{Path, PathBuf};

use memfold_lend::Durability;
use memfold_lend::graph::{Borrowing, Phase};
use memfold_segment::Manifest as SegmentManifest;
use memfold_snapshot::{Keep, Manifest};
use memfold_units::ByteSize;
use memfold_vm::{Record, SegmentSpec, VmSpec};
use serde::de::DeserializeOwned;

fn read<T: DeserializeOwned>(file: &str) -> T {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/c2105ba");
    let text = std::fs::read_to_string(recorded.join(file)).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[test]
fn vm_state_files_written_by_an_earlier_daemon_are_read() {
    for name in ["a", "b", "c", "g", "k-1"] {
        let spec: VmSpec = read(&format!("state/vms/{name}/spec.json"));
        assert_eq!(
            (spec.name.as_str(), spec.memory),
            (name, ByteSize::mib(512))
        );
        assert_eq!(spec.domain.as_deref(), Some("tutorial"));
        assert!(spec.fold && spec.disks[0].snapshot);
        assert_eq!(spec.swap, (name == "c").then_some(ByteSize::mib(256)));
        let record: Record = read(&format!("state/vms/{name}/process.json"));
        assert!(record.process.pid > 0 && record.process.start_ticks > 0);
        assert_eq!((record.version, record.accel.as_str()), ((10, 0, 2), "tcg"));
        assert_eq!(
            record.library.as_deref(),
            Some(Path::new("/usr/lib/memfold/libmemfold_qemu.so"))
        );
        let overlays: Vec<PathBuf> = read(&format!("state/vms/{name}/overlays.json"));
        assert!(!overlays.is_empty());
        let segments: Vec<SegmentSpec> = read(&format!("state/vms/{name}/segments.json"));
        let named: Vec<&str> = segments.iter().map(|one| one.name.as_str()).collect();
        let wanted: &[&str] = if name == "g" { &["tools@1"] } else { &[] };
        assert_eq!(named, wanted);
    }
    let borrowed: Borrowing = read("state/vms/c/borrowed.json");
    assert_eq!(borrowed.phase, Phase::Lent);
    assert_eq!(borrowed.durability, Durability::Disk);
    assert_eq!((borrowed.bytes, borrowed.parts.len()), (256 << 20, 1));
    assert!(!borrowed.copy_failed && !borrowed.copy_unwatched && borrowed.copy.is_some());
}

#[test]
fn snapshots_and_segments_written_by_an_earlier_daemon_are_read() {
    let warm: Manifest = read("snapshots/warm/manifest.json");
    assert_eq!(
        (warm.vm.as_str(), warm.format, warm.keep),
        ("a", 1, Keep::None)
    );
    assert!(warm.agent && warm.packed.is_none() && warm.references.is_none());
    let hot: Manifest = read("snapshots/bhot/manifest.json");
    assert_eq!((hot.vm.as_str(), hot.format, hot.keep), ("b", 2, Keep::Hot));
    assert!(hot.packed.is_some() && hot.references.is_some());
    let segment: SegmentManifest = read("segments/tools/1/manifest.json");
    assert_eq!((segment.name.as_str(), segment.generation), ("tools", 1));
    assert_eq!(segment.domain, "tutorial");
}
