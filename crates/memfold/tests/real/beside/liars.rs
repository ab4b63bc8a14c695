//! Tests with a guest whose agent reports false values in every field of its messages. Other guests
//! of the same trust domain must not be affected.

use std::time::{Duration, Instant};

use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::{bound, patience, seconds};
use memfold_wire::agent::{
    FileFacts, FileRange, FromAgent, HintRun, MAX_PATH, MAX_RUN_PAGES, MAX_RUNS, MAX_TEXT,
    OutputStream, PfnRun, VERSION,
};
use memfold_wire::encode;
use memfold_wire::memory::{LruGen, MemoryReading, TrimEnd, TrimMethod, TrimResult};

use super::segments::{self, SLOTS};
use super::snapshots;
use crate::support::{self, BOOT, MEMORY};

const HONEST: [&str; 2] = ["honest-a", "honest-b"];
const LIAR: &str = "liar";
const NAMES: [&str; 3] = [HONEST[0], HONEST[1], LIAR];
/// Longest time that any request may wait for the engine, whatever the liar reports.
const ANSWER: Duration = Duration::from_secs(15);

#[test]
fn agents_that_send_false_hints_change_no_byte_and_folding_of_other_vms_continues() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings {
        cpu_share: 0.2,
        ..EngineSettings::default()
    })
    .unwrap();
    for (name, image) in HONEST.iter().zip(["trixie-a", "trixie-b"]) {
        let spec = Lab::spec(name, image, MEMORY, DiskMode::Buffered).unwrap();
        lab.start_warm(spec).unwrap();
    }
    // The liar has a free port, into which the disk with its lies is plugged.
    let mut spec = segments::spec(LIAR, &[], SLOTS);
    // QEMU has to open the disk with the lies.
    spec.user = Some("root".into());
    lab.start_warm(spec).unwrap();
    for name in NAMES {
        lab.wait_ready(name, BOOT).unwrap();
    }
    support::prepare(&lab, &NAMES);
    // Files that honest guests cache, with their true sizes: the liar will claim to cache them,
    // too.
    let list = lab
        .exec(HONEST[0], "find /usr/bin /usr/lib -xdev -type f -size +15k -printf '%s %p\\n' | head -n 3000; stat -c '%s %n' /var/tmp/late* 2>/dev/null; true", Duration::from_secs(60))
        .unwrap();
    let mut files: Vec<(u64, Vec<u8>)> = list
        .lines()
        .filter_map(|l| l.split_once(' '))
        .map(|(size, path)| (size.parse().unwrap(), path.as_bytes().to_vec()))
        .collect();
    // Files that honest guests will write later: the liar reports them first.
    files.extend((0..LATE).map(|n| (LATE_BYTES, format!("/var/tmp/late{n}").into_bytes())));
    assert!(files.len() > 1000);
    plug_lies(&lab, &cases(&files));
    lab.fold(true).unwrap();

    let time = seconds("MEMFOLD_LIES_SECONDS", 20);
    let lie = format!(
        "cat > /opt/lie.py <<'END'\n{}\nEND\nsystemd-run -q --unit=lie sh -c 'systemctl stop memfold-agent; python3 /opt/lie.py {} 2> /run/lies; systemctl start memfold-agent'",
        include_str!("../guest/lie.py"),
        time.as_secs()
    );
    // The agent is stopped before it can report the command's result.
    let _ = lab.exec(LIAR, &lie, Duration::from_secs(120));
    let began = Instant::now();
    let slowest = std::thread::scope(|scope| {
        let honest = scope.spawn(|| honest_work(&lab));
        let mut slowest = Duration::ZERO;
        while began.elapsed() < time || !honest.is_finished() {
            let asked = Instant::now();
            lab.stats().unwrap();
            slowest = slowest.max(asked.elapsed());
            std::thread::sleep(Duration::from_millis(500));
        }
        honest.join().unwrap();
        slowest
    });
    // The liar's agent is back only after the daemon has waited for it, so this is done meanwhile.
    check_files(&lab, &HONEST);
    // Some false messages were Hellos, so only an answer shows that the true agent is back.
    let end = Instant::now() + patience(Duration::from_secs(400));
    let said = loop {
        match lab.exec(LIAR, "cat /run/lies", Duration::from_secs(3)) {
            Ok(said) if !said.is_empty() => break said,
            other => {
                assert!(
                    Instant::now() < end,
                    "the liar's agent is not back: {other:?}"
                );
                std::thread::sleep(Duration::from_millis(500));
            }
        }
    };
    let stats = lab.stats().unwrap();
    println!(
        "liar {said}slowest answer of the engine {slowest:?}; engine {:.2} s of CPU in {:?}",
        stats.engine_cpu_s,
        began.elapsed()
    );
    for name in NAMES {
        println!("{}", support::line(support::vm(&stats, name)));
        assert!(support::vm(&stats, name).problem.is_none());
    }
    assert!(said.starts_with("played "), "{said}");
    for vm in lab.report().unwrap().ledger.vms {
        let figures = vm.guest.expect("agents report memory figures");
        assert_eq!(figures.check(vm.ram_bytes), Ok(()), "{}", vm.name);
    }
    assert!(support::vm(&stats, LIAR).bogus_pages > 0);
    assert!(
        slowest < bound(ANSWER),
        "the engine kept others waiting for {slowest:?}"
    );
    check_files(&lab, &[LIAR]);
    let stats = support::wait_stats(
        "honest VMs are folded",
        Duration::from_secs(300),
        || lab.stats().unwrap(),
        |stats| {
            HONEST
                .iter()
                .all(|name| support::folded_percent(support::vm(stats, name)) > 80.0)
        },
    );
    for name in NAMES {
        println!("{}", support::line(support::vm(&stats, name)));
    }
}

const LATE: u64 = 8;
const LATE_BYTES: u64 = 4 << 20;

/// Checks that guests read the same bytes of `/usr` as before the lies.
fn check_files(lab: &Lab, names: &[&str]) {
    let script = format!(
        "{} && sums /run/sums.after && cmp /run/sums.before /run/sums.after",
        support::sums()
    );
    lab.exec_all(names, &script, Duration::from_secs(300))
        .unwrap();
}

/// Lets honest guests write equal files while the liar lies. The files must be folded within
/// seconds, as without the liar.
fn honest_work(lab: &Lab) {
    std::thread::sleep(Duration::from_secs(8));
    let before = lab.stats().unwrap();
    let write = format!(
        "for n in $(seq 0 {}); do python3 -c 'import hashlib,sys; sys.stdout.buffer.write(b\"\".join(hashlib.md5(b\"%d %d\" % ('$n', p)).digest() * 256 for p in range({})))' > /var/tmp/late$n; done; sync; cat /var/tmp/late* | md5sum",
        LATE - 1,
        LATE_BYTES / 4096
    );
    let sums = lab
        .exec_all(&HONEST, &write, Duration::from_secs(300))
        .unwrap();
    assert_eq!(sums[0], sums[1]);
    let began = Instant::now();
    let wanted = LATE * LATE_BYTES / 4096 * 8 / 10;
    support::wait_stats(
        "what honest guests wrote is folded while another lies",
        Duration::from_secs(300),
        || lab.stats().unwrap(),
        |stats| {
            HONEST.iter().all(|name| {
                let done = |stats| {
                    let vm = support::vm(stats, name);
                    vm.folded_pages + vm.refolded_pages
                };
                done(stats) - done(&before) >= wanted
            })
        },
    );
    println!(
        "honest guests' {wanted} pages each were folded {:.1} s after they were written",
        began.elapsed().as_secs_f64()
    );
}

fn hello() -> FromAgent {
    FromAgent::Hello {
        version: VERSION,
        agent: "0.1.0".into(),
        kernel: "6.12".into(),
        boot_id: "lie".into(),
        host_name: "liar".into(),
        problems: Vec::new(),
    }
}

fn frames(messages: &[FromAgent]) -> Vec<u8> {
    messages.iter().flat_map(|m| encode(m).unwrap()).collect()
}

/// Returns the liar's false messages, one connection for each.
fn cases(files: &[(u64, Vec<u8>)]) -> Vec<Vec<u8>> {
    let ram = snapshots::MEMORY.0 / 4096;
    let begun = |mut messages: Vec<FromAgent>| {
        messages.insert(0, hello());
        frames(&messages)
    };
    let facts = |files: &[(u64, Vec<u8>)]| -> Vec<FileFacts> {
        let number = |n: usize| u32::try_from(n).unwrap();
        let fact = |(n, (size, path)): (usize, &(u64, Vec<u8>))| FileFacts {
            file: number(n),
            path: path.clone(),
            size_bytes: *size,
        };
        files.iter().enumerate().map(fact).collect()
    };
    let introduce = |files: &[(u64, Vec<u8>)]| -> Vec<FromAgent> {
        facts(files)
            .chunks(500)
            .map(|c| FromAgent::Files(c.to_vec()))
            .collect()
    };
    let hint = |file: u32, page: u64, pfn: u64, pages: u32| HintRun {
        file,
        page,
        pfn,
        pages,
    };
    // Page frames of the liar from 16 MB on, which hold its kernel, page tables and programs.
    let mut pfn = 4096;
    let mut next = |pages: u32| {
        let at = pfn;
        pfn = 4096 + (pfn - 4096 + u64::from(pages)) % (ram - 8192);
        at
    };
    let claimed: Vec<HintRun> = files
        .iter()
        .zip(0..)
        .map(|((size, _), file)| {
            let pages = u32::try_from(size.div_ceil(4096)).unwrap().min(2048);
            hint(file, 0, next(pages), pages)
        })
        .collect();
    let claims: Vec<FromAgent> = claimed
        .chunks(1000)
        .map(|c| FromAgent::Hints(c.to_vec()))
        .collect();
    let mut theft = introduce(files);
    theft.extend(claims.clone());
    let mut noise = vec![0_u8; 256 << 10];
    let mut state = 1_u64;
    for byte in &mut noise {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = state.to_le_bytes()[3];
    }
    let mut cut = begun(theft.clone());
    cut.truncate(cut.len() - 7);
    cut.extend_from_slice(&noise[..4096]);
    let mut outside = introduce(&files[..10]);
    outside.push(FromAgent::Hints(vec![
        hint(1, 0, ram, 64),
        hint(1, 0, ram - 8, 64),
        hint(1, 0, u64::MAX, 64),
        hint(1, 0, u64::MAX - 10, MAX_RUN_PAGES),
        hint(1, u64::MAX, 4096, 64),
        hint(1, u64::from(u32::MAX) - 3, 4096, 64),
        hint(u32::MAX, 0, 4096, 64),
        hint(999_999, 0, 4096, 64),
        hint(1, 0, 0xa0, 512),
    ]));
    outside.push(FromAgent::Gone(vec![
        PfnRun {
            pfn: u64::MAX,
            pages: MAX_RUN_PAGES,
        },
        PfnRun {
            pfn: ram - 1,
            pages: 9,
        },
    ]));
    let huge = |page: u64| FileRange {
        file: 2,
        page,
        pages: MAX_RUN_PAGES,
    };
    // After a message that names so many pages the daemon reads nothing for 16 s, so the first
    // message alone has the most runs of the most pages; the other messages have one or the other.
    let mut counts = introduce(&files[..10]);
    counts.push(FromAgent::Hints(vec![
        hint(2, 0, 0x1000, MAX_RUN_PAGES);
        MAX_RUNS
    ]));
    let few = FileRange {
        pages: 64,
        ..huge(0)
    };
    counts.push(FromAgent::Dirty(vec![few; MAX_RUNS]));
    counts.push(FromAgent::Clean(vec![few; MAX_RUNS]));
    counts.push(FromAgent::Clean(vec![
        huge(u64::MAX - 5),
        huge(u64::from(u32::MAX) - 5),
    ]));
    counts.push(FromAgent::Gone(vec![
        PfnRun { pfn: 0, pages: 64 };
        MAX_RUNS
    ]));
    counts.push(FromAgent::Gone(vec![PfnRun {
        pfn: 0,
        pages: MAX_RUN_PAGES,
    }]));
    // The same places are reported for many files, and the same files at many places.
    let mut stale = introduce(files);
    for shift in 0..40 {
        stale.push(FromAgent::Hints(
            (0..1000_u32)
                .map(|n| {
                    hint(
                        n % 50,
                        u64::from(n / 50) * 16,
                        5000 + u64::from(shift * 7 + n) * 16 % (ram - 9000),
                        16,
                    )
                })
                .collect(),
        ));
    }
    let mut many = vec![hello()];
    many.extend((0..80).map(|n| {
        let named = |at: u32| FileFacts {
            file: n * 60 + at,
            path: [
                format!("/{n}/{at}/").into_bytes(),
                vec![b'x'; MAX_PATH - 32],
            ]
            .concat(),
            size_bytes: u64::MAX - u64::from(at),
        };
        FromAgent::Files((0..60).map(named).collect())
    }));
    let inventories = vec![
        hello(),
        FromAgent::InventoryEnd {
            files: u64::MAX,
            pages: u64::MAX,
        },
        FromAgent::InventoryBegin,
        FromAgent::InventoryBegin,
        FromAgent::InventoryEnd { files: 0, pages: 0 },
        FromAgent::InventoryEnd { files: 0, pages: 0 },
        FromAgent::InventoryBegin,
    ];
    let mut commands = vec![hello()];
    for command in 0..60 {
        commands.push(FromAgent::Exited {
            command,
            code: i32::MIN,
        });
        commands.push(FromAgent::Output {
            command,
            stream: OutputStream::Stderr,
            bytes: vec![7; MAX_TEXT],
        });
    }
    let most = u64::MAX;
    let memory = vec![
        FromAgent::Memory(Box::new(MemoryReading {
            mem_total_kib: most,
            mem_available_kib: most,
            pgscan: most,
            ..MemoryReading::default()
        })),
        FromAgent::Memory(Box::new(MemoryReading {
            mem_total_kib: MEMORY.0 >> 10,
            lru_gen: Some(
                [LruGen {
                    anon: most,
                    file: most,
                }; 4],
            ),
            ..MemoryReading::default()
        })),
        FromAgent::Trimmed(TrimResult {
            order: 0,
            reclaimed_bytes: most,
            refaults: most,
            steps: u32::MAX,
            method: TrimMethod::None,
            end: TrimEnd::Failed(i32::MIN),
        }),
    ];
    let mut wrong_version = frames(&[hello()]);
    wrong_version[6] ^= 0x55;
    vec![
        noise,
        u32::MAX.to_le_bytes().repeat(16),
        begun(theft.clone()),
        begun(outside),
        begun(stale),
        frames(&vec![hello(); 20_000]),
        begun(claims),
        cut,
        frames(&many),
        frames(&inventories),
        frames(&commands),
        begun(memory),
        wrong_version,
        frames(&theft),
        begun(theft),
        // This case is the last, because the link waits for each of these messages.
        begun(counts),
    ]
}

/// Writes the false messages to a disk, and plugs it into the liar's VM.
fn plug_lies(lab: &Lab, cases: &[Vec<u8>]) {
    let mut bytes = Vec::new();
    for case in cases {
        bytes.extend_from_slice(&(case.len() as u64).to_le_bytes());
        bytes.extend_from_slice(case);
    }
    bytes.resize(bytes.len().next_multiple_of(4096) + 4096, 0);
    let disk = lab.directory().join("lies.img");
    std::fs::write(&disk, bytes).unwrap();
    let mut qmp = support::qmp(lab.directory(), LIAR);
    let file = serde_json::json!({ "driver": "file", "filename": disk });
    let node = serde_json::json!({ "driver": "raw", "node-name": "lies", "file": file, "read-only": true });
    qmp.execute("blockdev-add", node).unwrap();
    let device = serde_json::json!({ "driver": "virtio-blk-pci", "id": "lies", "drive": "lies", "bus": "segport0" });
    qmp.execute("device_add", device).unwrap();
    drop(qmp);
    let found = "for left in $(seq 300); do test -b /dev/vdb && exit 0; sleep 0.2; done; exit 1";
    lab.exec(LIAR, found, Duration::from_secs(120)).unwrap();
}
