//! Stress tests of memfold's library for QEMU: the library folds, refolds, releases and discards
//! pages and drops zero pages, while other threads use the memory as guests do. The tests take 15 s
//! and 10 s, or `MEMFOLD_STRESS_SECONDS`.

#[path = "../src/preload.rs"]
mod preload;
mod support;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use memfold_folder::{Folder, Monitor};
use memfold_testkit::seconds;
use memfold_wire::library::{Freeze, Order, Outcome};
use support::{Bench, FakeQemu, Random};

const COUNTERS: u64 = 256;
const DISCARDED: u64 = 64;

/// Memory of the bench, which several threads share.
#[derive(Clone, Copy)]
struct Guest(*mut u64);
// SAFETY: only one thread uses each word, with volatile accesses. The folder replaces pages under
// all threads, which is the subject of the test.
unsafe impl Send for Guest {}
// SAFETY: the same as for `Send`.
unsafe impl Sync for Guest {}

impl Guest {
    fn read(self, page: u64, word: u64) -> u64 {
        // SAFETY: the word is inside the bench's memory.
        unsafe { self.at(page, word).read_volatile() }
    }
    fn write(self, page: u64, word: u64, value: u64) {
        // SAFETY: the word is inside the bench's memory.
        unsafe { self.at(page, word).write_volatile(value) }
    }
    fn at(self, page: u64, word: u64) -> *mut u64 {
        self.0
            .wrapping_add(usize::try_from(page * 512 + word).unwrap())
    }
}

/// Counts in two words of random pages, with pauses in which a page can be folded unchanged.
fn count(guest: Guest, thread: u64, stop: &AtomicBool) -> Vec<u64> {
    let mut shadow = vec![0; usize::try_from(COUNTERS).unwrap()];
    let mut random = Random(thread * 7919 + 88_172_645_463_325_252);
    while !stop.load(Ordering::Relaxed) {
        let page = random.below(COUNTERS);
        let value = guest.read(page, thread);
        guest.write(page, thread, value + 1);
        guest.write(page, 500 + thread, value + 1);
        shadow[usize::try_from(page).unwrap()] += 1;
        if random.below(64) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }
    shadow
}

/// Counts like [`count`], but by system calls, so that the kernel writes to the pages and reads
/// them.
fn count_in_kernel_mode(guest: Guest, stop: &AtomicBool) -> Vec<u64> {
    const WORD: u64 = 100;
    let mut shadow = vec![0; usize::try_from(COUNTERS).unwrap()];
    let file =
        File::from(rustix::fs::memfd_create("counter", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let mut random = Random(4711);
    while !stop.load(Ordering::Relaxed) {
        let page = random.below(COUNTERS);
        let place = guest.at(page, WORD).cast();
        let mut bytes = [0; 8];
        // SAFETY: these eight bytes are inside the bench's memory, and no other thread uses them.
        assert_eq!(unsafe { libc::pwrite(file.as_raw_fd(), place, 8, 0) }, 8);
        file.read_exact_at(&mut bytes, 0).unwrap();
        file.write_all_at(&(u64::from_ne_bytes(bytes) + 1).to_ne_bytes(), 0)
            .unwrap();
        // SAFETY: these are the same eight bytes.
        assert_eq!(unsafe { libc::pread(file.as_raw_fd(), place, 8, 0) }, 8);
        shadow[usize::try_from(page).unwrap()] += 1;
    }
    shadow
}

/// Discards pages and uses them again, like a balloon. A discarded page must be zero, and must keep
/// later writes.
fn discard(guest: Guest, stop: &AtomicBool) -> u64 {
    let mut random = Random(99);
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let page = COUNTERS + random.below(DISCARDED);
        let pages = 1 + random.below((COUNTERS + DISCARDED - page).min(8));
        let length = usize::try_from(pages * 4096).unwrap();
        // SAFETY: only this thread uses these pages.
        let result =
            unsafe { libc::madvise(guest.at(page, 0).cast(), length, libc::MADV_DONTNEED) };
        assert_eq!(result, 0);
        for page in page..page + pages {
            for word in [0, 17, 511] {
                assert_eq!(
                    guest.read(page, word),
                    0,
                    "discarded page {page} is not zero"
                );
            }
            let value = random.next();
            guest.write(page, 17, value);
            guest.write(page, 511, value);
            std::thread::yield_now();
            assert_eq!(
                (guest.read(page, 17), guest.read(page, 511)),
                (value, value)
            );
        }
        rounds += 1;
    }
    rounds
}

/// Makes the kernel move page frames (compaction), as it does when memory is scarce.
fn compact(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        // Only root may start a compaction.
        if std::fs::write("/proc/sys/vm/compact_memory", "1").is_err() {
            memfold_testkit::skip!("in part: nothing compacts memory meanwhile");
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
fn no_memory_write_is_lost_while_pages_are_folded_released_and_discarded() {
    // A VM whose stops stop nothing: also in a stopped VM, QEMU writes what a port receives.
    let qemu = FakeQemu::start();
    let monitor = Monitor::new(qemu.path.clone());
    let folder = Box::leak(Box::new(Folder::new(None, Some(monitor))));
    let Some(mut bench) = Bench::with(folder, COUNTERS + DISCARDED, 1) else {
        return;
    };
    preload::install(bench.folder);
    bench.fill(1);
    let guest = Guest(bench.words());
    for page in 0..COUNTERS {
        for word in [1, 2, 501, 502, 100] {
            guest.write(page, word, 0);
        }
    }
    let stop = &AtomicBool::new(false);
    let mut tally = std::collections::BTreeMap::new();
    let (one, two, kernel, discards) = std::thread::scope(|scope| {
        let one = scope.spawn(move || count(guest, 1, stop));
        let two = scope.spawn(move || count(guest, 2, stop));
        let kernel = scope.spawn(move || count_in_kernel_mode(guest, stop));
        let discards = scope.spawn(move || discard(guest, stop));
        scope.spawn(move || compact(stop));
        let end = Instant::now() + seconds("MEMFOLD_STRESS_SECONDS", 5);
        let mut random = Random(12345);
        while Instant::now() < end {
            let page = random.below(COUNTERS + DISCARDED);
            let most = (COUNTERS + DISCARDED - page).min(if random.below(4) == 0 { 64 } else { 2 });
            let pages = 1 + random.below(most);
            let (what, outcome) = match random.below(16) {
                0 | 1 => ("release", bench.release(Freeze::WriteProtect, page, pages)),
                2 => {
                    let (_, dropped) = bench.drop_zero(page, pages);
                    *tally.entry("zero pages".to_owned()).or_insert(0) += dropped;
                    continue;
                }
                _ => {
                    let at = bench.publish(page, pages);
                    if bench.next > 1 << 16 {
                        bench.renew_store();
                        continue;
                    }
                    let run = bench.run(page, u32::try_from(pages).unwrap(), at);
                    if random.below(8) == 0 {
                        let stopped = Freeze::Stopped { limit_us: 100_000 };
                        ("fold in a pause", bench.fold(stopped, run))
                    } else {
                        ("fold", bench.fold(Freeze::WriteProtect, run))
                    }
                }
            };
            assert_ne!(outcome, Outcome::Refused);
            let name = format!("{outcome:?}");
            let name = name.split([' ', '{']).next().unwrap_or_default().to_owned();
            *tally.entry(format!("{what} {name}")).or_insert(0) += 1;
        }
        stop.store(true, Ordering::Relaxed);
        (
            one.join().unwrap(),
            two.join().unwrap(),
            kernel.join().unwrap(),
            discards.join().unwrap(),
        )
    });
    for page in 0..COUNTERS {
        let i = usize::try_from(page).unwrap();
        for (word, shadow) in [
            (1, &one),
            (501, &one),
            (2, &two),
            (502, &two),
            (100, &kernel),
        ] {
            assert_eq!(
                guest.read(page, word),
                shadow[i],
                "page {page}, word {word}"
            );
        }
        let expected = support::pattern(1, page);
        assert_eq!(guest.read(page, 300), expected[300]);
    }
    let stats = bench.stats();
    println!(
        "{} + {} writes, {} by system calls, {discards} discards; {tally:?}; {stats:?}",
        one.iter().sum::<u64>(),
        two.iter().sum::<u64>(),
        kernel.iter().sum::<u64>()
    );
    assert!(
        stats.folded_pages > 100 && stats.refolded_pages > 100,
        "{stats:?}"
    );
    assert!(
        stats.released_pages > 10 && stats.discarded_pages > 10,
        "{stats:?}"
    );
}

/// Returns an empty file outside tmpfs, whose private mappings the kernel cannot write-protect.
fn file_on_disk() -> File {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let is_tmpfs = rustix::fs::fstatfs(&file).unwrap().f_type == libc::TMPFS_MAGIC;
    assert!(!is_tmpfs, "cargo's target directory is a tmpfs");
    file.set_len(1 << 34).unwrap();
    file
}

#[test]
fn no_memory_write_is_lost_while_pages_of_a_file_on_disk_are_folded_in_a_pause() {
    // QEMU's main loop writes to the RAM of a stopped VM what a port receives: this VM's stops stop
    // nothing.
    let qemu = FakeQemu::start();
    let folder = Box::leak(Box::new(Folder::new(
        None,
        Some(Monitor::new(qemu.path.clone())),
    )));
    let Some(mut bench) = Bench::with(folder, COUNTERS, 1) else {
        return;
    };
    let map = Order::Map {
        hva: bench.hva(0),
        pages: COUNTERS,
        file_page: 0,
    };
    bench.ok(&map, Some(file_on_disk().into()));
    bench.replace_store(file_on_disk());
    let pause = Freeze::Stopped { limit_us: 100_000 };
    let on_disk = bench.publish(0, 1);
    let run = bench.run(0, 1, on_disk);
    assert_eq!(bench.fold(Freeze::WriteProtect, run), Outcome::Refused);
    let guest = Guest(bench.words());
    let stop = &AtomicBool::new(false);
    let (one, two, done) = std::thread::scope(|scope| {
        let one = scope.spawn(move || count(guest, 1, stop));
        let two = scope.spawn(move || count(guest, 2, stop));
        let end = Instant::now() + seconds("MEMFOLD_STRESS_SECONDS", 5);
        let mut random = Random(2024);
        let mut done = [0; 2];
        while Instant::now() < end {
            let pages = 1 + random.below(8);
            let page = random.below(COUNTERS - pages + 1);
            if bench.next > 1 << 12 {
                bench.replace_store(file_on_disk());
            }
            let at = bench.publish(page, pages);
            let run = bench.run(page, u32::try_from(pages).unwrap(), at);
            let (kind, outcome) = match random.below(8) {
                0 => (1, bench.release(pause, page, pages)),
                _ => (0, bench.fold(pause, run)),
            };
            done[kind] += u64::from(outcome == Outcome::Done);
        }
        stop.store(true, Ordering::Relaxed);
        (one.join().unwrap(), two.join().unwrap(), done)
    });
    for (i, page) in (0..COUNTERS).enumerate() {
        for (word, shadow) in [(1, &one), (501, &one), (2, &two), (502, &two)] {
            let found = guest.read(page, word);
            assert_eq!(found, shadow[i], "page {page}, word {word}");
        }
    }
    let writes = one.iter().chain(&two).sum::<u64>();
    println!("{writes} writes; {done:?} runs folded and released");
    assert!(
        writes > 1000 && done.iter().all(|&runs| runs > 20),
        "{done:?}"
    );
}

#[test]
fn if_pages_are_folded_during_a_direct_io_read_into_them_no_byte_is_lost() {
    const PAGES: u64 = 8192;
    let Some(mut bench) = Bench::new(PAGES) else {
        return;
    };
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("direct-{}", std::process::id()));
    let bytes: Vec<u8> = (0..PAGES)
        .flat_map(|p| support::pattern(9, p))
        .flat_map(u64::to_ne_bytes)
        .collect();
    std::fs::write(&path, &bytes).unwrap();
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path);
    std::fs::remove_file(&path).unwrap();
    let Ok(file) = file else {
        memfold_testkit::skip!("the file system of {} has no O_DIRECT", path.display());
    };
    bench.fill(1);
    let guest = Guest(bench.words());
    let folder = bench.folder;
    let stop = &AtomicBool::new(false);
    let reads = &AtomicU64::new(0);
    let (mut busy, mut done, mut other) = (0, 0, 0);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut random = Random(5);
            while !stop.load(Ordering::Relaxed) {
                let first = random.below(PAGES - 256);
                let pages = 1 + random.below(256);
                // Some pages are discarded, as by a balloon, so that folded pages become anonymous
                // again.
                if random.below(2) == 0 {
                    let length = usize::try_from(pages * 4096).unwrap();
                    let _ = folder.discard(guest.at(first, 0).expose_provenance(), length);
                }
                // The old bytes of these pages must not survive, whatever is folded meanwhile.
                for page in first..first + pages {
                    guest.write(page, 1, 0);
                }
                // SAFETY: the pages are inside the bench's memory.
                let got = unsafe {
                    libc::pread(
                        file.as_raw_fd(),
                        guest.at(first, 0).cast(),
                        usize::try_from(pages * 4096).unwrap(),
                        i64::try_from(first * 4096).unwrap(),
                    )
                };
                assert_eq!(u64::try_from(got), Ok(pages * 4096));
                for page in first..first + pages {
                    assert_eq!(
                        guest.read(page, 1),
                        support::pattern(9, page)[1],
                        "page {page} lost its read"
                    );
                }
                reads.fetch_add(pages, Ordering::Relaxed);
            }
        });
        let end = Instant::now() + seconds("MEMFOLD_STRESS_SECONDS", 4);
        let mut random = Random(6);
        while Instant::now() < end {
            let page = random.below(PAGES - 16);
            let pages = 1 + random.below(16);
            let at = bench.publish(page, pages);
            if at > 1 << 16 {
                bench.renew_store();
                continue;
            }
            match bench.fold(
                Freeze::Move,
                bench.run(page, u32::try_from(pages).unwrap(), at),
            ) {
                Outcome::Busy { .. } => busy += 1,
                Outcome::Done => done += 1,
                _ => other += 1,
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!(
        "{} pages read directly; runs folded {done}, busy {busy}, other {other}",
        reads.load(Ordering::Relaxed)
    );
    assert!(done > 0);
}
