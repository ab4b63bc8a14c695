//! Fuzzes what memfold reads from QEMU's monitor (QMP). A guest may have taken over its QEMU, which
//! then answers as it likes. A thread plays this QEMU: it answers each command with the line of the
//! input that begins with the command's name. Lines `event`, `nothing COMMAND` and `close COMMAND`
//! let it send events between, answer without a value, and close the connection.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use memfold_lend::{graph, waits};
use memfold_snapshot::cpu::Cpu;
use memfold_vm::trial::MachineParts;
use memfold_vm::{Qmp, balloon, conditions, endpoints, ram, virtio_mem};
use rustix::process::getpid;
use serde_json::{Value, json};

use crate::place::Place;

const GREETING: &str =
    r#"{"QMP":{"version":{"qemu":{"major":10,"minor":0,"micro":2}},"capabilities":["oob"]}}"#;

/// Lines of an input: a command's name, for `qom-get` and `qom-list` with path and property, and
/// the JSON of its answer.
type Answers = Arc<Mutex<Vec<u8>>>;

/// A connection to the thread that plays QEMU, and the answers that it gives.
struct Played {
    qmp: Qmp,
    answers: Answers,
    _place: Place,
}

impl Played {
    fn start() -> Self {
        let place = Place::new();
        let socket = place.path().join("qmp");
        let listener = UnixListener::bind(&socket).expect("a socket for the test");
        let answers = Answers::default();
        let told = answers.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // The connection ends with the test, or when memfold gives it up.
                let _ = play(&stream, &told);
            }
        });
        let qmp = Qmp::connect(&socket, Duration::from_secs(60)).expect("QEMU is played");
        Self {
            qmp,
            answers,
            _place: place,
        }
    }
}

fn play(mut stream: &UnixStream, answers: &Answers) -> std::io::Result<()> {
    writeln!(stream, "{GREETING}")?;
    for line in BufReader::new(stream).lines() {
        let asked: Value = serde_json::from_str(&line?).unwrap_or_default();
        let (command, of) = (
            asked["execute"].as_str().unwrap_or_default(),
            &asked["arguments"],
        );
        let text = |key: &str| of[key].as_str().unwrap_or_default().to_owned();
        let name = match command {
            "qom-get" => format!("{command}:{}:{}", text("path"), text("property")),
            "qom-list" => format!("{command}:{}", text("path")),
            "human-monitor-command" => text("command-line").replace(' ', "-"),
            other => other.to_owned(),
        };
        let answers = answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut lines = answers.split(|byte| *byte == b'\n');
        let found = lines.find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b" "));
        let has = |line: &str| {
            answers
                .split(|byte| *byte == b'\n')
                .any(|l| l == line.as_bytes())
        };
        if command != "qmp_capabilities" && has(&format!("close {name}")) {
            return Ok(());
        }
        if has("event") {
            // An event, an empty line, and the answer to another command come before.
            stream.write_all(b"{\"event\":\"STOP\"}\n\n{\"return\":1,\"id\":0}\n")?;
        }
        if command != "qmp_capabilities" && has(&format!("nothing {name}")) {
            writeln!(stream, r#"{{"id":{}}}"#, asked["id"])?;
            continue;
        }
        let mut reply = format!(r#"{{"id":{},"#, asked["id"]).into_bytes();
        match found {
            _ if command == "qmp_capabilities" => reply.extend(br#""return":{}"#),
            Some(answer) => {
                reply.extend(br#""return":"#);
                reply.extend(answer);
            }
            None => reply.extend(br#""error":{"class":"GenericError","desc":"no such thing"}"#),
        }
        reply.extend(b"}\n");
        stream.write_all(&reply)?;
    }
    Ok(())
}

fn seed(answers: &[(&str, Value)]) -> Vec<u8> {
    let lines = answers
        .iter()
        .map(|(name, answer)| format!("{name} {answer}"));
    lines.collect::<Vec<_>>().join("\n").into_bytes()
}

#[allow(clippy::too_many_lines)] // it is data
pub fn answers() -> Vec<Vec<u8>> {
    let bins = |bins: [u64; 4]| json!({ "boundaries": [100_000_000_u64, 1_000_000_000, 5_000_000_000_u64], "bins": bins });
    let tree = "bus: virtio-serial-bus.0\n  dev: virtserialport, id \"agent0\"\n    chardev = \"agent\"\n    name = \"org.memfold.agent.0\"\n  dev: VGA, id \"\"\n";
    let memory = [
        (
            "info-ramblock",
            include_str!("../../memfold-vm/src/fixtures/qemu10_5g_dimm.ramblock").into(),
        ),
        (
            "info-mtree--f",
            include_str!("../../memfold-vm/src/fixtures/qemu10_5g_dimm.mtree").into(),
        ),
        (
            "query-memdev",
            json!([{ "id": "ram0", "share": true, "size": 4096 }, { "id": "mem1", "share": false, "size": 4096 }]),
        ),
        (
            "query-memory-devices",
            json!([{ "type": "dimm", "data": { "memdev": "/objects/mem1" } }]),
        ),
        ("query-migrate", json!({ "status": "active" })),
        (
            "query-migrate-capabilities",
            json!([{ "capability": "postcopy-ram", "state": true }]),
        ),
        ("query-kvm", json!({ "enabled": true })),
        (
            "query-named-block-nodes",
            json!([
                { "node-name": "a", "drv": "file", "cache": { "direct": true } },
                { "node-name": "b", "drv": "nvme", "cache": { "direct": false } },
                { "node-name": "c", "drv": "curl", "cache": { "direct": false } },
                { "node-name": "swap-file3", "drv": "file", "cache": { "direct": false }, "file": "/swap" },
            ]),
        ),
        (
            "qom-list:/machine/peripheral",
            json!([{ "type": "child<vfio-pci>" }, { "type": "child<vhost-user-fs>" }, { "type": "child<scsi-block>" }]),
        ),
        (
            "qom-list:/machine/peripheral-anon",
            json!([{ "name": "b", "type": "child<virtio-balloon-pci>" }]),
        ),
        (
            "qom-get:/machine:confidential-guest-support",
            "/objects/sev0".into(),
        ),
        ("qom-get:/objects/ram0:type", "memory-backend-memfd".into()),
        ("info-network", "x: index=0,type=vhost-user\n".into()),
    ];
    let rest = [
        ("info-qtree", tree.into()),
        (
            "query-chardev",
            json!([{ "label": "agent", "filename": "disconnected:unix:/run/a.sock,server=on" }]),
        ),
        (
            "query-block",
            json!([{ "qdev": "/machine/peripheral/swap/virtio-backend", "inserted": { "node-name": "swap3", "image": { "virtual-size": 4096 } } }]),
        ),
        (
            "query-blockstats",
            json!([{ "qdev": "/machine/peripheral/swap/virtio-backend", "stats": { "rd_latency_histogram": bins([9, 3, 2, 1]), "wr_latency_histogram": bins([u64::MAX, 1, 1, 1]) } }]),
        ),
        ("query-cpus-fast", json!([{ "qom-path": "/machine/cpu0" }])),
        ("qom-get:/machine/cpu0:type", "max-x86_64-cpu".into()),
        (
            "qom-get:/machine/cpu0:feature-words",
            json!([{ "cpuid-input-eax": 7, "cpuid-input-ecx": 0, "cpuid-register": "EBX", "features": 255 }]),
        ),
        (
            "qom-list:/machine/cpu0",
            json!([{ "name": "avx2", "type": "bool" }, { "name": "x", "type": "int" }]),
        ),
        ("qom-get:/machine/cpu0:avx2", json!(true)),
        (
            "qom-list:/machine/peripheral",
            json!([{ "name": "balloon0", "type": "child<virtio-balloon-pci>" }]),
        ),
        (
            "qom-get:/machine/peripheral/balloon0:guest-stats",
            json!({ "stats": { "stat-available-memory": 7, "stat-total-memory": u64::MAX }, "last-update": 3 }),
        ),
        (
            "qom-get:/machine/peripheral/balloon0:deflate-on-oom",
            json!(true),
        ),
        ("query-balloon", json!({ "actual": 4096 })),
        (
            "query-memory-size-summary",
            json!({ "base-memory": 4096, "plugged-memory": 8192 }),
        ),
        (
            "info-ramblock",
            include_str!("../../memfold-vm/src/fixtures/qemu10_kvm_vga.ramblock").into(),
        ),
        (
            "info-mtree--f",
            include_str!("../../memfold-vm/src/fixtures/qemu10_kvm_vga.mtree").into(),
        ),
        (
            "query-memdev",
            json!([{ "id": "pc.ram", "share": false, "size": 4096 }]),
        ),
        (
            "query-memory-devices",
            json!([{ "type": "virtio-mem", "data": { "id": "vmem0", "memdev": "/objects/ram1", "size": 2048, "requested-size": 4096, "max-size": 8192, "block-size": 2048 } }]),
        ),
        (
            "x-query-virtio-status",
            json!({ "status": { "statuses": ["VIRTIO_CONFIG_S_DRIVER_OK: Driver setup and ready"] } }),
        ),
        (
            "query-named-block-nodes",
            json!([{ "node-name": "swap-file3", "file": "/swap" }]),
        ),
        ("qom-get:/machine:confidential-guest-support", "".into()),
        ("qom-get:/objects/pc.ram:type", "memory-backend-ram".into()),
        ("query-migrate", json!({})),
        ("query-migrate-capabilities", json!([])),
        ("query-kvm", json!({ "enabled": false })),
        ("qom-list:/machine/peripheral-anon", json!([])),
        ("info-network", "".into()),
    ];
    let odd = "event\nnothing query-block\nclose query-kvm\ninfo-network 1\ninfo-ramblock {\nquery-chardev []\n";
    let events = [b"event\nclose query-memdev\n".to_vec(), seed(&rest)].concat();
    vec![seed(&memory), seed(&rest), events, odd.into()]
}

/// Asks everything of a QEMU that gives the answers in `data`.
pub fn answer(data: &[u8]) -> u64 {
    thread_local! {
        static PLAYED: RefCell<Option<Played>> = const { RefCell::new(None) };
    }
    PLAYED.with_borrow_mut(|played| {
        let played = played.get_or_insert_with(Played::start);
        *played
            .answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = data.to_vec();
        let found = ask(&mut played.qmp);
        // An answer that is no JSON leaves the connection out of step.
        played.qmp.reconnect().expect("QEMU is played");
        found
    })
}

fn ask(qmp: &mut Qmp) -> u64 {
    let mut found = 1;
    let mut add = |kind: usize, most: u32| found = found << most | kind.min((1 << most) - 1) as u64;
    if let Ok(layout) = ram::read(qmp) {
        add(layout.slots.len(), 2);
        for slot in &layout.slots {
            assert!(slot.pages > 0 && slot.block < layout.blocks.len());
        }
    }
    if let Ok((_, read)) = conditions::read(qmp, getpid(), false) {
        add(1 + read.fold.len(), 4);
        add(read.refold_live.len(), 3);
        assert!(!read.may_fold() || read.fold.is_empty());
    }
    if let Ok(parts) = MachineParts::of(qmp) {
        add(1 + usize::from(format!("{parts:?}").len() > 100), 2);
    }
    if let Ok(socket) = endpoints::agent_socket(getpid(), qmp) {
        add(1 + usize::from(socket.is_some()), 2);
    }
    if let Ok(cpu) = Cpu::of(qmp) {
        add(
            1 + cpu
                .as_ref()
                .map_or(0, |cpu| 1 + cpu.words.len() + cpu.features.len()),
            3,
        );
        if let Some(cpu) = cpu {
            // A CPU has the features that it has.
            assert!(cpu.check("it", qmp).is_ok());
        }
    }
    if let Ok(top) = graph::top(qmp, "vm") {
        add(1 + usize::from(top.file.is_some()), 2);
    }
    add(usize::from(graph::free_generation(qmp).is_ok()), 1);
    if let Ok(waits) = waits::look(qmp) {
        add(1 + usize::from(waits.is_some()), 2);
    }
    if let Ok(device) = balloon::find(qmp) {
        add(1, 1);
        add(
            usize::from(matches!(balloon::guest_stats(qmp, &device), Ok(Some(_)))),
            1,
        );
        add(
            usize::from(balloon::deflates_on_oom(qmp, &device).unwrap_or(false)),
            1,
        );
    }
    if let Ok(device) = virtio_mem::read(qmp) {
        add(1 + usize::from(device.is_some()), 2);
        assert!(device.is_none_or(|device| device.block.0 > 0));
    }
    add(usize::from(virtio_mem::plugged(qmp).is_ok()), 1);
    add(usize::from(virtio_mem::has_driver(qmp).unwrap_or(false)), 1);
    add(usize::from(balloon::full_size(qmp).is_ok()), 1);
    add(usize::from(balloon::actual(qmp).is_ok()), 1);
    found
}
