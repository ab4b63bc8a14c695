//! Tests of the fold engine with VMs that run from a snapshot's RAM image: which pages these VMs
//! share, and which pages are mapped to the image again (fold-back).

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use memfold_fold::{Command, EngineSettings, FoldedOnto};
use memfold_sys::descriptor;
use memfold_units::PAGE_SIZE;
use memfold_wire::agent::FromAgent;
use memfold_wire::encode;
use memfold_wire::library::{Advice, Arrived, MapRun, Order, Range, Reply};

use super::harness::{RAM_PAGES, Ram, Running, domain, folded, pattern, vm};

/// Creates an image in memory whose page n has the bytes of page n of file `seed`.
pub fn image(seed: u64) -> File {
    named("image", seed)
}

fn named(name: &str, seed: u64) -> File {
    let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = File::from(file);
    for page in 0..RAM_PAGES {
        file.write_all(&pattern(seed, page)).unwrap();
    }
    file
}

fn often() -> EngineSettings {
    EngineSettings {
        fold_back_interval: Duration::from_millis(100),
        ..EngineSettings::default()
    }
}

#[test]
fn a_page_of_a_clone_is_folded_back_only_if_it_equals_the_page_of_the_snapshot() {
    let (domain, image) = (domain("back"), image(21));
    let (mut a, mut b) = (Ram::of_image(&image), Ram::of_image(&image));
    let engine = Running::start_with(&often());
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    // Pages that the guest wrote back to the image's bytes, in long and short runs, and pages that
    // stay different.
    for at in (0..700).chain((1000..1100).step_by(2)) {
        a.page(at).fill(7);
        a.fill_page(at, 21);
    }
    a.page(2000).fill(7);
    b.page(5).fill(8);
    assert!((6..106).all(|at| b.page(at) == pattern(21, at)));
    let stats = engine.wait("returned", |s| vm(s, 1).folded_back_pages >= 750);
    assert_eq!(vm(&stats, 1).folded_back_pages, 750);
    let stats = engine.wait("looked at", |s| vm(s, 1).template_copied_pages == 1);
    assert_eq!(vm(&stats, 1).template_pages, RAM_PAGES as u64);
    assert_eq!(vm(&stats, 2).template_copied_pages, 1);
    assert!((0..2000).all(|at| a.page(at) == pattern(21, at)));
    assert!(a.page(2000).iter().all(|&byte| byte == 7));
    assert!(b.page(5).iter().all(|&byte| byte == 8));
    let frames = a.frames(6, 100);
    assert!(frames.iter().all(Option::is_some));
    assert_eq!(frames, b.frames(6, 100), "the image's own pages");
}

#[test]
fn an_image_that_is_no_longer_mapped_as_ram_is_closed_in_the_library() {
    let (domain, old, new) = (
        domain("closed"),
        named("old-image", 61),
        named("new-image", 62),
    );
    let mut ram = Ram::of_image(&old);
    let engine = Running::start_with(&often());
    engine.add(1, &domain, &ram, true);
    // The library compares pages by a shared mapping of the image.
    let is_open = |name: &str| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut maps = maps.lines().filter(|line| line.contains(" r--s "));
        maps.any(|line| line.contains(&format!("/memfd:{name} ")))
    };
    for (name, seed, pages) in [("old-image", 61, 10), ("new-image", 62, 20)] {
        for at in 0..10 {
            ram.page(at).fill(7);
            ram.fill_page(at, seed);
        }
        engine.wait("returned", |s| vm(s, 1).folded_back_pages >= pages);
        assert!(is_open(name));
        ram.map_disk(0..RAM_PAGES as u64, &new);
    }
    engine.wait("closed", |_| !is_open("old-image"));
    assert!(is_open("new-image"));
    assert!((0..RAM_PAGES).all(|at| ram.page(at) == pattern(62, at)));
}

#[test]
fn pages_of_a_clone_mapped_from_a_disk_count_as_shared_and_are_not_folded_back() {
    let (domain, image, disk) = (domain("hot"), named("memfold-image:1:2", 31), image(32));
    let mut ram = Ram::of_image(&image);
    // The disk's mapping comes first, and must not be taken for the image.
    ram.map_disk(0..100, &disk);
    ram.map_disk(200..210, &disk);
    let engine = Running::start_with(&often());
    engine.add(1, &domain, &ram, true);
    for at in (0..50).chain(1000..1300) {
        ram.page(at).fill(7);
        ram.fill_page(at, if at < 50 { 32 } else { 31 });
    }
    let stats = engine.wait("returned", |s| vm(s, 1).folded_back_pages >= 300);
    assert_eq!(vm(&stats, 1).folded_back_pages, 300);
    let stats = engine.wait("looked at", |s| vm(s, 1).template_copied_pages == 50);
    let all = RAM_PAGES as u64;
    assert_eq!(vm(&stats, 1).template_pages, all);
    assert_eq!(vm(&stats, 1).template_shared_pages, all - 50);
    // The kernel can write-protect only views of memory files, and the disk's file may not be one.
    assert!(vm(&stats, 1).pauses > 0);
    for at in 0..1400 {
        let seed = if at < 100 || (200..210).contains(&at) {
            32
        } else {
            31
        };
        assert!(ram.page(at) == pattern(seed, at), "page {at}");
    }
}

#[test]
fn a_guest_that_writes_all_the_time_loses_no_write_while_pages_are_shared_with_its_image_again() {
    let (domain, image) = (domain("writing"), image(22));
    let mut ram = Ram::of_image(&image);
    let engine = Running::start_with(&often());
    engine.add(1, &domain, &ram, true);
    let original: Vec<[u8; 8]> = (0..512)
        .map(|at| ram.page(at)[..8].try_into().unwrap())
        .collect();
    // Every page has in turn the image's bytes and the number of the round, and each look must find
    // the bytes that were written last.
    let (begun, mut rounds) = (Instant::now(), 0_u64);
    let enough = |rounds: u64| {
        rounds > 100
            && begun.elapsed() > Duration::from_secs(3)
            && vm(&engine.stats(), 1).folded_back_pages > 1000
    };
    while !enough(rounds) && begun.elapsed() < Duration::from_secs(400) {
        rounds += 1;
        for (at, original) in original.iter().enumerate() {
            let number = |round: u64| {
                let round = round + at as u64;
                if round % 2 == 0 {
                    *original
                } else {
                    round.to_le_bytes()
                }
            };
            let page = std::hint::black_box(ram.page(at));
            assert!(
                rounds == 1 || page[..8] == number(rounds - 1),
                "page {at} in round {rounds}"
            );
            page[..8].copy_from_slice(&number(rounds));
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    let back = vm(&engine.stats(), 1).folded_back_pages;
    println!("{rounds} rounds, {back} pages folded back");
    assert!(rounds > 100 && back > 1000, "{rounds} rounds, {back} pages");
    assert!((0..512).all(|at| ram.page(at)[8..] == pattern(22, at)[8..]));
}

#[test]
fn a_clone_folds_file_pages_read_after_the_snapshot_and_no_pages_of_the_snapshot() {
    let (domain, image) = (domain("clones"), image(23));
    let (mut a, mut b) = (Ram::of_image(&image), Ram::of_image(&image));
    let engine = Running::start();
    for (id, ram) in [(1, &a), (2, &b)] {
        engine.add(id, &domain, ram, true);
        engine.say(id, FromAgent::InventoryBegin);
        engine.cached(id, 1, "/cached/before", 100, 200);
        let (files, pages) = (1, 200);
        engine.say(id, FromAgent::InventoryEnd { files, pages });
    }
    for (id, ram, at) in [(1, &mut a, 1000), (2, &mut b, 2000)] {
        ram.fill(at, 64, 24);
        engine.cached(id, 2, "/read/since", at, 64);
    }
    let stats = engine.wait("folded", |s| folded(s, &[1, 2], 264));
    for id in [1, 2] {
        let vm = vm(&stats, id);
        assert_eq!((vm.matched_pages, vm.mapped_pages), (264, 64));
        assert_eq!(vm.template_pages, RAM_PAGES as u64 - 64);
    }
    assert_eq!(stats.domains[0].appended_pages, 64);
    assert!(a.holds(1000, 64, 24) && b.holds(2000, 64, 24));
    assert!(a.frames(1000, 64).iter().all(Option::is_some));
    assert_eq!(a.frames(1000, 64), b.frames(2000, 64));
    // The guests have written these pages: they differ from the snapshot, are equal in both VMs,
    // and are folded onto each other.
    for (id, ram) in [(1, &mut a), (2, &mut b)] {
        ram.fill(100, 200, 25);
        engine.hint(id, 1, 100, 200);
    }
    let stats = engine.wait("folded", |s| folded(s, &[1, 2], 264));
    assert_eq!(vm(&stats, 1).mapped_pages, 264);
    assert!(a.holds(100, 200, 25) && b.holds(100, 200, 25));
    assert_eq!(a.frames(100, 200), b.frames(100, 200));
}

#[test]
fn each_command_to_share_memory_with_a_fork_stops_the_forked_vm_once_and_tells_what_is_left() {
    let (domain, image) = (domain("onto"), image(41));
    let mut ram = Ram::new();
    ram.fill(0, RAM_PAGES, 41);
    // Written after the fork was saved.
    ram.page(8).fill(7);
    let engine = Running::start();
    engine.add(1, &domain, &ram, true);
    let hva = ram.hva();
    let fold = |ranges: Vec<MapRun>| -> FoldedOnto {
        let (answer, done) = sync_channel(1);
        let file = image.try_clone().unwrap();
        let command = Command::FoldOnto(1, file, ranges, answer);
        engine.commands.send(command).unwrap();
        done.recv().unwrap().unwrap()
    };
    // Twice as many runs as an order takes, none beside another.
    let ranges = (0..RAM_PAGES as u64).step_by(2).map(|page| MapRun {
        hva: hva.0 + page * PAGE_SIZE,
        pages: 1,
        file_page: page,
    });
    let ranges: Vec<MapRun> = ranges.collect();
    let first = fold(ranges.clone());
    assert_eq!((first.pages, first.left.len()), (1023, 1024));
    assert_eq!(first.left, ranges[1024..]);
    assert_eq!(ram.pauses.load(Ordering::SeqCst), 1);
    let second = fold(first.left);
    assert_eq!((second.pages, second.left.len()), (1024, 0));
    assert_eq!(ram.pauses.load(Ordering::SeqCst), 2);
    assert_eq!(fold(Vec::new()), FoldedOnto::default());
    assert_eq!(ram.pauses.load(Ordering::SeqCst), 2, "nothing to stop for");
    for page in 0..RAM_PAGES {
        let is_right = if page == 8 {
            ram.page(page).iter().all(|&byte| byte == 7)
        } else {
            ram.page(page) == pattern(41, page)
        };
        assert!(is_right, "page {page}");
    }
}

#[test]
fn while_the_memory_of_a_vm_arrives_its_library_gets_a_new_socket_over_the_engines_connection() {
    let (domain, image) = (domain("arriving"), image(23));
    let mut ram = Ram::new();
    let (hva, pages) = (ram.hva().0, RAM_PAGES as u64);
    let execute = |order: &Order, socket: Option<UnixStream>| {
        let reply = ram.folder.execute(order, socket.map(OwnedFd::from));
        assert_eq!(reply, Reply::Ok);
    };
    let add = Order::AddRam {
        hva,
        pages,
        advice: Advice::default(),
    };
    execute(&add, None);
    let (first, of_library) = UnixStream::pair().unwrap();
    let ranges = vec![Range { hva, pages }];
    execute(&Order::Await { ranges }, Some(of_library));
    drop(first);
    let engine = Running::start();
    let layout = ram.layout();
    let problem = Some("the VM's snapshot is still being fetched".to_owned());
    let command = Command::Add {
        id: 1,
        name: "vm1".to_owned(),
        domain: Some(domain),
        advice: vec![Advice::default()],
        layout,
        guest: Box::new(ram.guest(true)),
        problem: problem.clone(),
    };
    engine.commands.send(command).unwrap();
    let connect = || {
        let (second, of_library) = UnixStream::pair().unwrap();
        let (answer, answered) = sync_channel(1);
        let command = Command::Await(1, of_library.into(), answer);
        engine.commands.send(command).unwrap();
        answered.recv().unwrap().map(|()| second)
    };
    let second = connect().unwrap();
    assert_eq!(vm(&engine.stats(), 1).problem, problem);
    let run = MapRun {
        hva,
        pages,
        file_page: 0,
    };
    let frame = encode(&Arrived { runs: vec![run] }).unwrap();
    descriptor::send(&second, &frame, Some(image.as_fd())).unwrap();
    assert!(ram.holds(0, RAM_PAGES, 23));
    ram.lost.store(true, Ordering::SeqCst);
    assert!(connect().is_err());
    assert_ne!(vm(&engine.stats(), 1).problem, problem);
}
