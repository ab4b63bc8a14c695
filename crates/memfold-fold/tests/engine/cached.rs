//! Tests that the fold engine reports correctly which files a VM has in its page cache, and in
//! which pages.

use std::sync::mpsc::{SyncSender, sync_channel};

use memfold_fold::{CachedPages, Command, PageRun, VmId};
use memfold_wire::agent::{FromAgent, PfnRun};

use super::harness::{Ram, Running, domain};

fn ask<T>(engine: &Running, question: impl FnOnce(SyncSender<T>) -> Command) -> T {
    let (answer, answered) = sync_channel(1);
    engine.commands.send(question(answer)).unwrap();
    answered.recv().unwrap()
}

fn cached(engine: &Running, id: VmId) -> Option<CachedPages> {
    ask(engine, |answer| Command::CachedPages(id, answer))
}

#[test]
fn the_cached_pages_and_file_paths_of_a_vm_are_found_by_the_file_numbers_of_its_agent() {
    let domain = domain("cached");
    let (a, b) = (Ram::new(), Ram::new());
    let engine = Running::start();
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    engine.cached(1, 5, "/usr/bin/x", 100, 300);
    engine.cached(1, 6, "/usr/bin/y", 1000, 3);
    engine.cached(2, 5, "/usr/bin/z", 0, 10);
    assert!(cached(&engine, 1).is_none(), "before its first inventory");
    let inventoried = FromAgent::InventoryEnd {
        files: 2,
        pages: 303,
    };
    engine.say(1, inventoried);
    let run = |at, pages, file| PageRun {
        hva: a.hva().add_pages(at),
        pages,
        file,
        page: 0,
    };
    let copy = cached(&engine, 1).unwrap();
    engine.say(
        1,
        FromAgent::Gone(vec![PfnRun {
            pfn: 50,
            pages: 200,
        }]),
    );
    let runs = |copy: &CachedPages| copy.runs().collect::<Vec<_>>();
    let now = runs(&cached(&engine, 1).unwrap());
    assert_eq!(
        now[0],
        PageRun {
            page: 150,
            ..run(250, 150, 5)
        }
    );
    assert_eq!(
        runs(&copy),
        [run(100, 300, 5), run(1000, 3, 6)],
        "as it was then"
    );
    let paths = |id, files: &[u32]| ask(&engine, |a| Command::FilePaths(id, files.to_vec(), a));
    let own: [&[u8]; 3] = [b"/usr/bin/y", b"", b"/usr/bin/x"];
    assert_eq!(paths(1, &[6, 7, 5]), own);
    assert_eq!(paths(3, &[5]), [b""]);
    engine.commands.send(Command::AgentSession(1)).unwrap();
    assert!(cached(&engine, 1).is_none());
    assert_eq!(paths(1, &[5]), [b""]);
}
