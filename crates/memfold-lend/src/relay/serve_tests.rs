use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use memfold_testkit::{bound, wait_until};
use memfold_vm::{Identity, Process};
use rustix::net::sockopt;
use rustix::process::Pid;

use super::super::super::connection::{PATIENCE, Wire};
use super::super::super::export::{Export, ExportError};
use super::*;
use crate::endpoint::Address;
use crate::endpoint::{Listen, TcpListen};
use crate::lease::LeaseId;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const B: usize = BLOCK as usize;

/// Misbehaviour of a test's lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    FlipBit,
    OldBytes,
    OtherBlock,
    Zeroes,
    ForgetsWrites,
    ShortOfMagic,
    OtherCookie,
    SaysTooMuch,
    Refuses,
    HangsUp,
    SaysNothing,
}

/// Starts a lender in this process that serves from memory, and misbehaves as soon as `orders` says
/// so.
fn lender(mut stream: UnixStream, bytes: u64, orders: Receiver<Lie>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut disk = vec![0; usize::try_from(bytes).unwrap()];
        let mut before = disk.clone();
        let mut lie = None;
        let mut head = [0; REQUEST_BYTES];
        while stream.read_exact(&mut head).is_ok() {
            lie = lie.or(orders.try_recv().ok());
            let request = Request::decode(&head).unwrap();
            let at = range(request.offset, u64::from(request.length));
            let mut reply = Reply {
                error: 0,
                cookie: request.cookie,
            };
            let mut data = Vec::new();
            match request.command {
                Command::Write => {
                    let mut new = vec![0; at.len()];
                    stream.read_exact(&mut new).unwrap();
                    if lie != Some(Lie::ForgetsWrites) {
                        before[at.clone()].copy_from_slice(&disk[at.clone()]);
                        disk[at.clone()].copy_from_slice(&new);
                    }
                }
                Command::Read => data = disk[at.clone()].to_vec(),
                _ => return,
            }
            match lie {
                Some(Lie::FlipBit) if !data.is_empty() => data[17] ^= 4,
                Some(Lie::OldBytes) if !data.is_empty() => data = before[at.clone()].to_vec(),
                Some(Lie::OtherBlock) if !data.is_empty() => {
                    data = disk[at.start + B..at.end + B].to_vec();
                }
                Some(Lie::Zeroes) => data.fill(0),
                Some(Lie::OtherCookie) => reply.cookie ^= 1 << 40,
                Some(Lie::Refuses) => reply.error = EIO,
                Some(Lie::HangsUp) => return,
                Some(Lie::SaysNothing) => continue,
                _ => {}
            }
            let mut head = reply.encode();
            if lie == Some(Lie::ShortOfMagic) {
                head[0] ^= 1;
            }
            let mut said = [&head[..], &data].concat();
            if lie == Some(Lie::SaysTooMuch) {
                said.resize(said.len() + 2 * MOST, 0x67);
            }
            if stream.write_all(&said).is_err() {
                return;
            }
        }
    })
}

/// A relay in a thread, and its client's end of the connection.
struct Served {
    client: UnixStream,
    relay: Option<JoinHandle<Result<(), Ended>>>,
    patience: Arc<Patience>,
    cookie: u64,
}

impl Served {
    fn new(lenders: Vec<Stream>, bytes: u64) -> Self {
        let (client, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        client
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let stripes = Stripes {
            count: lenders.len() as u64,
            bytes,
        };
        let sums = Arc::new(Sums::new(bytes).unwrap());
        let patience = Arc::new(Patience::ms(PATIENCE.as_millis().try_into().unwrap()));
        let for_it = patience.clone();
        let relay =
            std::thread::spawn(move || Relay::new(theirs, lenders, stripes, sums, for_it).serve());
        Self {
            client,
            relay: Some(relay),
            patience,
            cookie: 0,
        }
    }

    fn ask(&mut self, command: Command, offset: u64, length: u64, data: &[u8]) -> u64 {
        self.cookie += 1;
        let request = Request {
            command,
            cookie: self.cookie,
            offset,
            length: u32::try_from(length).unwrap(),
        };
        self.client.write_all(&request.encode()).unwrap();
        self.client.write_all(data).unwrap();
        self.cookie
    }

    fn hear(&mut self) -> Reply {
        let mut head = [0; REPLY_BYTES];
        self.client.read_exact(&mut head).unwrap();
        Reply::decode(&head).unwrap()
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        let cookie = self.ask(Command::Write, offset, data.len() as u64, data);
        let reply = self.hear();
        assert_eq!(reply.cookie, cookie);
        reply.error
    }

    fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, u32> {
        let cookie = self.ask(Command::Read, offset, length, &[]);
        let reply = self.hear();
        assert_eq!(reply.cookie, cookie);
        if reply.error != 0 {
            return Err(reply.error);
        }
        let mut data = vec![0; usize::try_from(length).unwrap()];
        self.client.read_exact(&mut data).unwrap();
        Ok(data)
    }

    fn end(mut self) -> Result<(), Ended> {
        let relay = self.relay.take().unwrap();
        drop(self);
        relay.join().unwrap()
    }
}

fn liars(count: u64, bytes: u64) -> (Served, Vec<Sender<Lie>>) {
    let stripes = Stripes { count, bytes };
    let mut orders = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..count {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let (order, heard) = channel();
        lender(theirs, stripes.of_each(), heard);
        orders.push(order);
        streams.push(Stream::Unix(ours));
    }
    (Served::new(streams, bytes), orders)
}

/// Returns bytes that differ from block to block and for each seed.
fn pattern(blocks: usize, seed: u64) -> Vec<u8> {
    let mut x = seed * 2 + 1;
    let next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        u8::try_from(x & 255).unwrap()
    };
    std::iter::repeat_with(next).take(blocks * B).collect()
}

#[test]
fn a_client_that_reads_no_answers_makes_the_relay_hold_few_of_them() {
    let (mut client, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let stripes = Stripes {
        count: 1,
        bytes: 8 * MIB,
    };
    let sums = Arc::new(Sums::new(8 * MIB).unwrap());
    let patience = Arc::new(Patience::ms(PATIENCE.as_millis().try_into().unwrap()));
    // No block was written, so no lender is asked.
    let mut relay = Relay::new(theirs, Vec::new(), stripes, sums, patience);
    let count = 100;
    for cookie in 0..count {
        let request = Request {
            command: Command::Read,
            cookie,
            offset: 0,
            length: u32::try_from(MIB).unwrap(),
        };
        relay.inbox.bytes.extend(request.encode());
    }
    assert!(relay.take_requests());
    assert!(relay.outbox.rest().len() as u64 <= UNDER_WAY + MIB);
    // All answers come as soon as the client reads.
    let reader = std::thread::spawn(move || {
        for cookie in 0..count {
            let mut head = [0; REPLY_BYTES];
            client.read_exact(&mut head).unwrap();
            assert_eq!(Reply::decode(&head).unwrap().cookie, cookie);
            client.read_exact(&mut vec![0; 1 << 20]).unwrap();
        }
        let leave = Request {
            command: Command::Disconnect,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        client.write_all(&leave.encode()).unwrap();
        client
    });
    relay.serve().unwrap();
    drop(reader.join().unwrap());
}

#[test]
fn however_a_lender_misbehaves_a_read_fails_and_never_returns_wrong_data() {
    for (lie, why) in [
        (Lie::FlipBit, Why::Lied),
        (Lie::OldBytes, Why::Lied),
        (Lie::OtherBlock, Why::Lied),
        (Lie::Zeroes, Why::Lied),
        (Lie::ForgetsWrites, Why::Lied),
        (Lie::ShortOfMagic, Why::Lied),
        (Lie::OtherCookie, Why::Lied),
        (Lie::SaysTooMuch, Why::Lied),
        (Lie::Refuses, Why::Failed),
        (Lie::HangsUp, Why::Gone),
        (Lie::SaysNothing, Why::Silent),
    ] {
        for count in [1, 3] {
            let (mut served, orders) = liars(count, 8 * MIB);
            assert_eq!(served.write(0, &pattern(64, 1)), 0);
            assert_eq!(served.write(4096, &pattern(2, 2)), 0);
            assert_eq!(served.read(4096, 2 * 4096), Ok(pattern(2, 2)), "{lie:?}");
            // This is the first lender, which has the first unit.
            orders[0].send(lie).unwrap();
            let begun = Instant::now();
            if lie == Lie::ForgetsWrites {
                assert_eq!(served.write(4096, &pattern(1, 3)), 0);
            }
            let got = served.read(4096, 4096);
            // If a lender sends too much, its correct answer may be processed first.
            let is_true = lie == Lie::SaysTooMuch && got == Ok(pattern(2, 2)[..B].to_vec());
            assert!(got == Err(EIO) || is_true, "{lie:?}");
            assert!(
                begun.elapsed() < bound(PATIENCE + Duration::from_secs(2)),
                "{lie:?} {:?}",
                begun.elapsed()
            );
            let ended = served.end().unwrap_err();
            assert_eq!((ended.lender, ended.why), (Some(0), why), "{lie:?}");
        }
    }
}

/// A guest whose other copy has failed would lose everything with its lender, so it waits longer.
#[test]
fn if_the_timeout_is_lengthened_during_a_read_the_read_waits_for_the_longer_timeout() {
    let (mut served, orders) = liars(1, MIB);
    assert_eq!(served.write(0, &pattern(1, 1)), 0);
    orders[0].send(Lie::SaysNothing).unwrap();
    let begun = Instant::now();
    served.ask(Command::Read, 0, 4096, &[]);
    std::thread::sleep(PATIENCE / 2);
    let longer = PATIENCE + Duration::from_secs(1);
    served.patience.set(longer.as_millis().try_into().unwrap());
    assert_eq!(served.hear().error, EIO);
    let waited = begun.elapsed();
    assert!(waited >= longer && waited < bound(longer * 2), "{waited:?}");
    assert_eq!(served.end().unwrap_err().why, Why::Silent);
}

#[test]
fn if_a_lender_returns_wrong_data_each_pending_read_gets_correct_data_or_an_error() {
    let (mut served, orders) = liars(2, 8 * MIB);
    assert_eq!(served.write(0, &pattern(256, 1)), 0);
    orders[1].send(Lie::FlipBit).unwrap();
    let read = |n: u64| Request {
        command: Command::Read,
        cookie: 100 + n,
        offset: n * 32 * KIB,
        length: 8 * BLOCK,
    };
    let asked: Vec<u8> = (0..32).flat_map(|n| read(n).encode()).collect();
    served.client.write_all(&asked).unwrap();
    // Each request gets a correct answer or an error, or the connection ends.
    let mut right = 0;
    let mut head = [0; REPLY_BYTES];
    while served.client.read_exact(&mut head).is_ok() {
        let reply = Reply::decode(&head).unwrap();
        let number = usize::try_from(reply.cookie - 100).unwrap();
        if reply.error == 0 {
            let mut data = vec![0; 8 * B];
            if served.client.read_exact(&mut data).is_err() {
                break;
            }
            assert_eq!(data, pattern(256, 1)[number * 8 * B..][..8 * B], "{number}");
            right += 1;
        }
    }
    assert!(right < 32);
    assert_eq!(served.end().unwrap_err().lender, Some(1));
}

#[test]
fn if_a_disk_is_spread_over_several_lenders_random_reads_return_the_written_data() {
    const SIZE: u64 = 4 * MIB + 12 * KIB;
    for count in [1, 2, 3, 8] {
        let (mut served, _orders) = liars(count, SIZE);
        let mut model = vec![0_u8; usize::try_from(SIZE).unwrap()];
        let mut x = 88_172_645_463_325_252 + count;
        let mut chance = |below: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x % below
        };
        for step in 0..400 {
            let blocks = 1 + chance(if step % 8 == 0 { 256 } else { 8 });
            let offset = chance(SIZE / 4096 - blocks + 1) * 4096;
            let length = blocks * 4096;
            let at = range(offset, length);
            match chance(6) {
                0 | 1 => {
                    let mut data = pattern(at.len() / B, step + 1);
                    if chance(3) == 0 {
                        data[..B].fill(0);
                    }
                    model[at].copy_from_slice(&data);
                    assert_eq!(served.write(offset, &data), 0);
                }
                2 => {
                    let cookie = served.ask(Command::WriteZeroes, offset, length, &[]);
                    assert_eq!(served.hear(), Reply { error: 0, cookie });
                    model[at].fill(0);
                }
                3 => {
                    let cookie = served.ask(Command::Flush, 0, 0, &[]);
                    assert_eq!(served.hear(), Reply { error: 0, cookie });
                }
                _ => assert_eq!(served.read(offset, length).unwrap(), model[at], "{step}"),
            }
        }
        let cookie = served.ask(Command::Read, SIZE, 4096, &[]);
        assert_eq!(
            served.hear(),
            Reply {
                error: EINVAL,
                cookie
            }
        );
        let cookie = served.ask(Command::Write, 512, 512, &[7; 512]);
        assert_eq!(
            served.hear(),
            Reply {
                error: EINVAL,
                cookie
            }
        );
        assert_eq!(served.read(0, 4096).unwrap(), model[..B]);
        served.end().unwrap();
    }
}

/// The lender may execute requests for the same blocks in any order, and must not be taken for a
/// liar.
#[test]
fn overlapping_requests_to_lent_memory_are_executed_in_order() {
    let (mut served, _orders) = liars(2, 8 * MIB);
    let mut wanted = Vec::new();
    for round in 1..40_u64 {
        let data = pattern(32, round);
        served.ask(Command::Write, 0, data.len() as u64, &data);
        served.ask(Command::Read, 4096, 8192, &[]);
        wanted.push(data[B..3 * B].to_vec());
        for _ in 0..2 {
            let reply = served.hear();
            assert_eq!(reply.error, 0);
            if reply.cookie % 2 == 0 {
                let mut data = vec![0; 2 * B];
                served.client.read_exact(&mut data).unwrap();
                assert_eq!(Some(data), wanted.pop());
            }
        }
    }
    served.end().unwrap();
}

/// Returns a TCP address of this host; exports over TCP use TLS.
fn loopback() -> Listen {
    Listen::Tcp(TcpListen {
        ip: Ipv4Addr::LOCALHOST.into(),
        announce: None,
        ports: None,
    })
}

fn exported(directory: &std::path::Path, listen: Listen, id: u64, bytes: u64) -> Option<Export> {
    let mut export = match Export::start(directory, listen, LeaseId(id), bytes) {
        Ok(export) => export,
        Err(ExportError::Missing(error)) => {
            return memfold_testkit::reports_skip(&error.to_string());
        }
        Err(error) => panic!("{error}"),
    };
    wait_until("nbdkit serves", Duration::from_secs(60), || {
        export.is_ready().unwrap()
    });
    Some(export)
}

/// Applies `change` to each occurrence of `find` in a process's memory. Returns the number of
/// occurrences.
fn poke(pid: u32, find: &[u8], change: impl Fn(&mut [u8])) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .unwrap();
    let mut found = 0;
    for line in maps.lines().filter(|l| l.contains("rw-p")) {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [from, to] = [from, to].map(|n| u64::from_str_radix(n, 16).unwrap());
        let mut bytes = vec![0; usize::try_from(to - from).unwrap()];
        if memory.read_exact_at(&mut bytes, from).is_err() {
            continue;
        }
        let places: Vec<usize> = bytes
            .windows(find.len())
            .enumerate()
            .filter(|(_, window)| *window == find)
            .map(|(at, _)| at)
            .collect();
        for at in places {
            let place = &mut bytes[at..at + find.len()];
            change(place);
            memory.write_all_at(place, from + at as u64).unwrap();
            found += 1;
        }
    }
    found
}

#[test]
fn if_lent_memory_is_changed_at_the_lender_the_borrower_detects_it() {
    let tcp = loopback();
    for (listen, count) in [(Listen::Unix, 1), (tcp, 1), (tcp, 3)] {
        let directory = tempfile::tempdir().unwrap();
        let stripes = Stripes {
            count,
            bytes: 6 * MIB,
        };
        let mut exports = Vec::new();
        for id in 0..count {
            let Some(export) = exported(directory.path(), listen, id, stripes.of_each()) else {
                return;
            };
            exports.push(export);
        }
        let open =
            |export: &Export| Stream::open(&export.endpoint, stripes.of_each(), PATIENCE).unwrap();
        let mut served = Served::new(exports.iter().map(open).collect(), stripes.bytes);
        let data = pattern(256, 9);
        for mib in 0..6 {
            assert_eq!(served.write(mib * MIB, &data), 0);
        }
        for mib in 0..6 {
            assert_eq!(served.read(mib * MIB, MIB).unwrap(), data);
        }
        assert_eq!(served.write(4096, &pattern(1, 10)), 0);
        let poked = poke(exports[0].pid(), &pattern(1, 10)[..64], |bytes| {
            bytes[63] ^= 1;
        });
        assert!(poked > 0);
        // The unchanged block still has its bytes.
        assert_eq!(served.read(0, 4096).unwrap(), data[..B]);
        assert_eq!(served.read(4096, 4096), Err(EIO));
        let ended = served.end().unwrap_err();
        assert_eq!((ended.lender, ended.why), (Some(0), Why::Lied));
        assert!(ended.what.contains("block 1 "), "{}", ended.what);
    }
}

/// Forwards bytes between two connections in both directions, and returns a receiver of all
/// forwarded bytes.
fn tap(
    mut near: impl Read + Send + 'static,
    mut near_out: impl Write + Send + 'static,
    mut far: impl Read + Send + 'static,
    mut far_out: impl Write + Send + 'static,
) -> Receiver<Vec<u8>> {
    let (heard, all) = channel();
    let pass = |from: &mut dyn Read, to: &mut dyn Write, heard: &Sender<Vec<u8>>| {
        let mut some = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut some) {
            let is_left = heard.send(some[..count].to_vec()).is_err();
            if is_left || to.write_all(&some[..count]).is_err() {
                return;
            }
        }
    };
    let other = heard.clone();
    std::thread::spawn(move || pass(&mut near, &mut far_out, &heard));
    std::thread::spawn(move || pass(&mut far, &mut near_out, &other));
    all
}

#[test]
fn blocks_of_lent_memory_are_encrypted_before_they_are_sent_to_another_host() {
    let directory = tempfile::tempdir().unwrap();
    let tcp = loopback();
    for (id, listen) in [(1, Listen::Unix), (2, tcp)] {
        let Some(export) = exported(directory.path(), listen, id, MIB) else {
            return;
        };
        let mut endpoint = export.endpoint.clone();
        let taps: JoinHandle<Receiver<Vec<u8>>> = match &mut endpoint.address {
            Address::Unix(path) => {
                let far = UnixStream::connect(&*path).unwrap();
                *path = directory.path().join("tap");
                let listener = std::os::unix::net::UnixListener::bind(&*path).unwrap();
                std::thread::spawn(move || {
                    let near = listener.accept().unwrap().0;
                    let (near_out, far_out) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                    tap(near, near_out, far, far_out)
                })
            }
            Address::Tcp { ip, port } => {
                let far = std::net::TcpStream::connect((*ip, *port)).unwrap();
                let listener = std::net::TcpListener::bind((*ip, 0)).unwrap();
                *port = listener.local_addr().unwrap().port();
                std::thread::spawn(move || {
                    let near = listener.accept().unwrap().0;
                    let (near_out, far_out) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                    tap(near, near_out, far, far_out)
                })
            }
        };
        let stream = Stream::open(&endpoint, MIB, PATIENCE).unwrap();
        let heard = taps.join().unwrap();
        let mut served = Served::new(vec![stream], MIB);
        let data = pattern(64, 21);
        assert_eq!(served.write(0, &data), 0);
        assert_eq!(served.read(0, data.len() as u64).unwrap(), data);
        served.end().unwrap();
        drop(export);
        let all: Vec<u8> = heard.into_iter().flatten().collect();
        assert!(all.len() > 2 * data.len(), "{} bytes were heard", all.len());
        // Search for 16 consecutive bytes of each block that was sent in either direction.
        let windows: std::collections::HashSet<&[u8]> = all.windows(16).collect();
        let seen = data
            .chunks(B)
            .filter(|block| windows.contains(&block[1000..1016]));
        let seen = seen.count();
        // The bytes are found on the unencrypted connection, so the search would find them on the
        // other, too.
        let expected = if listen == Listen::Unix { 64 } else { 0 };
        assert_eq!(seen, expected, "{listen:?}");
        if let Some(key) = &endpoint.key {
            assert!(!windows.contains(&key.hex.as_bytes()[..16]));
            let raw: Vec<u8> = (0..32)
                .step_by(2)
                .map(|at| u8::from_str_radix(&key.hex[at..at + 2], 16).unwrap())
                .collect();
            assert!(!windows.contains(&raw[..]));
        }
    }
}

#[test]
fn a_borrower_refuses_a_lender_with_a_wrong_key_or_less_memory_than_agreed() {
    let directory = tempfile::tempdir().unwrap();
    let tcp = loopback();
    let Some(export) = exported(directory.path(), tcp, 1, MIB) else {
        return;
    };
    let small = Stream::open(&export.endpoint, 2 * MIB, PATIENCE).unwrap_err();
    assert!(small.to_string().contains("were lent"), "{small}");
    let Some(export) = exported(directory.path(), tcp, 2, MIB) else {
        return;
    };
    let mut endpoint = export.endpoint.clone();
    endpoint.key.as_mut().unwrap().hex = "0f".repeat(32);
    let stranger = Stream::open(&endpoint, MIB, PATIENCE).unwrap_err();
    assert!(stranger.to_string().contains("TLS"), "{stranger}");
    Stream::open(&export.endpoint, MIB, PATIENCE).unwrap();
}

#[test]
fn both_ends_of_an_idle_connection_survive_a_network_that_is_away_for_a_minute() {
    let directory = tempfile::tempdir().unwrap();
    let Some(export) = exported(directory.path(), loopback(), 1, MIB) else {
        return;
    };
    let stream = Stream::open(&export.endpoint, MIB, PATIENCE).unwrap();
    let Stream::Tls(tls) = &stream else {
        panic!("{stream:?}")
    };
    let ours = tls.get_ref().try_clone().unwrap();
    let limit = |of: &TcpStream| sockopt::tcp_user_timeout(of).unwrap();
    assert_eq!(limit(&ours), 3000);
    let served = Served::new(vec![stream], MIB);
    // The other copy of the disk is lost, so this lender has the only one.
    served.patience.set(60_000);
    wait_until("the kernel waits longer", Duration::from_secs(30), || {
        limit(&ours) == 60_000
    });
    // The lender does not know whether there is another copy.
    let pid = Pid::from_raw(i32::try_from(export.pid()).unwrap()).unwrap();
    let nbdkit = Process::open(Identity::of(pid).unwrap()).unwrap();
    let theirs = Wire::served_by(&nbdkit, ours.peer_addr().unwrap()).unwrap();
    assert_eq!(theirs[0].user_timeout().unwrap(), 60_000);
    served.end().unwrap();
}

#[test]
fn a_relay_says_for_how_long_its_client_has_waited_for_a_lender() {
    let (mut served, orders) = liars(1, MIB);
    assert_eq!(served.write(0, &pattern(1, 1)), 0);
    wait_until("no request waits", Duration::from_secs(30), || {
        served.patience.waited_ms() == 0
    });
    orders[0].send(Lie::SaysNothing).unwrap();
    served.ask(Command::Read, 0, 4096, &[]);
    wait_until("half a second has passed", Duration::from_secs(30), || {
        served.patience.waited_ms() >= 500
    });
    assert_eq!(served.hear().error, EIO);
    served.end().unwrap_err();
}
