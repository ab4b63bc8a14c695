//! For the engine's own tests: VMs that are no QEMU processes, and random changes of the engine's
//! tables, for tests that compare what the engine keeps with a search of all tables.

use std::os::fd::BorrowedFd;

use memfold_sys::region::Mapping;
use memfold_units::Hva;
use memfold_vm::RamLayout;
use memfold_wire::agent::{FileFacts, FromAgent, HintRun, PfnRun};
use memfold_wire::library::{Advice, Order, Reply};
use rustix::process::Pid;

use crate::guest::{Guest, GuestError, Refold, VmId};
use crate::member::Member;
use crate::state::{Engine, cached_ranges};
use crate::vm_table::Mapped;

/// A VM whose library gives the answers of a function.
pub struct FakeGuest<F> {
    pub pid: Pid,
    pub refold: Refold,
    answer: F,
}

impl<F: FnMut(&Order) -> Reply + Send> FakeGuest<F> {
    /// Creates a VM whose RAM is memory of this process, and that can't be folded again.
    pub fn new(answer: F) -> Self {
        Self {
            pid: rustix::process::getpid(),
            refold: Refold::Unknown,
            answer,
        }
    }
}

impl<F: FnMut(&Order) -> Reply + Send> Guest for FakeGuest<F> {
    fn pid(&self) -> Pid {
        self.pid
    }

    fn order(&mut self, order: &Order, _: Option<BorrowedFd<'_>>) -> Result<Reply, GuestError> {
        Ok((self.answer)(order))
    }

    fn refold(&mut self) -> Refold {
        self.refold
    }

    fn can_stop(&self) -> bool {
        false
    }
}

/// Returns a VM that executes no order.
pub fn idle() -> Box<dyn Guest> {
    Box::new(FakeGuest::new(|_| Reply::Ok))
}

/// Maps memory whose pages all hold the same bytes, and returns it with the layout of a VM that has
/// it as its RAM.
pub fn ram(pages: u32) -> (Mapping, RamLayout) {
    let ram = Mapping::anonymous(pages.into(), false).unwrap();
    ram.area().write(&vec![7; 512 * pages as usize]);
    let layout = RamLayout::one_block(ram.area().start(), pages.into());
    (ram, layout)
}

/// RAM of each VM in pages.
pub const PAGES: u32 = 600;

pub fn layout(pages: u32) -> RamLayout {
    // Nothing is mapped at this address.
    RamLayout::one_block(Hva(0x6000_0000_0000), pages.into())
}

/// Adds a VM of the trust domain of all random VMs.
pub fn add(engine: &mut Engine, id: VmId) {
    let domain = Some(format!("random-{}", std::process::id()));
    let advice = [Advice::default()];
    let name = format!("vm{id}");
    engine.add(id, name, domain, layout(PAGES), &advice, idle(), None);
    engine.agent_session(id);
}

fn message(random: &mut impl FnMut(u32) -> u32) -> FromAgent {
    let run = |random: &mut dyn FnMut(u32) -> u32| HintRun {
        file: random(6),
        page: u64::from(random(150)),
        pfn: u64::from(random(PAGES)),
        pages: 1 + random(30),
    };
    match random(20) {
        0..5 => {
            let facts = |random: &mut dyn FnMut(u32) -> u32| FileFacts {
                file: random(6),
                path: [&b""[..], b"/a/x", b"/b/x", b"/b/y"][random(4) as usize].into(),
                size_bytes: 1 << 20,
            };
            FromAgent::Files(vec![facts(random), facts(random)])
        }
        5..12 => FromAgent::Hints((0..3).map(|_| run(random)).collect()),
        12..17 => FromAgent::Gone(vec![PfnRun {
            pfn: u64::from(random(PAGES)),
            pages: 1 + random(30),
        }]),
        17 => FromAgent::InventoryBegin,
        18 => FromAgent::InventoryEnd { files: 0, pages: 0 },
        _ => FromAgent::Hints(Vec::new()),
    }
}

/// Changes the engine's tables at random, in one of the ways in which they change.
pub fn step(engine: &mut Engine, random: &mut impl FnMut(u32) -> u32) {
    let id = 1 + random(4);
    if !engine.vms.contains_key(&id) {
        return add(engine, id);
    }
    let domain = engine.vms[&id].domain.clone();
    let contents = |engine: &Engine, n: u32| {
        let contents = &engine.domains[&domain].contents;
        contents.of(Member { vm: id, file: n })
    };
    match random(40) {
        0 if engine.vms.len() > 1 => engine.remove(id),
        1 => engine.agent_session(id),
        2 => {
            let pages = PAGES - random(2) * 100;
            engine.set_layout(id, &layout(pages), vec![Advice::default()]);
        }
        3..6 => {
            let pair = contents(engine, random(6)).zip(contents(engine, random(6)));
            let (vms, domains) = (&engine.vms, &mut engine.domains);
            if let Some((one, other)) = pair {
                let known = domains.get_mut(&domain).unwrap();
                known.contents.alias(one, other, &|m| cached_ranges(vms, m));
            }
        }
        6..9 => {
            let member = Member {
                vm: id,
                file: random(6),
            };
            let (vms, domains) = (&engine.vms, &mut engine.domains);
            let known = domains.get_mut(&domain).unwrap();
            known
                .contents
                .try_variant(member, &|m| cached_ranges(vms, m));
        }
        9..16 => {
            let content = contents(engine, random(6));
            let known = engine.domains.get_mut(&domain).unwrap();
            for page in 0..random(100) {
                let Some(content) = content else { break };
                if random(3) > 0 {
                    known.contents.index(content, page, 1000 * content + page);
                } else {
                    known.contents.unindex(content, page);
                }
            }
        }
        16..19 => {
            let table = &mut engine.vms.get_mut(&id).unwrap().table;
            for at in 0..PAGES {
                let mapped = Mapped {
                    store_page: random(5000),
                    shared: true,
                };
                table.set_mapped(at, Some(mapped).filter(|_| random(2) == 0));
            }
            let own: Vec<u64> = (0..PAGES.div_ceil(64))
                .map(|_| u64::from(random(1 << 31)))
                .collect();
            table.set_copied(&own);
            table.set_views(std::iter::once(random(100)..300));
            table.set_foldable(&own);
        }
        _ => {
            let message = message(random);
            engine.agent(id, message);
        }
    }
}
