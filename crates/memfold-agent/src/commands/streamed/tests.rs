//! Tests of streamed commands, without a guest: the test is the daemon.

use super::*;
use crate::commands::Commands;
use memfold_testkit::wait_until;
use memfold_wire::agent::{MAX_INPUT, ToAgent};

const LIMIT: Duration = Duration::from_secs(20);

/// What the daemon's side of a test has received.
#[derive(Default)]
struct Heard {
    out: Vec<u8>,
    err: Vec<u8>,
    codes: Vec<(u32, i32)>,
    input_room: usize,
    cost: usize,
}

impl Heard {
    fn hear(&mut self, commands: &Commands) {
        while let Some(message) = commands.next() {
            match message {
                FromAgent::Output { stream, bytes, .. } => {
                    self.cost += bytes.len() + OUTPUT_COST;
                    match stream {
                        OutputStream::Stdout => self.out.extend(bytes),
                        OutputStream::Stderr => self.err.extend(bytes),
                    }
                }
                FromAgent::Exited { command, code } => self.codes.push((command, code)),
                FromAgent::InputRoom { bytes, .. } => self.input_room += bytes as usize,
                other => panic!("{other:?}"),
            }
        }
    }

    fn wait(&mut self, commands: &Commands, what: &str, is_so: impl Fn(&Self) -> bool) {
        wait_until(what, LIMIT, || {
            self.hear(commands);
            is_so(self)
        });
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }
}

fn start(commands: &Commands, command: u32, script: &str, terminal: Option<(u16, u16)>) {
    let terminal = terminal.map(|(rows, columns)| Terminal {
        kind: "xterm".into(),
        size: TerminalSize { rows, columns },
    });
    let message = ToAgent::Stream {
        command,
        script: script.into(),
        has_input: true,
        terminal,
    };
    assert_eq!(commands.stream(message), None);
}

fn say(commands: &Commands, text: &str) {
    let bytes = text.as_bytes().to_vec();
    let command = 1;
    assert_eq!(commands.stream(ToAgent::Input { command, bytes }), None);
}

/// Returns whether a process runs: it exists and is no zombie.
fn is_running(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn a_streamed_command_answers_input_while_it_runs_and_ends_with_its_input() {
    let commands = Commands::new().unwrap();
    let mut heard = Heard::default();
    start(&commands, 1, "cat; echo end >&2; exit 3", None);
    say(&commands, "one\n");
    heard.wait(&commands, "the first line is back", |h| h.out == b"one\n");
    assert_eq!(heard.codes, []);
    say(&commands, "two\n");
    assert_eq!(commands.stream(ToAgent::EndInput { command: 1 }), None);
    heard.wait(&commands, "the command has ended", |h| h.codes == [(1, 3)]);
    assert_eq!(
        (&heard.out[..], &heard.err[..]),
        (&b"one\ntwo\n"[..], &b"end\n"[..])
    );
    assert_eq!(heard.input_room, 8);
    wait_until("the command is forgotten", LIMIT, || {
        commands.streams.count() == 0
    });
}

#[test]
fn a_command_waits_until_the_daemon_has_room_for_its_output_and_loses_none() {
    let commands = Commands::new().unwrap();
    let mut heard = Heard::default();
    start(&commands, 1, "head -c 1000000 /dev/zero", None);
    heard.wait(&commands, "the room is used up", |h| {
        h.cost > OUTPUT_WINDOW - PIECE
    });
    std::thread::sleep(Duration::from_millis(100));
    heard.hear(&commands);
    assert!(heard.cost <= OUTPUT_WINDOW && heard.codes.is_empty());
    let mut told = 0;
    wait_until("the command has ended", LIMIT, || {
        heard.hear(&commands);
        let cost = u32::try_from(heard.cost - told).unwrap();
        told = heard.cost;
        assert_eq!(
            commands.stream(ToAgent::OutputRoom { command: 1, cost }),
            None
        );
        heard.codes == [(1, 0)]
    });
    assert_eq!(heard.out.len(), 1_000_000);
}

#[test]
fn a_daemon_that_sends_more_input_than_it_may_loses_the_command() {
    let commands = Commands::new().unwrap();
    start(&commands, 1, "sleep 100", None);
    for _ in 0..(INPUT_WINDOW + (64 << 10) + (64 << 10)) / MAX_INPUT + 8 {
        say(&commands, &"x".repeat(MAX_INPUT));
    }
    wait_until("the command is ended", LIMIT, || {
        commands.streams.count() == 0
    });
}

#[test]
fn input_that_the_command_does_not_read_to_its_end_is_dropped() {
    let commands = Commands::new().unwrap();
    let mut heard = Heard::default();
    start(
        &commands,
        1,
        "head -c 1 | cat; exec <&-; sleep 0.2; echo done",
        None,
    );
    let mut sent = 0;
    wait_until("the command has ended", LIMIT, || {
        heard.hear(&commands);
        if sent - heard.input_room + MAX_INPUT <= INPUT_WINDOW && heard.codes.is_empty() {
            say(&commands, &"x".repeat(MAX_INPUT));
            sent += MAX_INPUT;
        }
        heard.codes == [(1, 0)]
    });
    assert_eq!(heard.out, b"xdone\n");
}

#[test]
fn all_input_that_came_before_the_command_reads_reaches_the_command() {
    let commands = Commands::new().unwrap();
    let mut heard = Heard::default();
    start(&commands, 1, "sleep 0.3; cat | wc -c", None);
    for _ in 0..INPUT_WINDOW / MAX_INPUT {
        say(&commands, &"x".repeat(MAX_INPUT));
    }
    assert_eq!(commands.stream(ToAgent::EndInput { command: 1 }), None);
    heard.wait(&commands, "the command has ended", |h| h.codes == [(1, 0)]);
    assert_eq!(heard.text().trim(), INPUT_WINDOW.to_string());
    assert_eq!(heard.input_room, INPUT_WINDOW);
}

#[test]
fn a_terminal_has_its_type_and_size_and_ctrl_c_interrupts_its_foreground_program() {
    let commands = Commands::new().unwrap();
    let mut heard = Heard::default();
    // The outer shell has waited for the inner one to start (vfork) before the text is there. Until
    // then, dash would not pass the signal on.
    let script = "sh -c 'echo $TERM $(stty size); exec sleep 100'; echo not reached";
    start(&commands, 1, script, Some((11, 22)));
    heard.wait(&commands, "the size is shown", |h| {
        h.text().contains("xterm 11 22")
    });
    // Ctrl-C ends the sleep and the shell, which has no trap for it.
    say(&commands, "\x03");
    heard.wait(&commands, "the command has ended", |h| {
        h.codes == [(1, 130)]
    });
}

#[test]
fn a_new_size_of_the_terminal_reaches_the_program_and_the_end_of_input_is_one_ctrl_d() {
    let commands = Commands::new().unwrap();
    let mut heard = Heard::default();
    // A raw terminal passes Ctrl-D on as a byte, so a second one would be among the next two bytes.
    let one = "dd bs=1 count=1 2>/dev/null";
    let script = format!(
        "trap new=yes WINCH; echo ready; until [ $new ]; do sleep 0.1; done; \
         echo now $(stty size); cat; stty raw -echo; echo is raw; \
         a=$({one}); echo first read; b=$({one}); echo \"<$a$b>\"; exit 4"
    );
    start(&commands, 1, &script, Some((11, 22)));
    heard.wait(&commands, "the program is ready", |h| {
        h.text().contains("ready")
    });
    let size = TerminalSize {
        rows: 33,
        columns: 44,
    };
    assert_eq!(commands.stream(ToAgent::Resize { command: 1, size }), None);
    heard.wait(&commands, "the new size is shown", |h| {
        h.text().contains("now 33 44")
    });
    assert_eq!(commands.stream(ToAgent::EndInput { command: 1 }), None);
    heard.wait(&commands, "the end of input reached the program", |h| {
        h.text().contains("is raw")
    });
    // Each order wakes the command's thread, which must not end the input again.
    say(&commands, "a");
    heard.wait(&commands, "a byte is read", |h| {
        h.text().contains("first read")
    });
    say(&commands, "b");
    heard.wait(&commands, "the command has ended", |h| h.codes == [(1, 4)]);
    let text = heard.text();
    assert!(text.contains("<ab>"), "{text:?}");
}

#[test]
fn a_signal_reaches_the_whole_process_group_of_a_streamed_command() {
    let commands = Commands::new().unwrap();
    let mut heard = Heard::default();
    start(&commands, 1, "sleep 100 & echo $!; sleep 100", None);
    heard.wait(&commands, "the child runs", |h| h.out.ends_with(b"\n"));
    let child = heard.text();
    assert_eq!(
        commands.stream(ToAgent::Signal {
            command: 1,
            signal: 15
        }),
        None
    );
    heard.wait(&commands, "the command has ended", |h| {
        h.codes == [(1, 143)]
    });
    wait_until("the child has ended", LIMIT, || !is_running(&child));
}

#[test]
fn a_lost_connection_ends_every_process_of_its_streamed_commands_even_if_they_ignore_sighup() {
    for terminal in [None, Some((24, 80))] {
        let mut commands = Commands::new().unwrap();
        let mut heard = Heard::default();
        // With job control, each job has a process group of its own.
        let script = "set -m; (trap '' HUP TERM; sleep 100; sleep 100) & echo $!; trap '' HUP; sleep 100; sleep 100";
        start(&commands, 1, script, terminal);
        heard.wait(&commands, "the child runs", |h| h.out.contains(&b'\n'));
        let child = heard.text().lines().next().unwrap().to_owned();
        assert!(is_running(&child));
        commands.forget();
        wait_until("the command is forgotten", LIMIT, || {
            commands.streams.count() == 0
        });
        assert!(!is_running(&child), "process {child} still runs");
    }
}

#[test]
fn the_seventeenth_streamed_command_at_once_is_refused() {
    let mut commands = Commands::new().unwrap();
    let mut heard = Heard::default();
    for command in 0..=16 {
        start(&commands, command, "sleep 100", None);
    }
    heard.wait(&commands, "one is refused", |h| h.codes == [(16, 127)]);
    assert!(heard.err.starts_with(b"memfold-agent: command 16"));
    commands.forget();
    wait_until("all are ended", LIMIT, || commands.streams.count() == 0);
}
