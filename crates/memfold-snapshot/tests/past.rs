//! Tests that a live save stores memory as it was at the snapshot's instant, while threads write to
//! that memory. A test's own process takes the place of QEMU, and runs the code of memfold's
//! library.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memfold_folder::Folder;
use memfold_snapshot::Progress;
use memfold_snapshot::image::Source;
use memfold_snapshot::past::Past;
use memfold_snapshot::plan::Plan;
use memfold_snapshot::stored::{Pages, Stored};
use memfold_snapshot::writer::Writer;
use memfold_sys::memory;
use memfold_sys::region::{Area, Mapping};
use memfold_testkit::{seconds, wait_until};
use memfold_units::{Hva, PAGE_BYTES, PAGE_SIZE};
use memfold_wire::library::{Advice, FoldRun, Freeze, Order, Outcome, Reply, VERSION};
use rustix::process::Pid;

const PAGES: u64 = 8192;
/// Pages that are folded onto a page store.
const FOLDED: std::ops::Range<u64> = 1000..1400;
/// Pages that are never touched.
const HOLE: std::ops::Range<u64> = 5000..5600;
const WRITERS: usize = 3;

fn me() -> Pid {
    rustix::process::getpid()
}

/// Memory that serves as a VM's RAM.
struct Ram {
    memory: Mapping,
    folder: Folder,
    _store: File,
}

impl Ram {
    fn new() -> Self {
        let folder = Folder::new(None, None);
        let hello = folder.execute(&Order::Hello { version: VERSION }, None);
        assert!(
            matches!(hello, Reply::Hello { problem: None, .. }),
            "{hello:?}"
        );
        let memory = Mapping::anonymous(PAGES, true).unwrap();
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let store = File::from(rustix::fs::memfd_create("store", flags).unwrap());
        let ram = Self {
            memory,
            folder,
            _store: store.try_clone().unwrap(),
        };
        let advice = Advice {
            dontfork: true,
            noreserve: true,
            ..Advice::default()
        };
        let hva = ram.area().start().0;
        let pages = PAGES;
        ram.ok(&Order::AddRam { hva, pages, advice }, None);
        for page in (0..PAGES).filter(|page| !HOLE.contains(page)) {
            ram.write(page, page);
        }
        for page in FOLDED {
            store
                .write_all_at(&bytes(page), (page - FOLDED.start) * PAGE_SIZE)
                .unwrap();
        }
        let add = Order::AddStore {
            store: 1,
            max_pages: PAGES,
        };
        ram.ok(&add, Some(store.as_fd().try_clone_to_owned().unwrap()));
        let fold = Order::Fold {
            freeze: Freeze::Move,
            runs: vec![FoldRun {
                hva: ram.area().part(FOLDED.start, 1).start().0,
                pages: u32::try_from(FOLDED.end - FOLDED.start).unwrap(),
                store: 1,
                store_page: 0,
            }],
        };
        let reply = ram.folder.execute(&fold, None);
        assert!(
            matches!(&reply, Reply::Outcomes { outcomes, .. } if outcomes[..] == [Outcome::Done]),
            "{reply:?}"
        );
        ram
    }

    fn area(&self) -> Area {
        self.memory.area()
    }

    fn write(&self, page: u64, number: u64) {
        self.area().part(page, 1).write(&words(number));
    }

    fn ok(&self, order: &Order, descriptor: Option<OwnedFd>) {
        let reply = self.folder.execute(order, descriptor);
        assert_eq!(reply, Reply::Ok, "{order:?}");
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(PAGES).unwrap() * PAGE_BYTES];
        let read = memory::read(me(), self.area().start(), &mut bytes).unwrap();
        assert_eq!(read, bytes.len());
        bytes
    }

    fn plan(&self) -> Plan {
        let source = Source {
            name: "ram0".into(),
            hva: self.area().start(),
            pages: PAGES,
        };
        Plan::new(me(), vec![source], &[], None).unwrap()
    }

    /// Protects the present contents, and keeps old contents of up to `room` pages.
    fn keep_some(&self, plan: &Plan, room: u64) -> Past {
        let whole = self.area().start()..self.area().end();
        let wanted: Vec<_> = plan.wanted(0).collect();
        let past = Past::new(me(), &[whole], &wanted, room).unwrap().unwrap();
        let ranges = past.ranges();
        let file = past.descriptor().unwrap();
        self.ok(&Order::KeepPast { ranges }, Some(file));
        past
    }

    fn keep(&self, plan: &Plan) -> Past {
        self.keep_some(plan, PAGES)
    }

    /// Changes or discards pages, as a vCPU, the kernel or a balloon would.
    fn disturb(&self, random: u64) {
        let page = random % PAGES;
        match random >> 32 & 7 {
            0 => {
                let at = self.area().part(page, 1).start();
                assert_eq!(memory::write(me(), at, &bytes(random)).unwrap(), PAGE_BYTES);
            }
            1 => {
                let pages = (random >> 40 & 15) + 1;
                let gone = self.area().part(page, pages);
                let address = usize::try_from(gone.start().0).unwrap();
                let length = usize::try_from(gone.bytes()).unwrap();
                // `None` means that the library handles nothing there, and the caller makes the
                // plain system call.
                if let Some(done) = self.folder.discard(address, length) {
                    done.unwrap();
                }
            }
            _ => self.write(page, random),
        }
    }
}

fn words(number: u64) -> Vec<u64> {
    (0..512).map(|word| number << 16 | word).collect()
}

fn bytes(number: u64) -> Vec<u8> {
    words(number)
        .into_iter()
        .flat_map(u64::to_ne_bytes)
        .collect()
}

/// Returns the indexes of the pages that differ.
fn differing(a: &[u8], b: &[u8]) -> Vec<usize> {
    let pages = a.chunks_exact(PAGE_BYTES).zip(b.chunks_exact(PAGE_BYTES));
    let wrong = pages.enumerate().filter(|(_, (a, b))| a != b);
    wrong.map(|(page, _)| page).collect()
}

/// Generator of pseudorandom numbers (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Number of writes by each writer.
#[derive(Default)]
struct Writes {
    by: [AtomicU64; WRITERS],
    over: AtomicBool,
}

impl Writes {
    fn counts(&self) -> [u64; WRITERS] {
        self.by.each_ref().map(|n| n.load(Ordering::Relaxed))
    }

    /// Waits until each writer has written a hundred times more.
    fn wait_for_more(&self, what: &str) {
        let before = self.counts();
        wait_until(what, Duration::from_secs(20), || {
            let now = self.counts();
            now.iter()
                .zip(before)
                .all(|(now, before)| *now > before + 100)
        });
    }
}

/// Guard that ends the writers, even if a test fails meanwhile.
struct End<'a>(&'a Writes);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` while threads write to the memory all the time. Returns the number of writes, too.
fn while_written<T>(ram: &Ram, seed: u64, work: impl FnOnce(&Writes) -> T) -> (T, u64) {
    let writes = Writes::default();
    let done = std::thread::scope(|scope| {
        let _end = End(&writes);
        for (writer, count) in (0..).zip(&writes.by) {
            let mut random = Random(seed << 8 | writer << 1 | 1);
            let over = &writes.over;
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    ram.disturb(random.next());
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        work(&writes)
    });
    (done, writes.counts().iter().sum())
}

#[test]
fn a_live_save_stores_pages_written_meanwhile_with_their_previous_content() {
    let ram = Ram::new();
    let end = Instant::now() + seconds("MEMFOLD_STRESS_SECONDS", 4);
    let (mut rounds, mut kept, mut writes) = (0, 0, 0);
    while Instant::now() < end {
        let then = ram.read();
        let plan = ram.plan();
        let past = ram.keep(&plan);
        let ram_file = tempfile::tempfile().unwrap();
        let mut sums = tempfile::tempfile().unwrap();
        let ((), written) = while_written(&ram, rounds + 1, |_| {
            let mut writer = Writer::new(&plan, &ram_file, None).unwrap();
            let progress = Progress::default();
            writer.blocks(&plan, &[0], Some(&past), &progress).unwrap();
            writer.finish(&sums).unwrap();
        });
        ram.ok(&Order::ForgetPast, None);
        let mut saved = vec![0; then.len()];
        ram_file.read_exact_at(&mut saved, 0).unwrap();
        assert_eq!(differing(&saved, &then), [0_usize; 0], "round {rounds}");
        let mut all = Vec::new();
        sums.rewind().unwrap();
        sums.read_to_end(&mut all).unwrap();
        let stored = Stored {
            bytes: then.len() as u64,
            sums: all,
            sums_of_pages: true,
            pages: Pages::plain(ram_file).unwrap(),
            references: Vec::new(),
            sources: Vec::new(),
        };
        assert!(stored.verify(&Progress::default()).unwrap().is_empty());
        kept += past.kept_pages();
        writes += written;
        rounds += 1;
    }
    println!("{rounds} rounds, {kept} pages kept, {writes} writes");
    assert!(kept > rounds, "nothing was written to before it was read");
}

#[test]
fn during_a_live_save_folding_is_refused_and_afterwards_it_works_again() {
    let ram = Ram::new();
    let plan = ram.plan();
    let past = ram.keep(&plan);
    let refused = |order: &Order| {
        let reply = ram.folder.execute(order, None);
        assert!(
            matches!(&reply, Reply::Error { reason } if reason.contains("copy-before-write")),
            "{reply:?}"
        );
    };
    let ranges = vec![memfold_wire::library::Range {
        hva: ram.area().start().0,
        pages: 1,
    }];
    refused(&Order::DropZero {
        ranges: ranges.clone(),
    });
    refused(&Order::TrackWrites);
    let again = ram.folder.execute(
        &Order::KeepPast { ranges },
        Some(past.descriptor().unwrap()),
    );
    assert!(matches!(again, Reply::Error { .. }), "{again:?}");
    // The death of the daemon must not leave waiting writers.
    while_written(&ram, 1, |writes| {
        writes.wait_for_more("each writer writes");
        ram.folder.disconnected();
        writes.wait_for_more("each writer goes on without the daemon");
    });
    ram.ok(&Order::TrackWrites, None);
    ram.ok(&Order::UntrackWrites, None);
    ram.ok(&Order::ForgetPast, None);
}

#[test]
fn if_its_copy_file_is_unwritable_a_live_save_fails_and_the_vm_goes_on() {
    let ram = Ram::new();
    let plan = ram.plan();
    let whole = ram.area().start()..ram.area().end();
    let wanted: Vec<_> = plan.wanted(0).collect();
    let past = Past::new(me(), &[whole], &wanted, PAGES).unwrap().unwrap();
    // The library cannot write to this descriptor, as if the host had no memory left.
    let file = past.descriptor().unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let ranges = past.ranges();
    let unwritable = File::open(&path).unwrap();
    let refused = ram
        .folder
        .execute(&Order::KeepPast { ranges }, Some(unwritable.into()));
    assert!(
        matches!(&refused, Reply::Error { reason } if reason.contains("file for the saved pages")),
        "{refused:?}"
    );
    // The same failure happens in the middle of the copy.
    drop(past);
    let past = ram.keep(&plan);
    rustix::fs::fcntl_add_seals(
        past.descriptor().unwrap(),
        rustix::fs::SealFlags::FUTURE_WRITE,
    )
    .unwrap();
    ram.write(3, 77);
    let mut buffer = vec![0; PAGE_BYTES];
    let at = ram.area().part(2, 1).start();
    memory::read(me(), at, &mut buffer).unwrap();
    let error = past.settle(at, &mut buffer).unwrap_err();
    assert!(error.to_string().contains("without --live"), "{error}");
    while_written(&ram, 5, |writes| {
        writes.wait_for_more("each writer goes on");
    });
    ram.ok(&Order::ForgetPast, None);
}

#[test]
fn if_the_space_for_copied_pages_is_used_up_a_live_save_fails_and_the_vm_goes_on() {
    let ram = Ram::new();
    let past = ram.keep_some(&ram.plan(), 1);
    let settled = |page| {
        let mut buffer = vec![0; PAGE_BYTES];
        let at = ram.area().part(page, 1).start();
        memory::read(me(), at, &mut buffer).unwrap();
        past.settle(at, &mut buffer).map(|()| buffer)
    };
    ram.write(3, 77);
    assert!(settled(3).unwrap() == bytes(3));
    assert!(settled(5).unwrap() == bytes(5));
    ram.write(4, 77);
    let error = settled(6).unwrap_err().to_string();
    assert!(error.contains("without --live"), "{error}");
    ram.ok(&Order::ForgetPast, None);
}

#[test]
fn when_the_connection_to_the_preload_library_ends_a_live_save_fails() {
    let ram = Ram::new();
    let past = ram.keep(&ram.plan());
    ram.folder.disconnected();
    let mut buffer = vec![0; PAGE_BYTES];
    let at = ram.area().part(2, 1).start();
    let error = past.settle(at, &mut buffer).unwrap_err().to_string();
    assert!(error.contains("connection"), "{error}");
}

#[test]
fn the_preload_library_refuses_to_copy_pages_outside_guest_ram_before_writes() {
    let ram = Ram::new();
    let plan = ram.plan();
    let whole = ram.area().start()..ram.area().end();
    let wanted: Vec<_> = plan.wanted(0).collect();
    let past = Past::new(me(), &[whole], &wanted, PAGES).unwrap().unwrap();
    let file = || Some(past.descriptor().unwrap());
    let mut beyond = past.ranges();
    beyond.last_mut().unwrap().pages += 1;
    let mut twice = past.ranges();
    twice.extend(past.ranges());
    let nowhere = vec![memfold_wire::library::Range {
        hva: Hva(1 << 40).0,
        pages: 1,
    }];
    for ranges in [beyond, twice, nowhere, Vec::new()] {
        let reply = ram.folder.execute(&Order::KeepPast { ranges }, file());
        assert!(matches!(reply, Reply::Error { .. }), "{reply:?}");
    }
    let ranges = past.ranges();
    let reply = ram.folder.execute(&Order::KeepPast { ranges }, None);
    assert!(matches!(reply, Reply::Error { .. }), "{reply:?}");
    // After the refusals no copy is running, so tracking is allowed.
    ram.ok(&Order::TrackWrites, None);
    ram.ok(&Order::UntrackWrites, None);
}
