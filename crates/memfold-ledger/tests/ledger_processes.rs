//! Tests the ledger on child processes with known pages: every count is exact, and every sum
//! agrees.
//!
//! Each child has one "guest RAM"; numbers are pages:
//!
//! ```text
//!   | private P | zero 512 | free 512 | store 4096: touched T, written 512 at the end | file 4096: 1024 touched |
//! ```

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_ledger::{
    HostAccount, OwnCost, Report, StoreAccount, VmAccount, check_change, frames, shared_frames,
    take,
};
use memfold_store::StoreIdentity;
use memfold_sys::region::Mapping;
use memfold_testkit::{bound, start_helper, wait_for};
use memfold_units::{ByteSize, Hva, PageCount, Pfn};
use memfold_vm::{RamBlock, RamLayout};
use rustix::mm::Advice;

const ROLE: &str = "MEMFOLD_TEST_LEDGER_CHILD";
const STORE_PAGES: u64 = 4096;
const WRITTEN: u64 = 512;

fn memfd(name: &str, pages: u64) -> std::fs::File {
    let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(fd);
    for page in 0..pages {
        file.write_all(&[u8::try_from(page % 251).unwrap() + 1; 4096])
            .unwrap();
    }
    file
}

/// Runs in the child process; [`Actor`] is the other side.
#[test]
#[ignore = "the other process of the tests here; does nothing by itself"]
fn helper_process_whose_memory_the_other_tests_count() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let words: Vec<&str> = role.split(' ').collect();
    let store = std::fs::File::open(words[0]).unwrap();
    let (private, touched, split): (u64, u64, u64) = (
        words[1].parse().unwrap(),
        words[2].parse().unwrap(),
        words[3].parse().unwrap(),
    );
    let pages = private + 1024 + STORE_PAGES + 4096 + 2 * split;
    let store = store.as_fd();
    let mapping = Mapping::anonymous(pages, true).unwrap();
    let ram = mapping.area();
    ram.advise(Advice::LinuxNoHugepage).unwrap();
    // When one file page is accessed, the kernel maps the block of 16 pages around it, aligned to
    // 64 KiB of address.
    assert_eq!(ram.start().0 % 65536, 0);
    for page in 0..private {
        ram.part(page, 1).write(&[page + 1]);
    }
    assert_eq!(ram.part(private, 512).zero_pages(), 512);
    let at = private + 1024;
    ram.part(at, STORE_PAGES).map_file(store, 0).unwrap();
    for page in 0..touched {
        assert!(!ram.part(at + page, 1).is_zero());
    }
    for page in STORE_PAGES - WRITTEN..STORE_PAGES {
        ram.part(at + page, 1).write(&[7]);
    }
    let template = memfd("template", 4096);
    let at = at + STORE_PAGES;
    ram.part(at, 4096).map_file(template.as_fd(), 0).unwrap();
    for page in 0..1024 {
        assert!(!ram.part(at + page, 1).is_zero());
    }
    let at = at + 4096;
    for page in 0..split {
        let from = page % (STORE_PAGES - 1);
        ram.part(at + 2 * page, 1).map_file(store, from).unwrap();
    }
    println!("\nREADY {} {pages}", ram.start().0);
    // The child waits until the parent ends it or dies.
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Actor {
    child: Child,
    layout: RamLayout,
}

impl Actor {
    fn start(store: &std::fs::File, private: u64, touched: u64, split: u64) -> Self {
        let path = format!("/proc/{}/fd/{}", std::process::id(), store.as_raw_fd());
        let (child, ready) = start_helper(
            "helper_process_whose_memory_the_other_tests_count",
            ROLE,
            format!("{path} {private} {touched} {split}"),
        );
        let words: Vec<u64> = ready.split(' ').map(|w| w.parse().unwrap()).collect();
        let layout = RamLayout::one_block(Hva(words[0]), words[1]);
        Self { child, layout }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn account(&self, name: &str, stores: &[StoreIdentity]) -> VmAccount {
        take::vm(self.pid(), name, Some("d"), &self.layout, stores, &[]).unwrap()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pages(n: u64) -> ByteSize {
    PageCount(n).bytes()
}

fn host(vms: &[VmAccount], stores: &[&std::fs::File]) -> HostAccount {
    let stores: Vec<_> = stores
        .iter()
        .map(|s| StoreAccount::of("d", s).unwrap())
        .collect();
    let identities: Vec<_> = stores.iter().map(|s| s.identity).collect();
    let own = take::own(ByteSize(0), &identities, &[]).unwrap();
    assert_ne!(own, OwnCost::default());
    take::host(&take::Parts {
        vms,
        stores: &stores,
        own,
        ..take::Parts::default()
    })
    .unwrap()
}

/// Repeats `attempt` until it succeeds: other work on the machine may change host-wide sums between
/// two reads, and one quiet moment is enough.
fn in_a_quiet_moment<E: std::fmt::Debug>(mut attempt: impl FnMut() -> Result<(), E>) {
    let mut first = true;
    wait_for("a quiet moment", Duration::from_secs(30), || {
        if !std::mem::take(&mut first) {
            std::thread::sleep(Duration::from_millis(300));
        }
        attempt()
    });
}

#[test]
fn the_ledger_counts_every_page_in_the_correct_class_and_its_sums_match_the_kernels() {
    let store = memfd("store", STORE_PAGES);
    let id = StoreIdentity::of(&store).unwrap();
    let (a, b) = (
        Actor::start(&store, 4096, 2048, 0),
        Actor::start(&store, 2048, 1024, 0),
    );
    let account = a.account("a", &[id]);
    assert_eq!(account.sum_of_parts(), account.ram_bytes);
    assert_eq!(account.ram_bytes, pages(4096 + 1024 + STORE_PAGES + 4096));
    assert_eq!(account.private_bytes, pages(4096));
    assert_eq!(account.zero_bytes, pages(512));
    assert_eq!(account.free_bytes, pages(512));
    assert_eq!(account.folded_resident_bytes, pages(2048));
    assert_eq!(account.unfolded_bytes, pages(WRITTEN));
    assert_eq!(
        account.folded_untouched_bytes,
        pages(STORE_PAGES - 2048 - WRITTEN)
    );
    assert_eq!(account.folded_bytes, pages(STORE_PAGES - WRITTEN));
    assert_eq!(account.file_resident_bytes, pages(1024));
    assert_eq!(account.file_untouched_bytes, pages(4096 - 1024));
    assert_eq!(account.backed_bytes, account.ram_rss_bytes);
    assert_eq!(account.huge_bytes, ByteSize(0));
    assert_eq!(account.store_mappings, 1);
    // Both processes map the store pages 0..1024. Only this one maps the pages 1024..2048 and the
    // template.
    assert_eq!(account.store_pss_bytes, pages(1024 / 2 + 1024));
    assert_eq!(
        account.ram_pss_bytes,
        pages(4096 + WRITTEN + 1024 / 2 + 1024 + 1024)
    );

    in_a_quiet_moment(|| {
        let vms = vec![a.account("a", &[id]), b.account("b", &[id])];
        let report = Report::new(host(&vms, &[&store]), vms);
        assert_eq!(report.host.stores_bytes, pages(STORE_PAGES));
        assert_eq!(
            report.host.saved_by_folding_bytes,
            i64::try_from(pages(2 * (STORE_PAGES - WRITTEN) - STORE_PAGES).0).unwrap()
        );
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
        println!("{}", memfold_ledger::table::render(&report));
        if report.disagreements.is_empty() {
            Ok(())
        } else {
            Err(report.disagreements)
        }
    });
}

#[test]
fn when_processes_take_memory_the_ledgers_sum_changes_by_as_much_as_mem_available() {
    in_a_quiet_moment(|| {
        let before = Report::new(host(&[], &[]), vec![]);
        let store = memfd("store", STORE_PAGES);
        let id = StoreIdentity::of(&store).unwrap();
        let actors = [
            Actor::start(&store, 200_000, 2048, 0),
            Actor::start(&store, 100_000, 2048, 0),
        ];
        let vms: Vec<_> = actors.iter().map(|a| a.account("vm", &[id])).collect();
        let after = Report::new(host(&vms, &[&store]), vms);
        println!(
            "MemAvailable {} -> {}, the ledger's sum {} -> {}",
            before.host.mem_available_bytes,
            after.host.mem_available_bytes,
            before.host.unreclaimable_bytes,
            after.host.unreclaimable_bytes
        );
        check_change(&before, &after).map_or(Ok(()), Err)
    });
}

#[test]
fn processes_share_page_frames_only_if_they_map_the_same_page_store() {
    if !rustix::process::getuid().is_root() {
        memfold_testkit::skip!("frame numbers need root");
    }
    let (one, other) = (memfd("one", STORE_PAGES), memfd("other", STORE_PAGES));
    let more = Actor::start(&one, 64, 2048, 0);
    let less = Actor::start(&one, 64, 1024, 0);
    let stranger = Actor::start(&other, 64, 2048, 0);
    let shared = |left: &Actor, right: &Actor| {
        shared_frames((left.pid(), &left.layout), (right.pid(), &right.layout)).unwrap()
    };
    assert_eq!(shared(&more, &less), 1024);
    assert_eq!(shared(&more, &stranger), 0);
    assert_eq!(shared(&less, &stranger), 0);

    let store_at = Pfn(64 + 1024);
    let frames_of = |actor: &Actor| frames(actor.pid(), &actor.layout, store_at, 2048).unwrap();
    let (of_more, of_less) = (frames_of(&more), frames_of(&less));
    assert_eq!(of_more[..1024], of_less[..1024]);
    assert!(of_more.iter().all(Option::is_some));
    assert!(of_less[1024..].iter().all(Option::is_none));
    let beyond = frames(more.pid(), &more.layout, Pfn(1 << 30), 3).unwrap();
    assert_eq!(beyond, [None; 3]);
}

#[test]
fn the_ledger_reads_a_process_with_8000_mappings_in_at_most_a_second() {
    let store = memfd("store", STORE_PAGES);
    let id = StoreIdentity::of(&store).unwrap();
    let a = Actor::start(&store, 64, 16, 4000);
    let start = Instant::now();
    let account = a.account("a", &[id]);
    let (took, limit) = (start.elapsed(), bound(Duration::from_secs(1)));
    println!("{} mappings: {took:?} of {limit:?}", account.mappings);
    assert_eq!(account.store_mappings, 4001);
    assert!(account.mappings > 8000);
    assert_eq!(account.sum_of_parts(), account.ram_bytes);
    assert!(took < limit, "{took:?} of {limit:?}");
}

#[test]
fn if_a_vm_has_ended_reading_its_memory_is_an_error() {
    let store = memfd("store", STORE_PAGES);
    let actor = Actor::start(&store, 1, 16, 0);
    let (pid, layout) = (actor.pid(), actor.layout.clone());
    drop(actor);
    assert!(take::vm(pid, "gone", None, &layout, &[], &[]).is_err());
}

/// A QEMU without a guest runs its firmware under TCG, which ends in "no bootable device".
#[test]
fn the_ledgers_sums_of_a_real_qemu_match_the_kernels_and_tcg_code_counts_separately() {
    const RAM_MIB: u64 = 256;
    let Ok(mut qemu) = Command::new("qemu-system-x86_64")
        .args([
            "-accel",
            "tcg",
            "-m",
            "256",
            "-display",
            "none",
            "-nodefaults",
        ])
        .stdin(Stdio::null())
        .spawn()
    else {
        memfold_testkit::skip!("no qemu-system-x86_64");
    };
    let pid = i32::try_from(qemu.id()).unwrap();
    let proc = memfold_ledger::read::Proc::default();
    // Without QMP, the RAM is found by its size: the private anonymous mapping of exactly this size
    // or, if it was merged with others, the first larger one.
    let ram = || {
        proc.maps(pid)
            .unwrap()
            .into_iter()
            .filter(|v| v.file.is_none() && v.write && !v.execute)
            .find(|v| v.end.0 - v.start.0 >= RAM_MIB << 20)
    };
    let result = std::panic::catch_unwind(|| {
        let layout = wait_for("firmware has run", Duration::from_secs(30), || {
            let layout = RamLayout {
                blocks: vec![RamBlock {
                    name: "pc.ram".into(),
                    hva: ram().ok_or("no RAM yet".to_owned())?.start,
                    pages: RAM_MIB << 8,
                }],
                slots: vec![],
            };
            let vm = take::vm(pid, "qemu", None, &layout, &[], &[]).unwrap();
            if vm.private_bytes > ByteSize(0) && vm.tcg_pss_bytes > ByteSize::kib(64) {
                Ok(layout)
            } else {
                Err(format!("{vm:?}"))
            }
        });
        in_a_quiet_moment(|| {
            let vms = vec![take::vm(pid, "qemu", None, &layout, &[], &[]).unwrap()];
            let report = Report::new(host(&vms, &[]), vms);
            let vm = &report.vms[0];
            println!("{}", memfold_ledger::table::render(&report));
            assert_eq!(vm.ram_bytes, ByteSize::mib(RAM_MIB));
            assert!(vm.private_bytes > ByteSize(0));
            assert!(vm.tcg_pss_bytes > ByteSize::kib(64), "{vm:?}");
            assert!(vm.tcg_pss_bytes < vm.qemu_pss_bytes, "{vm:?}");
            assert_eq!(vm.store_mappings, 0);
            if report.disagreements.is_empty() {
                Ok(())
            } else {
                Err(report.disagreements)
            }
        });
    });
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}
