//! Tests of the fold engine on memory of the test's process: each "VM" is a buffer, and the code of
//! the real library folds it.

mod cached;
mod debt;
mod harness;
mod pauses;
mod reclaim;
mod snapshots;

use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use harness::{PAGE, RAM_PAGES, Ram, Running, domain, folded, pattern, two_vms, vm};
use memfold_fold::{Command, EngineSettings, EngineStats};
use memfold_units::{ByteSize, Pfn};
use memfold_vm::{RamBlock, RamSlot};
use memfold_wire::agent::{FileFacts, FromAgent, HintRun, PfnRun};
use memfold_wire::library::{Advice, Order, Reply};

#[test]
fn two_vms_that_cache_the_same_file_share_its_pages() {
    let domain = domain("same");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    a.fill(100, 300, 1);
    b.fill(700, 300, 1);
    let engine = Running::start();
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    engine.cached(1, 5, "/usr/bin/x", 100, 300);
    engine.cached(2, 9, "/usr/bin/x", 700, 300);
    let stats = engine.wait("both folded", |s| folded(s, &[1, 2], 300));
    // The last huge page of the store is allocated as a whole, before all of its bytes are used.
    assert!((300 * PAGE as u64..=2 << 20).contains(&stats.domains[0].store_bytes));
    assert_eq!(stats.case_same_path_same_content, 600);
    assert!(a.holds(100, 300, 1) && b.holds(700, 300, 1));
    let frames = a.frames(100, 300);
    assert!(frames.iter().all(Option::is_some));
    assert_eq!(frames, b.frames(700, 300), "the same physical pages");
}

#[test]
fn vms_of_two_trust_domains_share_no_page() {
    let (mut a, mut b) = (Ram::new(), Ram::new());
    a.fill(0, 64, 2);
    b.fill(0, 64, 2);
    let engine = Running::start();
    engine.add(1, &domain("one"), &a, true);
    engine.add(2, &domain("other"), &b, true);
    engine.cached(1, 1, "/f", 0, 64);
    engine.cached(2, 1, "/f", 0, 64);
    engine.wait("both told of their pages", |stats| {
        [1, 2].iter().all(|id| vm(stats, *id).hint_pages == 64)
    });
    // This is many times the time for which a hint waits.
    std::thread::sleep(Duration::from_millis(600));
    let stats = engine.stats();
    assert_eq!(
        (vm(&stats, 1).mapped_pages, vm(&stats, 2).mapped_pages),
        (0, 0)
    );
    let (left, right) = (a.frames(0, 64), b.frames(0, 64));
    assert!(left.iter().all(|frame| !right.contains(frame)));
}

#[test]
fn two_vms_with_a_second_version_of_a_file_share_that_version_with_each_other() {
    let domain = domain("versions");
    let (mut a, mut b, mut c) = (Ram::new(), Ram::new(), Ram::new());
    a.fill(0, 200, 3);
    b.fill(0, 200, 4);
    c.fill(50, 200, 4);
    let engine = Running::start();
    for (id, ram) in [(1, &a), (2, &b), (3, &c)] {
        engine.add(id, &domain, ram, true);
    }
    engine.cached(1, 1, "/lib/v.so", 0, 200);
    engine.cached(2, 1, "/lib/v.so", 0, 200);
    engine.cached(3, 1, "/lib/v.so", 50, 200);
    let stats = engine.wait("2 and 3 share", |s| folded(s, &[2, 3], 200));
    assert!(stats.case_same_path_different_content >= 4);
    assert!(a.holds(0, 200, 3) && b.holds(0, 200, 4) && c.holds(50, 200, 4));
    assert_eq!(b.frames(0, 200), c.frames(50, 200));
}

#[test]
fn after_an_agent_reconnects_page_store_pages_of_its_earlier_session_are_freed() {
    let domain = domain("sessions");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    let engine = Running::start();
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    for (session, pages) in [(0, 256), (1, 64)] {
        for (id, ram) in [(1, &mut a), (2, &mut b)] {
            engine.say(id, FromAgent::Gone(vec![PfnRun { pfn: 0, pages: 256 }]));
            engine.commands.send(Command::AgentSession(id)).unwrap();
            ram.fill(0, 256, 90 + session);
        }
        for id in [1, 2] {
            engine.cached(id, 1, &format!("/f{session}"), 0, pages);
        }
        engine.wait("folded", |s| {
            let refolded = |id| vm(s, id).refolded_pages == session * pages as u64;
            folded(s, &[1, 2], pages as u64) && refolded(1) && refolded(2)
        });
    }
    engine.wait("only what the second session folded is held", |s| {
        s.domains[0].store_bytes == 64 * PAGE as u64
    });
    assert!(a.holds(0, 256, 91) && b.holds(0, 256, 91));
}

#[test]
fn equal_files_under_different_paths_in_two_vms_are_detected_and_shared() {
    let (a, b, engine) = two_vms("alias", 128, 5);
    engine.cached(1, 1, "/usr/lib/libz.so", 0, 128);
    engine.cached(2, 1, "/opt/app/libz.so", 0, 128);
    let stats = engine.wait("both folded", |s| folded(s, &[1, 2], 128));
    assert!(stats.case_different_path_same_content >= 128);
    assert_eq!(a.frames(0, 128), b.frames(0, 128));
}

#[test]
fn pages_that_a_guest_writes_are_unfolded_and_unused_page_store_pages_are_freed() {
    let (mut a, mut b, engine) = two_vms("reclaim", 256, 6);
    engine.cached(1, 1, "/f", 0, 256);
    engine.cached(2, 1, "/f", 0, 256);
    engine.wait("both folded", |s| folded(s, &[1, 2], 256));
    // Both guests drop the first half of the file from their caches and use the memory for
    // something else.
    for (id, ram, seed) in [(1, &mut a, 70), (2, &mut b, 80)] {
        engine.say(id, FromAgent::Gone(vec![PfnRun { pfn: 0, pages: 128 }]));
        ram.fill(0, 128, seed);
    }
    let stats = engine.wait("half of the store given back", |s| {
        engine.say(1, FromAgent::Gone(vec![]));
        s.domains[0].store_bytes == 128 * PAGE as u64
    });
    assert_eq!(stats.domains[0].punched_pages, 128);
    assert!(
        a.holds(0, 128, 70) && b.holds(0, 128, 80),
        "private copies live on without the store"
    );
    let rest = pattern(6, 200);
    assert!(a.page(200) == rest && b.page(200) == rest);
    // The same frames cache a file again, and are refolded over the old mappings.
    a.fill(0, 128, 9);
    b.fill(0, 128, 9);
    engine.cached(1, 2, "/g", 0, 128);
    engine.cached(2, 2, "/g", 0, 128);
    let stats = engine.wait("folded again", |s| {
        vm(s, 1).refolded_pages >= 128 && vm(s, 2).refolded_pages >= 128
    });
    assert_eq!(vm(&stats, 1).copied_pages, 0);
    assert!(a.holds(0, 128, 9) && b.holds(0, 128, 9));
}

#[test]
fn a_page_that_a_vm_still_shows_is_not_freed_even_if_all_agents_say_that_it_is_gone() {
    let domain = domain("still-shown");
    let (mut a, mut b, c) = (Ram::new(), Ram::new(), Ram::new());
    a.fill(0, 256, 7);
    b.fill(0, 256, 7);
    let engine = Running::start();
    for (id, ram) in [(1, &a), (2, &b), (3, &c)] {
        engine.add(id, &domain, ram, true);
    }
    engine.cached(1, 1, "/f", 0, 256);
    engine.cached(2, 1, "/f", 0, 256);
    engine.wait("both folded", |s| folded(s, &[1, 2], 256));
    // The agents lie: the memory still shows the file's pages. Of one half they say that it caches
    // other files, of the other half that it caches nothing.
    for id in [1, 2] {
        engine.cached(id, 2, &format!("/only-in-{id}"), 0, 128);
        let gone = PfnRun {
            pfn: 128,
            pages: 128,
        };
        engine.say(id, FromAgent::Gone(vec![gone]));
    }
    // When a VM ends, unneeded store pages are freed at once, without a sync of the others.
    engine.commands.send(Command::Remove(3)).unwrap();
    assert_eq!(engine.stats().domains[0].punched_pages, 0);
    assert!(a.holds(0, 256, 7) && b.holds(0, 256, 7));
    // The guests overwrite one half, which a report's sync finds.
    for (ram, seed) in [(&mut a, 70), (&mut b, 71)] {
        ram.fill(0, 128, seed);
    }
    engine.stats();
    engine.add(3, &domain, &c, true);
    engine.commands.send(Command::Remove(3)).unwrap();
    assert_eq!(engine.stats().domains[0].punched_pages, 128);
    assert!(a.holds(0, 128, 70) && b.holds(0, 128, 71));
    let rest = |ram: &mut Ram| (128..256).all(|at| ram.page(at) == pattern(7, at));
    assert!(rest(&mut a) && rest(&mut b));
}

#[test]
fn pages_of_a_vm_with_direct_io_are_folded_a_second_time_only_while_it_is_paused() {
    let domain = domain("direct");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    a.fill(0, 64, 10);
    b.fill(0, 64, 10);
    let engine = Running::start();
    engine.add(1, &domain, &a, false);
    engine.add(2, &domain, &b, true);
    engine.cached(1, 1, "/f", 0, 64);
    engine.cached(2, 1, "/f", 0, 64);
    engine.wait("both folded", |s| folded(s, &[1, 2], 64));
    assert_eq!(
        a.pauses.load(Ordering::SeqCst),
        0,
        "anonymous memory is moved, which is safe with DMA"
    );
    for (id, ram) in [(1, &mut a), (2, &mut b)] {
        ram.fill(0, 64, 11);
        engine.cached(id, 2, "/g", 0, 64);
    }
    engine.wait("both folded again", |s| folded(s, &[1, 2], 64));
    assert!(a.pauses.load(Ordering::SeqCst) > 0);
    assert_eq!(b.pauses.load(Ordering::SeqCst), 0);
    assert!(a.holds(0, 64, 11) && b.holds(0, 64, 11));
}

#[test]
fn a_vm_with_a_busy_qemu_monitor_is_folded_again_later_without_a_pause() {
    let (mut a, mut b, engine) = two_vms("busy", 64, 10);
    engine.cached(1, 1, "/f", 0, 64);
    engine.cached(2, 1, "/f", 0, 64);
    engine.wait("both folded", |s| folded(s, &[1, 2], 64));
    a.busy.store(true, Ordering::SeqCst);
    for (id, ram) in [(1, &mut a), (2, &mut b)] {
        ram.fill(0, 64, 11);
        engine.cached(id, 2, "/g", 0, 64);
    }
    let stats = engine.wait("one folded again", |s| folded(s, &[2], 64));
    assert_eq!(vm(&stats, 1).refolded_pages, 0);
    a.busy.store(false, Ordering::SeqCst);
    engine.wait("both folded again", |s| folded(s, &[1, 2], 64));
    assert_eq!(a.pauses.load(Ordering::SeqCst), 0);
    assert!(a.holds(0, 64, 11) && b.holds(0, 64, 11));
}

#[test]
fn after_a_daemon_restart_the_page_store_is_adopted_and_further_vms_are_folded_onto_it() {
    let domain = domain("takeover");
    let (mut a, mut b, mut c) = (Ram::new(), Ram::new(), Ram::new());
    for ram in [&mut a, &mut b, &mut c] {
        ram.fill(0, 100, 12);
    }
    let first = Running::start();
    first.add(1, &domain, &a, true);
    first.add(2, &domain, &b, true);
    first.cached(1, 1, "/f", 0, 100);
    first.cached(2, 1, "/f", 0, 100);
    let before = first.wait("both folded", |s| folded(s, &[1, 2], 100));
    drop(first);
    assert!(
        a.holds(0, 100, 12) && b.holds(0, 100, 12),
        "without any engine"
    );
    let frames = a.frames(0, 100);
    let second = Running::start();
    second.add(1, &domain, &a, true);
    second.add(2, &domain, &b, true);
    second.add(3, &domain, &c, true);
    for id in 1..=3 {
        second.cached(id, 1, "/f", 0, 100);
    }
    let after = second.wait("all folded", |s| folded(s, &[1, 2, 3], 100));
    assert_eq!(
        before.domains[0].store_ino, after.domains[0].store_ino,
        "the same store"
    );
    assert_eq!(
        after.domains[0].appended_pages, 0,
        "what is in the store is offered again, not copied again"
    );
    assert!(c.holds(0, 100, 12));
    assert_eq!(frames, c.frames(0, 100));
    assert_eq!(frames, a.frames(0, 100));
}

#[test]
fn if_the_page_store_cannot_grow_it_reuses_holes_that_no_vm_maps() {
    let domain = domain("end");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    for ram in [&mut a, &mut b] {
        ram.fill(0, 100, 13);
        ram.fill(1000, 100, 14);
    }
    let first = Running::start();
    first.add(1, &domain, &a, true);
    first.add(2, &domain, &b, true);
    for id in 1..=2 {
        first.cached(id, 1, "/f", 0, 100);
    }
    first.wait("both folded", |s| folded(s, &[1, 2], 100));
    // The first pages of the store become a hole that is still mapped, under private copies.
    for ram in [&mut a, &mut b] {
        ram.fill(0, 100, 15);
    }
    first.wait("given back", |s| s.domains[0].store_bytes == 0);
    drop(first);
    // The file has the size of a store to which 16 TiB were appended, so the next daemon finds no
    // space behind its end.
    let name = format!("/memfold:{domain} (deleted)");
    let memfd = format!("/memfd:memfold:{domain} (deleted)");
    let stores = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let stores = stores.filter(|fd| {
        let target = std::fs::read_link(fd.path()).unwrap_or_default();
        target.as_os_str() == name.as_str() || target.as_os_str() == memfd.as_str()
    });
    let path = stores
        .last()
        .expect("the library has the store open")
        .path();
    let store = std::fs::File::options().write(true).open(path).unwrap();
    let size = (memfold_store::MAX_PAGES - 10) * PAGE as u64;
    store.set_len(size).unwrap();
    let second = Running::start();
    second.add(1, &domain, &a, true);
    second.add(2, &domain, &b, true);
    for id in 1..=2 {
        second.cached(id, 2, "/g", 1000, 100);
    }
    let after = second.wait("more folded", |s| folded(s, &[1, 2], 100));
    assert_eq!(after.domains[0].appended_pages, 100);
    for ram in [&mut a, &mut b] {
        assert!(ram.holds(0, 100, 15) && ram.holds(1000, 100, 14));
    }
    assert_eq!(a.frames(1000, 100), b.frames(1000, 100));
    let first_data = rustix::fs::seek(&store, rustix::fs::SeekFrom::Data(0)).unwrap();
    assert_eq!(first_data, 2 << 20, "behind what is mapped");
    assert_eq!(store.metadata().unwrap().len(), size, "within the file");
}

#[test]
fn after_memory_is_unplugged_from_a_vm_the_preload_library_forgets_the_memory_block() {
    let domain = domain("unplug");
    let ram = Ram::new();
    let engine = Running::start();
    let whole = ram.layout();
    let half = RAM_PAGES as u64 / 2;
    let mut layout = whole.clone();
    layout.blocks[0].pages = half;
    layout.slots[0].pages = half;
    let second = RamBlock {
        name: "ram1".into(),
        hva: whole.blocks[0].hva.add_pages(half),
        pages: half,
    };
    let mut both = layout.clone();
    both.slots.push(RamSlot {
        pfn: Pfn(half),
        pages: half,
        hva: second.hva,
        block: 1,
    });
    both.blocks.push(second.clone());
    engine.add_with(1, &domain, &ram, true, both);
    // This block would overlap the block that contains it.
    let again = Order::AddRam {
        hva: second.hva.add_pages(1).0,
        pages: half - 1,
        advice: Advice::default(),
    };
    engine.stats();
    assert!(
        matches!(ram.folder.execute(&again, None), Reply::Error { .. }),
        "it is known"
    );
    let layout = Command::Layout {
        id: 1,
        layout,
        advice: vec![Advice::default()],
    };
    engine.commands.send(layout).unwrap();
    engine.stats();
    assert_eq!(ram.folder.execute(&again, None), Reply::Ok);
}

#[test]
fn an_agent_that_sends_false_hints_uses_up_only_its_own_cpu_budget() {
    let domain = domain("liar");
    let (mut a, mut b, mut liar) = (Ram::new(), Ram::new(), Ram::new());
    a.fill(0, 100, 13);
    b.fill(0, 100, 13);
    liar.fill(0, RAM_PAGES, 99);
    let engine = Running::start();
    for (id, ram) in [(1, &a), (2, &b), (3, &liar)] {
        engine.add(id, &domain, ram, true);
    }
    // The agent reports frames outside RAM, files that it never introduced, and a file of the
    // others with different bytes.
    engine.cached(3, 1, "/f", 0, 100);
    engine.say(
        3,
        FromAgent::Hints(vec![
            HintRun {
                file: 1,
                page: u64::MAX,
                pfn: 0,
                pages: 1 << 18
            };
            64
        ]),
    );
    engine.say(
        3,
        FromAgent::Hints(vec![
            HintRun {
                file: 77,
                page: 0,
                pfn: 5,
                pages: 4
            };
            64
        ]),
    );
    engine.say(
        3,
        FromAgent::Hints(vec![
            HintRun {
                file: 1,
                page: 0,
                pfn: u64::MAX - 3,
                pages: 1000
            };
            64
        ]),
    );
    engine.say(
        3,
        FromAgent::Gone(vec![
            PfnRun {
                pfn: u64::MAX,
                pages: 1 << 18
            };
            64
        ]),
    );
    engine.cached(1, 1, "/f", 0, 100);
    engine.cached(2, 1, "/f", 0, 100);
    let stats = engine.wait("the honest share", |s| folded(s, &[1, 2], 100));
    assert!(vm(&stats, 3).bogus_pages > 1000);
    assert!(a.holds(0, 100, 13) && b.holds(0, 100, 13) && liar.holds(0, RAM_PAGES, 99));
}

#[test]
fn while_a_save_holds_a_vm_the_vm_is_not_folded() {
    let (_a, _b, engine) = two_vms("held", 64, 15);
    let (answer, answered) = sync_channel(1);
    engine.commands.send(Command::Track(1, answer)).unwrap();
    answered.recv().unwrap().unwrap();
    // For example, a migration ends.
    engine.commands.send(Command::Problem(1, None)).unwrap();
    engine.cached(1, 1, "/f", 0, 64);
    engine.cached(2, 1, "/f", 0, 64);
    std::thread::sleep(Duration::from_secs(2));
    let stats = engine.stats();
    assert_eq!(vm(&stats, 1).folded_pages, 0);
    assert!(
        vm(&stats, 1)
            .problem
            .as_ref()
            .is_some_and(|p| p.contains("snapshot"))
    );
    engine.commands.send(Command::Release(1)).unwrap();
    let stats = engine.wait("folded when it is over", |s| folded(s, &[1, 2], 64));
    assert_eq!(vm(&stats, 1).problem, None);
}

#[test]
fn after_it_reconnects_the_preload_library_receives_missed_memory_layout_changes() {
    let domain = domain("reached");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    let engine = Running::start();
    // At first, the VM has only the first half of the block.
    let mut half = a.layout();
    half.blocks[0].pages /= 2;
    half.slots[0].pages /= 2;
    engine.add_with(1, &domain, &a, true, half);
    engine.add(2, &domain, &b, true);
    for (id, ram) in [(1, &mut a), (2, &mut b)] {
        ram.fill(100, 64, 31);
        engine.cached(id, 1, "/before", 100, 64);
    }
    engine.wait("folded", |s| folded(s, &[1, 2], 64));
    a.lost.store(true, Ordering::SeqCst);
    let problem = |s: &EngineStats| vm(s, 1).problem.clone();
    let stats = engine.wait("lost", |s| problem(s).is_some());
    assert!(problem(&stats).unwrap().contains("does not answer"));
    // The block is replaced by a larger one, which the library cannot be told now.
    engine
        .commands
        .send(Command::Layout {
            id: 1,
            layout: a.layout(),
            advice: vec![Advice::default()],
        })
        .unwrap();
    assert!(problem(&engine.stats()).is_some());
    a.lost.store(false, Ordering::SeqCst);
    engine
        .commands
        .send(Command::Reached {
            id: 1,
            guest: Box::new(a.guest(true)),
            problem: None,
        })
        .unwrap();
    assert_eq!(problem(&engine.stats()), None);
    let mapped = vm(&engine.stats(), 1).mapped_pages;
    assert_eq!(mapped, 64, "what was folded before");
    for (id, ram) in [(1, &mut a), (2, &mut b)] {
        ram.fill(3000, 64, 32);
        engine.cached(id, 2, "/since", 3000, 64);
    }
    let stats = engine.wait("folded", |s| vm(s, 1).mapped_pages == 128);
    assert_eq!(problem(&stats), None);
    assert!(a.holds(100, 64, 31) && a.holds(3000, 64, 32) && b.holds(3000, 64, 32));
    assert_eq!(a.frames(3000, 64), b.frames(3000, 64));
}

#[test]
fn if_no_guest_changes_anything_the_folding_thread_uses_no_cpu_time() {
    let domain = domain("idle");
    let mut a = Ram::new();
    a.fill(0, 10, 14);
    let engine = Running::start();
    engine.add(1, &domain, &a, true);
    engine.cached(1, 1, "/f", 0, 10);
    // The answer itself needs one sync with the kernel's tables. The smallest of several
    // measurements counts, because other programs may have used this core's caches.
    let mut used = Vec::new();
    while used.len() < 5 && !used.iter().any(|used| *used < 0.01) {
        std::thread::sleep(Duration::from_secs(1));
        let before = engine.stats().engine_cpu_s;
        std::thread::sleep(Duration::from_secs(2));
        used.push(engine.stats().engine_cpu_s - before);
    }
    let is_idle = used.last().is_some_and(|used| *used < 0.01);
    assert!(is_idle, "{used:?} s of CPU, each in 2 s of nothing");
}

#[test]
fn a_full_page_store_keeps_folded_pages_and_takes_new_content_once_space_is_freed() {
    let domain = domain("full");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    for ram in [&mut a, &mut b] {
        ram.fill(0, 64, 20);
        ram.fill(100, 64, 21);
    }
    let engine = Running::start_with(&EngineSettings {
        store_cap: ByteSize(64 * PAGE as u64),
        ..EngineSettings::default()
    });
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    for id in [1, 2] {
        engine.cached(id, 1, "/first", 0, 64);
    }
    engine.wait("the first file folded", |s| folded(s, &[1, 2], 64));
    for id in [1, 2] {
        engine.cached(id, 2, "/second", 100, 64);
    }
    let stats = engine.wait("the store is full", |s| s.domains[0].store_full);
    assert_eq!(stats.domains[0].appended_pages, 64);
    assert!((64 * PAGE as u64..=2 << 20).contains(&stats.domains[0].store_bytes));
    assert!(folded(&stats, &[1, 2], 64), "the first file stays folded");
    // Both guests drop the first file and use its memory for other things. Its content is freed,
    // and there is room for the second file.
    for (id, ram, seed) in [(1, &mut a, 30), (2, &mut b, 31)] {
        engine.say(id, FromAgent::Gone(vec![PfnRun { pfn: 0, pages: 64 }]));
        ram.fill(0, 64, seed);
    }
    engine.wait("the second file folded", |s| {
        engine.say(1, FromAgent::Gone(vec![]));
        folded(s, &[1, 2], 64) && !s.domains[0].store_full
    });
    assert!(a.holds(0, 64, 30) && b.holds(0, 64, 31));
    assert!(a.holds(100, 64, 21) && b.holds(100, 64, 21));
    assert_eq!(a.frames(100, 64), b.frames(100, 64));
}

#[test]
fn pages_of_a_file_in_descending_order_in_guest_memory_become_one_mapping() {
    let domain = domain("descending");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    let place = |page: usize| 500 - page;
    for ram in [&mut a, &mut b] {
        (0..128).for_each(|page| ram.fill_page(place(page), 14));
    }
    let engine = Running::start();
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    let facts = FileFacts {
        file: 1,
        path: "/descending".into(),
        size_bytes: 128 * PAGE as u64,
    };
    let run = |page: usize| HintRun {
        file: 1,
        page: page as u64,
        pfn: place(page) as u64,
        pages: 1,
    };
    for id in [1, 2] {
        engine.say(id, FromAgent::Files(vec![facts.clone()]));
        engine.say(id, FromAgent::Hints((0..128).map(run).collect()));
    }
    engine.wait("both folded", |s| folded(s, &[1, 2], 128));
    let first = place(127);
    assert_eq!(a.frames(first, 128), b.frames(first, 128));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for ram in [&mut a, &mut b] {
        let start = ram.hva().add_pages(first as u64).0;
        let whole = format!("{start:x}-{:x} rw-p", start + 128 * PAGE as u64);
        assert!(maps.contains(&whole), "no mapping {whole} in {maps}");
        for at in first..first + 128 {
            assert!(ram.page(at) == pattern(14, at), "page {at}");
        }
    }
}
