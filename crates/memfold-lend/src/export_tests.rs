use std::io::Write;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use super::super::endpoint::Address;
use super::*;

const MIB: u64 = 1 << 20;

fn there() -> bool {
    let there = Command::new("nbdkit").arg("--version").output().is_ok();
    if !there {
        memfold_testkit::report_skip("nbdkit is not installed");
    }
    there
}

/// Returns the server's greeting: NBDMAGIC, IHAVEOPT (doc/proto.md of NBD), flags. `None` if the
/// server closes the connection.
fn greet(stream: &mut (impl Read + Write)) -> Option<[u8; 18]> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).ok()?;
    Some(greeting)
}

/// Does the handshake in the old way, which the protocol still has: `NBD_OPT_EXPORT_NAME`. Returns
/// the size of the export.
fn enter(stream: &mut UnixStream) -> Option<u64> {
    let greeting = greet(stream)?;
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    let mut ask = 3_u32.to_be_bytes().to_vec();
    ask.extend(b"IHAVEOPT");
    ask.extend(1_u32.to_be_bytes());
    ask.extend(0_u32.to_be_bytes());
    stream.write_all(&ask).ok()?;
    let mut answer = [0; 10];
    stream.read_exact(&mut answer).ok()?;
    Some(u64::from_be_bytes(answer[..8].try_into().unwrap()))
}

fn ready(place: &Path, listen: Listen, id: u64, bytes: u64) -> Export {
    let mut export = Export::start(place, listen, LeaseId(id), bytes).unwrap();
    wait("it is ready", || export.is_ready().unwrap());
    export
}

fn resident_bytes(pid: u32) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[track_caller]
fn wait(what: &str, ready: impl FnMut() -> bool) {
    memfold_testkit::wait_until(what, Duration::from_secs(60), ready);
}

#[test]
fn an_export_of_lent_memory_uses_locked_memory_serves_one_client_and_leaves_no_file() {
    if !there() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut export = ready(place.path(), Listen::Unix, 7, 8 * MIB);
    assert!(locked_bytes(export.pid()) >= 8 * MIB);
    // The kernel kills an export before the host's own VMs, and core dumps do not contain its
    // memory.
    let of = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", export.pid()));
    assert_eq!(of("oom_score_adj").unwrap().trim(), "1000");
    assert_eq!(of("coredump_filter").unwrap().trim(), "00000000");
    let Address::Unix(path) = export.endpoint.address.clone() else {
        panic!("{export:?}");
    };
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut first = UnixStream::connect(&path).unwrap();
    assert_eq!(enter(&mut first), Some(8 * MIB));
    // TRIM, then WRITE_ZEROES: neither frees a page.
    for command in [4_u16, 6] {
        let mut ask = 0x2560_9513_u32.to_be_bytes().to_vec();
        ask.extend(0_u16.to_be_bytes());
        ask.extend(command.to_be_bytes());
        ask.extend([0; 16]);
        ask.extend(u32::try_from(4 * MIB).unwrap().to_be_bytes());
        first.write_all(&ask).unwrap();
        let mut answer = [0; 16];
        first.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
        assert!(resident_bytes(export.pid()) >= 8 * MIB);
    }
    // No second client is served beside the first or after it.
    let mut second = UnixStream::connect(&path).unwrap();
    second
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    assert_eq!(enter(&mut second), None);
    assert_eq!(export.health(), Health::Serving);
    drop((first, second));
    wait("its end", || export.health() == Health::Ended);
    assert!(UnixStream::connect(&path).is_err());
    drop(export);
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
}

#[test]
fn an_export_over_tcp_refuses_clients_without_its_tls_key_which_is_in_a_private_file() {
    if !there() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let listen = Listen::Tcp(TcpListen {
        ip: [127, 0, 0, 1].into(),
        announce: None,
        ports: None,
    });
    let mut export = ready(place.path(), listen, 8, MIB);
    export.endpoint.check().unwrap();
    let Address::Tcp { ip, port } = export.endpoint.address.clone() else {
        panic!("{export:?}");
    };
    let mut stream = TcpStream::connect((ip, port)).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    greet(&mut stream).unwrap();
    // Without TLS, the server answers NBD_OPT_GO with NBD_REP_ERR_TLS_REQD.
    let mut ask = 3_u32.to_be_bytes().to_vec();
    ask.extend(b"IHAVEOPT");
    ask.extend(7_u32.to_be_bytes());
    ask.extend(6_u32.to_be_bytes());
    ask.extend([0; 6]);
    stream.write_all(&ask).unwrap();
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[12..16], (0x8000_0005_u32).to_be_bytes());
    drop(stream);
    // A client of another protocol is counted each time it connects.
    assert_eq!(export.refused(), 0);
    for _ in 0..3 {
        let mut stream = TcpStream::connect((ip, port)).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    }
    let mut refused = 0;
    wait("strangers are counted", || {
        refused += export.refused();
        refused == 3
    });
    assert_eq!(export.refused(), 0);
    assert_eq!(export.health(), Health::Serving, "a stranger ended it");
    let line = std::fs::read(format!("/proc/{}/cmdline", export.pid())).unwrap();
    let key = export.endpoint.key.clone().unwrap();
    assert!(!String::from_utf8_lossy(&line).contains(&key.hex));
    let file = place.path().join("8.psk");
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(export);
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
}

#[test]
fn exports_of_lent_memory_use_only_the_given_ports_and_announce_the_given_address() {
    if !there() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    // The range has one port, which was free a moment ago and is in use at the second export.
    let ip = IpAddr::from([127, 0, 0, 1]);
    let free = TcpListener::bind((ip, 0)).unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let listen = Listen::Tcp(TcpListen {
        ip,
        announce: Some([192, 0, 2, 7].into()),
        ports: Some((port, port)),
    });
    let export = ready(place.path(), listen, 1, MIB);
    let Address::Tcp { ip: told, port: at } = export.endpoint.address else {
        panic!("{export:?}");
    };
    assert_eq!((told.to_string().as_str(), at), ("192.0.2.7", port));
    TcpStream::connect((ip, port)).unwrap();
    let error = Export::start(place.path(), listen, LeaseId(2), MIB).unwrap_err();
    let text = memfold_host::chain(&error);
    assert!(text.contains("are in use"), "{text}");
    let words = format!("127.0.0.1, ports {port} to {port}, announced as 192.0.2.7");
    assert_eq!(listen.to_string(), words);
}

#[test]
fn if_the_process_of_an_export_is_stopped_by_a_signal_it_is_detected_and_ended() {
    if !there() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut export = ready(place.path(), Listen::Unix, 9, MIB);
    let pid = Pid::from_raw(i32::try_from(export.pid()).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    wait("it is seen", || export.health() == Health::Stopped);
    drop(export);
    assert!(!Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists());
}

#[test]
fn an_export_larger_than_the_available_memory_fails_and_leaves_no_files() {
    if !there() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let start = |bytes| Export::start(place.path(), Listen::Unix, LeaseId(1), bytes);
    let mut export = start(1 << 49).unwrap();
    let mut error = None;
    wait("it fails", || {
        error = export.is_ready().err();
        error.is_some()
    });
    let error = error.unwrap();
    drop(export);
    assert!(matches!(error, ExportError::Start { .. }), "{error}");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
}

#[test]
fn an_export_ends_when_the_daemon_that_started_it_ends_even_if_its_client_is_silent() {
    if !there() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut export = ready(place.path(), Listen::Unix, 2, MIB);
    let mut client = UnixStream::connect(place.path().join("2.sock")).unwrap();
    enter(&mut client).unwrap();
    // Closes the pipe as the kernel does when the process ends.
    let (nothing, _) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    drop(std::mem::replace(&mut export.alive, nothing));
    wait("its end", || export.health() == Health::Ended);
}

#[test]
fn when_an_export_ends_its_watcher_process_ends_too() {
    if !there() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let export = ready(place.path(), Listen::Unix, 3, MIB);
    let children = format!("/proc/{0}/task/{0}/children", export.pid());
    let children = std::fs::read_to_string(children).unwrap();
    let watcher = children.trim().to_owned();
    assert!(!watcher.is_empty());
    drop(export);
    wait("the watcher's end", || {
        // The process that adopts the watcher may leave it as a zombie.
        let stat = std::fs::read_to_string(format!("/proc/{watcher}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z "))
    });
}
