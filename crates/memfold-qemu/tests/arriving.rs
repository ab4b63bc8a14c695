//! Tests of memory that arrives while the VM runs: a file is mapped when its pages are there, and
//! who accesses a page before waits.

mod support;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use memfold_sys::{descriptor, memory};
use memfold_units::{Hva, PAGE_SIZE};
use memfold_wire::library::{Arrived, Awaited, MapRun, Order, Range, Reply};
use memfold_wire::{Decoder, encode};
use support::{Bench, PAGE, pattern};

const PAGES: u64 = 256;

/// Time in which a thread would end that does not wait.
const MOMENT: Duration = Duration::from_millis(200);

/// The daemon's side: a snapshot's image, and the socket over which its pages are announced.
struct Daemon {
    image: File,
    socket: UnixStream,
    decoder: Decoder,
}

impl Daemon {
    /// Makes all of the bench's RAM wait for the pages of an image.
    fn begin(bench: &Bench) -> Self {
        let fd = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let image = File::from(fd);
        for page in 0..PAGES {
            let bytes = pattern(1, page).into_iter().flat_map(u64::to_le_bytes);
            let bytes: Vec<u8> = bytes.collect();
            image.write_all_at(&bytes, page * PAGE_SIZE).unwrap();
        }
        Self::connect(bench, image, vec![bench.range(0, PAGES)])
    }

    fn connect(bench: &Bench, image: File, ranges: Vec<Range>) -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        bench.ok(&Order::Await { ranges }, Some(OwnedFd::from(theirs)));
        Self {
            image,
            socket,
            decoder: Decoder::new(),
        }
    }

    /// Waits until the library wants this number of pages, and returns them.
    fn wanted(&mut self, bench: &Bench, number: usize) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        while pages.len() < number {
            match self.next() {
                Awaited::Wanted { hva } => pages.insert((hva - bench.hva(0)) / PAGE_SIZE),
                Awaited::Complete => panic!("pages are missing"),
            };
        }
        pages
    }

    fn next(&mut self) -> Awaited {
        loop {
            if let Some(message) = self.decoder.next().unwrap() {
                return message;
            }
            let mut bytes = [0; 64];
            let read = self.socket.read(&mut bytes).unwrap();
            assert!(read > 0, "the library has closed the socket");
            self.decoder.push(&bytes[..read]);
        }
    }

    fn bring(&self, bench: &Bench, page: u64, pages: u64) {
        let run = MapRun {
            hva: bench.hva(page),
            pages,
            file_page: page,
        };
        let frame = encode(&Arrived { runs: vec![run] }).unwrap();
        descriptor::send(&self.socket, &frame, Some(self.image.as_fd())).unwrap();
    }

    /// Brings all pages and waits until they are mapped.
    fn bring_whole(&mut self, bench: &Bench) {
        self.bring(bench, 0, PAGES);
        while self.next() != Awaited::Complete {}
    }
}

fn still_arriving() -> Reply {
    Reply::Error {
        reason: "the VM's memory is still arriving".into(),
    }
}

/// Reads a page on another thread as a device does: by the kernel.
fn read(bench: &Bench, page: u64) -> JoinHandle<Vec<u8>> {
    let at = Hva(bench.hva(page));
    std::thread::spawn(move || {
        let mut bytes = vec![0; PAGE];
        memory::read(rustix::process::getpid(), at, &mut bytes).unwrap();
        bytes
    })
}

fn bytes_of(page: u64) -> Vec<u8> {
    let words = pattern(1, page).into_iter();
    words.flat_map(u64::to_le_bytes).collect()
}

#[test]
fn an_access_waits_until_its_page_has_arrived_and_a_page_is_mapped_only_once() {
    let Some(bench) = Bench::new(PAGES) else {
        return;
    };
    let mut daemon = Daemon::begin(&bench);
    let (by_kernel, area) = (read(&bench, 10), bench.area(200, 1));
    let by_program = std::thread::spawn(move || area.is_zero());
    assert_eq!(daemon.wanted(&bench, 2), [10, 200].into());
    std::thread::sleep(MOMENT);
    assert!(!by_kernel.is_finished() && !by_program.is_finished());
    // No order may change mappings meanwhile.
    for order in [
        Order::DropZero {
            ranges: vec![bench.range(0, 1)],
        },
        Order::TrackWrites,
    ] {
        assert_eq!(bench.folder.execute(&order, None), still_arriving());
    }
    daemon.bring(&bench, 8, 8);
    assert_eq!(by_kernel.join().unwrap(), bytes_of(10));
    assert!(!by_program.is_finished());
    daemon.bring(&bench, 200, 1);
    assert!(!by_program.join().unwrap());
    // What was written stays, although the page is announced again.
    bench.area(11, 1).write(&[9]);
    daemon.bring_whole(&bench);
    assert_eq!(bench.wrong(1, 0, PAGES), [11]);
    assert_eq!(bench.drop_zero(0, PAGES).1, 0);
    // The next daemon is told that nothing is missing.
    let image = daemon.image.try_clone().unwrap();
    let mut next = Daemon::connect(&bench, image, Vec::new());
    assert_eq!(next.next(), Awaited::Complete);
}

#[test]
fn threads_that_wait_for_pages_go_on_when_the_next_daemon_brings_them() {
    let Some(bench) = Bench::new(PAGES) else {
        return;
    };
    let mut daemon = Daemon::begin(&bench);
    let early = read(&bench, 3);
    assert_eq!(daemon.wanted(&bench, 1), [3].into());
    let image = daemon.image.try_clone().unwrap();
    drop(daemon);
    let late = read(&bench, 5);
    std::thread::sleep(MOMENT);
    let mut next = Daemon::connect(&bench, image, Vec::new());
    assert_eq!(next.wanted(&bench, 2), [3, 5].into());
    assert!(!early.is_finished() && !late.is_finished());
    next.bring(&bench, 3, 3);
    assert_eq!(early.join().unwrap(), bytes_of(3));
    assert_eq!(late.join().unwrap(), bytes_of(5));
    next.bring_whole(&bench);
    bench.assert_holds(1, 0, PAGES);
}

#[test]
fn a_page_that_is_discarded_before_it_arrives_reads_as_zeroes() {
    let Some(bench) = Bench::new(PAGES) else {
        return;
    };
    let mut daemon = Daemon::begin(&bench);
    let reader = read(&bench, 4);
    assert_eq!(daemon.wanted(&bench, 1), [4].into());
    let (address, length) = (usize::try_from(bench.hva(4)).unwrap(), 2 * PAGE);
    bench.folder.discard(address, length).unwrap().unwrap();
    assert_eq!(reader.join().unwrap(), [0; PAGE]);
    daemon.bring_whole(&bench);
    assert_eq!(bench.wrong(1, 0, PAGES), [4, 5]);
    assert!(bench.area(4, 2).is_zero());
}

#[test]
fn pages_that_are_mapped_or_outside_ram_cannot_be_awaited() {
    let Some(bench) = Bench::new(PAGES) else {
        return;
    };
    let mut daemon = Daemon::begin(&bench);
    for range in [bench.range(PAGES - 1, 2), bench.range(7, 1)] {
        let (_ours, theirs) = UnixStream::pair().unwrap();
        let order = Order::Await {
            ranges: vec![range],
        };
        let reply = bench.folder.execute(&order, Some(theirs.into()));
        assert!(matches!(reply, Reply::Error { .. }), "{reply:?}");
    }
    // A file that is too short brings nothing, and ends the connection.
    daemon.image.set_len(PAGE_SIZE).unwrap();
    daemon.bring(&bench, 1, 1);
    let image = daemon.image.try_clone().unwrap();
    assert_eq!(daemon.socket.read(&mut [0; 64]).unwrap(), 0);
    let reader = read(&bench, 1);
    std::thread::sleep(MOMENT);
    assert!(!reader.is_finished());
    image.set_len(PAGES * PAGE_SIZE).unwrap();
    let mut daemon = Daemon::connect(&bench, image, Vec::new());
    daemon.bring(&bench, 1, 1);
    assert_eq!(reader.join().unwrap(), [0; PAGE]);
    daemon.bring_whole(&bench);
}

#[test]
fn a_message_with_two_files_is_refused_and_maps_nothing() {
    let Some(bench) = Bench::new(PAGES) else {
        return;
    };
    let mut daemon = Daemon::begin(&bench);
    let run = MapRun {
        hva: bench.hva(1),
        pages: 1,
        file_page: 1,
    };
    let frame = encode(&Arrived { runs: vec![run] }).unwrap();
    // As if the kernel had split a long message, whose end comes with the next message's file.
    let other = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&other, PAGES * PAGE_SIZE).unwrap();
    let (begin, end) = frame.split_at(frame.len() / 2);
    descriptor::send(&daemon.socket, begin, Some(daemon.image.as_fd())).unwrap();
    descriptor::send(&daemon.socket, end, Some(other.as_fd())).unwrap();
    assert_eq!(daemon.socket.read(&mut [0; 64]).unwrap(), 0);
    let image = daemon.image.try_clone().unwrap();
    let mut next = Daemon::connect(&bench, image, Vec::new());
    next.bring_whole(&bench);
    bench.assert_holds(1, 0, PAGES);
}
