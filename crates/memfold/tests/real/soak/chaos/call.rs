//! The chaos test's calls: every command of the program `memfold`, in random order, each with a
//! deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::process::{Command, ExitStatus};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_testkit::patience;
use rustix::process::{Pid, Signal, kill_process};

use super::disturb::{KEPT, names, one_of, vms};
use super::libvirt::DOMAINS;
use super::testbed::{Testbed, lock, threads};
use crate::served::Random;

/// Commands that are not called, each with the reason.
const LEFT_OUT: [(&str, &str); 12] = [
    ("serve", "it is the daemon: disturbances start and end it"),
    ("vm edit", "it runs an editor; 'vm define' sends the same"),
    ("vm console", "it ends only when its user or its VM ends it"),
    ("demo", "it has a daemon and VMs of its own, for minutes"),
    (
        "self-test",
        "it has a daemon and VMs of its own, for minutes",
    ),
    (
        "bench",
        "studies have daemons and VMs of their own, for minutes to hours",
    ),
    (
        "snapshot push",
        "it copies a gigabyte of disk image; beside::object_store kills daemons meanwhile",
    ),
    ("snapshot pull", "as snapshot push"),
    (
        "snapshot rekey",
        "no snapshot is encrypted here; memfold/tests/faults injects faults into it",
    ),
    (
        "pve enable",
        "it only writes a file of a node of Proxmox VE",
    ),
    ("pve disable", "as pve enable"),
    ("pve status", "as pve enable"),
];

/// Seconds that a call may take longer than without disturbances: the daemon is stopped for at most
/// 25 s, its disk for as long, and the daemon runs a third of the time for 10 s.
const SLACK: u64 = 90;

/// Pause of a client after it found no daemon.
const PAUSE: Duration = Duration::from_millis(300);

/// Most throwaway VMs, snapshots and segments at the same time.
const MOST: usize = 4;

/// Name of the only VM that is defined. It is a throwaway VM when it runs.
const DEFINED: &str = "t-defined";

/// A command, the seconds that it may take according to the documents (docs/operating/vm-states.md,
/// its own timeouts), and a function that returns its arguments.
type Called = (&'static str, u64, fn(&mut Chooser) -> Vec<String>);

const CALLED: [Called; 58] = [
    ("doctor", 60, |c| {
        let place = c.testbed.root.join("doctor").display().to_string();
        words(&["doctor", "--state", &place])
    }),
    ("dashboard", 10, |_| words(&["dashboard", "--role", "read"])),
    ("vm run", 30, |c| c.run_vm()),
    ("vm define", 30, |c| c.define_vm()),
    ("vm show", 10, |_| words(&["vm", "show", DEFINED])),
    ("vm undefine", 30, |_| words(&["vm", "undefine", DEFINED])),
    ("vm start", 30, |_| words(&["vm", "start", DEFINED])),
    ("vm autostart", 30, |c| match c.random.below(2) {
        0 => words(&["vm", "autostart", DEFINED]),
        _ => words(&["vm", "autostart", DEFINED, "--disable"]),
    }),
    ("vm list", 10, |_| words(&["vm", "list", "--json"])),
    ("vm stop", 30, |c| {
        let vm = c.throwaway();
        let timeout = c.one(&["0", "2", "10"]);
        words(&["vm", "stop", &vm, "--timeout", timeout])
    }),
    ("vm pause", 30, |c| {
        let vm = c.throwaway();
        words(&["vm", "pause", &vm])
    }),
    ("vm resume", 20, |c| {
        let vm = c.any_vm();
        words(&["vm", "resume", &vm])
    }),
    ("vm reboot", 90, |c| {
        let vm = c.throwaway_with_guest();
        words(&["vm", "reboot", &vm, "--timeout", "60"])
    }),
    ("vm logs", 30, |c| {
        let vm = c.any_vm();
        words(&["vm", "logs", &vm])
    }),
    ("vm attach", 30, |c| {
        let qmp = c.testbed.root.join("foreign.sock").display().to_string();
        words(&["vm", "attach", &qmp, "--name", "foreign"])
    }),
    ("vm exec", 30, |c| {
        let vm = c.kept();
        words(&["vm", "exec", "--timeout", "10", &vm, "uptime; sync"])
    }),
    ("report", 30, |c| {
        let vm = c.kept();
        match c.random.below(2) {
            0 => words(&["report"]),
            _ => words(&["report", "--vm", &vm, "--json"]),
        }
    }),
    ("top", 30, |_| words(&["top", "-n", "0.5"])),
    ("estimate", 60, |c| {
        let [file, key] =
            ["fingerprint", "key"].map(|n| c.testbed.root.join(n).display().to_string());
        match c.random.below(2) {
            0 => words(&["estimate", "--cpu", "20", "--seconds", "4"]),
            _ => words(&[
                "estimate",
                "--cpu",
                "50",
                "--fingerprint",
                &file,
                "--key",
                &key,
            ]),
        }
    }),
    ("debt", 30, |c| match c.random.below(2) {
        0 => words(&["debt"]),
        _ => words(&["debt", "--reserve", "6.25%", "--cover", "50"]),
    }),
    ("fold status", 30, |_| words(&["fold", "status"])),
    ("fold pause", 30, |_| words(&["fold", "pause"])),
    ("fold resume", 30, |_| words(&["fold", "resume"])),
    ("fold budget", 30, |_| {
        words(&["fold", "budget", "--cpu", "50"])
    }),
    ("ksm status", 30, |_| words(&["ksm", "status"])),
    ("ksm start", 30, |_| {
        words(&["ksm", "start", "--domain", "lab", "--cpu", "10"])
    }),
    ("ksm stop", 30, |_| words(&["ksm", "stop"])),
    ("ksm explain", 60, |c| {
        let vm = c.kept();
        words(&["ksm", "explain", &vm])
    }),
    ("snapshot save", 300, |c| c.save()),
    ("snapshot restore", 120, |c| {
        if c.has_enough() {
            return c.make_room();
        }
        let (snapshot, vm) = (c.snapshot(), c.name("t-restored"));
        words(&["snapshot", "restore", &snapshot, "--as", &vm])
    }),
    ("snapshot list", 60, |_| words(&["snapshot", "list"])),
    ("snapshot inspect", 10, |c| {
        let snapshot = c.snapshot();
        words(&["snapshot", "inspect", &snapshot])
    }),
    ("snapshot verify", 120, |c| {
        let snapshot = c.snapshot();
        words(&["snapshot", "verify", &snapshot])
    }),
    ("snapshot compact", 120, |c| {
        let snapshot = c.snapshot();
        words(&["snapshot", "compact", &snapshot])
    }),
    ("snapshot remove", 120, |c| {
        let (snapshot, merge) = (c.removable(), c.random.below(3) == 0);
        let mut asked = words(&["snapshot", "remove", &snapshot]);
        asked.extend(merge.then(|| "--merge".to_owned()));
        asked
    }),
    ("clone", 190, |c| {
        if c.has_enough() {
            return c.make_room();
        }
        let (snapshot, prefix) = (c.snapshot(), c.name("t-clone"));
        words(&["clone", &snapshot, "--prefix", &prefix])
    }),
    ("fork", 190, |c| {
        if c.has_enough() {
            return c.make_room();
        }
        let (vm, prefix) = (c.throwaway_with_guest(), c.name("t-fork"));
        words(&["fork", &vm, "--name", &prefix])
    }),
    ("segment build", 120, |c| {
        let (name, from) = (
            c.name("segment"),
            c.testbed.root.join("programs").display().to_string(),
        );
        let name = if c.segments().len() < MOST {
            name
        } else {
            c.segment()
        };
        words(&[
            "segment", "build", &name, "--domain", "lab", "--from", &from,
        ])
    }),
    ("segment rank", 60, |_| {
        words(&["segment", "rank", "--domain", "lab"])
    }),
    ("segment attach", 320, |c| {
        let segment = c.segment();
        words(&["segment", "attach", "writer", &segment])
    }),
    ("segment detach", 320, |c| {
        let segment = c.segment();
        words(&["segment", "detach", "writer", &segment])
    }),
    ("segment list", 30, |_| words(&["segment", "list"])),
    ("segment inspect", 30, |c| {
        let segment = c.segment();
        words(&["segment", "inspect", &segment])
    }),
    ("segment verify", 60, |c| {
        let segment = c.segment();
        words(&["segment", "verify", &segment])
    }),
    ("segment remove", 30, |c| {
        let segment = c.segment();
        words(&["segment", "remove", &segment])
    }),
    ("lend", 60, |c| match c.random.below(3) {
        0 => words(&["lend"]),
        1 => words(&["lend", "--max", "64M"]),
        _ => words(&["lend", "--stop"]),
    }),
    ("borrow", 300, |_| {
        words(&["borrow", "swapper", "--durability", "disk"])
    }),
    ("return", 300, |c| match c.random.below(3) {
        0 => {
            let lease = c.lease();
            words(&["return", "--lease", &lease])
        }
        _ => words(&["return", "swapper"]),
    }),
    ("leases", 30, |c| match c.random.below(2) {
        0 => words(&["leases"]),
        _ => words(&["leases", "--trust", "lender"]),
    }),
    ("host add", 10, |c| {
        c.at_the_lender(&["host", "add", "guest-host"])
    }),
    ("host list", 10, |c| c.at_the_lender(&["host", "list"])),
    ("host remove", 10, |c| {
        c.at_the_lender(&["host", "remove", "guest-host"])
    }),
    ("libvirt enable", 60, |c| {
        let domain = c.one(&DOMAINS);
        words(&["libvirt", "enable", domain, "--domain", "lab"])
    }),
    ("libvirt disable", 60, |c| {
        let domain = c.one(&DOMAINS);
        words(&["libvirt", "disable", domain])
    }),
    ("libvirt status", 60, |_| words(&["libvirt", "status"])),
    ("libvirt attach", 60, |c| {
        let domain = c.one(&DOMAINS);
        words(&["libvirt", "attach", domain])
    }),
    ("config check", 10, |_| {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/memfold.toml");
        words(&["config", "check", shipped])
    }),
    ("plan", 60, |_| words(&["plan"])),
];

/// Returns how often a deck contains a command. Commands on which others depend are more frequent.
fn times(command: &str) -> usize {
    match command {
        "borrow" | "snapshot save" | "clone" | "fork" | "vm resume" | "libvirt enable" => 3,
        _ => 1,
    }
}

/// Returns the time after which a command that does not end by itself is interrupted by Ctrl-C.
fn interrupted(command: &str) -> Option<Duration> {
    (command == "top").then(|| Duration::from_secs(2))
}

/// Returns whether an exit code is documented for a command (docs/operating/exit-codes.md,
/// `--help`).
fn is_agreed(command: &str, code: i32) -> bool {
    match command {
        // Code 4: the VM was switched off.
        "vm stop" => [0, 1, 4].contains(&code),
        // Code 124: the command in the guest reached its time limit.
        "vm exec" => [0, 1, 124].contains(&code),
        _ => [0, 1, 3].contains(&code),
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// Chooses the arguments of a call.
struct Chooser<'a> {
    testbed: &'a Testbed,
    random: Random,
    number: u64,
}

impl Chooser<'_> {
    fn at_the_lender(&mut self, asked: &[&str]) -> Vec<String> {
        let mut all = words(asked);
        if self.random.below(4) > 0 {
            all.extend([
                "--socket".into(),
                self.testbed.lender.socket().display().to_string(),
            ]);
        }
        all
    }

    fn one<'b>(&mut self, of: &[&'b str]) -> &'b str {
        one_of(of, &mut self.random).unwrap()
    }

    /// Returns a name that is not in use yet.
    fn name(&self, begin: &str) -> String {
        format!("{begin}-{}", self.number)
    }

    fn kept(&mut self) -> String {
        self.one(&KEPT).to_owned()
    }

    fn any_vm(&mut self) -> String {
        let all = vms(self.testbed);
        let vm = one_of(&all, &mut self.random).cloned();
        vm.unwrap_or_else(|| "writer".into())
    }

    fn throwaways(&self) -> Vec<String> {
        let mut all = vms(self.testbed);
        all.retain(|name| !KEPT.contains(&name.as_str()));
        all
    }

    fn throwaway(&mut self) -> String {
        let vm = one_of(&self.throwaways(), &mut self.random).cloned();
        vm.unwrap_or_else(|| "t-none".into())
    }

    /// Returns the name of a throwaway VM whose guest has booted.
    fn throwaway_with_guest(&mut self) -> String {
        let mut all = self.throwaways();
        all.retain(|name| !name.starts_with("t-run"));
        let vm = one_of(&all, &mut self.random).cloned();
        vm.unwrap_or_else(|| "t-none".into())
    }

    fn has_enough(&self) -> bool {
        self.throwaways().len() >= MOST
    }

    /// Returns the arguments that end a throwaway VM.
    fn make_room(&mut self) -> Vec<String> {
        let vm = self.throwaway();
        words(&["vm", "stop", &vm, "--timeout", "0"])
    }

    fn run_vm(&mut self) -> Vec<String> {
        if self.has_enough() {
            return self.make_room();
        }
        let name = self.name("t-run");
        words(&[
            "vm", "run", "--name", &name, "--memory", "64M", "--domain", "lab",
        ])
    }

    fn define_vm(&mut self) -> Vec<String> {
        let file = self.testbed.root.join("defined.toml");
        let text = format!("name = '{DEFINED}'\nmemory = '64M'\ndomain = 'lab'\n");
        std::fs::write(&file, text).unwrap();
        words(&["vm", "define", &file.display().to_string()])
    }

    fn snapshots(&self) -> Vec<String> {
        names(&self.testbed.snapshots.place.join("shelf"))
    }

    fn snapshot(&mut self) -> String {
        let all = self.snapshots();
        let one = one_of(&all, &mut self.random).cloned();
        one.unwrap_or_else(|| "seed".into())
    }

    /// Returns a VM that the test itself does not need.
    fn removable(&mut self) -> String {
        let mut all = self.snapshots();
        all.retain(|name| name != "seed");
        let one = one_of(&all, &mut self.random).cloned();
        one.unwrap_or_else(|| "none".into())
    }

    fn save(&mut self) -> Vec<String> {
        if self.snapshots().len() > MOST {
            let old = self.removable();
            return words(&["snapshot", "remove", &old]);
        }
        let name = self.name("saved");
        let vm = match self.random.below(4) {
            0 => self.any_vm(),
            _ => "writer".into(),
        };
        let keep = self.one(&["none", "hot", "all"]);
        let mut asked = words(&[
            "snapshot",
            "save",
            &vm,
            &name,
            "--keep",
            keep,
            "--drop-timeout",
            "10",
        ]);
        for flag in ["--live", "--compress"] {
            if self.random.below(3) == 0 {
                asked.push(flag.into());
            }
        }
        asked
    }

    /// Returns the last lease of the lender.
    fn lease(&self) -> String {
        let log = self.testbed.lender.log();
        let last = log
            .rsplit("exported to its borrower lease=")
            .next()
            .unwrap_or_default();
        let number: String = last.chars().take_while(char::is_ascii_digit).collect();
        if number.is_empty() {
            "1".into()
        } else {
            number
        }
    }

    fn segments(&self) -> Vec<String> {
        let mut all = names(&self.testbed.snapshots.place.join("segments"));
        // Other files beside them are left out.
        all.retain(|name| !name.contains('.'));
        all
    }

    fn segment(&mut self) -> String {
        let all = self.segments();
        let one = one_of(&all, &mut self.random).cloned();
        one.unwrap_or_else(|| "none".into())
    }
}

/// Returns every command of the program, from its own help, except groups of commands.
pub fn commands(testbed: &Testbed) -> BTreeSet<String> {
    let mut leaves = BTreeSet::new();
    let mut open = vec![Vec::new()];
    while let Some(path) = open.pop() {
        let mut words = path.clone();
        words.push("--help".to_owned());
        let help = testbed.command(&words).output().unwrap();
        assert!(help.status.success(), "{words:?}");
        let help = String::from_utf8(help.stdout).unwrap();
        let mut below = help
            .lines()
            .skip_while(|line| *line != "Commands:")
            .skip(1)
            .peekable();
        if below.peek().is_none() {
            leaves.insert(path.join(" "));
        }
        for line in below.take_while(|line| !line.is_empty()) {
            let name = line.split_whitespace().next().unwrap();
            // The continuation of a long line is indented further.
            if name != "help" && line.starts_with("  ") && !line.starts_with("   ") {
                let mut path = path.clone();
                path.push(name.to_owned());
                open.push(path);
            }
        }
    }
    leaves
}

/// Returns commands of the program that are neither called nor left out for a reason, and called
/// commands that do not exist.
pub fn forgotten(testbed: &Testbed) -> Vec<String> {
    let all = commands(testbed);
    let called = CALLED.iter().map(|called| called.0);
    let known: BTreeSet<String> = called
        .chain(LEFT_OUT.iter().map(|out| out.0))
        .map(str::to_owned)
        .collect();
    all.symmetric_difference(&known).cloned().collect()
}

/// Results of a command's calls.
#[derive(Default)]
struct Outcome {
    failures: u64,
    seconds: Vec<f64>,
}

/// Calls that remain, and the results of earlier calls.
pub struct Calls {
    cards: Mutex<Cards>,
    done: Mutex<BTreeMap<&'static str, Outcome>>,
    without: Vec<String>,
}

struct Cards {
    random: Random,
    left: Vec<usize>,
    decks: u64,
    drawn: u64,
}

struct Call {
    card: usize,
    command: &'static str,
    words: Vec<String>,
    limit: Duration,
    number: u64,
}

impl Calls {
    pub fn new(seed: u64, without: &[String]) -> Self {
        Self {
            cards: Mutex::new(Cards {
                random: Random(seed),
                left: Vec::new(),
                decks: 0,
                drawn: 0,
            }),
            done: Mutex::default(),
            without: without.to_vec(),
        }
    }

    /// Returns the next call. When the test is over, only commands that were not called yet.
    fn draw(&self, testbed: &Testbed, is_over: bool) -> Option<Call> {
        let mut cards = lock(&self.cards);
        if cards.left.is_empty() {
            if is_over && cards.decks > 0 {
                return None;
            }
            let is_in = |&at: &usize| !self.without.iter().any(|name| name == CALLED[at].0);
            let all = (0..CALLED.len()).filter(is_in);
            let mut left: Vec<usize> = all.flat_map(|at| vec![at; times(CALLED[at].0)]).collect();
            cards.random.shuffle(&mut left);
            cards.left = left;
            cards.decks += 1;
        } else if is_over && cards.decks > 1 {
            return None;
        }
        let card = cards.left.pop().unwrap();
        let (command, seconds, choose) = CALLED[card];
        cards.drawn += 1;
        let mut chooser = Chooser {
            testbed,
            random: Random(cards.random.below(u64::MAX) | 1),
            number: cards.drawn,
        };
        Some(Call {
            card,
            command,
            words: choose(&mut chooser),
            limit: patience(Duration::from_secs(seconds + SLACK)),
            number: cards.drawn,
        })
    }

    pub fn run(&self, testbed: &Testbed, over: &AtomicBool) {
        while let Some(call) = self.draw(testbed, over.load(Ordering::Relaxed)) {
            let (took, end) = carry_out(testbed, &call);
            if end == End::Unheard {
                // The command is called again later, so that each command is executed as often as
                // the others.
                lock(&self.cards).left.insert(0, call.card);
                std::thread::sleep(PAUSE);
            }
            let mut done = lock(&self.done);
            let outcome = done.entry(call.command).or_default();
            outcome.seconds.push(took);
            outcome.failures += u64::from(end != End::Done);
        }
    }

    /// Returns a table of each command's calls, failures, median and longest seconds.
    pub fn table(&self) -> String {
        let mut done = lock(&self.done);
        let mut lines = vec![format!(
            "{:18} {:>6} {:>8} {:>8} {:>8}",
            "command", "calls", "failures", "median s", "longest s"
        )];
        for (command, outcome) in &mut *done {
            outcome.seconds.sort_unstable_by(f64::total_cmp);
            let seconds = &outcome.seconds;
            lines.push(format!(
                "{command:18} {:6} {:8} {:8.2} {:8.2}",
                seconds.len(),
                outcome.failures,
                seconds[seconds.len() / 2],
                seconds[seconds.len() - 1]
            ));
        }
        for name in &self.without {
            lines.push(format!("{name:18} left out by MEMFOLD_CHAOS_WITHOUT"));
        }
        for (name, why) in LEFT_OUT {
            lines.push(format!("{name:18} left out: {why}"));
        }
        lines.join("\n")
    }

    /// Returns the commands that never succeeded.
    pub fn never_done(&self) -> Vec<&'static str> {
        let done = lock(&self.done);
        let never = done
            .iter()
            .filter(|(_, outcome)| outcome.failures == outcome.seconds.len() as u64);
        never.map(|(command, _)| *command).collect()
    }
}

/// The way in which a call ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    Failed,
    /// No daemon answered.
    Unheard,
}

/// Makes a call, waits until its deadline at most, and judges how it ended. Returns the seconds and
/// the result.
fn carry_out(testbed: &Testbed, call: &Call) -> (f64, End) {
    let typed = format!("memfold {}", call.words.join(" "));
    let mut command = testbed.command(&call.words);
    let (took, ended, said) = run(testbed, &mut command, call);
    let Some(status) = ended else {
        let daemon = testbed
            .daemon
            .pid()
            .map(|pid| threads(pid.as_raw_nonzero().get().unsigned_abs()));
        testbed.faults.add(format!(
            "'{typed}' has not returned after {took:.0} s; the daemon:\n{}",
            daemon.unwrap_or_default()
        ));
        return (took, End::Failed);
    };
    let first = said.lines().find(|line| !line.trim().is_empty());
    if let Some(wrong) = verdict(call.command, status, &said) {
        testbed
            .faults
            .add(format!("'{typed}' ({took:.1} s): {wrong}: {said}"));
        return (took, End::Failed);
    }
    if status.success() {
        return (took, End::Done);
    }
    if said.contains("no memfold daemon serves") {
        return (took, End::Unheard);
    }
    testbed.faults.note(&format!(
        "'{typed}' failed after {took:.1} s: {}",
        first.unwrap_or_default()
    ));
    (took, End::Failed)
}

fn run(testbed: &Testbed, command: &mut Command, call: &Call) -> (f64, Option<ExitStatus>, String) {
    let path = testbed.root.join(format!("call-{}", call.number));
    // Output goes to a file, because no thread would read a pipe meanwhile.
    let output = File::create(&path).unwrap();
    let mut child = command
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .unwrap();
    let (began, mut ended, mut interrupt) = (Instant::now(), None, interrupted(call.command));
    while ended.is_none() && began.elapsed() < call.limit {
        std::thread::sleep(Duration::from_millis(10));
        ended = child.try_wait().unwrap();
        if ended.is_none() && interrupt.is_some_and(|after| began.elapsed() >= after) {
            let _ = kill_process(Pid::from_child(&child), Signal::INT);
            interrupt = None;
        }
    }
    let took = began.elapsed().as_secs_f64();
    if ended.is_none() {
        let _ = child.kill();
    }
    let _ = child.wait();
    let said = std::fs::read(&path).unwrap_or_default();
    let _ = std::fs::remove_file(&path);
    (took, ended, String::from_utf8_lossy(&said).into_owned())
}

/// Returns the problem with the end of a call; `None` if it ended as expected.
fn verdict(command: &str, status: ExitStatus, said: &str) -> Option<String> {
    let Some(code) = status.code() else {
        return Some(format!("ended by a signal ({status})"));
    };
    if said.contains("panicked at") {
        return Some(format!("it panicked (exit code {code})"));
    }
    if !is_agreed(command, code) {
        return Some(format!("exit code {code}"));
    }
    (code != 0 && said.trim().is_empty()).then(|| format!("exit code {code} without a word"))
}
