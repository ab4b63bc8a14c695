//! Tests of signals that end `memfold vm console` in a terminal.

use std::process::Stdio;

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

use super::fake_daemon::{FakeDaemon, Reaction};
use super::support::wait;

#[test]
fn a_signal_that_ends_vm_console_leaves_the_terminal_as_it_was() {
    for (signal, number) in [(Signal::TERM, 15), (Signal::HUP, 1), (Signal::INT, 2)] {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let terminal = open(name.as_c_str(), flags, Mode::empty()).unwrap();
        let modes = || tcgetattr(&terminal).unwrap().local_modes;
        let before = modes();
        assert!(before.contains(LocalModes::ICANON | LocalModes::ECHO));

        let upgraded = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n\
                        upgrade: memfold-console\r\n\r\n";
        let daemon = FakeDaemon::start(vec![Reaction::Stay(upgraded.into())]);
        let mut command = daemon.command(&["vm", "console", "web1"]);
        command.stdin(terminal.try_clone().unwrap());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut console = command.spawn().unwrap();
        wait("the terminal is raw", || {
            !modes().contains(LocalModes::ICANON)
        });
        kill_process(Pid::from_child(&console), signal).unwrap();
        let status = console.wait().unwrap();
        assert_eq!(modes(), before, "{signal:?}");
        assert_eq!(status.code(), Some(128 + number));
    }
}
