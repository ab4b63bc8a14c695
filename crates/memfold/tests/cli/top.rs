//! Tests of `memfold top`, with its output in a pipe and on a terminal.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::support::{Daemon, code, err};

#[test]
fn if_memfold_top_writes_to_a_pipe_it_prints_a_report_per_line_and_ends_with_the_reader() {
    let daemon = Daemon::start();
    for json in [true, false] {
        let mut command = daemon.command(&["top"]);
        if json {
            command.arg("--json");
        }
        let mut top = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut reader = BufReader::new(top.stdout.take().unwrap());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if json {
            let report: Value = serde_json::from_str(&line).unwrap();
            assert!(report["ledger"]["host"]["mem_total_bytes"].as_u64() > Some(0));
        }
        drop(reader);
        assert_eq!(top.wait().unwrap().code(), Some(0), "json: {json}");
    }
}

/// Runs a command on a terminal of 120 by 30 characters, until its output contains `until`. Then
/// types the keys; the command must succeed. Returns the output.
fn on_a_terminal(daemon: &Daemon, arguments: &[&str], until: &str, keys: &str) -> String {
    let command = daemon.command(arguments);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_str().unwrap()).collect();
    let line = format!("stty cols 120 rows 30; exec {}", words.join(" "));
    let mut script = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .env("TERM", "xterm")
        .envs(command.get_envs().filter_map(|(k, v)| Some((k, v?))))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut shown = Vec::new();
    let mut out = script.stdout.take().unwrap();
    let mut typed = false;
    let mut buffer = [0; 4096];
    loop {
        let read = out.read(&mut buffer).unwrap();
        if read == 0 {
            break;
        }
        shown.extend_from_slice(&buffer[..read]);
        if !typed && String::from_utf8_lossy(&shown).contains(until) {
            let stdin = script.stdin.as_mut().unwrap();
            stdin.write_all(keys.as_bytes()).unwrap();
            typed = true;
        }
    }
    let shown = String::from_utf8_lossy(&shown).into_owned();
    assert!(typed, "no '{until}': {shown}");
    assert_eq!(script.wait().unwrap().code(), Some(0), "{shown}");
    shown
}

#[test]
fn memfold_top_on_a_terminal_reacts_to_keys_and_restores_the_terminal_at_its_end() {
    let daemon = Daemon::start();
    for keys in ["?xq", "\u{3}"] {
        let shown = on_a_terminal(&daemon, &["top", "-n", "0.5"], "no VMs", keys);
        assert!(shown.contains("memfold top"), "{shown}");
        // `top` switches to the alternate screen, and leaves it at the end.
        let (enter, leave) = ("\u{1b}[?1049h", "\u{1b}[?1049l");
        assert!(shown.find(enter) < shown.rfind(leave), "{shown:?}");
        assert_eq!(shown.contains("what the columns mean"), keys.contains('?'));
    }
    let output = daemon.run(&["top", "-n", "0.1"]);
    assert_eq!(code(&output), 2);
    assert!(err(&output).contains("0.5 to 3600"), "{}", err(&output));
}
