//! Tests of the file of a page store.

use memfold_units::PageCount;

use super::*;

fn me() -> Pid {
    rustix::process::getpid()
}

fn address(bytes: &[u8]) -> Hva {
    Hva(bytes.as_ptr().expose_provenance() as u64)
}

fn pattern(pages: usize) -> Vec<u8> {
    let bytes = (1..=251).cycle().flat_map(|byte| [byte; 7]);
    bytes.take(pages * PAGE_BYTES).collect()
}

/// Creates a page store of each kind that this process can create, for the domains `NAME0` and
/// so on.
fn stores(name: &str, cap: ByteSize) -> Vec<Store> {
    let mut files = Vec::new();
    match huge_file(&format!("{name}0")) {
        Ok(file) => files.push(file),
        Err(error) => {
            memfold_testkit::report_skip(&format!("in part: no store in a tmpfs: {error}"));
        }
    }
    files.push(memfd(&format!("{name}{}", files.len())).unwrap());
    let stores = files.into_iter().map(|file| {
        rustix::fs::fchmod(&file, Mode::RUSR).unwrap();
        Store::from_file(file, cap)
    });
    stores.collect::<Result<_, _>>().unwrap()
}

#[test]
fn pages_appended_to_a_page_store_read_back_equal_and_freed_places_are_not_used_next() {
    for mut store in stores("t1", ByteSize::mib(64)) {
        let source = pattern(3);
        let (first, copied) = store.append(me(), address(&source), 3).unwrap();
        assert_eq!((first, copied), (StorePage(0), PageCount(3)));
        let mut page = [0; PAGE_BYTES];
        store.read_page(StorePage(2), &mut page).unwrap();
        assert_eq!(page[..], source[2 * PAGE_BYTES..]);

        store.punch(StorePage(0), 3).unwrap();
        assert_eq!(store.held().unwrap(), ByteSize(0));
        assert_eq!(
            store.append(me(), address(&source), 1).unwrap().0,
            StorePage(3)
        );
    }
}

#[test]
fn when_a_page_store_can_grow_no_more_it_reuses_gaps_and_its_file_never_shrinks() {
    for mut store in stores("t9", ByteSize::mib(64)) {
        let source = pattern(1024);
        store.append(me(), address(&source), 1024).unwrap();
        store.append(me(), address(&source), 1024).unwrap();
        store.punch(StorePage(500), 1024).unwrap();
        store.skip(MAX_PAGES - 2048 - 3);
        assert_eq!(store.room(), 3);
        store.append(me(), address(&source), 2).unwrap();
        assert!(matches!(
            store.append(me(), address(&source), 2),
            Err(StoreError::Exhausted)
        ));
        assert!(!store.next_gap());
        let size = store.file.metadata().unwrap().len();
        let holes = store.holes().unwrap();
        let ends = [
            StorePage(512)..StorePage(1024),
            StorePage(2048)..StorePage((MAX_PAGES - 3) / 512 * 512),
        ];
        assert_eq!(holes, ends);
        store.reuse(holes);
        assert!(store.next_gap());
        assert_eq!((store.frontier(), store.room()), (StorePage(512), 512));
        store.append(me(), address(&source), 512).unwrap();
        assert_eq!(store.file.metadata().unwrap().len(), size);
        let mut page = [0; PAGE_BYTES];
        for at in (0..500).chain(512..1024).chain(1524..2048) {
            store.read_page(StorePage(at as u64), &mut page).unwrap();
            let expected = match at {
                0..500 => at,
                500..1024 => at - 512,
                _ => at - 1024,
            };
            assert_eq!(
                page[..],
                source[expected * PAGE_BYTES..][..PAGE_BYTES],
                "page {at}"
            );
        }
        assert!(store.next_gap());
        assert_eq!(store.frontier(), StorePage(2048));
    }
}

#[test]
fn the_page_store_copies_pages_of_several_processes_and_reports_unreadable_pages() {
    for mut store in stores("t8", ByteSize::mib(64)) {
        let source = pattern(700);
        let at = |page: u64| address(&source).add_pages(page);
        let mut sources = vec![Source {
            pid: me(),
            from: at(0),
            pages: 3,
        }];
        let nowhere = Source {
            pid: me(),
            from: Hva(PAGE_SIZE),
            pages: 5,
        };
        sources.push(nowhere);
        sources.extend((3..10).map(|page| Source {
            pid: me(),
            from: at(page),
            pages: 1,
        }));
        sources.push(Source {
            pid: me(),
            from: at(10),
            pages: 690,
        });
        sources.push(nowhere);
        // These pages end within a huge page of the store.
        store.append(me(), at(0), 100).unwrap();
        store.align();
        assert_eq!(store.frontier(), StorePage(512));
        store.append(me(), at(0), 100).unwrap();
        let first = store.reserve(710).unwrap();
        let filled = store.fill(first, &sources);
        let missing = [
            first.add_pages(3)..first.add_pages(8),
            first.add_pages(705)..first.add_pages(710),
        ];
        assert!(filled.error.is_none());
        assert_eq!(filled.missing, missing);
        let mut page = [0; PAGE_BYTES];
        for step in 0..710 {
            store.read_page(first.add_pages(step), &mut page).unwrap();
            let expected = match step {
                0..3 => Some(step),
                8..705 => Some(step - 5),
                _ => None,
            };
            match expected {
                Some(at) => {
                    let at = usize::try_from(at).unwrap() * PAGE_BYTES;
                    assert_eq!(page[..], source[at..][..PAGE_BYTES], "page {step}");
                }
                None => assert_eq!(page, [0; PAGE_BYTES], "page {step}"),
            }
        }
        assert_eq!(store.frontier(), first.add_pages(710));
    }
}

#[test]
fn punching_a_hole_in_the_page_store_frees_its_pages_and_keeps_adjacent_pages() {
    for mut store in stores("t6", ByteSize::mib(64)) {
        let source = pattern(1024);
        store.append(me(), address(&source), 1024).unwrap();
        assert_eq!(store.held().unwrap(), ByteSize::mib(4));
        // Like a VM, this test maps the page elsewhere: a huge page must be split under its
        // users.
        let window = memfold_sys::region::Mapping::window(store.read_only(), 1024).unwrap();
        assert_eq!(window.area().zero_pages(), 0);
        for first in (0..1024).step_by(16) {
            store.punch(StorePage(first), 9).unwrap();
        }
        assert_eq!(store.held().unwrap(), ByteSize(64 * 7 * PAGE_SIZE));
        let left = (0..1024).step_by(16);
        let left: Vec<_> = left.map(|p| StorePage(p + 9)..StorePage(p + 16)).collect();
        assert_eq!(store.filled().unwrap(), left);
        let mut page = [0; PAGE_BYTES];
        for at in (0..1024).filter(|at| at % 16 >= 9) {
            store.read_page(StorePage(at as u64), &mut page).unwrap();
            assert_eq!(page[..], source[at * PAGE_BYTES..][..PAGE_BYTES]);
        }
    }
}

#[test]
fn a_page_store_never_holds_more_pages_than_its_limit() {
    for mut store in stores("t2", ByteSize(8 * PAGE_SIZE)) {
        let source = vec![1; PAGE_BYTES * 9];
        assert!(matches!(
            store.append(me(), address(&source), 9),
            Err(StoreError::Full { .. })
        ));
        store.append(me(), address(&source), 8).unwrap();
        assert!(matches!(
            store.append(me(), address(&source), 1),
            Err(StoreError::Full { .. })
        ));
        store.punch(StorePage(0), 1).unwrap();
        store.append(me(), address(&source), 1).unwrap();
    }
}

#[test]
fn the_file_descriptor_of_the_page_store_that_qemu_gets_is_not_writable() {
    for store in stores("t3", ByteSize::mib(1)) {
        assert_eq!(
            rustix::io::write(store.read_only(), b"x").unwrap_err(),
            rustix::io::Errno::BADF
        );
        assert_eq!(
            rustix::fs::ftruncate(store.read_only(), 0).unwrap_err(),
            rustix::io::Errno::INVAL
        );
    }
}

#[test]
fn a_new_daemon_adopts_the_page_store_and_continues_at_its_end() {
    let source = vec![9; PAGE_BYTES];
    for (number, old) in stores("t4-", ByteSize::mib(1)).iter_mut().enumerate() {
        old.append(me(), address(&source), 1).unwrap();
        let domain = format!("t4-{number}");
        let adopted = Store::adopt(me(), &domain, ByteSize::mib(1)).unwrap();
        let adopted = adopted.unwrap();
        assert_eq!(
            (adopted.identity(), adopted.frontier()),
            (old.identity(), StorePage(1))
        );
    }
    assert!(
        Store::adopt(me(), "nobody", ByteSize::mib(1))
            .unwrap()
            .is_none()
    );
}

#[test]
fn a_file_that_others_can_write_is_not_adopted_as_a_page_store_whatever_its_name() {
    let adopt = |domain: &str| Store::adopt(me(), domain, ByteSize::mib(1)).unwrap();
    let writable = memfd("t6-writable").unwrap();
    assert!(adopt("t6-writable").is_none());
    rustix::fs::fchmod(&writable, Mode::RUSR).unwrap();
    assert!(adopt("t6-writable").is_some());
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::fchown(&writable, Some(1234), None).unwrap();
        assert!(adopt("t6-writable").is_none());
    }
    // A file on a disk that has the name of a store, and no other.
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join(file_name("t6-disk"));
    let options = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::open(&place, options, Mode::RUSR).unwrap();
    std::fs::remove_file(&place).unwrap();
    assert!(adopt("t6-disk").is_none());
    drop(file);
}

#[test]
fn a_descriptor_that_changes_meanwhile_does_not_lead_to_another_file() {
    let store = Store::create("t7", ByteSize::mib(1)).unwrap();
    let disk = tempfile::NamedTempFile::new().unwrap();
    let path = OFlags::PATH | OFlags::CLOEXEC;
    let disk_fd = rustix::fs::open(disk.path(), path, Mode::empty()).unwrap();
    let mut changing = rustix::io::dup(store.read_only()).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                rustix::io::dup2(&disk_fd, &mut changing).unwrap();
                rustix::io::dup2(store.read_only(), &mut changing).unwrap();
            }
        });
        for _ in 0..2000 {
            let adopted = Store::adopt(me(), "t7", ByteSize::mib(1)).unwrap();
            assert_eq!(adopted.unwrap().identity(), store.identity());
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_page_store_in_a_memfd_cannot_be_truncated() {
    let file = memfd("t5").unwrap();
    file.set_len(PAGE_SIZE).unwrap();
    assert!(file.set_len(0).is_err());
}

#[test]
fn a_page_store_is_created_for_a_trust_domain_with_any_name() {
    for domain in ["", "a/b", "../x", &"n".repeat(200)] {
        let mut store = Store::create(domain, ByteSize::mib(1)).unwrap();
        let source = vec![9; PAGE_BYTES];
        store.append(me(), address(&source), 1).unwrap();
        let adopted = Store::adopt(me(), domain, ByteSize::mib(1)).unwrap();
        assert_eq!(adopted.unwrap().identity(), store.identity());
    }
}
