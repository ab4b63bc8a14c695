//! Test of `memfold plan`: from two running guests, it predicts how many guests fit. The predicted
//! number of guests is then started.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use memfold_api::FullReport;
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::estimate::fingerprint::{self, Fingerprint, HostMemory, Key};
use memfold_ledger::estimate::place::propose;
use memfold_ledger::estimate::{Domains, Options, Pace, VmFacts, look, targets};
use memfold_ledger::history::{History, Lent, growth, host_values, vm_values};
use memfold_ledger::plan::{Growths, Order};
use memfold_testkit::dose;
use memfold_units::ByteSize;

use crate::support::{self, BOOT};

const MEMORY: ByteSize = ByteSize::mib(512);
/// Permitted error of the prediction, in percent.
const OFF: f64 = 10.0;
/// Number of VMs from which the plan is computed.
const MEASURED: usize = 2;

/// Shell script that starts a web server and fetches a page.
const WORK: &str = "systemctl start apache2 && \
    for n in 1 2 3 4 5 6 7 8; do curl -sf http://127.0.0.1/ | wc -c; done | sort -u";

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

/// Starts VMs, lets them work, and waits until their common pages are folded and memory no longer
/// changes.
fn start(lab: &Lab, names: &[String]) -> FullReport {
    for name in names {
        let spec = Lab::spec(name, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
        lab.start(spec).unwrap();
    }
    for name in names {
        lab.wait_ready(name, BOOT).unwrap();
    }
    let limit = Duration::from_secs(600);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for said in lab.exec_all(&names, WORK, limit).unwrap() {
        assert!(said.trim().parse::<u64>().unwrap() > 100, "served: {said}");
    }
    let stats = || lab.stats().unwrap();
    support::wait_stats("folded", limit, stats, |stats| {
        let folded = |vm| support::folded_percent(vm) > 85.0;
        stats
            .vms
            .iter()
            .all(|vm| vm.matched_pages > 10_000 && folded(vm))
    });
    let end = Instant::now() + limit;
    let mut before = lab.report().unwrap();
    loop {
        std::thread::sleep(Duration::from_secs(4));
        let now = lab.report().unwrap();
        let bytes = |report: &FullReport| report.ledger.host.unreclaimable_bytes.0;
        if bytes(&now).abs_diff(bytes(&before)) < 4 << 20 {
            return now;
        }
        assert!(Instant::now() < end, "it never settles");
        before = now;
    }
}

#[test]
fn a_plan_computed_from_two_guests_predicts_memory_of_more_guests_within_ten_percent() {
    let Some(_turn) = support::turn() else { return };
    let all = usize::try_from(dose("MEMFOLD_PLAN_VMS", 4)).unwrap();
    let names: Vec<String> = (1..=all).map(|number| format!("web-{number}")).collect();
    let lab = Lab::new(EngineSettings::default()).unwrap();
    lab.fold(true).unwrap();
    let first = start(&lab, &names[..MEASURED]);
    let taken = first.ledger.host.unreclaimable_bytes.0;
    // One more VM is started each time, so that each number has its figure; the plan is always
    // computed from the first two.
    for number in MEASURED + 1..=all {
        let order = Order {
            vms: vec![("lab".into(), number as u64)],
            ..Order::default()
        };
        let none = Growths::new();
        let planned = order.plan(&first.ledger, &first.fold, &none).unwrap();
        assert_eq!(planned.kinds.len(), 1);
        let kind = &planned.kinds[0];
        // Memory that other processes on this host take is left out: only VMs, page stores and
        // memfold count, each page once. (The ledger's own tests compare this sum with
        // MemAvailable.)
        let predicted = taken + planned.predicted_bytes - planned.used_bytes;
        let now = start(&lab, &names[number - 1..number]);
        let real = now.ledger.host.unreclaimable_bytes.0;
        let off = (predicted as f64 - real as f64) * 100.0 / real as f64;
        println!(
            "{number} VMs: predicted {} MiB +- {}, really {} MiB: {off:+.1} %; one more takes {} MiB +- {} (page cache {}), shares {}, owes {}; {} more fit, {} by memory alone",
            mib(predicted),
            mib(planned.plus_minus_bytes.unwrap()),
            mib(real),
            mib(kind.own_bytes),
            mib(kind.plus_minus_bytes.unwrap()),
            mib(kind.page_cache_bytes),
            mib(kind.shared_bytes),
            mib(kind.owed_bytes),
            kind.more_fit,
            kind.more_fit_by_memory,
        );
        let used = |report: &FullReport| {
            let host = &report.ledger.host;
            mib((host.mem_total_bytes - host.mem_available_bytes).0)
        };
        println!(
            "  the host: predicted {} MiB, really {} MiB used, with what others took",
            mib(planned.predicted_bytes),
            used(&now)
        );
        assert!(off.abs() <= OFF, "{number} VMs: {off:+.1} %");
        // The measured VMs must have memory of their own and shared memory.
        assert!(kind.own_bytes > 32 << 20 && kind.shared_bytes > 32 << 20);
    }
    would_share(&names[..MEASURED], &lab);
    grows(&lab, &names[0]);
}

/// Starts a guest program that takes 2 MiB more each second, with a sample each second, and checks
/// the trend in the history.
fn grows(lab: &Lab, name: &str) {
    const RATE: f64 = (2 << 20) as f64 * 3600.0;
    let program = "import os, time\nheld = []\nwhile True:\n held.append(os.urandom(2 << 20))\n time.sleep(1)";
    let begin = format!("systemd-run -q --unit=grows python3 -c '{program}'");
    lab.exec(name, &begin, Duration::from_secs(300)).unwrap();
    let place = tempfile::tempdir().unwrap();
    let mut history = History::open(&place.path().join("history")).unwrap();
    let now = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        i64::try_from(now.unwrap().as_secs()).unwrap()
    };
    let began = now();
    while now() < began + 50 {
        let report = lab.report().unwrap();
        let host = host_values(&report.ledger, &report.fold, Lent::default());
        let vms = report.ledger.vms.iter();
        let vms: Vec<_> = vms
            .map(|vm| (vm.name.clone(), vm_values(vm, None)))
            .collect();
        history.add(now(), &host, &vms, &[]).unwrap();
        std::thread::sleep(Duration::from_secs(1));
    }
    let trend = |name: &str| {
        let series = history.vm(name, now(), began - 1, 1000).unwrap();
        growth(&series).unwrap().bytes_per_hour as f64
    };
    let (grows, stays) = (trend(name), trend("web-2"));
    println!(
        "a guest that takes 2 MiB a second grows by {:.2} of that, one that stays by {:.2}",
        grows / RATE,
        stays / RATE
    );
    // A second of the guest is longer while the emulator is busy.
    assert!((0.5..1.3).contains(&(grows / RATE)), "{grows}");
    assert!((stays / RATE).abs() < 0.2, "{stays}");
}

/// Checks the proposal for two VMs as if they were on two hosts: from their fingerprints, it
/// proposes to place them together, and predicts the saving.
fn would_share(names: &[String], lab: &Lab) {
    let place = tempfile::tempdir().unwrap();
    let (key, _) = Key::open(&place.path().join("key")).unwrap();
    let domains = Domains {
        one: true,
        ..Domains::default()
    };
    let targets = targets::find(Path::new("/proc"), names, &domains, &VmFacts::default()).unwrap();
    let options = Options {
        seed: key.seed(),
        reads_files: true,
        ..Options::here()
    };
    let stop = AtomicBool::new(false);
    let pace = Pace::new(1.0, None, &stop);
    let looked = look::look(targets, &options, &pace, &mut |_, _, _| {}).unwrap();
    let host = HostMemory {
        total_bytes: 16 << 30,
        available_bytes: 16 << 30,
    };
    let both = fingerprint::of(&looked, &key, "both", host).unwrap();
    let hosts = both.vms.iter().map(|vm| Fingerprint {
        host: format!("of-{}", vm.name),
        vms: vec![vm.clone()],
        ..both.clone()
    });
    let hosts: Vec<Fingerprint> = hosts.collect();
    assert_eq!(hosts.len(), names.len());
    let proposal = propose(&hosts, 16 << 20, 10.0, None).unwrap();
    let saves = proposal.now_bytes - proposal.then_bytes;
    // The memory that the two VMs really share: folded pages of one VM whose page frame the other
    // VM maps, too.
    let report = lab.report().unwrap();
    let folded = |name: &String| {
        let vm = report.ledger.vms.iter().find(|vm| vm.name == *name);
        vm.unwrap().folded_bytes.0
    };
    let folded = names.iter().map(folded).min().unwrap();
    println!(
        "together they would save {} MiB +- {}; {} MiB are folded",
        mib(saves),
        mib(proposal.plus_minus_bytes),
        mib(folded)
    );
    assert_eq!(proposal.moves.len(), 1, "{proposal:?}");
    // All folded pages are in both VMs; in addition, kernels, zeroed structures and heaps have
    // pages in common.
    assert!(saves as f64 > folded as f64 * 0.85, "{saves} {folded}");
    assert!(saves < both.vms[0].ram_bytes, "{saves}");
}
