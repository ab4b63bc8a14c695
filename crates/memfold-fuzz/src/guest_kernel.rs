//! Fuzzes the agent's parsers of kernel data, and the daemon's glob matcher. The seeds are the
//! agent's test fixtures, captured from real kernels.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use memfold_agent::format::{EventFormat, PageFormat};
use memfold_agent::glob::matches;
use memfold_agent::memory::parse;
use memfold_agent::mounts::{Kind, Mounts, OVERLAY_DEVICE};
use memfold_agent::trace::{EventDecoder, Round, decode_page};
use memfold_wire::memory::MemoryReading;

use crate::subject::parts;

macro_rules! fixture {
    ($kernel:literal, $file:literal) => {
        include_str!(concat!(
            "../../memfold-agent/tests/fixtures/",
            $kernel,
            "/",
            $file
        ))
    };
}

pub fn rings() -> Vec<Vec<u8>> {
    let texts = [
        fixture!("6.1", "pages.base64"),
        fixture!("6.12", "pages.base64"),
    ];
    let pages = texts.map(|text| BASE64_STANDARD.decode(text.trim()).expect("base64"));
    let pages = pages.iter().flat_map(|pages| pages.chunks(4096));
    pages.map(<[u8]>::to_vec).collect()
}

pub fn formats() -> Vec<Vec<u8>> {
    let texts = [
        fixture!("6.1", "header_page"),
        fixture!("6.1", "mm_filemap_add_to_page_cache"),
        fixture!("6.12", "mm_filemap_add_to_page_cache"),
        fixture!("6.12", "writeback_dirty_folio"),
        fixture!("6.12", "writeback_single_inode"),
    ];
    let record = (0..96).collect::<Vec<u8>>();
    texts
        .iter()
        .map(|t| [t.as_bytes(), &record].join(&0))
        .collect()
}
pub fn mountinfos() -> Vec<Vec<u8>> {
    vec![
            b"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n\
              23 22 0:21 / /proc rw - proc proc rw\n\
              24 22 0:35 /sub /mnt\\040x rw - btrfs /dev/vdb rw,space_cache=v2,subvolid=256,subvol=/sub\n\
              25 22 254:0 /var/lib /srv/lib rw - ext4 /dev/vda rw\n\
              26 22 0:40 / /merged rw - overlay o rw,lowerdir=/a\n"
                .to_vec(),
            b"30 22 253:3 / /x rw master:7 propagate_from:2 - xfs /dev/dm-3 rw\n\
              31 30 7:1 / /x/y\\134z ro - erofs /dev/loop1 ro\n"
                .to_vec(),
        ]
}
pub fn memory_files() -> Vec<Vec<u8>> {
    [
        fixture!("memory", "meminfo"),
        fixture!("memory", "vmstat"),
        fixture!("memory", "pressure"),
        fixture!("memory", "lru_gen"),
        fixture!("memory", "memory.stat"),
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}
pub fn globs() -> Vec<Vec<u8>> {
    let pairs = [
        ("/usr/**", "/usr/lib/x86_64-linux-gnu/libc.so.6"),
        ("/usr/*/[a-m]?b*/**/*.so*", "/usr/lib/libb/x/y/z.so.6"),
        ("*a*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
        ("/[!x]\\*", "/y*"),
    ];
    pairs
        .iter()
        .map(|(p, t)| [p.as_bytes(), t.as_bytes()].join(&0))
        .collect()
}

fn decoder() -> EventDecoder {
    let decoder = EventDecoder::new(|event| {
        let text = match event.rsplit('/').next()? {
            "mm_filemap_add_to_page_cache" => fixture!("6.12", "mm_filemap_add_to_page_cache"),
            "mm_filemap_delete_from_page_cache" => {
                fixture!("6.12", "mm_filemap_delete_from_page_cache")
            }
            "writeback_dirty_folio" => fixture!("6.12", "writeback_dirty_folio"),
            "writeback_single_inode" => fixture!("6.12", "writeback_single_inode"),
            _ => return None,
        };
        Some(text.to_owned())
    });
    decoder.expect("the fixtures are whole")
}

pub fn ring(data: &[u8]) -> u64 {
    thread_local! {
        static DECODER: EventDecoder = decoder();
    }
    let format = PageFormat::parse(fixture!("6.12", "header_page")).expect("the fixture is whole");
    let mut round = Round::default();
    DECODER.with(|decoder| {
        for page in data.chunks(4096) {
            decode_page(page, &format, decoder, &mut round);
        }
    });
    // A record has four bytes at least.
    assert!(round.records <= data.len() as u64 / 4);
    assert!(round.events.len() as u64 <= round.records);
    assert!(round.events.iter().all(|e| e.order <= 18));
    let kinds = round.events.iter().map(|e| 1 << (e.what as u64));
    let kinds = kinds.fold(0, |set, kind: u64| set | kind);
    kinds << 8 | u64::from(round.lost > 0) << 7 | round.records.min(127)
}

pub fn format(data: &[u8]) -> u64 {
    let [text, record] = parts(data);
    let text = String::from_utf8_lossy(text);
    let event = EventFormat::parse(&text);
    let mut found = 0;
    let names = "common_type pfn i_ino index s_dev order name data";
    for (at, name) in names.split(' ').enumerate() {
        if let Some(field) = event.as_ref().and_then(|e| e.field(name)) {
            let bytes = field.bytes(record);
            assert!(bytes.is_none_or(|b| b.len() == field.size));
            assert!(field.number(record).is_none() || matches!(field.size, 1 | 2 | 4 | 8));
            assert!(field.text(record).is_none_or(|t| !t.contains(&0)));
            found |= 1 << at;
        }
    }
    if let Some(page) = PageFormat::parse(&text) {
        // Whatever a kernel says of its pages, reading one is safe.
        let decoder = decoder();
        decode_page(record, &page, &decoder, &mut Round::default());
        found |= 1 << 8;
    }
    found
}

pub fn mountinfo(data: &[u8]) -> u64 {
    let mounts = Mounts::parse(data);
    assert!(mounts.list.len() <= data.len());
    let walked = mounts.to_walk();
    assert!(walked.len() <= mounts.list.len());
    assert!(mounts.list.is_empty() || !walked.is_empty());
    for mount in &mounts.list {
        assert!(mount.device >> 20 < 1 << 12);
        let found = mounts.by_device(mount.device);
        assert!(found.contains(&mount));
        if mount.kind != Kind::Overlay {
            assert_eq!(mounts.hint_device(mount.device), Some(mount.device));
        }
        assert!(mount.kind != Kind::Overlay || mount.hint_device() == OVERLAY_DEVICE);
    }
    let kinds = mounts.list.iter().map(|m| 1 << (m.kind as u64));
    let kinds = kinds.fold(0, |set, kind: u64| set | kind);
    kinds << 8 | (mounts.list.len() as u64).min(15) << 4 | (walked.len() as u64).min(15)
}

pub fn memory(data: &[u8]) -> u64 {
    let mut reading = MemoryReading::default();
    parse::meminfo(data, &mut reading);
    parse::vmstat(data, &mut reading);
    let figures = [
        reading.mem_total_kib,
        reading.swap_free_kib,
        reading.pgscan,
        reading.allocstall,
        reading.oom_kill,
    ];
    let mut found = 0;
    for (at, figure) in figures.into_iter().enumerate() {
        found |= u64::from(figure > 0) << at;
    }
    let has_all = parse::has_all_of_vmstat;
    let at_end = has_all(data);
    // Only whole lines count, and once they suffice, more of the file changes nothing.
    let whole = data
        .iter()
        .rposition(|b| *b == b'\n')
        .map_or(0, |end| end + 1);
    assert_eq!(has_all(&data[..whole]), at_end);
    assert!(!at_end || has_all(&[data, &b"more"[..]].concat()));
    found |= u64::from(at_end) << 9;
    let stat = parse::GroupStat::parse(data);
    assert!(stat.clean_file() <= stat.active_file.saturating_add(stat.inactive_file));
    found |= u64::from(stat.clean_file() > 0) << 5;
    found |= u64::from(parse::pressure(data).is_some()) << 6;
    found |= u64::from(parse::lru_gen(data).is_some()) << 7;
    found | u64::from(parse::limit(data).is_some()) << 8
}

pub fn glob(data: &[u8]) -> u64 {
    let [pattern, path] = parts(data);
    // Patterns are the operator's, paths the guest's: two kinds of stars cost the square of the
    // path's length.
    let [pattern, path] = [pattern, path].map(|text| &text[..text.len().min(256)]);
    let matched = matches(pattern, path);
    if !pattern.iter().any(|b| b"*?[\\".contains(b)) {
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or(path);
        let against = if pattern.contains(&b'/') { path } else { name };
        let is_same = pattern == against;
        assert_eq!(
            matched, is_same,
            "a pattern without signs matches itself alone"
        );
    }
    u64::from(matched) << 16 | (pattern.len() as u64) << 8 | path.len().min(255) as u64
}
