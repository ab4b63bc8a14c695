//! Test of folding while guests' page caches change all the time: guests repeatedly read files of
//! three times their memory.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::seconds;
use memfold_units::ByteSize;
use memfold_vm::{Aio, CacheMode, DiskSpec};

use crate::support::{self, BOOT};

const MEMORY: ByteSize = ByteSize::mib(256);
const FILES: u64 = 192;
const FILE_BYTES: u64 = 4 << 20;
/// Permitted ratio of the median of the last third to the median of the middle third.
const TOLERANCE: f64 = 1.15;
/// Permitted number of mappings, as a part of the kernel's limit for a process: half of the limit,
/// where the engine begins to require longer runs, and a little for mappings that it has not
/// counted yet.
const MOST_MAPPINGS: f64 = 0.55;
/// Time from which on the number of mappings is judged: when a guest reads round and round, its
/// page cache is divided into shorter and shorter runs, each of which takes a mapping. After this
/// time, the number may no longer grow.
const LONG: Duration = Duration::from_secs(300);
const STEP: Duration = Duration::from_secs(10);

/// VMs: name, image, disk mode, least part of the matched pages that must be folded, in percent.
const VMS: [(&str, &str, DiskMode, f64); 2] = [
    ("writeback", "trixie-a", DiskMode::Buffered, 80.0),
    ("none", "trixie-b", DiskMode::Direct, 60.0),
];

/// Returns the shell script of a guest, which reads the files in turn, one file in each step of the
/// clock, and checks every byte. Both guests read the same file at a time, so that nearly all of
/// their page cache matches at any moment. Without the clock, they would drift apart, and mostly
/// unchanged pages would be folded.
fn reading(step: Duration) -> String {
    format!(
        "mount -o ro,noatime /dev/vdb /mnt || exit 1; cd /mnt; errors=0; reads=0; last=0; \
         while [ ! -e /run/enough ]; do now=$(($(date +%s%N) / {})); \
         if [ $now = $last ]; then sleep 0.05; continue; fi; last=$now; \
         grep \" file$((now % {FILES}))\\$\" sums | md5sum --status -c - || errors=$((errors + 1)); \
         reads=$((reads + 1)); done; echo errors $errors reads $reads",
        step.as_nanos()
    )
}

/// Measurements of everything that must not grow.
#[derive(Debug)]
struct Sample {
    folded_percent: Vec<f64>,
    matched_percent: Vec<f64>,
    /// Number of mappings of both VMs, divided by the number of runs of cached pages.
    mappings: f64,
    most_mappings: f64,
    store_bytes: f64,
    daemon_bytes: f64,
}

type Figure = fn(&Sample) -> f64;

#[test]
fn while_guests_change_their_page_cache_most_of_it_stays_folded_and_no_resource_use_grows() {
    let Some(_turn) = support::turn() else { return };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let disk = lab.directory().join("churn.img");
    make_disk(lab.directory(), &disk);
    for (name, image, mode, _) in VMS {
        let mut spec = Lab::spec(name, image, MEMORY, mode).unwrap();
        let mut data = DiskSpec::new(&disk);
        data.read_only = true;
        if mode == DiskMode::Direct {
            data.cache = CacheMode::None;
            data.aio = Aio::IoUring;
        }
        spec.disks.push(data);
        lab.start(spec).unwrap();
    }
    let names = VMS.map(|(name, ..)| name);
    for name in names {
        lab.wait_ready(name, BOOT).unwrap();
    }
    lab.fold(true).unwrap();
    let time = seconds("MEMFOLD_CHURN_SECONDS", 90);
    // Folding must happen while a page is cached: about 160 MB at 8 MB/s, which is 20 s.
    let step = Duration::from_millis(500);
    let over = AtomicBool::new(false);
    let (samples, printed) = std::thread::scope(|scope| {
        let sampling = scope.spawn(|| sample(&lab, &names, &over));
        let enough = scope.spawn(|| {
            std::thread::sleep(time);
            over.store(true, Ordering::SeqCst);
            lab.exec_all(&names, "touch /run/enough", Duration::from_secs(60))
                .unwrap();
        });
        let printed = lab.exec_all(&names, &reading(step), time + Duration::from_secs(240));
        enough.join().unwrap();
        (sampling.join().unwrap(), printed.unwrap())
    });
    let stats = lab.stats().unwrap();
    for (name, printed) in names.iter().zip(&printed) {
        println!(
            "{name}: {}{}",
            printed,
            support::line(support::vm(&stats, name))
        );
        assert!(printed.starts_with("errors 0 reads "), "{name}: {printed}");
    }
    println!(
        "engine {:.2} s of CPU, library {:.2} s; p50 {:?} s, p95 {:?} s from hint to fold; huge kept {}, given up {}",
        stats.engine_cpu_s,
        stats.library_cpu_s,
        stats.hint_to_fold_p50_s,
        stats.hint_to_fold_p95_s,
        stats.huge_kept_pages,
        stats.files_given_up
    );
    judge(&samples, time >= LONG);
}

/// Makes a file system of pseudo-random files with their sums, without mounting it.
fn make_disk(directory: &Path, disk: &Path) {
    let root = directory.join("churn");
    std::fs::create_dir(&root).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for file in 0..FILES {
        let bytes: Vec<u8> = (0..FILE_BYTES / 8)
            .flat_map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_le_bytes()
            })
            .collect();
        std::fs::write(root.join(format!("file{file}")), bytes).unwrap();
    }
    let script = format!(
        "cd '{}' && md5sum file* > sums && {}",
        root.display(),
        make_file_system(disk)
    );
    let done = Command::new("sh").args(["-c", &script]).status().unwrap();
    assert!(done.success());
    std::fs::remove_dir_all(root).unwrap();
}

/// Makes ext4, whose page cache consists of single pages before Linux 6.16; or, with
/// `MEMFOLD_CHURN_FS=erofs`, EROFS, whose page cache consists of large folios.
fn make_file_system(disk: &Path) -> String {
    let disk = disk.display();
    if std::env::var("MEMFOLD_CHURN_FS").is_ok_and(|name| name == "erofs") {
        return format!("mkfs.erofs --quiet '{disk}' .");
    }
    let megabytes = ((FILES * FILE_BYTES) >> 20) * 11 / 10 + 32;
    format!("mke2fs -q -F -t ext4 -d . '{disk}' {megabytes}M")
}

fn sample(lab: &Lab, names: &[&str], over: &AtomicBool) -> Vec<Sample> {
    let began = Instant::now();
    let mut samples = Vec::new();
    while !over.load(Ordering::SeqCst) {
        std::thread::sleep(STEP);
        let stats = lab.stats().unwrap();
        let vms: Vec<_> = names.iter().map(|name| support::vm(&stats, name)).collect();
        let sample = Sample {
            folded_percent: vms.iter().map(|vm| support::folded_percent(vm)).collect(),
            matched_percent: vms
                .iter()
                .map(|vm| vm.matched_pages as f64 * 100.0 / vm.cached_pages.max(1) as f64)
                .collect(),
            mappings: vms.iter().map(|vm| vm.mappings as f64).sum::<f64>()
                / vms
                    .iter()
                    .map(|vm| vm.cached_runs as f64)
                    .sum::<f64>()
                    .max(1.0),
            most_mappings: vms.iter().map(|vm| vm.mappings as f64).fold(0.0, f64::max),
            store_bytes: stats.domains.iter().map(|d| d.store_bytes as f64).sum(),
            daemon_bytes: own_anonymous_bytes(),
        };
        println!(
            "{:4.0} s: folded {:.1?} % of {:?} matched of {:?} cached; copied {:?}; runs {:?}, mappings {:?}; store {:.1} MB, daemon {:.1} MB, waiting {}, CPU {:.1} s",
            began.elapsed().as_secs_f64(),
            sample.folded_percent,
            vms.iter().map(|vm| vm.matched_pages).collect::<Vec<_>>(),
            vms.iter().map(|vm| vm.cached_pages).collect::<Vec<_>>(),
            vms.iter().map(|vm| vm.copied_pages).collect::<Vec<_>>(),
            vms.iter().map(|vm| vm.cached_runs).collect::<Vec<_>>(),
            vms.iter().map(|vm| vm.mappings).collect::<Vec<_>>(),
            sample.store_bytes / 1e6,
            sample.daemon_bytes / 1e6,
            stats.hints_waiting,
            stats.engine_cpu_s + stats.library_cpu_s,
        );
        samples.push(sample);
    }
    samples
}

/// Returns the anonymous memory of this process, which contains the daemon.
fn own_anonymous_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("RssAnon:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() * 1024.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn judge(samples: &[Sample], long: bool) {
    let third = samples.len() / 3;
    assert!(third > 1, "too short to judge: {} samples", samples.len());
    let (middle, last) = (&samples[third..2 * third], &samples[2 * third..]);
    for (at, (name, .., least)) in VMS.iter().enumerate() {
        let after = &samples[third..];
        let share = median(after.iter().map(|s| s.folded_percent[at]).collect());
        let matched = median(after.iter().map(|s| s.matched_percent[at]).collect());
        println!(
            "{name}: median {share:.1} % of matched pages folded, {least} wanted; median {matched:.1} % of cached pages matched"
        );
        assert!(
            matched > 50.0,
            "{name}: what churns must match, or its share says nothing"
        );
        assert!(share >= *least, "{name}: {share:.1} %");
    }
    let allowed = EngineSettings::default().max_mappings as f64;
    let most = samples.iter().map(|s| s.most_mappings).fold(0.0, f64::max);
    println!("most mappings of a VM: {most} of {allowed}");
    assert!(most < allowed * MOST_MAPPINGS, "{most} mappings");
    let grown: [(&str, bool, Figure); 3] = [
        ("mappings of a run of cached pages", long, |s| s.mappings),
        ("page store bytes", true, |s| s.store_bytes),
        ("daemon bytes", true, |s| s.daemon_bytes),
    ];
    for (what, judged, of) in grown {
        let (middle, last) = (
            median(middle.iter().map(of).collect()),
            median(last.iter().map(of).collect()),
        );
        println!("{what}: median {middle:.2} in the middle third, {last:.2} in the last");
        assert!(
            !judged || last <= middle * TOLERANCE,
            "{what} grew from {middle} to {last}"
        );
    }
}
