//! Fuzzes the parsers of a snapshot's and a segment's files, and of what a guest reports when it
//! was restored. A snapshot or image may come from another host.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use memfold_agent::segment;
use memfold_agent::segment::mount_table::MountTable;
use memfold_snapshot::clock::{self, Offset};
use memfold_snapshot::encryption::{self, DataKey, HeaderError, OperatorKey};
use memfold_snapshot::refer::{self, Reference};
use memfold_snapshot::working_set::WorkingSet;
use memfold_snapshot::{Manifest, Renewal, pack, portable};
use memfold_transfer::nbd::{self, Exports};
use memfold_vm::{balloon, swap};
use memfold_wire::order::GuestOrder;
use serde_json::json;

use crate::images::qcow2_headers;
use crate::place::Place;

pub fn manifests() -> Vec<Vec<u8>> {
    let file = |bytes: u64| json!({ "bytes": bytes, "xxh3_128": "00" });
    let mut manifest = json!({
        "format": 3, "name": "warm", "domain": "shop", "vm": "web1", "created_s": 7,
        "memfold": "0.1.0", "keep": "hot", "qemu": [10, 0, 2], "machine": "pc,hpet=off", "accel": "tcg",
        "parent": { "name": "base", "sums": "00", "depth": 1 },
        "blocks": [{ "name": "ram0", "pages": 512, "first_page": 0 }, { "name": "vga", "pages": 16, "first_page": 512 }],
        "counts": { "pages": 528, "saved_pages": 100, "zero_pages": 428 },
        "ram_bytes": 1024 * 4096, "sums": file(32), "devices": file(9), "pause_ms": 1.0, "save_ms": 2.0,
        "references": { "table": file(24), "sources": ["disk0.qcow2", "/base.img"], "pages": 90, "parent_pages": 20, "mappings": 3 },
        "spec": { "name": "web1", "memory": "4MiB", "cpu": "max", "user": "nobody", "boot": { "kernel": "/k" },
            "disks": [{ "path": "/top.qcow2" }, { "path": "/cd.img", "read_only": true }] },
        "disks": [{ "path": "disk0.qcow2", "bytes": 7, "modified_ns": 1, "format": "qcow2", "read_only": false,
                "backing": [{ "path": "/base.img", "bytes": 8, "modified_ns": 2 }] },
            { "path": "/cd.img", "bytes": 7, "modified_ns": 1, "format": "qcow2", "read_only": true }],
    });
    let layer = manifest.to_string().into_bytes();
    manifest["packed"] = json!({ "bytes": 900, "index": file(32) });
    manifest["references"] = serde_json::Value::Null;
    manifest["spec"]["swap"] = "64MiB".into();
    let packed = manifest.to_string().into_bytes();
    manifest["spec"]["swap"] = serde_json::Value::Null;
    manifest["format"] = 4.into();
    manifest["encryption"] = json!({ "key": "k", "header": file(112), "compressed": true });
    let encrypted = manifest.to_string().into_bytes();
    manifest["format"] = 3.into();
    manifest["encryption"] = serde_json::Value::Null;
    manifest["files"] = json!([file(3)]);
    manifest["spec"]["files"] = json!(["file0"]);
    let with_files = manifest.to_string().into_bytes();
    vec![layer, packed, encrypted, with_files]
}

/// Reads a manifest, and adapts it to this host. Afterwards it names only files that arrived.
pub fn manifest(data: &[u8]) -> u64 {
    let mut manifest = match Manifest::parse(data) {
        Ok(manifest) => manifest,
        Err(why) => return 1 + why.len() as u64 % 16,
    };
    let all = manifest.ram_bytes / 4096;
    for block in &manifest.blocks {
        assert!(
            block
                .first_page
                .checked_add(block.pages)
                .is_some_and(|end| end <= all)
        );
    }
    for (name, ..) in manifest.parts() {
        assert!(portable::is_member_name(&manifest, name));
    }
    for name in ["disk0.qcow2", "file12", "base3", "working-set"] {
        assert!(portable::is_member_name(&manifest, name));
    }
    for name in [
        "disk.qcow2",
        "base123456",
        "../base1",
        "base1/x",
        "ram.new",
        "",
    ] {
        assert!(!portable::is_member_name(&manifest, name));
    }
    let figures = [
        manifest.own_bytes(),
        manifest.parent_bytes(),
        manifest.memory().0,
    ];
    let kinds = u64::from(manifest.is_mappable())
        | u64::from(manifest.no_parent().is_some()) << 1
        | u64::from(manifest.tells_twins_apart()) << 2
        | u64::from(manifest.depth().min(3)) << 3
        | (figures.iter().filter(|bytes| **bytes > 0).count() as u64) << 5;
    thread_local! {
        static PLACE: Place = {
            let place = Place::new();
            let headers = qcow2_headers();
            place.write("disk0.qcow2", &headers[1]);
            place.write("disk1.qcow2", &headers[2]);
            place.write("base1", &headers[2]);
            for name in ["base0", "base2", "file0"] {
                place.write(name, b"plain");
            }
            place
        };
    }
    let bases = [
        ("/base.img", "base0"),
        ("/cd.img", "base1"),
        ("/k", "base2"),
    ];
    let bases: BTreeMap<PathBuf, String> = bases
        .map(|(path, name)| (path.into(), name.to_owned()))
        .into();
    let result = PLACE.with(|place| {
        let to = (place.path(), Path::new("/snapshots/other"));
        portable::adapt_arriving(&mut manifest, to, &bases, ("other", Some("mine")))
    });
    let Ok(chains) = result else {
        let why = result.unwrap_err().to_string();
        return 1 << 16 | kinds << 5 | (why.len() as u64 % 32);
    };
    assert_eq!(
        (manifest.name.as_str(), manifest.domain.as_deref()),
        ("other", Some("mine"))
    );
    let inside =
        |path: &Path| path.starts_with("/snapshots/other") || path.components().count() == 1;
    let of_disks = manifest
        .disks
        .iter()
        .flat_map(memfold_snapshot::manifest::SavedDisk::files);
    let sources = manifest.references.iter().flat_map(|refs| &refs.sources);
    for path in of_disks.map(|file| &file.path).chain(sources) {
        assert!(
            inside(path) && !path.to_string_lossy().contains(".."),
            "{}",
            path.display()
        );
    }
    for disk in &manifest.spec.disks {
        assert!(inside(&disk.path), "{}", disk.path.display());
    }
    1 << 17 | kinds << 5 | chains.iter().flatten().map(Vec::len).sum::<usize>().min(31) as u64
}

/// Pages of the image that [`references`] checks tables of.
const PAGES: u64 = 2048;

pub fn tables() -> Vec<Vec<u8>> {
    let reference = |page, pages, file, block| Reference {
        page,
        pages,
        file,
        block,
    };
    let many: Vec<_> = (0..8).map(|n| reference(n * 100, 12, 0, n * 12)).collect();
    let frames: Vec<u8> = (0..4_u64)
        .flat_map(|n| [n * 4096, 900])
        .flat_map(u64::to_le_bytes)
        .collect();
    let set = json!({ "image": "sum", "runs": [[0, 16], [64, 1]] }).to_string();
    vec![
        refer::encode(&[
            reference(0, 4, 0, 7),
            reference(4, 4, 1, 0),
            reference(510, 2, 0, 11),
        ]),
        refer::encode(&many),
        frames,
        set.into_bytes(),
    ]
}

/// Parses the tables beside a RAM image: references to disks, frames of compressed chunks, pages to
/// prefetch.
pub fn table(data: &[u8]) -> u64 {
    let mut found = 1;
    if let Ok(references) = refer::decode(data, PAGES, 2) {
        let ends = references.iter().map(|r| r.page + r.length() as u64 / 4096);
        assert!(ends.clone().all(|end| end <= PAGES) && ends.is_sorted());
        assert!(
            references
                .iter()
                .all(|r| r.file < 2 && r.block.checked_mul(4096).is_some())
        );
        assert_eq!(refer::encode(&references), data);
        found |= refer::mappings(&references).min(63) << 1;
    }
    if let Ok(frames) = pack::frames(data, data.len() as u64 / 16) {
        // Each is read into memory as a whole.
        assert!(frames.iter().all(|frame| frame.1 <= 3 << 20));
        found |= (frames.iter().filter(|frame| frame.1 > 0).count().min(31) as u64) << 8;
    }
    thread_local! {
        static PLACE: Place = Place::new();
    }
    PLACE.with(|place| {
        place.write(memfold_snapshot::working_set::FILE, data);
        if let Some(set) = WorkingSet::read(place.path(), "sum") {
            let bytes = set.bytes();
            found |= 1 << 14 | u64::from(bytes > 0) << 15 | (set.runs().len().min(15) as u64) << 16;
        }
    });
    found
}

/// Key with which [`sealed`] opens data keys.
const OPERATOR_KEY: &[u8] = b"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

pub fn sealed_parts() -> Vec<Vec<u8>> {
    let operator = OperatorKey::parse(OPERATOR_KEY).expect("a valid key");
    let header = DataKey::random().and_then(|key| key.wrap(&operator));
    // Lists of pages of a chunk, and the pages.
    let mut pages = vec![0; 64 + 2 * 4096];
    pages[3] = 0x81;
    vec![header.expect("random numbers"), pages, vec![0; 64]]
}

/// Opens the file `key` of an encrypted snapshot, and unpacks a decrypted frame of its image.
pub fn sealed(data: &[u8]) -> u64 {
    thread_local! {
        static OPERATOR: Option<OperatorKey> = OperatorKey::parse(OPERATOR_KEY).ok();
        static CHUNK: RefCell<Vec<u8>> = RefCell::new(vec![1; 2 << 20]);
    }
    let opened = OPERATOR.with(|operator| {
        let operator = operator.as_ref().expect("a valid key");
        DataKey::unwrap(data, operator).map(drop)
    });
    let kind = match opened {
        Ok(()) => 1,
        Err(HeaderError::Length(_)) => 2,
        Err(HeaderError::Magic) => 3,
        Err(HeaderError::Version(_)) => 4,
        Err(HeaderError::OtherKey) => 5,
        Err(HeaderError::Damaged) => 6,
    };
    let pages = CHUNK.with_borrow_mut(|chunk| {
        encryption::expand(data, chunk).map_or(0, |()| {
            let listed: u32 = data[..64].iter().map(|byte| byte.count_ones()).sum();
            let held = chunk
                .chunks_exact(4096)
                .filter(|page| page.iter().any(|&byte| byte != 0));
            assert!(held.count() as u64 <= u64::from(listed));
            1 + u64::from(listed.min(31))
        })
    });
    kind | pages << 3
}

pub fn segment_manifests() -> Vec<Vec<u8>> {
    vec![
        b"memfold-segment 1\nformat 1\nname web\ngeneration 3\nlay /usr\nlay /opt\n".to_vec(),
        b"format 1\nname web\ngeneration 3\nlay /usr\nlay /opt\n".to_vec(),
        b"format 1\nname a.b-c_d\ngeneration 18446744073709551615\n".to_vec(),
        b"22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n23 22 0:40 / /usr rw - overlay memfold:web rw\n24 22 0:41 / /usr/a\\040b rw master:1 - tmpfs x rw\n".to_vec(),
    ]
}

/// Parses the manifest in a segment's image as the agent in the guest does, and a mount table.
pub fn segment_manifest(data: &[u8]) -> u64 {
    let table = MountTable::parse(data);
    for mount in &table.0 {
        let point = Path::new(std::ffi::OsStr::new(
            std::str::from_utf8(&mount.point).unwrap_or("/"),
        ));
        let _ = (table.at(point), table.below(point));
    }
    let mounts = table.0.len().min(15) as u64;
    let text = String::from_utf8_lossy(data);
    let named = u64::from(segment::parse_reference(text.lines().next().unwrap_or("")).is_ok());
    match segment::manifest::Manifest::parse(data) {
        Ok(manifest) => {
            assert!(manifest.lay.len() <= 64);
            for directory in &manifest.lay {
                segment::manifest::check_directory(directory).expect("a checked directory");
                assert!(!directory.windows(2).any(|two| two == b".."));
            }
            segment::manifest::check_apart(&manifest.lay).expect("directories that are apart");
            64 | manifest.lay.len() as u64 | mounts << 8
        }
        Err(error) => (1 + error.to_string().len() as u64 % 32) | named << 7 | mounts << 8,
    }
}

pub fn guest_reports() -> Vec<Vec<u8>> {
    vec![
        b"1700000000.250000000\n".to_vec(),
        b"1700000000\n".to_vec(),
        b"done host name: web\ndone MAC address\nleft machine ID: read-only\nend\n".to_vec(),
        b"done a\nleft b: c\nend\n".to_vec(),
        b"12345\n".to_vec(),
        br#"{"stats":{"stat-available-memory":1,"stat-free-memory":2,"stat-total-memory":3,"stat-disk-caches":4},"last-update":17}"#.to_vec(),
    ]
}

/// Parses what a guest answers to commands: its time, its renewed identities, its used swap; and
/// what its balloon driver reports.
pub fn guest_report(data: &[u8]) -> u64 {
    let mut found = 1;
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let (before, after) = (at(1_700_000_000), at(1_700_000_002));
    if let Some(offset) = Offset::of(data, before, after) {
        assert!(offset.uncertainty >= 1_000_000_000);
        let step = offset.step(after);
        assert!(
            matches!(step, GuestOrder::StepClock { behind_ns, .. } if behind_ns == offset.behind)
        );
        let words = clock::in_words(clock::milliseconds(offset.behind));
        assert!(words.contains("behind") || words.contains("ahead"));
        found |= 2
            | u64::from(offset.is_right()) << 2
            | u64::from(offset.is_explained(offset, Duration::ZERO)) << 3;
    }
    let text = String::from_utf8_lossy(data);
    if let Ok(renewal) = Renewal::read(&text) {
        found |=
            16 | (renewal.done.len().min(3) as u64) << 5 | (renewal.left.len().min(3) as u64) << 7;
    }
    found |= u64::from(swap::parse_used(data).is_some()) << 9;
    if let Some(stats) = serde_json::from_slice(data)
        .ok()
        .and_then(|json| balloon::GuestStats::parse(&json))
    {
        found |= 1 << 10 | (format!("{stats:?}").len() as u64 % 64) << 11;
    }
    found
}

/// An export of 8 KiB, of which a part cannot be read.
struct One;

impl Exports for One {
    fn bytes(&self, name: &str) -> Option<u64> {
        (name == "disk0").then_some(8192)
    }

    fn read(&self, _: &str, at: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        assert!(at + buffer.len() as u64 <= 8192);
        if at == 4096 {
            return Err(std::io::ErrorKind::Other.into());
        }
        buffer.fill(7);
        Ok(())
    }
}

/// A client that sends these bytes and then goes away. Counts the bytes that it receives.
struct Client<'a>(&'a [u8], usize);

impl std::io::Read for Client<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(into)
    }
}

impl std::io::Write for Client<'_> {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.1 += data.len();
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub fn disk_clients() -> Vec<Vec<u8>> {
    let option = |number: u32, data: &[u8]| {
        let length = u32::try_from(data.len()).unwrap_or(0).to_be_bytes();
        [b"IHAVEOPT", &number.to_be_bytes()[..], &length, data].concat()
    };
    let go = b"\x00\x00\x00\x05disk0\x00\x00";
    let request = |command: u16, at: u64, length: u32| {
        let (magic, flags, handle) = (0x2560_9513_u32.to_be_bytes(), [0; 2], [9; 8]);
        [
            &magic[..],
            &flags,
            &command.to_be_bytes(),
            &handle,
            &at.to_be_bytes(),
            &length.to_be_bytes(),
        ]
        .concat()
    };
    let reads = [
        request(0, 0, 4096),
        request(0, 4096, 4096),
        request(0, 8192, 1),
        request(3, 0, 0),
        request(2, 0, 0),
    ];
    let reads = reads.concat();
    let short = 3_u32.to_be_bytes();
    vec![
        [
            &short[..],
            &option(99, b""),
            &option(6, go),
            &option(7, go),
            &reads,
        ]
        .concat(),
        [&1_u32.to_be_bytes()[..], &option(1, b"disk0"), &reads].concat(),
        [
            &short[..],
            &option(7, b"\x00\x00\x00\x01x"),
            &option(2, b""),
        ]
        .concat(),
        [&short[..], &option(1, b"none")].concat(),
    ]
}

/// Serves a client of a disk that is still being fetched, as QEMU is one.
pub fn disk_client(data: &[u8]) -> u64 {
    let mut client = Client(data, 0);
    let result = nbd::client(&mut client, &One);
    // The greeting was sent.
    assert!(client.1 >= 18);
    // A client that asks for little gets little: a reply has at most an export's bytes.
    assert!(client.1 <= 18 + data.len() * 8192);
    (1 + u64::from(result.is_ok())) | (client.1.min(1 << 20) as u64) << 2
}
