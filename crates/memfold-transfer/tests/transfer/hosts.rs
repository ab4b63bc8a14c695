//! Two hosts with snapshots of a VM that was never started, and an object store between them.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use memfold_host::progress::Progress;
use memfold_snapshot::image::CHUNK_PAGES;
use memfold_snapshot::refer::{self, Reference};
use memfold_snapshot::{Manifest, Shelf};
use memfold_transfer::{
    PullReport, PullRequest, PushReport, PushRequest, Remote, TransferError, pull, push,
};
use memfold_units::PAGE_SIZE;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

pub const MIB: u64 = 1 << 20;

/// Two hosts and an object store between them.
pub struct Hosts {
    pub directory: tempfile::TempDir,
    /// Port of an S3 server; `None`: the store is a directory.
    pub s3: Option<u16>,
    pub here: Shelf,
    pub there: Shelf,
}

impl Hosts {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let shelf = |name: &str| Shelf::open(&directory.path().join(name));
        let (here, there) = (shelf("here"), shelf("there"));
        fs::create_dir(directory.path().join("store")).unwrap();
        Self {
            directory,
            s3: None,
            here,
            there,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn remote(&self) -> Remote {
        let Some(port) = self.s3 else {
            return Remote::open(&format!("file://{}", self.path("store").display())).unwrap();
        };
        let endpoint = format!("http://127.0.0.1:{port}");
        let settings = [
            ("aws_access_key_id", "S3RVER"),
            ("aws_secret_access_key", "S3RVER"),
            ("aws_endpoint", &endpoint),
            ("aws_allow_http", "true"),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Remote::open_with("s3://memfold/fleet", settings.into_iter()).unwrap()
    }

    /// Saves a snapshot of a VM whose disk is an overlay over `base.img`. `seed` decides about the
    /// bytes of its memory.
    pub fn save(&self, name: &str, seed: u64, change: impl Fn(&mut Value)) -> Manifest {
        self.save_layer(name, seed, None, change)
    }

    /// Saves such a snapshot whose first 2 MiB of random bytes are references to pages of the RAM
    /// image of `parent`, which was saved with the same `seed`.
    pub fn save_layer(
        &self,
        name: &str,
        seed: u64,
        parent: Option<&str>,
        change: impl Fn(&mut Value),
    ) -> Manifest {
        let base = self.path("base.img");
        if !base.exists() {
            let file = File::create(&base).unwrap();
            file.write_all_at(&random(99, 3 * MIB), MIB).unwrap();
            file.set_len(8 * MIB).unwrap();
        }
        let draft = self.here.draft(name).unwrap();
        let ram = draft.file("ram").unwrap();
        ram.set_len(64 * MIB).unwrap();
        let (bytes, at) = (random(seed, 2 * MIB), 5 * MIB + 4096);
        ram.write_all_at(&bytes, at).unwrap();
        ram.write_all_at(&random(1, 2 * MIB), 40 * MIB).unwrap();
        let part = |part: &str, bytes: &[u8]| {
            draft.file(part).unwrap().write_all_at(bytes, 0).unwrap();
            json!({ "bytes": bytes.len(), "xxh3_128": sum(bytes) })
        };
        let image = fs::read(draft.path().join("ram")).unwrap();
        let of_chunks = image
            .chunks(2 << 20)
            .flat_map(|chunk| xxh3_128(chunk).to_le_bytes());
        let of_chunks: Vec<u8> = of_chunks.collect();
        let (sums, devices) = (part("ram.sums", &of_chunks), part("devices", b"devices"));
        let refers = parent.map(|parent| {
            ram.write_all_at(&vec![0; bytes.len()], at).unwrap();
            // A reference does not reach over the end of a chunk of the image.
            let (first, end) = (at / PAGE_SIZE, at / PAGE_SIZE + 512);
            let middle = end / CHUNK_PAGES * CHUNK_PAGES;
            let references = [(first, middle), (middle, end)].map(|(page, end)| Reference {
                page,
                pages: u32::try_from(end - page).unwrap(),
                file: 0,
                block: page,
            });
            let table = part("ram.refs", &refer::encode(&references));
            let source = self.here.path(parent).unwrap().join("ram");
            json!({
                "table": table, "sources": [source], "pages": 512,
                "mappings": refer::mappings(&references),
            })
        });
        let disk = draft.path().join("disk0.qcow2");
        overlay(&disk, &base, "raw");
        let mut saved = facts(&disk);
        saved["path"] = "disk0.qcow2".into();
        saved["format"] = "qcow2".into();
        saved["read_only"] = false.into();
        saved["xxh3_128"] = sum(&fs::read(&disk).unwrap()).into();
        saved["backing"] = json!([facts(&base)]);
        let mut manifest = json!({
            "format": 1, "name": name, "domain": "shop", "vm": "web1", "created_s": 7,
            "memfold": "0.1.0", "keep": "none", "qemu": [10, 0, 2], "machine": "pc-q35-10.0,hpet=off",
            "accel": "tcg", "blocks": [],
            "counts": { "pages": 0, "saved_pages": 0, "zero_pages": 0 },
            "ram_bytes": 64 * MIB, "sums": sums, "devices": devices, "disks": [saved],
            "pause_ms": 1.0, "save_ms": 2.0,
            "spec": { "name": "web1", "memory": "64MiB",
                      "disks": [{ "path": base, "format": "raw", "snapshot": true }] },
        });
        if let Some(refers) = refers {
            manifest["references"] = refers;
        }
        change(&mut manifest);
        let manifest: Manifest = serde_json::from_value(manifest).unwrap();
        draft.commit(&manifest).unwrap();
        self.here.manifest(name).unwrap()
    }

    pub fn push(&self, name: &str) -> PushReport {
        self.try_push(name).unwrap()
    }

    pub fn try_push(&self, name: &str) -> Result<PushReport, TransferError> {
        let request = PushRequest {
            name: name.into(),
            to: name.into(),
            key: None,
        };
        push(&self.here, &self.remote(), &request, &Progress::default())
    }

    pub fn pull(&self, name: &str) -> Result<PullReport, TransferError> {
        self.pull_as(&PullRequest {
            from: name.into(),
            name: name.into(),
            domain: Some("bank".into()),
            ..PullRequest::default()
        })
    }

    pub fn pull_as(&self, request: &PullRequest) -> Result<PullReport, TransferError> {
        pull(&self.there, &self.remote(), request, &Progress::default())
    }

    /// Returns the files of the store under a directory.
    pub fn objects(&self, under: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut open = vec![self.path("store").join(under)];
        while let Some(place) = open.pop() {
            for entry in fs::read_dir(place).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    open.push(entry.path());
                } else {
                    found.push(entry.path());
                }
            }
        }
        found.sort();
        found
    }

    pub fn pulled(&self) -> Vec<String> {
        self.there.names().unwrap()
    }
}

/// Returns what a manifest tells of a file.
pub fn facts(path: &Path) -> Value {
    let facts = fs::metadata(path).unwrap();
    let modified = facts.mtime() * 1_000_000_000 + facts.mtime_nsec();
    json!({ "path": path, "bytes": facts.len(), "modified_ns": modified })
}

pub fn sum(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}

pub fn random(seed: u64, bytes: u64) -> Vec<u8> {
    let mut state = seed;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..bytes).map(next).collect()
}

pub fn qemu_img(arguments: &[&std::ffi::OsStr]) -> String {
    let output = Command::new("qemu-img").args(arguments).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    String::from_utf8(output.stdout).unwrap()
}

pub fn overlay(path: &Path, backing: &Path, format: &str) {
    let words = ["create", "-q", "-u", "-f", "qcow2", "-F", format, "-b"].map(std::ffi::OsStr::new);
    let (backing, path) = (backing.as_os_str(), path.as_os_str());
    qemu_img(&[&words[..], &[backing, path, "8M".as_ref()]].concat());
    qemu_io(path, "write -P 0x5a 64k 64k");
}

/// Writes to or reads from an overlay alone: without its backing file.
pub fn qemu_io(path: &std::ffi::OsStr, command: &str) {
    let output = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", command])
        .arg(path)
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && !words.contains("failed"),
        "{words}"
    );
}
