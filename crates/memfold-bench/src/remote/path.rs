//! A part of the study `remote`: measures how long an access of 4 KiB to another host's RAM takes
//! through QEMU's block layer, without a guest. The lending host is at the other end of a simulated
//! link. The drawing shows the three ways that are compared.
//!
//! ```text
//!   bare     a client of NBD with TLS -----------------------------> nbdkit
//!   direct   qemu-io, nbd with TLS --------------------------------> nbdkit
//!   blocks   qemu-io, quorum, nbd --Unix socket--> relay, with TLS -> nbdkit
//!                            file (the copy)
//! ```
//! Each way has its own lease. `bare` is a plain NBD client, `direct` is QEMU's NBD client alone
//! (which memfold does not use), and `blocks` is what a VM uses.
//!
//! The ways take turns of [`TURN`] consecutive accesses, as a swapping guest makes them, because a
//! process that gets the next request at once need not be woken. `apart` holds the latency of
//! isolated accesses.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command as Program, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use memfold_api::registry_at;
use memfold_host::own_program;
use memfold_lend::nbd::{BLOCK, Command, REPLY_BYTES, Reply, Request};
use memfold_lend::relay::stream::Stream;
use memfold_lend::relay::{Orders, start};
use memfold_lend::wire::PATIENCE;
use memfold_lend::{Address, Durability, Endpoint, Lease, Registry, RegistryAt, Want};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};

use super::lender::{Lender, wait};
use crate::clones::percentile;
use crate::record::{median, ratios, spread};

/// Size of each lease, in bytes.
const BYTES: u64 = 64 << 20;

const BLOCK_BYTES: u64 = BLOCK as u64;

/// Number of accesses of each kind in a round. The next constant: number of rounds.
const ACCESSES: u64 = 600;
const ROUNDS: usize = 7;

/// Number of consecutive accesses of one way.
const TURN: u64 = 50;

/// Name of the borrower.
const HERE: &str = "block-path";

/// Duration of a lease.
const TTL: Duration = Duration::from_secs(300);

/// Measures the latency of each way to lent memory, in microseconds. Returns the latencies and
/// their ratios.
pub fn measure(lender: &Lender) -> anyhow::Result<Value> {
    let registry = registry_at(&RegistryAt::Socket(lender.socket()));
    // The copy lies on a disk; /tmp is often in memory.
    let place = std::env::var_os("TMPDIR").unwrap_or_else(|| "/var/tmp".into());
    let directory = tempfile::Builder::new()
        .prefix("memfold-path.")
        .tempdir_in(place)?;
    let take = || Taken::new(&registry);
    let (bare, direct, blocks) = (take()?, take()?, take()?);
    let mut direct = Blocks::direct(directory.path(), &direct.endpoint()?)?;
    let mut bare = Bare(Stream::open(&bare.endpoint()?, BYTES, PATIENCE)?);
    let mut blocks = Blocks::start(directory.path(), blocks.endpoint()?)?;
    let data = vec![0xa5; BLOCK as usize];
    for block in 0..BYTES / BLOCK_BYTES {
        bare.write(block * BLOCK_BYTES, &data)?;
    }
    let mut ways = Ways {
        bare: &mut bare,
        blocks: &mut blocks,
        direct: &mut direct,
        data,
    };
    let in_a_row = ways.measure(TURN)?;
    let apart = ways.measure(1)?;
    blocks.end();
    direct.end();
    let mut results = in_a_row.json();
    results["apart"] = apart.json();
    Ok(results)
}

/// Connections to lent memory, one for each way that is compared.
struct Ways<'a> {
    bare: &'a mut Bare,
    blocks: &'a mut Blocks,
    direct: &'a mut Blocks,
    data: Vec<u8>,
}

impl Ways<'_> {
    /// Makes an access, and returns its microseconds. `number`: 0 to 2 are reads, 3 to 5 writes; in
    /// each group, the first is by a bare client, the second by QEMU's nodes as a VM has them, the
    /// third by QEMU's own client.
    fn access(&mut self, number: usize, at: u64, byte: u64) -> anyhow::Result<f64> {
        let order = if number < 3 {
            format!("read -C {at} {BLOCK}")
        } else {
            format!("write -C -P {byte} {at} {BLOCK}")
        };
        match number {
            0 => self.bare.read(at),
            3 => self.bare.write(at, &self.data),
            1 | 4 => self.blocks.order(&order),
            _ => self.direct.order(&order),
        }
    }

    /// Makes `turn` accesses of one way, then as many of the next.
    fn measure(&mut self, turn: u64) -> anyhow::Result<Latencies> {
        let mut found = Latencies::default();
        for round in 0..ROUNDS as u64 {
            let mut times: [Vec<f64>; 6] = Default::default();
            for from in (0..ACCESSES).step_by(usize::try_from(turn)?) {
                for (number, times) in times.iter_mut().enumerate() {
                    for access in from..from + turn {
                        // Each block is a new one, far from the last.
                        let block = (round * ACCESSES + access) * 7919 % (BYTES / BLOCK_BYTES);
                        times.push(self.access(number, block * BLOCK_BYTES, 1 + access % 250)?);
                    }
                }
            }
            for (number, times) in times.into_iter().enumerate() {
                found.medians[number].push(median(&times));
                found.all[number].extend(times);
            }
        }
        Ok(found)
    }
}

/// Microseconds of each kind of access: of all accesses, and the median of each round.
#[derive(Default)]
struct Latencies {
    all: [Vec<f64>; 6],
    medians: [Vec<f64>; 6],
}

impl Latencies {
    fn json(&self) -> Value {
        let [bare, blocks, direct] = [0, 1, 2];
        let (of, all) = (&self.medians, &self.all);
        let mut found = json!({ "added_read_us": median(&of[blocks]) - median(&of[bare]) });
        for (what, at) in [("read", 0), ("write", 3)] {
            let ratio = |way: usize| ratios(&of[way + at], &of[bare + at]);
            found[format!("bare_{what}_us")] = spread(&all[bare + at]);
            found[format!("{what}_us")] = spread(&all[blocks + at]);
            for percent in [50, 99] {
                let us = percentile(&all[blocks + at], percent);
                found[format!("{what}_p{percent}_us")] = us.into();
            }
            found[format!("qemu_direct_{what}_us")] = spread(&all[direct + at]);
            found[format!("qemu_direct_{what}_ratio")] = median(ratio(direct)).into();
            found[format!("{what}_ratio")] = median(ratio(blocks)).into();
            found[format!("{what}_ratio_spread")] = spread(ratio(blocks));
        }
        found
    }
}

/// A lease, which is released when it is dropped.
struct Taken<'a> {
    registry: &'a Arc<dyn Registry>,
    lease: Lease,
}

impl<'a> Taken<'a> {
    fn new(registry: &'a Arc<dyn Registry>) -> anyhow::Result<Self> {
        let want = Want {
            borrower: HERE.into(),
            vm: HERE.into(),
            bytes: BYTES,
            disk_bytes: 0,
            durability: Durability::None,
            apart_from: Vec::new(),
        };
        let lease = registry.take(&want, TTL)?;
        Ok(Self { registry, lease })
    }

    fn endpoint(&self) -> anyhow::Result<Endpoint> {
        let mut found = None;
        wait("the lender exports", || {
            found = self.registry.endpoint(self.lease.id, HERE).ok().flatten();
            found.is_some()
        })?;
        found.context("the lender does not export the lease")
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.registry.release(self.lease.id, HERE) {
            eprintln!("memfold: {error}");
        }
    }
}

/// A client that only sends requests and receives answers.
struct Bare(Stream);

impl Bare {
    fn read(&mut self, at: u64) -> anyhow::Result<f64> {
        let mut into = vec![0; BLOCK as usize];
        self.exchange(Command::Read, at, &[], &mut into)
    }

    fn write(&mut self, at: u64, data: &[u8]) -> anyhow::Result<f64> {
        self.exchange(Command::Write, at, data, &mut [])
    }

    fn exchange(
        &mut self,
        command: Command,
        at: u64,
        data: &[u8],
        into: &mut [u8],
    ) -> anyhow::Result<f64> {
        let request = Request {
            command,
            cookie: at,
            offset: at,
            length: BLOCK,
        };
        let message = [&request.encode(), data].concat();
        let began = Instant::now();
        let write = |stream: &mut Stream, done| stream.write(&message[done..]);
        self.go(PollFlags::OUT, message.len(), write)?;
        let length = REPLY_BYTES + into.len();
        let mut answer = vec![0; length];
        let read = |stream: &mut Stream, done| stream.read(&mut answer[done..]);
        self.go(PollFlags::IN, length, read)?;
        let took = began.elapsed();
        let (head, rest) = answer.split_at(REPLY_BYTES);
        let reply = Reply::decode(head.try_into()?).map_err(|nonsense| anyhow!("{nonsense}"))?;
        let is_done = reply.error == 0 && reply.cookie == at;
        ensure!(is_done, "the lender said {reply:?}");
        into.copy_from_slice(rest);
        Ok(took.as_secs_f64() * 1e6)
    }

    /// Transfers `bytes` bytes in one direction.
    fn go(
        &mut self,
        wants: PollFlags,
        bytes: usize,
        mut step: impl FnMut(&mut Stream, usize) -> io::Result<usize>,
    ) -> anyhow::Result<()> {
        let mut done = 0;
        while done < bytes {
            match step(&mut self.0, done) {
                Ok(0) => {
                    bail!("the lender closed the connection before all bytes were transferred")
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll(&mut [PollFd::new(&self.0, wants)], None)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// QEMU's block nodes as a VM has them, used by `qemu-io`.
struct Blocks {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Blocks {
    fn start(directory: &Path, endpoint: Endpoint) -> anyhow::Result<Self> {
        let (socket, copy) = (directory.join("relay"), directory.join("copy"));
        std::fs::File::create(&copy)?.set_len(BYTES)?;
        let log = std::fs::File::create(directory.join("log"))?;
        let orders = Orders {
            socket: socket.clone(),
            bytes: BYTES,
            lenders: vec![endpoint],
            patience_ms: u64::try_from(PATIENCE.as_millis())?,
        };
        // The relay ends when its client disconnects.
        start::start(&own_program()?, &orders, log)?;
        let nodes = json!({
            "driver": "quorum", "vote-threshold": 1, "read-pattern": "fifo",
            "children": [
                { "driver": "nbd", "export": "", "server": { "type": "unix", "path": socket } },
                { "driver": "raw", "file": { "driver": "file", "filename": copy } },
            ],
        });
        Self::open(&[], &nodes)
    }

    /// Starts QEMU's own NBD client, connected directly to the lender.
    fn direct(directory: &Path, endpoint: &Endpoint) -> anyhow::Result<Self> {
        let (Address::Tcp { ip, port }, Some(key)) = (&endpoint.address, &endpoint.key) else {
            bail!("cannot connect QEMU to the lender: the export does not use TCP with a TLS key");
        };
        // QEMU looks for the key in this file and in this form.
        let line = format!("{}:{}\n", key.identity, key.hex);
        std::fs::write(directory.join("keys.psk"), line)?;
        let (place, user) = (directory.display(), &key.identity);
        let credentials =
            format!("tls-creds-psk,id=psk,endpoint=client,dir={place},username={user}");
        let nodes = json!({
            "driver": "nbd", "export": "", "tls-creds": "psk",
            "server": { "type": "inet", "host": ip.to_string(), "port": port.to_string() },
        });
        Self::open(&["--object", &credentials], &nodes)
    }

    fn open(options: &[&str], nodes: &Value) -> anyhow::Result<Self> {
        let mut child = Program::new("qemu-io")
            // As for the VM's swap disk: without this mode, each write would be followed by a flush
            // of the copy.
            .args(["-t", "unsafe"])
            .args(options)
            .arg(format!("json:{nodes}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start qemu-io; install it (apt install qemu-utils)")?;
        let ends = child.stdin.take().zip(child.stdout.take());
        let (orders, answers) =
            ends.context("cannot talk to qemu-io: its standard input or output is not a pipe")?;
        let mut blocks = Self {
            child,
            orders,
            answers: BufReader::new(answers),
        };
        blocks.order(&format!("write -C -P 165 0 {BYTES}"))?;
        Ok(blocks)
    }

    /// Makes `qemu-io` do one access. Returns the microseconds that `qemu-io` measured.
    fn order(&mut self, order: &str) -> anyhow::Result<f64> {
        writeln!(self.orders, "{order}")?;
        self.orders.flush()?;
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.answers.read_line(&mut line)?;
            ensure!(read > 0, "qemu-io has ended at '{order}'");
            // Format of the line: bytes,accesses,time,bytes a second,accesses a second.
            let fields: Vec<&str> = line.trim().split(',').collect();
            if let [_, _, _, _, rate] = fields[..] {
                return Ok(1e6 / rate.parse::<f64>()?);
            }
            ensure!(!line.contains("failed"), "{order}: {}", line.trim());
        }
    }

    fn end(mut self) {
        // `qemu-io` waits for the end of its input.
        drop(self.orders);
        let _ = self.child.wait();
    }
}
