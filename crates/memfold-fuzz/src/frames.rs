//! Fuzzes the parsers of the daemon's two message protocols: with the guest's agent, and with
//! memfold's library in QEMU.

use std::fmt::Debug;

use memfold_wire::agent::{
    self, AgentCounters, FileFacts, FileRange, FromAgent, HintRun, OutputStream, PfnRun, Terminal,
    TerminalSize, ToAgent,
};
use memfold_wire::frame::{Decoder, FrameError, HEADER, Validate, decode_body, encode};
use memfold_wire::library::{
    self, Advice, FoldRun, Freeze, HISTOGRAM_BUCKETS, MapRun, Order, Outcome, Range, Reply, Stats,
};
use memfold_wire::memory::{
    self, LruGen, MemoryReading, Pressure, TrimEnd, TrimMethod, TrimOrder, TrimResult,
};
use memfold_wire::order::{GuestOrder, NewAddresses, NewIdentities, NewNames, PathList};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Parses the bytes as a stream of frames, in pieces as a socket might deliver them, and then,
/// without the frame header, as the body of one message. Returns a number that identifies the kind
/// of result.
pub fn run<M>(data: &[u8]) -> u64
where
    M: Serialize + DeserializeOwned + Validate + PartialEq + Debug + Limited,
{
    let step = usize::from(data.first().copied().unwrap_or(0)).max(1);
    let mut decoder = Decoder::new();
    let mut count = 0;
    'stream: for piece in data.chunks(step) {
        decoder.push(piece);
        loop {
            match decoder.next::<M>() {
                Ok(Some(message)) => {
                    check(&message);
                    count += 1;
                }
                Ok(None) => break,
                Err(_) => break 'stream,
            }
        }
    }
    let body = match decode_body::<M>(data.get(HEADER..).unwrap_or_default()) {
        Ok(message) => {
            check(&message);
            // The variant is what postcard writes first.
            16 + u64::from(data[HEADER])
        }
        Err(FrameError::TooLong(_)) => 1,
        Err(FrameError::Limit(what)) => 2 + what.len() as u64 % 8,
        Err(FrameError::Malformed(_)) => 0,
    };
    body << 8 | count.min(255)
}

/// Checks that a message which the parser accepted is within its limits, and is the same after it
/// is encoded and decoded.
fn check<M>(message: &M)
where
    M: Serialize + DeserializeOwned + Validate + PartialEq + Debug + Limited,
{
    assert!(message.validate().is_ok());
    message.assert_limits();
    // Numbers may have been written in more bytes than needed, so it may be shorter than it came,
    // never longer.
    let frame = encode(message).expect("what was read can be written");
    let again: M = decode_body(&frame[HEADER..]).expect("what was written can be read");
    assert_eq!(*message, again);
}

/// A message whose limits can be asserted: those on which the receiver's code relies, checked
/// independently of [`Validate`].
pub trait Limited {
    fn assert_limits(&self);
}

impl Limited for FromAgent {
    fn assert_limits(&self) {
        let runs: Vec<u32> = match self {
            Self::Hints(list) => list.iter().map(|r| r.pages).collect(),
            Self::Gone(list) => list.iter().map(|r| r.pages).collect(),
            Self::Dirty(list) | Self::Clean(list) => list.iter().map(|r| r.pages).collect(),
            _ => Vec::new(),
        };
        assert!(runs.len() <= agent::MAX_RUNS);
        let longest = agent::MAX_RUN_PAGES;
        assert!(runs.iter().all(|pages| (1..=longest).contains(pages)));
        match self {
            Self::Files(list) => {
                assert!(list.len() <= agent::MAX_RUNS);
                assert!(list.iter().all(|f| f.path.len() <= agent::MAX_PATH));
            }
            Self::Output { bytes, .. } => assert!(bytes.len() <= agent::MAX_TEXT),
            Self::Hello {
                agent,
                kernel,
                boot_id,
                host_name,
                problems,
                ..
            } => {
                assert!(problems.len() <= agent::MAX_PROBLEMS);
                for text in [agent, kernel, boot_id, host_name]
                    .into_iter()
                    .chain(problems)
                {
                    assert!(text.len() <= agent::MAX_TEXT);
                }
            }
            Self::Hints(_)
            | Self::Gone(_)
            | Self::Dirty(_)
            | Self::Clean(_)
            | Self::InventoryBegin
            | Self::InventoryEnd { .. }
            | Self::Counters(_)
            | Self::Exited { .. }
            | Self::InputRoom { .. }
            | Self::Memory(_)
            | Self::Trimmed(_) => {}
            Self::Allowed { words } => {
                assert!(words.len() <= 64);
                assert!(words.iter().all(|word| word.len() <= 64));
            }
            Self::NotAllowed { word, .. } => assert!(word.len() <= 64),
        }
    }
}

impl Limited for ToAgent {
    fn assert_limits(&self) {
        match self {
            Self::Run { script, .. } | Self::Stream { script, .. } => {
                assert!(script.len() <= agent::MAX_TEXT);
            }
            Self::Input { bytes, .. } => assert!(bytes.len() <= agent::MAX_INPUT),
            Self::ReportMemory { interval_ms } => {
                assert!(*interval_ms == 0 || *interval_ms >= memory::MIN_INTERVAL_MS);
            }
            Self::Order { order, .. } | Self::StreamOrder { order, .. } => {
                let script = order.script();
                assert!(script.len() <= agent::MAX_TEXT && !script.contains('\0'));
                // Only the line after a list ends it.
                let ends = script.lines().filter(|line| *line == "END").count();
                let has_list = script.contains("<<'END'");
                let is_quoted = matches!(
                    order,
                    GuestOrder::CopyToDisk { .. }
                        | GuestOrder::SendArchive { .. }
                        | GuestOrder::SendFile { .. }
                        | GuestOrder::ReceiveArchive { .. }
                );
                assert!(is_quoted || ends == usize::from(has_list), "{script}");
            }
            _ => {}
        }
    }
}

impl Limited for Order {
    fn assert_limits(&self) {
        let runs: Vec<u64> = match self {
            Self::Fold { runs, .. } => runs.iter().map(|r| r.pages.into()).collect(),
            Self::Release { ranges, .. } => ranges.iter().map(|r| r.pages).collect(),
            Self::DropZero { ranges } => return assert!(ranges.len() <= library::MAX_RUNS),
            _ => return,
        };
        assert!(runs.len() <= library::MAX_RUNS);
        let longest = library::MAX_RUN_PAGES.into();
        assert!(runs.iter().all(|pages| (1..=longest).contains(pages)));
    }
}

impl Limited for Reply {
    fn assert_limits(&self) {
        if let Self::Outcomes { outcomes, .. } = self {
            assert!(outcomes.len() <= library::MAX_RUNS);
            assert!(outcomes.iter().all(|o| o.pages_done(7) <= 7));
        }
    }
}

/// Makes seeds: each message as a frame, and all messages as one stream of frames.
fn frames<M: Serialize>(messages: &[M]) -> Vec<Vec<u8>> {
    let frames = messages.iter().map(|m| encode(m).expect("a valid message"));
    let mut seeds: Vec<Vec<u8>> = frames.collect();
    seeds.push(seeds.concat());
    seeds
}

pub fn from_agent() -> Vec<Vec<u8>> {
    let range = |file| FileRange {
        file,
        page: 64,
        pages: agent::MAX_RUN_PAGES,
    };
    let hint = |file: u32| HintRun {
        file,
        page: u64::from(file) * 64,
        pfn: 0x1_0000 + u64::from(file) * 64,
        pages: 64,
    };
    let facts = |file, path: &str, size_bytes| FileFacts {
        file,
        path: path.into(),
        size_bytes,
    };
    let ranges: Vec<FileRange> = (0..4).map(range).collect();
    let (command, code) = (9, -1);
    frames(&[
        FromAgent::Hello {
            version: agent::VERSION,
            agent: "0.1.0".into(),
            kernel: "6.12.0-cloud-amd64".into(),
            boot_id: "a2f7e6c0-0000-4000-8000-000000000000".into(),
            host_name: "guest".into(),
            problems: vec!["no trace events".into()],
        },
        FromAgent::Files(vec![facts(1, "/usr/bin/bash", 1_298_416), facts(2, "", 0)]),
        FromAgent::Hints((0..8).map(hint).collect()),
        FromAgent::Gone(vec![PfnRun { pfn: 77, pages: 1 }; 3]),
        FromAgent::Dirty(ranges.clone()),
        FromAgent::Clean(ranges),
        FromAgent::InventoryBegin,
        FromAgent::InventoryEnd {
            files: 1000,
            pages: 50_000,
        },
        FromAgent::Counters(AgentCounters {
            events: u64::MAX,
            rss_bytes: 3 << 20,
            ..AgentCounters::default()
        }),
        FromAgent::Output {
            command,
            stream: OutputStream::Stderr,
            bytes: vec![0xFF; 300],
        },
        FromAgent::Exited { command, code },
        FromAgent::InputRoom {
            command,
            bytes: 1 << 16,
        },
        FromAgent::Memory(Box::default()),
        FromAgent::Memory(Box::new(MemoryReading {
            mem_total_kib: 8 << 20,
            pgscan: u64::MAX,
            pressure: Some(Pressure {
                some_us: 1 << 40,
                some_avg10: 10_000,
                ..Pressure::default()
            }),
            lru_gen: Some([LruGen { anon: 7, file: 9 }; 4]),
            cgroup_limit_kib: Some(1 << 20),
            ..MemoryReading::default()
        })),
        FromAgent::Trimmed(TrimResult {
            order: 3,
            reclaimed_bytes: 64 << 20,
            refaults: 12,
            steps: 16,
            method: TrimMethod::MemoryReclaim,
            end: TrimEnd::Failed(-5),
        }),
        FromAgent::Allowed {
            words: ["exec", "drop-caches", "unknown"].map(String::from).into(),
        },
        FromAgent::NotAllowed {
            command,
            word: "exec".into(),
        },
    ])
}

pub fn to_agent() -> Vec<Vec<u8>> {
    let (reason, script, command) = ("too old".into(), String::from("uname -r"), 1);
    let size = TerminalSize {
        rows: 24,
        columns: 80,
    };
    let kind = "xterm-256color".into();
    let stream = ToAgent::Stream {
        command,
        script: script.clone(),
        has_input: true,
        terminal: Some(Terminal { kind, size }),
    };
    let input = ToAgent::Input {
        command,
        bytes: vec![3; 40],
    };
    let signal = 15;
    let (files, _) = PathList::new([&b"/usr/bin/a b"[..], b"/x\n\\\xff'"]);
    let limit_ms = 2500;
    let order = |order| ToAgent::Order { command, order };
    let path = String::from("/srv/it's");
    frames(&[
        order(GuestOrder::ListExtents(files.clone())),
        order(GuestOrder::DropCaches { files, limit_ms }),
        order(GuestOrder::StepClock {
            behind_ns: -(1 << 70),
            now_s: i128::MAX,
        }),
        order(GuestOrder::Renew(NewIdentities {
            seed: "5f".repeat(32),
            network: Some(NewAddresses { mac: 77, cards: 1 }),
            names: Some(NewNames {
                host_name: "web-1.a".into(),
                machine_id: "0a".repeat(16),
            }),
        })),
        order(GuestOrder::MountSegment {
            name: "base@3".into(),
            content: true,
        }),
        order(GuestOrder::CopyToDisk {
            tops: vec![path.clone()],
        }),
        ToAgent::StreamOrder {
            command,
            order: GuestOrder::ReceiveArchive {
                name: String::new(),
                destination: path,
            },
            has_input: true,
        },
        ToAgent::Welcome {
            version: agent::VERSION,
            include: vec!["/usr/**".into()],
            exclude: vec!["/usr/share/*".into(), String::new()],
        },
        ToAgent::Refused { reason },
        ToAgent::Inventory,
        ToAgent::Ping,
        ToAgent::Run { command, script },
        ToAgent::Kill { command },
        stream,
        input,
        ToAgent::EndInput { command },
        ToAgent::OutputRoom {
            command,
            cost: 70_000,
        },
        ToAgent::Resize { command, size },
        ToAgent::Signal { command, signal },
        ToAgent::HangUp { command },
        ToAgent::ReportMemory { interval_ms: 2000 },
        ToAgent::Trim(TrimOrder {
            order: 3,
            bytes: 64 << 20,
            max_some: 100,
            deadline_ms: 10_000,
            spare_swap: true,
        }),
    ])
}

pub fn orders() -> Vec<Vec<u8>> {
    let hva = 0x7fd5_27e0_0000;
    let ranges = vec![Range { hva, pages: 512 }; 3];
    let run = |i: u32| FoldRun {
        hva: hva + u64::from(i) * 4096,
        pages: 1 + i * 100,
        store: 1,
        store_page: u64::from(i),
    };
    let fold = |freeze| Order::Fold {
        freeze,
        runs: (0..5).map(run).collect(),
    };
    let map = MapRun {
        hva,
        pages: 3,
        file_page: u64::MAX,
    };
    frames(&[
        Order::Hello {
            version: library::VERSION,
        },
        Order::AddRam {
            hva,
            pages: 1 << 17,
            advice: Advice {
                mergeable: true,
                ..Advice::default()
            },
        },
        Order::AddStore {
            store: 1,
            max_pages: 1 << 22,
        },
        fold(Freeze::Move),
        fold(Freeze::WriteProtect),
        fold(Freeze::Stopped { limit_us: 5000 }),
        Order::Release {
            freeze: Freeze::WriteProtect,
            ranges: ranges.clone(),
        },
        Order::DropZero {
            ranges: ranges.clone(),
        },
        Order::KeepPast { ranges },
        Order::ForgetPast,
        Order::Map {
            hva,
            pages: map.pages,
            file_page: map.file_page,
        },
        Order::MapRuns { runs: vec![map] },
        Order::Await {
            ranges: vec![library::Range { hva, pages: 3 }],
        },
        Order::Stats,
        Order::RemoveRam { hva },
        Order::RemoveStore { store: u32::MAX },
        Order::Stop,
        Order::Continue,
    ])
}

pub fn replies() -> Vec<Vec<u8>> {
    frames(&[
        Reply::Hello {
            version: library::VERSION,
            library: "0.1.0".into(),
            can_move: true,
            can_write_protect: false,
            can_stop: true,
            problem: Some("no userfaultfd".into()),
        },
        Reply::Ok,
        Reply::Outcomes {
            outcomes: vec![
                Outcome::Done,
                Outcome::Differs { folded: 3 },
                Outcome::Busy { folded: u32::MAX },
                Outcome::Hole { folded: 0 },
                Outcome::Late,
                Outcome::Refused,
                Outcome::Failed {
                    errno: 22,
                    folded: 1,
                },
            ],
            cpu_ns: 12_345,
            stopped_ns: 5_000_000,
        },
        Reply::Zero {
            scanned: 262_144,
            dropped: 1,
            cpu_ns: 1,
        },
        Reply::Stats(Box::new(Stats {
            folded_pages: 190_000,
            freeze_histogram: [7; HISTOGRAM_BUCKETS],
            ..Stats::default()
        })),
        Reply::Error {
            reason: "no such store".into(),
        },
    ])
}
