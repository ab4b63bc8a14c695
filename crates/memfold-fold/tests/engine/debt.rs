//! Tests that the fold engine reports the copy-on-write debt correctly, and that it shares no more
//! pages while the brake is on.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use memfold_fold::{Command, Owed, VmOwed};
use memfold_testkit::wait_until;
use memfold_wire::agent::{FromAgent, PfnRun};

use super::harness::{PAGE, RAM_PAGES, Ram, Running, domain, folded, pattern, two_vms, vm};

pub fn owed(engine: &Running, look: bool, give_back: bool) -> Owed {
    let (answer, answered) = sync_channel(1);
    let command = Command::Owed {
        look,
        give_back,
        answer,
    };
    engine.commands.send(command).unwrap();
    answered.recv().unwrap()
}

fn of(owed: &Owed, id: u32) -> &VmOwed {
    let name = format!("vm{id}");
    owed.vms.iter().find(|vm| vm.name == name).unwrap()
}

fn braked(engine: &Running, why: Option<&str>) {
    let command = Command::SetBraked(why.map(str::to_owned));
    engine.commands.send(command).unwrap();
}

#[test]
fn folded_pages_count_as_debt_until_a_guest_writes_them() {
    let (mut a, mut b, engine) = two_vms("owed", 256, 31);
    assert_eq!(of(&owed(&engine, true, false), 1).folded_pages, 0);
    engine.cached(1, 1, "/f", 0, 256);
    engine.cached(2, 1, "/f", 0, 256);
    engine.wait("both folded", |s| folded(s, &[1, 2], 256));
    let all = owed(&engine, true, false);
    assert_eq!(
        (of(&all, 1).folded_pages, of(&all, 2).folded_pages),
        (256, 256)
    );
    assert_eq!(of(&all, 1).cached_pages, 256);
    let before = all.store_bytes;
    assert!(before >= 256 * PAGE as u64);
    // The guests overwrite a part that neither caches any more; the counters show it after the next
    // sync.
    for (id, ram, seed) in [(1, &mut a, 71), (2, &mut b, 72)] {
        engine.say(id, FromAgent::Gone(vec![PfnRun { pfn: 0, pages: 128 }]));
        ram.fill(0, 128, seed);
    }
    // The request comes before the engine would free the store pages by itself.
    let asked = owed(&engine, true, true);
    assert_eq!(of(&asked, 1).folded_pages, 128);
    assert_eq!(asked.given_back_pages, 128);
    assert_eq!(asked.store_bytes, 128 * PAGE as u64);
    assert!(a.holds(0, 128, 71) && b.holds(0, 128, 72));
    assert!((128..256).all(|at| a.page(at) == pattern(31, at) && b.page(at) == pattern(31, at)));
}

#[test]
fn while_the_brake_is_active_folded_pages_stay_folded_and_no_further_pages_are_folded() {
    let domain = domain("braked");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    for ram in [&mut a, &mut b] {
        ram.fill(0, 64, 33);
        ram.fill(500, 64, 34);
    }
    let engine = Running::start();
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    engine.cached(1, 1, "/f", 0, 64);
    engine.cached(2, 1, "/f", 0, 64);
    engine.wait("both folded", |s| folded(s, &[1, 2], 64));
    braked(&engine, Some("enough"));
    engine.cached(1, 2, "/g", 500, 64);
    engine.cached(2, 2, "/g", 500, 64);
    // This is forty times the time for which a hint waits.
    std::thread::sleep(Duration::from_secs(2));
    let stats = engine.stats();
    assert_eq!(stats.braked.as_deref(), Some("enough"));
    assert!(!stats.paused);
    for id in [1, 2] {
        assert_eq!(vm(&stats, id).folded_pages, 64);
        assert_eq!(
            vm(&stats, id).matched_folded_pages,
            64,
            "what was folded stays"
        );
    }
    // The engine still syncs with the kernel's tables by itself: the counters change without a
    // request to sync.
    a.fill(0, 64, 73);
    engine.say(1, FromAgent::Gone(vec![]));
    wait_until("it looks by itself", Duration::from_secs(20), || {
        of(&owed(&engine, false, false), 1).folded_pages == 0
    });
    assert_eq!(of(&owed(&engine, false, false), 2).folded_pages, 64);
    braked(&engine, None);
    let stats = engine.wait("folded", |s| vm(s, 2).matched_folded_pages >= 128);
    assert_eq!(stats.braked, None);
    assert!(a.holds(0, 64, 73) && a.holds(500, 64, 34));
    assert!(b.holds(0, 64, 33) && b.holds(500, 64, 34));
}

#[test]
fn snapshot_pages_that_a_clone_has_not_written_count_as_debt_and_holes_do_not() {
    let domain = domain("owed-image");
    let image = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let image = File::from(image);
    image.set_len((RAM_PAGES * PAGE) as u64).unwrap();
    for page in (100..300).chain(1000..1100) {
        let offset = (page * PAGE) as u64;
        image.write_all_at(&pattern(35, page), offset).unwrap();
    }
    let (mut a, b) = (Ram::of_image(&image), Ram::of_image(&image));
    let engine = Running::start();
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    assert_eq!(of(&owed(&engine, true, false), 1).snapshot_pages, 300);
    // The guest writes fifty pages of the image's data, and fifty of its hole (where the memory
    // file now holds pages of zeroes).
    for at in (250..300).chain(2000..2050) {
        a.page(at).fill(9);
    }
    let owed = owed(&engine, true, false);
    assert_eq!(of(&owed, 1).snapshot_pages, 250);
    assert_eq!(of(&owed, 2).snapshot_pages, 300);
    assert_eq!((of(&owed, 1).folded_pages, of(&owed, 1).zero_pages), (0, 0));
}
