//! Test of memfold's library in QEMU when the process cannot have more memory mappings
//! (`vm.max_map_count`). The test is a separate program, because it uses up all mappings of its
//! process.

mod support;

use std::time::Duration;

use memfold_testkit::wait_until;
use memfold_wire::library::{Freeze, Outcome};
use rustix::mm::Advice;
use support::{Bench, PAGE};

#[test]
fn if_max_map_count_is_reached_a_run_stays_unfolded_and_writable() {
    let limit: u64 = std::fs::read_to_string("/proc/sys/vm/max_map_count")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    if limit > 100_000 {
        memfold_testkit::skip!(
            "vm.max_map_count is {limit}; filling it would take {} MiB",
            limit / 128
        );
    }
    let Some(mut bench) = Bench::new(limit + 64) else {
        return;
    };
    bench.fill(1);
    bench.publish(0, limit + 64);
    // Eight of the last pages are a mapping of their own.
    let own = limit + 40;
    let advise = |page, pages| bench.area(page, pages).advise(Advice::LinuxDontDump);
    advise(own, 8).unwrap();
    // A thread needs mappings, too.
    let (read, may_read) = std::sync::mpsc::channel();
    let area = bench.area(own, 1);
    let reader = std::thread::spawn(move || may_read.recv().is_ok() && area.is_zero());
    // Every other page is folded, which needs one mapping for each page, and one for each page
    // between.
    let mut failed = None;
    for page in (1..limit).step_by(2) {
        match bench.fold(Freeze::Move, bench.run(page, 1, page)) {
            Outcome::Done => {}
            Outcome::Failed { errno, folded: 0 } => {
                failed = Some((page, errno));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    let (page, errno) = failed.expect("more mappings than vm.max_map_count");
    assert_eq!(errno, libc::ENOMEM);
    assert!(page > limit / 2);
    // No page remains frozen.
    bench.assert_holds(1, 0, limit + 64);
    bench.area(page, 1).write(&[3]);
    assert_eq!(bench.wrong(1, 0, limit + 64), [page]);
    // A release needs a mapping for a moment, so it fails, too, and leaves the page unchanged.
    assert_eq!(
        bench.release(Freeze::WriteProtect, 1, 1),
        Outcome::Failed {
            errno: libc::ENOMEM,
            folded: 0
        }
    );
    assert_eq!(bench.wrong(1, 0, limit + 64), [page]);
    // The last places for mappings are used up.
    assert!((limit..own).step_by(2).any(|page| advise(page, 1).is_err()));
    // The kernel freezes the mapping of eight pages, and cannot split the next one.
    let failed = bench.fold(Freeze::Move, bench.run(own, 16, own));
    assert!(
        matches!(failed, Outcome::Failed { errno, folded: 0 } if errno == libc::ENOMEM),
        "{failed:?}"
    );
    let address = usize::try_from(bench.hva(own)).unwrap();
    bench.folder.discard(address, PAGE).unwrap().unwrap();
    read.send(()).unwrap();
    wait_until("the page can be read", Duration::from_secs(10), || {
        reader.is_finished()
    });
    assert!(reader.join().unwrap());
}
