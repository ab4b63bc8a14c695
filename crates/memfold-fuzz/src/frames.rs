//! Fuzzes the two message protocols: with the guest's agent, and with the library in QEMU.

use std::fmt::Debug;

use memfold_wire::agent::{
    self, AgentCounters, FileFacts, FileRange, FromAgent, HintRun, OutputStream, PfnRun, ToAgent,
};
use memfold_wire::frame::{Decoder, FrameError, HEADER, Validate, decode_body, encode};
use memfold_wire::library::{
    self, Advice, FoldRun, Freeze, HISTOGRAM_BUCKETS, MapRun, Order, Outcome, Range, Reply, Stats,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::subject::Subject;

pub const FROM_AGENT: Subject = Subject {
    name: "from_agent",
    run: run::<FromAgent>,
    seeds: || frames(&from_agent()),
};
pub const TO_AGENT: Subject = Subject {
    name: "to_agent",
    run: run::<ToAgent>,
    seeds: || frames(&to_agent()),
};
pub const ORDER: Subject = Subject {
    name: "order",
    run: run::<Order>,
    seeds: || frames(&orders()),
};
pub const REPLY: Subject = Subject {
    name: "reply",
    run: run::<Reply>,
    seeds: || frames(&replies()),
};

/// The bytes as a stream, in pieces as a socket might give them, and (with the header left out) as
/// a body.
fn run<M>(data: &[u8]) -> u64
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

/// What was accepted is within its limits, and survives another way over the wire.
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

/// The limits that the receiver's code relies on, said a second time and independently of
/// [`Validate`].
trait Limited {
    fn assert_limits(&self);
}

fn agent_run(pages: u32) -> bool {
    (1..=agent::MAX_RUN_PAGES).contains(&pages)
}

impl Limited for FromAgent {
    fn assert_limits(&self) {
        match self {
            Self::Hints(list) => {
                assert!(list.len() <= agent::MAX_RUNS);
                assert!(list.iter().all(|r| agent_run(r.pages)));
            }
            Self::Gone(list) => {
                assert!(list.len() <= agent::MAX_RUNS);
                assert!(list.iter().all(|r| agent_run(r.pages)));
            }
            Self::Dirty(list) | Self::Clean(list) => {
                assert!(list.len() <= agent::MAX_RUNS);
                assert!(list.iter().all(|r| agent_run(r.pages)));
            }
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
                ..
            } => {
                for text in [agent, kernel, boot_id, host_name] {
                    assert!(text.len() <= agent::MAX_TEXT);
                }
            }
            Self::InventoryBegin
            | Self::InventoryEnd { .. }
            | Self::Counters(_)
            | Self::Exited { .. } => {}
        }
    }
}

impl Limited for ToAgent {
    fn assert_limits(&self) {
        if let Self::Run { script, .. } = self {
            assert!(script.len() <= agent::MAX_TEXT);
        }
    }
}

impl Limited for Order {
    fn assert_limits(&self) {
        let longest = u64::from(library::MAX_RUN_PAGES);
        match self {
            Self::Fold { runs, .. } => {
                assert!(runs.len() <= library::MAX_RUNS);
                assert!(
                    runs.iter()
                        .all(|r| (1..=longest).contains(&u64::from(r.pages)))
                );
            }
            Self::Release { ranges, .. } => {
                assert!(ranges.len() <= library::MAX_RUNS);
                assert!(ranges.iter().all(|r| (1..=longest).contains(&r.pages)));
            }
            Self::DropZero { ranges } => assert!(ranges.len() <= library::MAX_RUNS),
            _ => {}
        }
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

/// Each message as a frame, and all of them as one stream.
fn frames<M: Serialize>(messages: &[M]) -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = messages
        .iter()
        .map(|m| encode(m).expect("a valid message"))
        .collect();
    seeds.push(seeds.concat());
    seeds
}

fn from_agent() -> Vec<FromAgent> {
    let ranges: Vec<_> = (0..4)
        .map(|i| FileRange {
            file: i,
            page: 64,
            pages: agent::MAX_RUN_PAGES,
        })
        .collect();
    vec![
        FromAgent::Hello {
            version: agent::VERSION,
            agent: "0.1.0".into(),
            kernel: "6.12.0-cloud-amd64".into(),
            boot_id: "a2f7e6c0-0000-4000-8000-000000000000".into(),
            host_name: "guest".into(),
            problems: vec!["no trace events".into()],
        },
        FromAgent::Files(vec![
            FileFacts {
                file: 1,
                path: b"/usr/bin/bash".to_vec(),
                size_bytes: 1_298_416,
            },
            FileFacts {
                file: 2,
                path: Vec::new(),
                size_bytes: 0,
            },
        ]),
        FromAgent::Hints(
            (0..8)
                .map(|i| HintRun {
                    file: i,
                    page: u64::from(i) * 64,
                    pfn: 0x1_0000 + u64::from(i) * 64,
                    pages: 64,
                })
                .collect(),
        ),
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
            command: 9,
            stream: OutputStream::Stderr,
            bytes: vec![0xFF; 300],
        },
        FromAgent::Exited {
            command: 9,
            code: -1,
        },
    ]
}

fn to_agent() -> Vec<ToAgent> {
    vec![
        ToAgent::Welcome {
            version: agent::VERSION,
            include: vec!["/usr/**".into()],
            exclude: vec!["/usr/share/*".into(), String::new()],
        },
        ToAgent::Refused {
            reason: "too old".into(),
        },
        ToAgent::Inventory,
        ToAgent::Ping,
        ToAgent::Run {
            command: 1,
            script: "uname -r".into(),
        },
        ToAgent::Kill { command: 1 },
    ]
}

fn orders() -> Vec<Order> {
    let hva = 0x7fd5_27e0_0000;
    let ranges = vec![Range { hva, pages: 512 }; 3];
    let fold = |freeze| Order::Fold {
        freeze,
        runs: (0..5)
            .map(|i| FoldRun {
                hva: hva + u64::from(i) * 4096,
                pages: 1 + i * 100,
                store: 1,
                store_page: u64::from(i),
            })
            .collect(),
    };
    vec![
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
            pages: 3,
            file_page: u64::MAX,
        },
        Order::MapRuns {
            runs: vec![MapRun {
                hva,
                pages: 3,
                file_page: u64::MAX,
            }],
        },
        Order::Stats,
        Order::RemoveRam { hva },
        Order::RemoveStore { store: u32::MAX },
        Order::Stop,
        Order::Continue,
    ]
}

fn replies() -> Vec<Reply> {
    vec![
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
    ]
}
