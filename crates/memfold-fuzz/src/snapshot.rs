//! What a guest says it has free.

use memfold_snapshot::free;

use crate::subject::Subject;

pub const FREE_PAGES: Subject = Subject {
    name: "free_pages",
    run: free_pages,
    seeds: || {
        vec![
            b"16 144\n256 130768\n".to_vec(),
            b"1048576 524288\n".to_vec(),
        ]
    },
};

fn free_pages(data: &[u8]) -> u64 {
    let Ok(list) = free::parse(data, 1 << 12) else {
        return 0;
    };
    assert!(list.len() <= 192 && list.is_sorted_by(|a, b| a.end <= b.start));
    1 << 8 | list.len() as u64
}
