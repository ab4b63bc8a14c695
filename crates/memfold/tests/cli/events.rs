//! Tests of the stream of events, without VMs: the events are pauses of folding.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::Duration;

use memfold_api::{Client, ClientError, EventGap, EventParser, SentEvent};
use memfold_ledger::history::Event;
use memfold_testkit::wait_until;

use crate::fake_daemon::{self, FakeDaemon, Reaction};
use crate::support::{Daemon, code, err};

const LIMIT: Duration = Duration::from_secs(60);
const STREAM: &str = "/v1/events/stream?count=100";

/// Returns the next `count` events of a stream that begins after the event `last`.
fn next(client: &Client, last: Option<&str>, count: usize) -> Vec<SentEvent> {
    let mut pieces = client.stream(STREAM, last).unwrap();
    let (mut parser, mut events) = (EventParser::default(), Vec::new());
    while events.len() < count {
        let piece = pieces.next_piece().unwrap().expect("the stream goes on");
        events.extend(parser.push(&piece));
    }
    events
}

fn text(sent: &SentEvent) -> String {
    serde_json::from_str::<Event>(&sent.data).unwrap().text
}

#[test]
fn a_stream_of_events_continues_after_the_last_event_of_the_client() {
    let daemon = Daemon::start();
    let client = Client::new(&daemon.socket()).unwrap();
    let began = next(&client, None, 1).remove(0);
    assert_eq!(
        (began.kind.as_str(), began.id.as_deref()),
        ("event", Some("1"))
    );
    assert!(text(&began).ends_with(" began"), "{began:?}");

    // Nobody reads the stream while something happens.
    let paused = daemon.run(&["fold", "pause"]);
    assert_eq!(code(&paused), 0, "{}", err(&paused));
    let mut seen = next(&client, began.id.as_deref(), 1);
    assert_eq!(text(&seen[0]), "paused");
    assert_eq!(seen[0].id.as_deref(), Some("2"));

    // A client whose event belongs to another history gets all events of this one.
    seen = next(&client, Some("5000"), 3);
    let gap: EventGap = serde_json::from_str(&seen[0].data).unwrap();
    assert_eq!((seen[0].kind.as_str(), gap.missed), ("gap", None));
    assert_eq!(
        [&seen[1], &seen[2]].map(|one| one.id.as_deref()),
        [Some("1"), Some("2")]
    );

    // A stream without events can be resumed, too.
    let mut pieces = client.stream("/v1/events/stream", None).unwrap();
    let mut parser = EventParser::default();
    while parser.last_id().is_none() {
        let piece = pieces.next_piece().unwrap().expect("the stream goes on");
        assert_eq!(parser.push(&piece), []);
    }
    assert_eq!(parser.last_id(), Some("2"));

    let error = client.stream(STREAM, Some("x")).unwrap_err();
    assert!(
        matches!(&error, ClientError::Refused { body, .. } if body.error.contains("last-event-id"))
    );

    // The command shows the same events, oldest first.
    wait_until("both events are shown", LIMIT, || {
        let shown = daemon.run(&["events"]);
        let shown = String::from_utf8(shown.stdout).unwrap();
        let lines: Vec<&str> = shown.lines().collect();
        lines.len() == 2
            && lines[0].ends_with(" began")
            && lines[1].contains("! folding   -: paused")
    });
}

#[test]
fn events_follow_continues_after_a_lost_connection_and_after_a_refused_stream() {
    let stream = |id: u32| {
        Reaction::Answer(format!(
            "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n\
             event: event\nid: {id}\ndata: {{\"number\":{id}}}\n\n"
        ))
    };
    let full = serde_json::json!({ "error": "too many streams", "hint": null });
    let refused = fake_daemon::json(503, &full);
    let daemon = FakeDaemon::start(vec![stream(1), Reaction::Close, refused, stream(2)]);
    let mut command = daemon.command(&["events", "--follow", "--json"]);
    let mut follows = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(follows.stdout.take().unwrap()).lines();
    let lines: Vec<String> = lines.take(2).map(Result::unwrap).collect();
    // The command tries to connect again for a minute.
    let _ = follows.kill();
    let output = follows.wait_with_output().unwrap();
    assert_eq!(
        lines,
        ["{\"number\":1}", "{\"number\":2}"],
        "{}",
        err(&output)
    );

    // A command that was never connected fails at once.
    let daemon = FakeDaemon::start(vec![fake_daemon::json(503, &full)]);
    let output = daemon.command(&["events", "--follow"]).output().unwrap();
    crate::support::refused(&output, 1, &["too many streams"]);
}

#[test]
fn events_follow_with_a_json_file_prints_text_and_writes_each_event_as_a_line_of_the_file() {
    let event = |text: &str| {
        serde_json::json!({
            "at_unix_s": 1, "kind": "vm", "warning": false, "vm": "web1", "text": text,
        })
        .to_string()
    };
    let (first, second) = (event("started"), event("ended"));
    let daemon = FakeDaemon::start(vec![Reaction::Stay(format!(
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n\
         event: event\nid: 1\ndata: {first}\n\nevent: event\nid: 2\ndata: {second}\n\n"
    ))]);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("events.json");
    std::fs::write(&file, "an earlier run").unwrap();
    let json = format!("--json={}", file.display());
    let mut command = daemon.command(&["events", "--follow", &json]);
    let mut follows = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(follows.stdout.take().unwrap()).lines();
    let lines: Vec<String> = lines.take(2).map(Result::unwrap).collect();
    let written = std::fs::read_to_string(&file).unwrap();
    let _ = follows.kill();
    follows.wait().unwrap();
    assert_eq!(written, format!("{first}\n{second}\n"));
    assert!(lines[0].ends_with("web1: started"), "{lines:?}");
    assert!(lines[1].ends_with("web1: ended"), "{lines:?}");
}

#[test]
fn vm_console_with_json_is_refused_as_wrong_usage() {
    let daemon = FakeDaemon::start(Vec::new());
    for json in ["--json", "--json=events.json"] {
        let mut command = daemon.command(&["vm", "console", "web1", json]);
        crate::support::refused(&command.output().unwrap(), 2, &["has no JSON"]);
    }
}
