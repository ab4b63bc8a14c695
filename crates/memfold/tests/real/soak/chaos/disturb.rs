//! The chaos test's disturbances, for example killed processes and full disks. They come in random
//! order, two at a time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_vm::Vm;
use rustix::process::{Pid, Signal, kill_process};

use super::testbed::{END, FileSystem, LENDER_END, Service, Testbed, lock};
use crate::served::Random;

/// Causes a disturbance. Returns a text about its target; `None` if there is no target.
type Act = fn(&Testbed, &mut Random) -> Option<String>;

/// All disturbances, each with its name. Agents are disturbed from within their guests
/// ([`super::guests`]).
const ALL: [(&str, Act); 27] = [
    ("QEMU stopped", |t, r| held(&any_vm(t, r)?, r)),
    ("QEMU slowed", |t, r| slowed(&any_vm(t, r)?, r)),
    ("QEMU killed", |t, r| killed(throwaway_vm(t, r)?)),
    ("daemon stopped", |t, r| service_held(&t.daemon, r)),
    ("daemon slowed", |t, r| service_slowed(&t.daemon, r)),
    ("daemon killed", |t, r| service_killed(&t.daemon, r)),
    ("daemon asked to end", |t, r| {
        service_ended(t, &t.daemon, END, r)
    }),
    ("lender stopped", |t, r| service_held(&t.lender, r)),
    ("lender slowed", |t, r| service_slowed(&t.lender, r)),
    ("lender killed", |t, r| service_killed(&t.lender, r)),
    ("lender asked to end", |t, r| {
        service_ended(t, &t.lender, LENDER_END, r)
    }),
    ("nbdkit stopped", |t, r| held(&nbdkit(t, r)?, r)),
    ("nbdkit slowed", |t, r| slowed(&nbdkit(t, r)?, r)),
    ("nbdkit killed", |t, r| killed(nbdkit(t, r)?)),
    ("relay stopped", |t, r| held(&relay(t, r)?, r)),
    ("relay slowed", |t, r| slowed(&relay(t, r)?, r)),
    ("relay killed", |t, r| killed(relay(t, r)?)),
    ("libvirtd stopped", |t, r| held(&libvirtd(t)?, r)),
    ("libvirtd slowed", |t, r| slowed(&libvirtd(t)?, r)),
    ("libvirtd killed", |t, r| libvirtd_killed(t, r)),
    ("domain started", |t, r| {
        t.libvirt.virsh("start", r, &t.faults)
    }),
    ("domain destroyed", |t, r| {
        t.libvirt.virsh("destroy", r, &t.faults)
    }),
    ("state directory full", |t, r| full(t, &t.state, r)),
    ("overlays' disk full", |t, r| full(t, &t.overlays, r)),
    ("snapshots' disk full", |t, r| full(t, &t.snapshots, r)),
    ("snapshots' disk frozen", |t, r| Some(frozen(t, r))),
    ("snapshots' disk slowed", |t, r| Some(disk_slowed(t, r))),
];

/// VMs that the test itself needs to the end; all others may be killed at any time.
pub const KEPT: [&str; 3] = ["writer", "swapper", "clone-1"];

/// Only one file system is full at a time.
static FULL: Mutex<()> = Mutex::new(());

/// Length of a stop: usually below all time limits of the product, sometimes above.
fn time(random: &mut Random) -> Duration {
    if random.below(6) == 0 {
        Duration::from_secs(12) + random.below_ms(13_000)
    } else {
        Duration::from_millis(50) + random.below_ms(4000)
    }
}

struct Target {
    pid: Pid,
    name: String,
}

fn held(target: &Target, random: &mut Random) -> Option<String> {
    let time = time(random);
    kill_process(target.pid, Signal::STOP).ok()?;
    std::thread::sleep(time);
    let _ = kill_process(target.pid, Signal::CONT);
    Some(format!("{} for {:.1} s", target.name, time.as_secs_f64()))
}

/// Lets a process run a third of the time, in short turns.
fn slowed(target: &Target, random: &mut Random) -> Option<String> {
    let time = Duration::from_secs(2) + random.below_ms(8000);
    turns(target.pid, time)?;
    Some(format!("{} for {:.1} s", target.name, time.as_secs_f64()))
}

fn turns(pid: Pid, time: Duration) -> Option<()> {
    let end = Instant::now() + time;
    kill_process(pid, Signal::STOP).ok()?;
    while Instant::now() < end && kill_process(pid, Signal::STOP).is_ok() {
        std::thread::sleep(Duration::from_millis(60));
        let _ = kill_process(pid, Signal::CONT);
        std::thread::sleep(Duration::from_millis(30));
    }
    let _ = kill_process(pid, Signal::CONT);
    Some(())
}

fn killed(target: Target) -> Option<String> {
    kill_process(target.pid, Signal::KILL).ok()?;
    Some(target.name)
}

fn of_service(service: &Service) -> Option<Target> {
    Some(Target {
        pid: service.pid()?,
        name: service.name.into(),
    })
}

fn service_held(service: &Service, random: &mut Random) -> Option<String> {
    let _hands = service.hands();
    held(&of_service(service)?, random)
}

fn service_slowed(service: &Service, random: &mut Random) -> Option<String> {
    let _hands = service.hands();
    slowed(&of_service(service)?, random)
}

fn service_killed(service: &Service, random: &mut Random) -> Option<String> {
    let _hands = service.hands();
    let target = of_service(service)?;
    service.kill();
    let away = random.below_ms(3000);
    std::thread::sleep(away);
    Some(format!("{}, away for {away:?}", target.name))
}

fn service_ended(
    testbed: &Testbed,
    service: &Service,
    limit: Duration,
    random: &mut Random,
) -> Option<String> {
    let _hands = service.hands();
    let target = of_service(service)?;
    service.end(limit, &testbed.faults);
    let away = random.below_ms(3000);
    std::thread::sleep(away);
    Some(format!("{}, away for {away:?}", target.name))
}

/// Returns the names of the present VMs, in order.
pub fn vms(testbed: &Testbed) -> Vec<String> {
    names(&testbed.state.place.join("vms"))
}

/// Returns the names in a directory, in order; none if there is no such directory.
pub fn names(place: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort();
    names
}

fn vm_of(testbed: &Testbed, names: &[String], random: &mut Random) -> Option<Target> {
    let name = one_of(names, random)?;
    let vm = Vm::find(testbed.state(), name).ok()?;
    Some(Target {
        pid: vm.pid(),
        name: name.clone(),
    })
}

pub fn one_of<'a, T>(of: &'a [T], random: &mut Random) -> Option<&'a T> {
    let number = random.below(of.len().max(1) as u64);
    of.get(usize::try_from(number).unwrap())
}

fn any_vm(testbed: &Testbed, random: &mut Random) -> Option<Target> {
    vm_of(testbed, &vms(testbed), random)
}

fn throwaway_vm(testbed: &Testbed, random: &mut Random) -> Option<Target> {
    let mut names = vms(testbed);
    names.retain(|name| !KEPT.contains(&name.as_str()));
    vm_of(testbed, &names, random)
}

/// Finds a process whose standard error is a file below a directory.
fn with_log_in(place: &Path, comm: &str, random: &mut Random) -> Option<Target> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let is_it = std::fs::read_link(entry.path().join("fd/2"))
            .is_ok_and(|to| to.starts_with(place))
            && std::fs::read_to_string(entry.path().join("comm")).is_ok_and(|c| c.trim() == comm);
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let Some(pid) = pid.filter(|_| is_it).and_then(Pid::from_raw) {
            found.push(pid);
        }
    }
    let pid = *one_of(&found, random)?;
    Some(Target {
        pid,
        name: format!("{comm} ({})", pid.as_raw_nonzero()),
    })
}

fn nbdkit(testbed: &Testbed, random: &mut Random) -> Option<Target> {
    with_log_in(&testbed.root.join("lending"), "nbdkit", random)
}

fn relay(testbed: &Testbed, random: &mut Random) -> Option<Target> {
    with_log_in(&testbed.state.place.join("vms"), "memfold", random)
}

fn libvirtd(testbed: &Testbed) -> Option<Target> {
    Some(Target {
        pid: testbed.libvirt.libvirtd()?,
        name: "libvirtd".into(),
    })
}

fn libvirtd_killed(testbed: &Testbed, random: &mut Random) -> Option<String> {
    let away = random.below_ms(3000);
    testbed.libvirt.restart(away)?;
    Some(format!("away for {away:?}"))
}

/// Time for which a disk counts as full after it was full.
const FULL_IS_FELT: Duration = Duration::from_secs(3);

fn full(testbed: &Testbed, disk: &FileSystem, random: &mut Random) -> Option<String> {
    let _alone = lock(&FULL);
    testbed.is_full.store(true, Ordering::Relaxed);
    let left = *one_of(&[0, 64, 1024], random)?;
    let filler = disk.fill(left, random.below(1 << 20));
    let time = time(random);
    std::thread::sleep(time);
    // The file system may be frozen as well; the thread that froze it thaws it.
    let _ = std::fs::remove_file(filler);
    // A daemon that started while the disk was full may end a moment later for that reason, and
    // must not be taken for one that died by itself.
    std::thread::sleep(FULL_IS_FELT);
    testbed.is_full.store(false, Ordering::Relaxed);
    Some(format!("{left} KiB left for {:.1} s", time.as_secs_f64()))
}

/// Freezes a file system. Processes that write to it cannot be ended meanwhile, so the daemon is
/// not asked to end.
fn frozen(testbed: &Testbed, random: &mut Random) -> String {
    let _hands = testbed.daemon.hands();
    let time = time(random);
    testbed.snapshots.freeze();
    std::thread::sleep(time);
    testbed.snapshots.thaw();
    format!("for {:.1} s", time.as_secs_f64())
}

/// Freezes a file system for two thirds of the time, in short turns.
fn disk_slowed(testbed: &Testbed, random: &mut Random) -> String {
    let _hands = testbed.daemon.hands();
    let time = Duration::from_secs(2) + random.below_ms(8000);
    let end = Instant::now() + time;
    while Instant::now() < end {
        testbed.snapshots.freeze();
        std::thread::sleep(Duration::from_millis(60));
        testbed.snapshots.thaw();
        std::thread::sleep(Duration::from_millis(30));
    }
    format!("for {:.1} s", time.as_secs_f64())
}

/// Disturbances that remain, and the number of each kind so far.
pub struct Deck {
    cards: Mutex<(Random, Vec<usize>)>,
    done: Mutex<BTreeMap<&'static str, u64>>,
    without: Vec<String>,
}

impl Deck {
    /// Creates the deck. `without`: names of disturbances to leave out.
    pub fn new(seed: u64, without: &[String]) -> Self {
        Self {
            cards: Mutex::new((Random(seed), Vec::new())),
            done: Mutex::default(),
            without: without.to_vec(),
        }
    }

    /// Draws the next disturbance, and a random number generator for it.
    fn draw(&self) -> (&'static str, Act, Random) {
        let mut cards = lock(&self.cards);
        let (random, left) = &mut *cards;
        if left.is_empty() {
            let is_in = |&at: &usize| !self.without.iter().any(|name| name == ALL[at].0);
            left.extend((0..ALL.len()).filter(is_in));
            random.shuffle(left);
        }
        let (name, act) = ALL[left.pop().unwrap()];
        let own = Random(random.below(u64::MAX) | 1);
        (name, act, own)
    }

    pub fn run(&self, testbed: &Testbed, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            let (name, act, mut random) = self.draw();
            if let Some(whom) = act(testbed, &mut random) {
                testbed.faults.note(&format!("{name}: {whom}"));
                *lock(&self.done).entry(name).or_default() += 1;
            }
            std::thread::sleep(random.below_ms(2000));
        }
    }

    /// Returns a table of the number of disturbances of each kind.
    pub fn table(&self) -> String {
        let done = lock(&self.done);
        let line = |(name, _): &(&str, Act)| {
            if self.without.iter().any(|one| one == name) {
                format!("{name:24} left out")
            } else {
                format!("{name:24} {:5}", done.get(name).unwrap_or(&0))
            }
        };
        ALL.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// Returns the disturbances that never happened.
    pub fn missing(&self) -> Vec<&'static str> {
        let done = lock(&self.done);
        let names = ALL.iter().map(|(name, _)| *name);
        names
            .filter(|name| !done.contains_key(name) && !self.without.iter().any(|one| one == name))
            .collect()
    }
}
