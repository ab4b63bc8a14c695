use memfold_sys::guest;
use memfold_testkit::wait_until;
use memfold_wire::memory::{TrimEnd, TrimOrder};
use memfold_wire::order::GuestOrder;

use super::*;
use crate::consent::Consent;
use crate::worker::Finding;

const LIMIT: Duration = Duration::from_secs(20);

/// An agent whose guest's owner allows this, in a session of `version`.
fn agent(allowed: &[Permission], version: u16) -> Agent {
    let signals = guest::signal_descriptor(&[]).unwrap();
    let consent = Consent::of_permissions(allowed);
    let mut agent = Agent::assemble(signals, Sink::Text, None, Vec::new(), consent).unwrap();
    agent.version = version;
    agent
}

/// Returns all that the agent answers to a command, up to its end.
fn answer(agent: &mut Agent, message: ToAgent) -> Vec<FromAgent> {
    agent.order(message);
    let mut heard = Vec::new();
    wait_until("the command ends", LIMIT, || {
        heard.extend(agent.commands.next());
        matches!(
            heard.last(),
            Some(FromAgent::Exited { .. } | FromAgent::NotAllowed { .. } | FromAgent::Trimmed(_))
        )
    });
    heard
}

fn script(command: u32) -> ToAgent {
    let script = "echo ran".into();
    ToAgent::Run { command, script }
}

fn stream(command: u32) -> ToAgent {
    ToAgent::Stream {
        command,
        script: "echo ran".into(),
        has_input: false,
        terminal: None,
    }
}

fn copy(command: u32) -> ToAgent {
    let path = "/proc/self/comm".into();
    ToAgent::StreamOrder {
        command,
        order: GuestOrder::SendFile { path },
        has_input: false,
    }
}

fn boot_id(command: u32) -> ToAgent {
    let order = GuestOrder::BootId;
    ToAgent::Order { command, order }
}

#[test]
fn the_agent_starts_only_orders_and_scripts_that_its_guests_owner_allows() {
    let messages = [script, stream, copy, boot_id];
    let words = ["exec", "exec", "copy", "inspect"];
    let mut closed = agent(&[Permission::Clock], VERSION);
    for (message, word) in messages.into_iter().zip(words) {
        let word = word.to_owned();
        let refused = FromAgent::NotAllowed { command: 7, word };
        assert_eq!(answer(&mut closed, message(7)), [refused]);
    }
    let open = [Permission::Exec, Permission::Copy, Permission::Inspect];
    let mut open = agent(&open, VERSION);
    for message in messages {
        let heard = answer(&mut open, message(8));
        let [
            FromAgent::Output { bytes, .. },
            FromAgent::Exited { code: 0, .. },
        ] = &heard[..]
        else {
            panic!("{heard:?}")
        };
        assert!(!bytes.is_empty());
    }
}

#[test]
fn an_older_daemon_gets_the_refusal_of_a_script_as_its_output_and_exit_code() {
    let mut closed = agent(&[Permission::Sync], ORDERS_VERSION - 1);
    let heard = answer(&mut closed, script(9));
    let [
        FromAgent::Output { bytes, .. },
        FromAgent::Exited { command: 9, code },
    ] = &heard[..]
    else {
        panic!("{heard:?}")
    };
    assert_eq!(*code, NOT_ALLOWED);
    let text = String::from_utf8_lossy(bytes);
    assert!(text.contains("add \"exec\" to 'allow'"), "{text}");
}

#[test]
fn neither_trims_nor_memory_figures_come_from_a_guest_whose_owner_does_not_allow_them() {
    let trim = ToAgent::Trim(TrimOrder {
        order: 3,
        bytes: 1 << 20,
        max_some: 100,
        deadline_ms: 100,
        spare_swap: true,
    });
    let mut closed = agent(&[], VERSION);
    let heard = answer(&mut closed, trim);
    let [FromAgent::Trimmed(result)] = &heard[..] else {
        panic!("{heard:?}")
    };
    assert_eq!((result.order, result.end), (3, TrimEnd::Forbidden));
    closed.order(ToAgent::ReportMemory { interval_ms: 100 });
    assert!(closed.memory.next().is_none());
    let mut open = agent(&[Permission::Inspect], VERSION);
    open.order(ToAgent::ReportMemory { interval_ms: 100 });
    assert!(open.memory.next().is_some());
}

#[test]
fn changed_counters_are_sent_with_the_memory_figures_if_the_daemon_wants_these() {
    let mut agent = agent(&[Permission::Inspect], VERSION);
    agent.welcome(Rules::default());
    assert_eq!(agent.counters_due(), None);
    agent.cache.counters.events += 1;
    let soon = Instant::now() + Duration::from_secs(2);
    assert!(agent.counters_due().is_some_and(|due| due < soon));
    let interval_ms = 3_600_000;
    agent.order(ToAgent::ReportMemory { interval_ms });
    assert!(agent.memory.next().is_some());
    assert_eq!(agent.counters_due(), agent.memory.due());
    // The answer to a ping does not wait.
    agent.order(ToAgent::Ping);
    assert_eq!(agent.counters_due(), None);
}

#[test]
fn a_new_session_begins_when_most_file_numbers_are_used_and_no_command_runs() {
    let mut agent = agent(&[], VERSION);
    agent.welcome(Rules::default());
    assert!(agent.most_files > memfold_wire::agent::MIN_FILES);
    agent.most_files = 80;
    let see = |agent: &mut Agent, files: std::ops::Range<u64>| {
        for inode in files {
            agent.cache.finding(Finding::Cached {
                inode: (1, inode),
                path: format!("/{inode}").into(),
                size: 1,
                runs: Vec::new(),
            });
        }
    };
    see(&mut agent, 0..69);
    see(&mut agent, 0..69);
    assert!(!agent.is_session_used_up());
    see(&mut agent, 69..70);
    assert!(agent.is_session_used_up());
    assert!(!agent.is_session_used_up(), "not twice in ten minutes");
    agent.renew_session();
    assert!(matches!(agent.state, State::Waiting(_)));
    agent.welcome(Rules::default());
    assert_eq!(agent.cache.numbers_used(), 0);
    let command = agent.commands.outbox();
    assert!(!agent.commands.is_idle());
    drop(command);
    assert!(agent.commands.is_idle());
}

#[test]
fn the_agent_runs_no_command_that_comes_before_welcome() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let mut agent = agent(&[Permission::Exec], VERSION);
    agent.sink = Sink::Port(crate::port::Port::open(file.path()).unwrap());
    agent.state = State::Waiting(Instant::now() + LIMIT);
    // The agent reads what follows the part that it has read.
    let mut say = |messages: &[ToAgent]| {
        for message in messages {
            let frame = memfold_wire::encode(message).unwrap();
            std::io::Write::write_all(&mut file, &frame).unwrap();
        }
    };
    say(&[script(1)]);
    agent.port_event(PollFlags::IN);
    assert!(
        agent.commands.is_idle(),
        "a command of an earlier session runs"
    );
    let welcome = ToAgent::Welcome {
        version: VERSION,
        include: Vec::new(),
        exclude: Vec::new(),
    };
    say(&[welcome, script(2)]);
    agent.port_event(PollFlags::IN);
    assert_eq!(agent.state, State::Working);
    wait_until("the command of this session ends", LIMIT, || {
        matches!(
            agent.commands.next(),
            Some(FromAgent::Exited {
                command: 2,
                code: 0
            })
        )
    });
}
