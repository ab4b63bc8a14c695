//! Fuzzes the parsers of a snapshot's parts that are read from an object store: compressed chunks,
//! indexes, first pages and descriptions.

use memfold_transfer::first_pages::{PageRun, Part, check_order};
use memfold_transfer::{Description, chunk};
use serde_json::json;

/// Size in bytes of the chunk from which the seeds of [`chunks`] are made.
const CHUNK: usize = 8192;

fn plain() -> Vec<u8> {
    (0..CHUNK / 4)
        .flat_map(|n| (n / 7).to_le_bytes()[..4].to_vec())
        .collect()
}

pub fn chunks() -> Vec<Vec<u8>> {
    // A frame of one block, and one that is not compressed.
    let raw = zstd_raw(&plain());
    chunk::pack(&plain()).into_iter().chain([raw]).collect()
}

/// Returns a Zstandard frame of one raw block (RFC 8878, 3.1.1).
fn zstd_raw(bytes: &[u8]) -> Vec<u8> {
    let mut frame = 0xfd2f_b528_u32.to_le_bytes().to_vec();
    // A single segment whose length is two bytes, less 256.
    frame.push(0x60);
    frame.extend(u16::try_from(bytes.len() - 256).unwrap_or(0).to_le_bytes());
    let header = u32::try_from(bytes.len()).unwrap_or(0) << 3 | 1;
    frame.extend(&header.to_le_bytes()[..3]);
    frame.extend(bytes);
    frame
}

pub fn chunk(data: &[u8]) -> u64 {
    let (right, wrong) = (blake3::hash(&plain()), blake3::hash(b"another chunk"));
    assert!(chunk::unpack(data, CHUNK, &wrong).is_err());
    match chunk::unpack(data, CHUNK, &right) {
        Ok(bytes) => {
            assert_eq!(bytes, plain());
            1 << 8
        }
        Err(why) => why.len() as u64,
    }
}

/// Whole pages of each file of the snapshot to which the parts of [`first_pages`] belong.
const FILE_PAGES: [u64; 3] = [1000, 0, 300];

/// Returns two parts of a snapshot's first pages each, one after the other.
pub fn first_parts() -> Vec<Vec<u8>> {
    let run = |file, first, pages| PageRun { file, first, pages };
    let pairs = [
        [
            vec![run(0, 3, 1), run(0, 7, 2)],
            vec![run(0, 254, 2), run(2, 299, 1)],
        ],
        [vec![run(0, 0, 1)], vec![run(0, 1, 1)]],
    ];
    let part = |runs: &Vec<PageRun>| {
        let bytes = vec![5; runs.iter().map(PageRun::bytes).sum()];
        let runs = runs.clone();
        Part { runs, bytes }.encode()
    };
    let pair = |parts: &[Vec<PageRun>; 2]| {
        let parts = parts.each_ref().map(part);
        let first = u32::try_from(parts[0].len()).unwrap_or(0);
        [&first.to_le_bytes()[..], &parts[0], &parts[1]].concat()
    };
    pairs.iter().map(pair).collect()
}

/// Decodes two parts. What is accepted names each page of a file at most once, and has its bytes.
pub fn first_pages(data: &[u8]) -> u64 {
    let Some((length, data)) = data.split_first_chunk() else {
        return 0;
    };
    let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(0);
    let (first, second) = data.split_at(length.min(data.len()));
    let parts = [first, second].map(|part| Part::decode(part.to_vec(), &FILE_PAGES));
    let whys = parts.iter().filter_map(|part| part.as_ref().err());
    if let Some(why) = whys.max() {
        return 1 + why.len() as u64 % 64;
    }
    let parts = parts.map(Result::unwrap_or_default);
    let mut seen = std::collections::HashSet::new();
    let mut is_twice = false;
    for (run, bytes) in parts.iter().flat_map(Part::pages) {
        let file = usize::try_from(run.file).unwrap_or(usize::MAX);
        assert!(run.pages > 0 && run.end() <= FILE_PAGES[file] && bytes.len() == run.bytes());
        for page in run.first..run.end() {
            assert_eq!(page / 256, run.chunk());
            is_twice |= !seen.insert((file, page));
        }
    }
    for part in &parts {
        let pages: usize = part.pages().map(|(run, _)| run.bytes()).sum();
        assert!(pages == part.bytes.len() && part.pages().count() == part.runs.len());
    }
    let is_right = check_order(&parts).is_ok();
    assert!(!(is_right && is_twice));
    1 << 8 | u64::from(is_right) << 7 | (seen.len() as u64 % 64)
}

pub fn descriptions() -> Vec<Vec<u8>> {
    let file = |bytes: u64| json!({ "bytes": bytes, "xxh3_128": "00" });
    let manifest = json!({
        "format": 1, "name": "warm", "domain": null, "vm": "web1", "created_s": 7,
        "memfold": "0.1.0", "keep": "none", "qemu": [10, 0, 2], "machine": "pc", "accel": "tcg",
        "blocks": [], "counts": { "pages": 0, "saved_pages": 0, "zero_pages": 0 },
        "ram_bytes": 1 << 21, "sums": file(16), "devices": file(9), "pause_ms": 1.0, "save_ms": 2.0,
        "spec": { "name": "web1", "memory": "2MiB", "disks": [{ "path": "/base.img" }] },
        "disks": [{ "path": "disk0.qcow2", "bytes": 7, "modified_ns": 1, "format": "qcow2",
            "read_only": false, "backing": [{ "path": "/base.img", "bytes": 8, "modified_ns": 2 }] }],
    });
    let description = json!({
        "format": 1, "name": "warm", "chunk_bytes": 1 << 20, "stored_bytes": 3,
        "index": blake3::hash(b"index").to_hex().as_str(), "manifest": manifest,
        "files": [{ "name": "ram", "bytes": 1 << 21 }, { "name": "ram.sums", "bytes": 16 },
            { "name": "devices", "bytes": 9 }, { "name": "disk0.qcow2", "bytes": 7 },
            { "name": "base0", "bytes": 8, "origin": "/base.img" }],
        "first_pages": [{ "object": blake3::hash(b"part").to_hex().as_str(), "bytes": 5000 }],
    });
    let pretty = serde_json::to_vec_pretty(&description).unwrap_or_default();
    vec![description.to_string().into_bytes(), pretty]
}

pub fn description(data: &[u8]) -> u64 {
    let Ok(of) = Description::parse(data, "warm") else {
        return 0;
    };
    assert!(of.name == "warm" && of.chunks() <= 4 << 20);
    assert!(of.files.iter().all(|file| !file.name.contains('/')));
    for part in &of.first_pages {
        assert!(part.object.len() == 64 && part.bytes < 3 << 20);
    }
    1 << 8 | of.files.len() as u64
}
