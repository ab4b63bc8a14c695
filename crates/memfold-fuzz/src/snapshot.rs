//! Fuzzes the parsers of two lists that a guest reports when it is saved as a snapshot: its free
//! pages, and where its files are on its disks.

use memfold_snapshot::{free, guest_extents};

pub fn free_lists() -> Vec<Vec<u8>> {
    vec![
        b"16 144\n256 130768\n".to_vec(),
        b"1048576 524288\n".to_vec(),
    ]
}

pub fn free_pages(data: &[u8]) -> u64 {
    let Ok(list) = free::parse(data, 1 << 12) else {
        return 0;
    };
    assert!(list.len() <= 192 && list.is_sorted_by(|a, b| a.end <= b.start));
    1 << 8 | list.len() as u64
}

pub fn extent_lists() -> Vec<Vec<u8>> {
    vec![
        b"0 0 16 254:0 4096\n0 16 1 254:0 1\n3 4294967295 1 8:16 0\n".to_vec(),
        b"2 7 32768 259:3 1125899906842624\n".to_vec(),
    ]
}

pub fn extents(data: &[u8]) -> u64 {
    const FILES: usize = 4;
    let Ok(list) = guest_extents::parse(data, FILES) else {
        return 0;
    };
    let is_apart = list
        .is_sorted_by(|a, b| a.file < b.file || a.file == b.file && a.end() <= u64::from(b.page));
    assert!(is_apart && list.iter().all(|extent| extent.file < FILES));
    // Their bytes on the disk can be counted.
    assert!(list.iter().all(|extent| extent.block < 1 << 51));
    1 << 8 | list.len() as u64
}
