//! Tests of what a guest's owner allows, at the daemon's end of an agent's connection. The tests
//! simulate agents.

use std::sync::mpsc::channel;

use memfold_testkit::wait_until;
use memfold_vm::{
    AgentError, AgentOptions, GuestOrder, GuestTask, Permission, StreamEvent, StreamRequest,
};
use memfold_wire::agent::{FromAgent, ToAgent};

use crate::agent::{Guest, LONG, hello, link, session};

fn words(words: &[&str]) -> FromAgent {
    let words = words.iter().map(ToString::to_string).collect();
    FromAgent::Allowed { words }
}

fn not_allowed(command: u32, word: &str) -> FromAgent {
    let word = word.into();
    FromAgent::NotAllowed { command, word }
}

#[test]
fn the_daemon_knows_what_a_guests_owner_allows_until_the_session_ends() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.say_hello("one");
    session(&events);
    assert_eq!(link.allowed(), None);
    // A word of a newer agent is no permission of this daemon.
    guest.say(&words(&["trim", "exec", "fly"]));
    wait_until("the words have come", LONG, || link.allowed().is_some());
    let allowed: Vec<_> = link.allowed().into_iter().flatten().collect();
    assert_eq!(allowed, [Permission::Exec, Permission::Trim]);
    guest.say_hello("two");
    session(&events);
    assert_eq!(link.allowed(), None);
}

#[test]
fn an_order_that_the_guests_owner_does_not_allow_fails_with_the_word_that_allows_it() {
    let (_dir, listener, link, _events) = link(AgentOptions::default());
    let guest = std::thread::spawn(move || {
        let mut guest = Guest::accept(&listener);
        guest.greet("one");
        let ToAgent::Order { command, order } = guest.hear() else {
            panic!("no order")
        };
        assert_eq!(order, GuestOrder::Sync);
        guest.say(&not_allowed(command, "sync"));
        let ToAgent::Run { command, .. } = guest.hear() else {
            panic!("no script")
        };
        guest.say(&not_allowed(command, "exec"));
        guest
    });
    link.wait_session(LONG).unwrap();
    let refused = link.run(GuestOrder::Sync, LONG).unwrap_err();
    assert!(
        matches!(refused, AgentError::NotAllowed(Permission::Sync)),
        "{refused:?}"
    );
    let refused = link.run("true", LONG).unwrap_err().to_string();
    assert!(
        refused.contains("run commands in it") && refused.contains("add \"exec\" to 'allow'"),
        "{refused}"
    );
    drop(guest.join().unwrap());
}

#[test]
fn a_streamed_copy_is_an_order_and_its_refusal_is_its_last_event() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.greet("one");
    session(&events);
    link.wait_session(LONG).unwrap();
    let (sender, heard) = channel();
    let order = GuestOrder::SendFile {
        path: "/etc/shadow".into(),
    };
    let request = StreamRequest {
        task: GuestTask::Order(order.clone()),
        has_input: false,
        terminal: None,
    };
    let copy = link.stream(request, move |event| drop(sender.send(event)));
    let copy = copy.unwrap();
    let ToAgent::StreamOrder {
        command,
        order: asked,
        ..
    } = guest.hear()
    else {
        panic!("no order")
    };
    assert_eq!(asked, order);
    guest.say(&not_allowed(command, "copy"));
    let refused = StreamEvent::NotAllowed(Permission::Copy);
    assert_eq!(heard.recv_timeout(LONG).unwrap(), refused);
    assert!(heard.recv_timeout(LONG).is_err(), "the sink is dropped");
    drop(copy);
}

#[test]
fn an_agent_that_knows_no_orders_gets_the_script_of_an_order() {
    let (_dir, listener, link, events) = link(AgentOptions::default());
    let mut guest = Guest::accept(&listener);
    guest.say(&hello(2, "old"));
    assert!(matches!(guest.hear(), ToAgent::Welcome { version: 2, .. }));
    assert_eq!(guest.hear(), ToAgent::Inventory);
    session(&events);
    link.wait_session(LONG).unwrap();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| link.run(GuestOrder::DropClean, LONG));
        let ToAgent::Run { command, script } = guest.hear() else {
            panic!("no script")
        };
        assert_eq!(script, GuestOrder::DropClean.script());
        guest.say(&FromAgent::Exited { command, code: 0 });
        assert_eq!(run.join().unwrap().unwrap().code, 0);
    });
}
