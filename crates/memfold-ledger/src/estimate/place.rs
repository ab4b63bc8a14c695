//! Proposes which VMs should run on the same host, because they have much memory in common. From
//! the fingerprints of several hosts, it computes moves of VMs that lower the total memory use.
//!
//! ```text
//!   a host takes   others + sum over its VMs (RAM + beside) - contents that VMs of one trust domain hold more than once there
//!
//!   repeat the best move of one VM, or exchange of two, as long as it saves enough; a host that lacks memory is
//!   relieved first
//! ```
//! The drawing shows how the memory use of a host is computed, and how moves are chosen. The result
//! is a model: it assumes that folding, KSM or clones share all common contents. Contents that
//! repeat within a single VM are left out, because they move with the VM.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use foldhash::HashMap;
use memfold_units::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use super::fingerprint::{FORMAT, Fingerprint, VmPrint, level_of};

/// Weight of a byte of memory that a host lacks, compared with a byte that is used.
const LACK: u64 = 16;

/// Most moves of a proposal: a safety limit that has never been reached.
const MOST_MOVES: usize = 10_000;

/// Most contents of all VMs that are compared.
const MOST_CONTENTS: usize = 1 << 18;

/// Reason why no placement can be proposed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// Only one host was given, so no VM can move.
    #[error(
        "give the fingerprints of at least two hosts (run 'memfold estimate --fingerprint FILE --key KEY' on each host)"
    )]
    OneHost,
    /// A fingerprint has a format that this version of memfold cannot read.
    #[error(
        "the fingerprint of '{host}' has format {format}; this memfold reads format {FORMAT} only"
    )]
    Format {
        /// Name of the host that the fingerprint describes.
        host: String,
        /// Number of the fingerprint's format.
        format: u32,
    },
    /// The fingerprints of two hosts, which are named, were made with different keys and cannot be
    /// compared.
    #[error(
        "the fingerprints of '{0}' and '{1}' were made with different keys; copy the key file of one host to the other, and make both fingerprints again"
    )]
    Keys(String, String),
    /// Two fingerprints are of the named host.
    #[error("two fingerprints are of host '{0}'; leave out the older one")]
    Twice(String),
    /// A fingerprint, whose host is named, has amounts of memory that no host has.
    #[error("the fingerprint of '{0}' has amounts of memory that no host has; make it again")]
    Amounts(String),
}

/// Most bytes that all fingerprints together may name: far more than hosts have, and few enough to
/// be added.
const MOST_BYTES: u64 = 1 << 60;

/// Proposed moves of VMs between hosts, and the memory that the moves save.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// Memory use of each host before and after the moves, in the order of the fingerprints given.
    pub hosts: Vec<PlacedHost>,
    /// Moves to make, in this order. An exchange of two VMs is two moves.
    pub moves: Vec<Move>,
    /// Bytes that all hosts together would use now, if all shareable contents were shared.
    pub now_bytes: u64,
    /// Bytes that all hosts together would use after the moves, if all shareable contents were
    /// shared.
    pub then_bytes: u64,
    /// Error bar (95 %) of the saving (`now_bytes` - `then_bytes`), due to sampling.
    pub plus_minus_bytes: u64,
    /// Whether all moves that save enough were found. False: the time for the search was over, and
    /// more may be found after these moves.
    pub complete: bool,
}

/// Memory use of a host before and after the proposed moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlacedHost {
    /// Name of the host.
    pub host: String,
    /// Largest number of bytes that may be used on the host: its memory less the reserve.
    pub limit_bytes: u64,
    /// Bytes that the host would use now, if all shareable contents were shared.
    pub now_bytes: u64,
    /// Bytes that the host would use after the moves, if all shareable contents were shared.
    pub then_bytes: u64,
    /// Names of the VMs on the host after the moves.
    pub vms: Vec<String>,
}

/// A proposed move of one VM from a host to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// Name of the VM that is moved.
    pub vm: String,
    /// Name of the host that the VM runs on.
    pub from: String,
    /// Name of the host to move the VM to.
    pub to: String,
    /// Bytes that the move saves on all hosts together. The first move of an exchange has the
    /// saving of both moves, the second has 0.
    pub saves_bytes: i64,
}

/// A VM's contents and trust domain, as numbers.
struct Vm<'a> {
    print: &'a VmPrint,
    contents: Vec<u64>,
    domain: u32,
}

impl Vm<'_> {
    const fn bytes(&self) -> u64 {
        self.print.ram_bytes + self.print.beside_bytes
    }
}

struct Host {
    others: u64,
    limit: u64,
    vms: BTreeSet<usize>,
    /// Number of VMs of this host that hold a content, by trust domain and content.
    holders: HashMap<(u32, u64), u32>,
    apart: u64,
    /// Number of copies of contents beyond the first copy.
    common: u64,
}

struct Model<'a> {
    vms: Vec<Vm<'a>>,
    hosts: Vec<Host>,
    bytes_a_content: u64,
    /// When the search ends, complete or not; `None`: when it is complete.
    end: Option<Instant>,
}

impl Model<'_> {
    fn is_late(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }

    fn taken(&self, host: usize) -> u64 {
        let host = &self.hosts[host];
        let all = host.others + host.apart;
        all.saturating_sub(host.common.saturating_mul(self.bytes_a_content))
    }

    fn put(&mut self, vm: usize, host: usize) {
        let (vm_of, host) = (&self.vms[vm], &mut self.hosts[host]);
        for &content in &vm_of.contents {
            let holders = host.holders.entry((vm_of.domain, content)).or_default();
            *holders += 1;
            host.common += u64::from(*holders > 1);
        }
        host.apart += vm_of.bytes();
        host.vms.insert(vm);
    }

    fn take(&mut self, vm: usize, host: usize) {
        let (vm_of, host) = (&self.vms[vm], &mut self.hosts[host]);
        for &content in &vm_of.contents {
            if let Some(holders) = host.holders.get_mut(&(vm_of.domain, content)) {
                host.common -= u64::from(*holders > 1);
                *holders -= 1;
            }
        }
        host.apart -= vm_of.bytes();
        host.vms.remove(&vm);
    }

    /// Returns the memory used and lacked by the two hosts of a step, before and after the step.
    fn weigh(&mut self, step: Step) -> (Weight, Weight) {
        let before = self.weight(step);
        self.apply(step);
        let after = self.weight(step);
        self.apply(Step {
            from: step.to,
            to: step.from,
            ..step
        });
        (before, after)
    }

    fn weight(&self, step: Step) -> Weight {
        let hosts = [step.from, step.to];
        Weight {
            taken: hosts.iter().map(|&host| i128::from(self.taken(host))).sum(),
            lacks: hosts.map(|host| self.lacks(host)),
        }
    }

    fn lacks(&self, host: usize) -> u64 {
        self.taken(host).saturating_sub(self.hosts[host].limit)
    }

    fn apply(&mut self, step: Step) {
        let Step { vm, from, to, back } = step;
        self.take(vm, from);
        if let Some(back) = back {
            self.take(back, to);
            self.put(back, from);
        }
        self.put(vm, to);
    }

    /// Returns all VMs, each with its host.
    fn places(&self) -> Vec<(usize, usize)> {
        (0..self.hosts.len())
            .flat_map(|host| self.hosts[host].vms.iter().map(move |&vm| (vm, host)))
            .collect()
    }

    fn moves(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (vm, from) in self.places() {
            let others = (0..self.hosts.len()).filter(|&to| to != from);
            let back = None;
            steps.extend(others.map(|to| Step { vm, from, to, back }));
        }
        steps
    }

    fn exchanges(&self) -> Vec<Step> {
        let places = self.places();
        let mut steps = Vec::new();
        for (at, &(vm, from)) in places.iter().enumerate() {
            let others = places[at + 1..].iter().filter(|(_, to)| *to != from);
            steps.extend(others.map(|&(back, to)| Step {
                vm,
                from,
                to,
                back: Some(back),
            }));
        }
        steps
    }

    /// Returns the step that saves most, among the steps that save at least `least_bytes`. Of equal
    /// steps, the first is chosen, so that the same fingerprints give the same proposal. No step
    /// may increase the memory that a host lacks. Reducing this lack counts [`LACK`] times as much
    /// as saving. When the search has to end, only the steps before are considered.
    fn best(&mut self, steps: Vec<Step>, least_bytes: u64) -> Option<Step> {
        let mut best: Option<(i128, Step)> = None;
        for step in steps {
            if self.is_late() {
                break;
            }
            let (before, after) = self.weigh(step);
            if (0..2).any(|host| after.lacks[host] > before.lacks[host]) {
                continue;
            }
            let least = i128::from(least_bytes) * if step.back.is_some() { 2 } else { 1 };
            let lack = |weight: &Weight| i128::from(weight.lacks[0]) + i128::from(weight.lacks[1]);
            let relief = lack(&before) - lack(&after);
            let relieves = relief > 0 && (relief >= least || lack(&after) == 0);
            let saves = before.taken - after.taken;
            let gain = saves + relief * i128::from(LACK);
            let is_enough = relieves || saves >= least;
            if gain > 0 && is_enough && best.is_none_or(|(most, _)| gain > most) {
                best = Some((gain, step));
            }
        }
        best.map(|(_, step)| step)
    }
}

/// Memory that two hosts use together, and memory that each lacks, in bytes.
struct Weight {
    taken: i128,
    lacks: [u64; 2],
}

/// A change of placement: a VM moves from one host to another. In an exchange, the VM `back` moves
/// the opposite way. VMs and hosts are numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    vm: usize,
    from: usize,
    to: usize,
    back: Option<usize>,
}

/// Proposes moves of VMs that save at least `least_bytes` each. A move may save less if it relieves
/// a host that uses more than its memory less `reserve_percent` of it. The search ends after
/// `limit` at the latest: with hundreds of VMs on many hosts, it would take hours.
///
/// # Errors
///
/// A [`PlaceError`] if the fingerprints cannot be compared, or if there are fewer than two.
pub fn propose(
    prints: &[Fingerprint],
    least_bytes: u64,
    reserve_percent: f64,
    limit: Option<Duration>,
) -> Result<Proposal, PlaceError> {
    check(prints)?;
    let mut model = model(prints, reserve_percent);
    model.end = limit.map(|limit| Instant::now() + limit);
    let hosts = 0..prints.len();
    let all = |model: &Model<'_>| hosts.clone().map(|h| model.taken(h)).collect::<Vec<_>>();
    let now = all(&model);
    let mut drawn = 0;
    let mut moves = Vec::new();
    while moves.len() < MOST_MOVES {
        // Moves are tried before exchanges, of which there are many more.
        let moved = model.best(model.moves(), least_bytes);
        let Some(step) = moved.or_else(|| model.best(model.exchanges(), least_bytes)) else {
            break;
        };
        let before: u64 = all(&model).iter().sum();
        let Step { from, to, .. } = step;
        let common = |model: &Model<'_>| [from, to].map(|host| model.hosts[host].common);
        let had = common(&model);
        model.apply(step);
        let has = common(&model);
        // Contents that one host loses and the other gains were drawn at both.
        drawn += had[0].abs_diff(has[0]) + had[1].abs_diff(has[1]);
        let after: u64 = all(&model).iter().sum();
        let saves = i64::try_from(i128::from(before) - i128::from(after)).unwrap_or(i64::MAX);
        let told = |vm: usize, from: usize, to: usize, saves| Move {
            vm: model.vms[vm].print.name.clone(),
            from: prints[from].host.clone(),
            to: prints[to].host.clone(),
            saves_bytes: saves,
        };
        moves.push(told(step.vm, from, to, saves));
        moves.extend(step.back.map(|vm| told(vm, to, from, 0)));
    }
    let then = all(&model);
    // The number of sampled contents has the distribution of rare events: its deviation is its
    // square root.
    let plus_minus = 1.96 * (drawn as f64).sqrt() * model.bytes_a_content as f64;
    let name = |&vm: &usize| model.vms[vm].print.name.clone();
    let hosts = prints.iter().enumerate().map(|(number, print)| PlacedHost {
        host: print.host.clone(),
        limit_bytes: model.hosts[number].limit,
        now_bytes: now[number],
        then_bytes: then[number],
        vms: model.hosts[number].vms.iter().map(name).collect(),
    });
    Ok(Proposal {
        hosts: hosts.collect(),
        moves,
        now_bytes: now.iter().sum(),
        then_bytes: then.iter().sum(),
        plus_minus_bytes: whole(plus_minus),
        complete: !model.is_late(),
    })
}

/// Rounds an amount down to whole bytes.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a cast of a float ends at the type's bounds
const fn whole(bytes: f64) -> u64 {
    bytes as u64
}

fn check(prints: &[Fingerprint]) -> Result<(), PlaceError> {
    if let Some(other) = prints.iter().find(|print| print.format != FORMAT) {
        return Err(PlaceError::Format {
            host: other.host.clone(),
            format: other.format,
        });
    }
    let first = prints.split_first().filter(|(_, rest)| !rest.is_empty());
    let (first, rest) = first.ok_or(PlaceError::OneHost)?;
    if let Some(other) = rest.iter().find(|print| print.key != first.key) {
        return Err(PlaceError::Keys(first.host.clone(), other.host.clone()));
    }
    let mut all = 0_u64;
    for print in prints {
        let vms = (print.vms.iter()).flat_map(|vm| [vm.ram_bytes, vm.beside_bytes]);
        for bytes in vms.chain([print.memory_bytes, print.others_bytes]) {
            all = all.saturating_add(bytes);
        }
        if all > MOST_BYTES {
            return Err(PlaceError::Amounts(print.host.clone()));
        }
    }
    let mut names = BTreeSet::new();
    match prints.iter().find(|print| !names.insert(&print.host)) {
        Some(twice) => Err(PlaceError::Twice(twice.host.clone())),
        None => Ok(()),
    }
}

fn model(prints: &[Fingerprint], reserve_percent: f64) -> Model<'_> {
    // Uses the contents that are sampled on every host, and no more than can be compared for each
    // pair of VMs.
    let mut level = prints.iter().map(|print| print.level).max().unwrap_or(0);
    let all = || {
        prints
            .iter()
            .flat_map(|p| &p.vms)
            .flat_map(|vm| &vm.contents)
    };
    while all().filter(|&&content| level_of(content) >= level).count() > MOST_CONTENTS {
        level += 1;
    }
    let mut domains: HashMap<String, u32> = HashMap::default();
    let mut model = Model {
        vms: Vec::new(),
        hosts: Vec::new(),
        bytes_a_content: PAGE_SIZE << level.min(40),
        end: None,
    };
    for (number, print) in prints.iter().enumerate() {
        let kept = print.memory_bytes as f64 * (1.0 - reserve_percent / 100.0);
        model.hosts.push(Host {
            others: print.others_bytes,
            limit: whole(kept),
            vms: BTreeSet::new(),
            holders: HashMap::default(),
            apart: 0,
            common: 0,
        });
        for vm in &print.vms {
            // A VM without a trust domain gets a domain of its own on every host.
            let name = match &vm.domain {
                Some(domain) => format!("domain/{domain}"),
                None => format!("vm/{number}/{}", vm.name),
            };
            let next = u32::try_from(domains.len()).unwrap_or(u32::MAX);
            let domain = *domains.entry(name).or_insert(next);
            let drawn = vm.contents.iter().copied();
            model.vms.push(Vm {
                print: vm,
                contents: drawn
                    .filter(|&content| level_of(content) >= level)
                    .collect(),
                domain,
            });
            model.put(model.vms.len() - 1, number);
        }
    }
    model
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Makes a VM of `mib` MiB that holds contents of a kind: numbers from `kind * 1000` on, at
    /// level 0.
    fn vm(name: &str, domain: Option<&str>, kind: u64, mib: u64) -> VmPrint {
        VmPrint {
            name: name.into(),
            domain: domain.map(str::to_owned),
            ram_bytes: mib * MIB,
            beside_bytes: 0,
            contents: (0..mib / 2 * 256).map(|page| kind << 32 | page).collect(),
        }
    }

    fn host(name: &str, gib: u64, vms: Vec<VmPrint>) -> Fingerprint {
        Fingerprint {
            format: FORMAT,
            host: name.into(),
            key: "k".into(),
            level: 0,
            memory_bytes: gib << 30,
            others_bytes: 100 * MIB,
            vms,
        }
    }

    fn propose(
        prints: &[Fingerprint],
        least_bytes: u64,
        reserve_percent: f64,
    ) -> Result<Proposal, PlaceError> {
        super::propose(prints, least_bytes, reserve_percent, None)
    }

    fn web(name: &str) -> VmPrint {
        vm(name, Some("shop"), 1, 100)
    }

    fn db(name: &str) -> VmPrint {
        vm(name, Some("shop"), 2, 100)
    }

    fn names(proposal: &Proposal) -> Vec<Vec<&str>> {
        let of = |host: &PlacedHost| -> Vec<String> {
            let mut vms = host.vms.clone();
            vms.sort();
            vms
        };
        let all: Vec<Vec<String>> = proposal.hosts.iter().map(of).collect();
        all.iter()
            .map(|vms| {
                vms.iter()
                    .map(|name| &*Box::leak(name.clone().into_boxed_str()))
                    .collect()
            })
            .collect()
    }

    #[test]
    fn the_placement_proposal_moves_similar_vms_to_the_same_host() {
        let prints = [
            host("a", 8, vec![web("w1"), db("d1"), web("w2")]),
            host("b", 8, vec![db("d2"), web("w3"), db("d3")]),
        ];
        let found = propose(&prints, MIB, 5.0).unwrap();
        // All six VMs on one host would save no more than each kind on its own host, so no VM moves
        // without a saving.
        assert_eq!(found.now_bytes - found.then_bytes, 2 * 50 * MIB);
        let all: i64 = found.moves.iter().map(|m| m.saves_bytes).sum();
        assert_eq!(all, 100 << 20);
        for kind in ["w", "d"] {
            let has = |vms: &Vec<&str>| vms.iter().any(|vm| vm.starts_with(kind));
            assert_eq!(
                names(&found).iter().filter(|vms| has(vms)).count(),
                1,
                "{found:?}"
            );
        }
        assert!(found.plus_minus_bytes > 0);
        assert_eq!(propose(&prints, MIB, 5.0).unwrap(), found, "the same again");
        // Without any time, nothing is found, and the proposal says so.
        let none = super::propose(&prints, MIB, 5.0, Some(Duration::ZERO)).unwrap();
        assert!(found.complete && !none.complete && none.moves.is_empty());
        // A move that saves less than the requested minimum is not proposed.
        let still = propose(&prints, 51 * MIB, 5.0).unwrap();
        assert!(still.moves.is_empty());
        assert_eq!(still.now_bytes, still.then_bytes);
    }

    #[test]
    fn if_both_hosts_are_full_the_placement_proposal_swaps_vms_between_them() {
        // Each host uses 100 MiB for others and 100 for each of two VMs: 300 of 330.
        let mut prints = [
            host("a", 1, vec![web("w1"), db("d1")]),
            host("b", 1, vec![web("w2"), db("d2")]),
        ];
        for print in &mut prints {
            print.memory_bytes = 330 * MIB;
        }
        let found = propose(&prints, MIB, 0.0).unwrap();
        assert_eq!(found.moves.len(), 2, "{found:?}");
        assert_eq!(found.moves[0].saves_bytes, 100 << 20);
        assert_eq!(found.moves[1].saves_bytes, 0);
        let mut placed = names(&found);
        placed.sort();
        assert_eq!(placed, [["d1", "d2"], ["w1", "w2"]]);
        assert!(
            found
                .hosts
                .iter()
                .all(|host| host.then_bytes <= host.limit_bytes)
        );
    }

    #[test]
    fn if_a_host_lacks_memory_the_placement_proposal_moves_a_vm_even_if_nothing_is_saved() {
        let mut prints = [
            host("a", 1, vec![web("w1"), web("w2"), db("d1")]),
            host("b", 1, Vec::new()),
        ];
        prints[0].memory_bytes = 300 * MIB;
        let found = propose(&prints, 1 << 30, 0.0).unwrap();
        assert_eq!(names(&found), [vec!["w1", "w2"], vec!["d1"]]);
        assert_eq!(found.moves.len(), 1);
    }

    #[test]
    fn no_move_of_the_placement_proposal_leaves_a_host_with_less_than_its_reserve() {
        // Both VMs on b would share 50 MiB and take 250 MiB, but b has 240.
        let mut prints = [host("a", 8, vec![web("w1")]), host("b", 8, vec![web("w2")])];
        for print in &mut prints {
            print.memory_bytes = 240 * MIB;
        }
        assert!(propose(&prints, 0, 0.0).unwrap().moves.is_empty());
        // Moving a very small VM does not relieve a host that lacks memory.
        let crumb = vm("crumb", Some("shop"), 3, 2);
        let mut prints = [
            host("a", 8, vec![crumb, db("d1")]),
            host("b", 8, vec![web("w1")]),
        ];
        prints[0].memory_bytes = 150 * MIB;
        prints[1].memory_bytes = 210 * MIB;
        let found = propose(&prints, 16 * MIB, 0.0).unwrap();
        assert!(found.moves.is_empty(), "{found:?}");
        assert_eq!(propose(&prints, MIB, 0.0).unwrap().moves.len(), 1);
    }

    #[test]
    fn in_a_placement_proposal_vms_of_different_trust_domains_share_no_memory() {
        let alone = |name: &str| vm(name, None, 1, 100);
        let other = vm("o", Some("other"), 1, 100);
        let prints = [
            host("a", 8, vec![web("w1"), alone("x")]),
            host("b", 8, vec![other, alone("x")]),
        ];
        let found = propose(&prints, 0, 0.0).unwrap();
        assert!(found.moves.is_empty(), "{found:?}");
        assert_eq!(found.now_bytes, 600 * MIB);
    }

    #[test]
    fn if_two_hosts_sampled_memory_unequally_the_coarser_sampling_is_used_for_both() {
        // On b, only every 4th content was drawn: contents whose first six bits are 2 or more.
        let at = |level: u64, n: u64| (0..n).map(move |number| level << 58 | number);
        let print = |name: &str, level| VmPrint {
            contents: at(0, if level == 0 { 300 } else { 0 })
                .chain(at(2, 100))
                .collect(),
            ..vm(name, Some("shop"), 1, 100)
        };
        let mut prints = [
            host("a", 8, vec![print("w1", 0)]),
            host("b", 8, vec![print("w2", 2)]),
        ];
        prints[1].level = 2;
        let found = propose(&prints, 0, 0.0).unwrap();
        assert_eq!(found.now_bytes - found.then_bytes, 100 * 4 * PAGE_SIZE);
    }

    #[test]
    fn memory_fingerprints_from_one_host_only_or_with_different_keys_are_refused() {
        let one = host("a", 1, Vec::new());
        assert_eq!(propose(&[], 0, 0.0), Err(PlaceError::OneHost));
        assert_eq!(
            propose(std::slice::from_ref(&one), 0, 0.0),
            Err(PlaceError::OneHost)
        );
        let twice = propose(&[one.clone(), one.clone()], 0, 0.0);
        assert_eq!(twice, Err(PlaceError::Twice("a".into())));
        let mut huge = host("b", 1, vec![web("w")]);
        huge.vms[0].beside_bytes = u64::MAX;
        let amounts = propose(&[host("a", 1, vec![]), huge], u64::MAX, 0.0);
        assert_eq!(amounts, Err(PlaceError::Amounts("b".into())));
        let mut other = host("b", 1, Vec::new());
        other.key = "l".into();
        let keys = propose(&[one.clone(), other.clone()], 0, 0.0);
        assert_eq!(keys, Err(PlaceError::Keys("a".into(), "b".into())));
        other.format = 2;
        let format = propose(&[one, other], 0, 0.0);
        assert_eq!(
            format,
            Err(PlaceError::Format {
                host: "b".into(),
                format: 2
            })
        );
    }
}
