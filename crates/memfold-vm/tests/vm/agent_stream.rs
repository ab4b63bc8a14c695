//! Tests of streamed commands at the daemon's end of an agent's connection. The tests simulate
//! agents, well-behaved and hostile ones.

use std::sync::mpsc::{Receiver, channel};

use memfold_vm::{
    AgentError, AgentLink, AgentOptions, INPUT_WINDOW, OutputStream, StreamEvent, StreamRequest,
    StreamedCommand,
};
use memfold_wire::agent::{FromAgent, MAX_INPUT, MAX_STREAMS, OUTPUT_COST, OUTPUT_WINDOW, ToAgent};

use crate::agent::{Guest, LONG, hello, link, session};

fn stream(link: &AgentLink) -> Result<(StreamedCommand, Receiver<StreamEvent>), AgentError> {
    let (sender, events) = channel();
    let request = StreamRequest {
        task: "cat".into(),
        has_input: true,
        terminal: None,
    };
    let command = link.stream(request, move |event| drop(sender.send(event)))?;
    Ok((command, events))
}

/// Returns the number of the streamed command that the guest is asked to run.
fn asked(guest: &mut Guest) -> u32 {
    match guest.hear() {
        ToAgent::Stream { command, .. } => command,
        other => panic!("{other:?} instead of a streamed command"),
    }
}

fn output(command: u32, length: usize) -> FromAgent {
    FromAgent::Output {
        command,
        stream: OutputStream::Stdout,
        bytes: vec![7; length],
    }
}

#[test]
fn input_and_output_of_a_streamed_command_pass_through_the_link_within_their_windows() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    session(&events);
    link.wait_session(LONG).unwrap();
    let (command, heard) = stream(&link).unwrap();
    let number = asked(&mut guest);

    command.input(&vec![1; INPUT_WINDOW]).unwrap();
    let error = command.input(&[1]).unwrap_err();
    assert!(matches!(error, AgentError::TooMuchInput), "{error}");
    for _ in 0..INPUT_WINDOW / MAX_INPUT {
        assert!(matches!(guest.hear(), ToAgent::Input { bytes, .. } if bytes.len() == MAX_INPUT));
    }
    // More room than was used up is not believed.
    let bytes = u32::MAX;
    guest.say(&FromAgent::InputRoom {
        command: number,
        bytes,
    });
    let room = u32::try_from(INPUT_WINDOW).unwrap();
    assert_eq!(
        heard.recv_timeout(LONG).unwrap(),
        StreamEvent::InputRoom(room)
    );
    command.input(&[1]).unwrap();
    assert!(matches!(guest.hear(), ToAgent::Input { bytes, .. } if bytes == [1]));

    // The agent gets room when a quarter of the window was passed on.
    let piece = OUTPUT_WINDOW / 8;
    for passed in 1..=2 {
        guest.say(&output(number, piece));
        let got = heard.recv_timeout(LONG).unwrap();
        assert_eq!(
            got,
            StreamEvent::Output(OutputStream::Stdout, vec![7; piece])
        );
        assert_eq!(command.tells_agent(piece), passed == 2);
        command.passed_on(piece).unwrap();
    }
    let cost = u32::try_from(2 * (piece + OUTPUT_COST)).unwrap();
    assert_eq!(
        guest.hear(),
        ToAgent::OutputRoom {
            command: number,
            cost
        }
    );
    guest.say(&FromAgent::Exited {
        command: number,
        code: 3,
    });
    assert_eq!(heard.recv_timeout(LONG).unwrap(), StreamEvent::Exited(3));
    // A command that has ended is not ended again.
    drop(command);
    link.take_inventory().unwrap();
    assert_eq!(guest.hear(), ToAgent::Inventory);
}

#[test]
fn an_agent_that_sends_more_output_than_it_may_loses_only_this_command() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    session(&events);
    link.wait_session(LONG).unwrap();
    let (_command, heard) = stream(&link).unwrap();
    let number = asked(&mut guest);
    let piece = OUTPUT_WINDOW / 8;
    for _ in 0..8 {
        guest.say(&output(number, piece));
    }
    assert_eq!(guest.hear(), ToAgent::HangUp { command: number });
    assert_eq!(
        heard.iter().count(),
        7,
        "the client waits for no more events"
    );
    assert_eq!(link.stats().protocol_errors, 1);
    assert!(link.session().is_some());
}

#[test]
fn many_empty_or_one_byte_outputs_do_not_fill_the_daemons_memory() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    session(&events);
    link.wait_session(LONG).unwrap();
    let (_command, heard) = stream(&link).unwrap();
    let number = asked(&mut guest);
    for _ in 0..5000 {
        guest.say(&output(number, 0));
    }
    let most = OUTPUT_WINDOW / (1 + OUTPUT_COST);
    for _ in 0..=most {
        guest.say(&output(number, 1));
    }
    assert_eq!(guest.hear(), ToAgent::HangUp { command: number });
    assert_eq!(heard.iter().count(), most);
}

#[test]
fn an_agent_of_version_1_is_welcomed_but_gets_no_streamed_commands() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.say(&hello(1, "old"));
    assert!(matches!(guest.hear(), ToAgent::Welcome { version: 1, .. }));
    assert_eq!(guest.hear(), ToAgent::Inventory);
    assert_eq!(session(&events), "old");
    link.wait_session(LONG).unwrap();
    let error = stream(&link).unwrap_err();
    assert!(
        matches!(&error, AgentError::TooOld { version, .. } if version == "0.1.0"),
        "{error}"
    );
    // A newer agent is welcomed with the newest version that this daemon speaks.
    guest.say(&hello(u16::MAX, "new"));
    let version = memfold_wire::agent::VERSION;
    assert!(matches!(guest.hear(), ToAgent::Welcome { version: v, .. } if v == version));
}

#[test]
fn a_dropped_command_is_ended_and_its_place_is_free_again() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    session(&events);
    link.wait_session(LONG).unwrap();
    let mut commands = Vec::new();
    for _ in 0..MAX_STREAMS {
        commands.push(stream(&link).unwrap());
        asked(&mut guest);
    }
    let error = stream(&link).unwrap_err();
    assert!(matches!(error, AgentError::TooManyStreams), "{error}");
    drop(commands.pop());
    assert!(matches!(guest.hear(), ToAgent::HangUp { .. }));
    let (_command, heard) = stream(&link).unwrap();
    asked(&mut guest);
    // When the connection ends, the client's events end.
    drop(guest);
    assert_eq!(heard.iter().count(), 0);
}
