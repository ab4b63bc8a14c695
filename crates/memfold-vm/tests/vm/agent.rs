//! Tests of the daemon's connection to guest agents. The tests simulate agents, well-behaved and
//! hostile ones.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use memfold_testkit::{patience, wait_until};
use memfold_vm::{AgentError, AgentEvent, AgentLink, AgentOptions, Permission, Trim};
use memfold_wire::agent::{FromAgent, HintRun, OutputStream, ToAgent, VERSION};
use memfold_wire::memory::{self, MemoryReading, TrimEnd, TrimMethod, TrimResult};
use memfold_wire::{Decoder, encode};

/// Time limit that is longer than any step of these tests, even on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

pub struct Guest {
    stream: UnixStream,
    decoder: Decoder,
}

impl Guest {
    pub fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Self {
            stream,
            decoder: Decoder::new(),
        }
    }

    pub fn say(&mut self, message: &FromAgent) {
        self.stream.write_all(&encode(message).unwrap()).unwrap();
    }

    pub fn hear(&mut self) -> ToAgent {
        loop {
            if let Some(message) = self.decoder.next().unwrap() {
                return message;
            }
            let mut chunk = [0; 4096];
            let n = self.stream.read(&mut chunk).unwrap();
            assert_ne!(n, 0, "the link closed");
            self.decoder.push(&chunk[..n]);
        }
    }

    /// Begins a session, and allows the daemon everything.
    pub fn greet(&mut self, boot_id: &str) {
        self.say_hello(boot_id);
        self.allow_all();
    }

    /// Says Hello, and hears the daemon's answer.
    pub fn say_hello(&mut self, boot_id: &str) {
        self.say(&hello(VERSION, boot_id));
        assert!(matches!(
            self.hear(),
            ToAgent::Welcome {
                version: VERSION,
                ..
            }
        ));
        assert_eq!(self.hear(), ToAgent::Inventory);
    }

    fn allow_all(&mut self) {
        let words = Permission::ALL.iter().map(|one| one.word().to_owned());
        self.say(&FromAgent::Allowed {
            words: words.collect(),
        });
    }
}

pub fn hello(version: u16, boot_id: &str) -> FromAgent {
    FromAgent::Hello {
        version,
        agent: "0.1.0".into(),
        kernel: "6.12".into(),
        boot_id: boot_id.into(),
        host_name: "g".into(),
        problems: Vec::new(),
    }
}

fn hints(pages: u32) -> FromAgent {
    FromAgent::Hints(vec![HintRun {
        file: 1,
        page: 0,
        pfn: 7,
        pages,
    }])
}

pub fn link(
    options: AgentOptions,
) -> (
    tempfile::TempDir,
    UnixListener,
    AgentLink,
    Receiver<AgentEvent>,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let listener = UnixListener::bind(&path).unwrap();
    let (sender, events) = sync_channel(16);
    let link = AgentLink::start(&path, options, move |event| {
        // Sending fails if the test has ended.
        let _ = sender.send(event);
    });
    (dir, listener, link, events)
}

pub fn session(events: &Receiver<AgentEvent>) -> String {
    match events.recv_timeout(LONG).unwrap() {
        AgentEvent::Session(facts) => facts.boot_id,
        other => panic!("{other:?} instead of a session"),
    }
}

#[test]
fn after_a_guest_reboot_a_new_agent_session_begins_on_the_same_connection() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    // Messages before a Hello are dropped.
    guest.say(&hints(1));
    guest.greet("one");
    guest.say(&hints(2));
    assert_eq!(session(&events), "one");
    assert_eq!(
        events.recv_timeout(LONG).unwrap(),
        AgentEvent::Message(hints(2))
    );
    guest.greet("two");
    assert_eq!(session(&events), "two");
    // The event comes before the session can be queried.
    assert_eq!(link.wait_session(LONG).unwrap().boot_id, "two");
    assert_eq!((link.stats().sessions, link.stats().dropped), (2, 1));
}

#[test]
fn after_a_malformed_message_the_agents_connection_is_closed_and_the_next_one_works() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    assert_eq!(session(&events), "one");
    // A run of no pages breaks a limit of the protocol.
    guest.say(&hints(0));
    assert!(
        matches!(events.recv_timeout(LONG).unwrap(), AgentEvent::Lost { reason } if reason.contains("protocol"))
    );
    assert!(link.session().is_none());
    let mut guest = Guest::accept(&listener);
    guest.stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(matches!(
        events.recv_timeout(LONG).unwrap(),
        AgentEvent::Lost { .. }
    ));
    let mut guest = Guest::accept(&listener);
    guest.greet("three");
    assert_eq!(session(&events), "three");
    assert_eq!(link.stats().protocol_errors, 2);
}

#[test]
fn an_agent_of_an_unknown_version_is_refused_with_a_reason_and_its_hints_are_ignored() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.say(&hello(0, "old"));
    assert!(
        matches!(guest.hear(), ToAgent::Refused { reason } if reason.contains("update the agent"))
    );
    guest.say(&hints(1));
    guest.greet("right");
    assert_eq!(session(&events), "right");
    assert_eq!(link.stats().dropped, 1);
}

#[test]
fn if_the_agent_does_not_introduce_itself_its_connection_is_closed_and_opened_again() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    // The agent was restored with its VM: it still believes in its session, and continues to send.
    let mut guest = Guest::accept(&listener);
    let mut end = [0];
    wait_until("talk without a hello ends the connection", LONG, || {
        guest.stream.write_all(&encode(&hints(1)).unwrap()).is_err()
    });
    assert!(!matches!(guest.stream.read(&mut end), Ok(n) if n > 0));
    let mut guest = Guest::accept(&listener);
    guest.greet("again");
    assert_eq!(session(&events), "again");
    // This is longer than the second connection waits, which is two seconds.
    std::thread::sleep(Duration::from_secs(3));
    guest.say(&hints(1));
    assert!(matches!(
        events.recv_timeout(LONG).unwrap(),
        AgentEvent::Message(FromAgent::Hints(_))
    ));
    assert!(link.session().is_some());
}

#[test]
fn the_output_and_the_exit_code_of_a_command_in_the_guest_are_collected() {
    let (_dir, listener, link, _events) = link(AgentOptions::default());
    assert!(matches!(
        link.run("true", LONG),
        Err(AgentError::NoSession(_))
    ));
    let guest = std::thread::spawn(move || {
        let mut guest = Guest::accept(&listener);
        guest.greet("one");
        let ToAgent::Run { command, script } = guest.hear() else {
            panic!()
        };
        assert_eq!(script, "echo hi");
        // Output of a command nobody asked for is dropped.
        guest.say(&FromAgent::Output {
            command: 999,
            stream: OutputStream::Stdout,
            bytes: b"x".into(),
        });
        for (stream, bytes) in [
            (OutputStream::Stdout, "h"),
            (OutputStream::Stderr, "e"),
            (OutputStream::Stdout, "i"),
        ] {
            guest.say(&FromAgent::Output {
                command,
                stream,
                bytes: bytes.into(),
            });
        }
        guest.say(&FromAgent::Exited { command, code: 3 });
        // This command never ends, so it is killed.
        let ToAgent::Run { command, .. } = guest.hear() else {
            panic!()
        };
        assert_eq!(guest.hear(), ToAgent::Kill { command });
        // The guest of the last command dies.
        assert!(matches!(guest.hear(), ToAgent::Run { .. }));
    });
    link.wait_session(LONG).unwrap();
    let result = link.run("echo hi", LONG).unwrap();
    assert_eq!(
        (&result.stdout[..], &result.stderr[..], result.code),
        (&b"hi"[..], &b"e"[..], 3)
    );
    let slow = link.run("sleep 9", Duration::from_millis(100));
    assert!(matches!(slow, Err(AgentError::Timeout { .. })), "{slow:?}");
    let began = Instant::now();
    let lost = link.run("poweroff -f", Duration::from_secs(30));
    assert!(matches!(lost, Err(AgentError::Lost)), "{lost:?}");
    assert!(began.elapsed() < patience(LONG));
    guest.join().unwrap();
}

#[test]
fn a_command_waits_while_an_agent_repeats_its_hello() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let guest = std::thread::spawn(move || {
        let mut guest = Guest::accept(&listener);
        guest.say_hello("one");
        // The answer came too late for the agent, which has not read it. A command that was sent
        // before the next Hello would be lost.
        std::thread::sleep(Duration::from_millis(300));
        guest.greet("one");
        let ToAgent::Run { command, .. } = guest.hear() else {
            panic!()
        };
        guest.say(&FromAgent::Exited { command, code: 7 });
        guest
    });
    session(&events);
    let done = link.run("exit 7", LONG).unwrap();
    assert_eq!(done.code, 7);
    drop(guest.join().unwrap());
}

#[test]
fn a_new_link_waits_for_its_first_session_until_the_link_is_five_seconds_old() {
    let (_dir, listener, link, _events) = link(AgentOptions::default());
    let guest = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        let mut guest = Guest::accept(&listener);
        guest.greet("one");
        guest
    });
    link.wait_first_session();
    assert!(link.session().is_some());
    drop(guest.join().unwrap());

    let (_dir, _listener, link, _events) = self::link(AgentOptions::default());
    let began = Instant::now();
    link.wait_first_session();
    assert!(link.session().is_none());
    assert!(began.elapsed() > Duration::from_secs(4));
    let old = Instant::now();
    link.wait_first_session();
    assert!(old.elapsed() < Duration::from_secs(4));
}

#[test]
fn an_agent_that_sends_too_much_data_is_throttled() {
    let options = AgentOptions {
        max_bytes_per_s: 64 << 10,
        ..AgentOptions::default()
    };
    let (_dir, listener, link, events) = link(options);
    let drain = std::thread::spawn(move || events.iter().count());
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    let flood = encode(&FromAgent::Hints(vec![
        HintRun {
            file: 1,
            page: 1,
            pfn: 7,
            pages: 1
        };
        1000
    ]))
    .unwrap();
    guest
        .stream
        .set_write_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    let began = Instant::now();
    let mut written = 0;
    while began.elapsed() < Duration::from_secs(2) {
        written += guest.stream.write(&flood).unwrap_or(0);
    }
    let stats = link.stats();
    assert!(
        stats.throttled > 0 && stats.bytes < 6 * (64 << 10),
        "{stats:?}"
    );
    // The limit includes bytes in the socket's buffer.
    assert!(written < 2 << 20, "{written} bytes were taken in 2 s");
    drop(link);
    drain.join().unwrap();
}

#[test]
fn answers_of_an_agent_do_not_wait_behind_its_report_of_a_large_page_cache() {
    let options = AgentOptions {
        max_pages_per_s: 1 << 16,
        ..AgentOptions::default()
    };
    let (_dir, listener, link, events) = link(options);
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    // Twice a minute's worth of pages. The daemon takes the first message at once.
    let run = HintRun {
        file: 1,
        page: 0,
        pfn: 0,
        pages: 1 << 18,
    };
    let minute = FromAgent::Hints(vec![run; 16]);
    guest.say(&minute);
    guest.say(&minute);
    session(&events);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| link.run("true", LONG));
        let ToAgent::Run { command, .. } = guest.hear() else {
            panic!("no script")
        };
        guest.say(&FromAgent::Exited { command, code: 7 });
        assert_eq!(run.join().unwrap().unwrap().code, 7);
    });
    let expected = AgentEvent::Message(minute);
    assert_eq!(events.recv_timeout(LONG).unwrap(), expected);
    // A new session makes the report void that waits.
    guest.greet("two");
    assert_eq!(session(&events), "two");
    assert!(events.try_recv().is_err());
}

#[test]
fn when_the_daemon_drops_its_link_to_an_agent_the_thread_of_the_link_ends_at_once() {
    let (_dir, listener, link, _events) = link(AgentOptions::default());
    let _guest = Guest::accept(&listener);
    let began = Instant::now();
    drop(link);
    assert!(began.elapsed() < patience(LONG));
}

#[test]
fn an_agent_that_introduces_itself_endlessly_is_disconnected_and_can_connect_again() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let drain = std::thread::spawn(move || events.iter().count());
    let mut guest = Guest::accept(&listener);
    let flood = encode(&hello(VERSION, "flood")).unwrap().repeat(1000);
    // The link closes the connection in the middle of the flood.
    let _ = guest.stream.write_all(&flood);
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    let stats = link.stats();
    assert!(
        stats.protocol_errors == 1 && stats.sessions < 20,
        "{stats:?}"
    );
    drop(link);
    drain.join().unwrap();
}

fn memory_session(guest: &mut Guest) {
    let mut hello = hello(VERSION, "one");
    if let FromAgent::Hello { agent, .. } = &mut hello {
        *agent = memory::version_with("0.1.0", &[memory::FEATURE]);
    }
    guest.say(&hello);
    assert!(matches!(guest.hear(), ToAgent::Welcome { .. }));
    assert_eq!(guest.hear(), ToAgent::Inventory);
    guest.allow_all();
}

#[test]
fn only_an_agent_that_knows_memory_messages_is_asked_for_figures_and_trims() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.greet("old");
    assert_eq!(session(&events), "old");
    let trim = Trim {
        bytes: 1 << 20,
        max_pressure: 0.01,
        limit: LONG,
        spare_swap: true,
    };
    link.wait_session(LONG).unwrap();
    let refused = link.trim(&trim).unwrap_err();
    assert!(matches!(refused, AgentError::TooOld { .. }), "{refused}");
    memory_session(&mut guest);
    let interval_ms = AgentOptions::default().memory_interval_ms;
    assert_eq!(guest.hear(), ToAgent::ReportMemory { interval_ms });
    assert_eq!(session(&events), "one");
    let reading = MemoryReading {
        mem_total_kib: 7,
        ..MemoryReading::default()
    };
    guest.say(&FromAgent::Memory(Box::new(reading.clone())));
    let expected = AgentEvent::Message(FromAgent::Memory(Box::new(reading)));
    assert_eq!(events.recv_timeout(LONG).unwrap(), expected);
    std::thread::scope(|scope| {
        let result = scope.spawn(|| link.trim(&trim).unwrap());
        let ToAgent::Trim(order) = guest.hear() else {
            panic!("no trim");
        };
        assert_eq!((order.bytes, order.max_some), (1 << 20, 100));
        assert!(order.spare_swap);
        let answer = TrimResult {
            order: order.order,
            reclaimed_bytes: 4096,
            refaults: 0,
            steps: 1,
            method: TrimMethod::MemoryReclaim,
            end: TrimEnd::Exhausted,
        };
        // An answer to an order that nobody gave is dropped.
        let other = order.order.wrapping_add(7);
        guest.say(&FromAgent::Trimmed(TrimResult {
            order: other,
            ..answer
        }));
        guest.say(&FromAgent::Trimmed(answer));
        assert_eq!(result.join().unwrap(), answer);
    });
    assert_eq!(link.stats().dropped, 1);
}

#[test]
fn a_trim_ends_with_an_error_if_the_agent_disconnects() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    memory_session(&mut guest);
    session(&events);
    link.wait_session(LONG).unwrap();
    let trim = Trim {
        bytes: 1 << 20,
        max_pressure: 1.0,
        limit: LONG,
        spare_swap: false,
    };
    std::thread::scope(|scope| {
        let result = scope.spawn(|| link.trim(&trim).unwrap_err());
        while !matches!(guest.hear(), ToAgent::Trim(_)) {}
        drop(guest);
        let error = result.join().unwrap();
        assert!(matches!(error, AgentError::Lost), "{error}");
    });
}
