//! `memfold vm console`: connects the terminal to the serial console of a VM. `memfold vm logs`.

use std::io::{ErrorKind, IsTerminal as _, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use crossterm::terminal::{disable_raw_mode, enable_raw_mode};
use memfold_api::{CONSOLE_PROTOCOL, Client, VmLogs};
use tokio::signal::unix::{SignalKind, signal};

use super::context::Context;
use super::vm_info::segment;

/// The key that ends `vm console`: Ctrl-].
const END: u8 = 0x1d;

/// Sets the terminal to raw mode until this is dropped, so that each key reaches the guest.
pub(super) struct Raw;

impl Raw {
    pub(super) fn set() -> anyhow::Result<Self> {
        enable_raw_mode()?;
        Ok(Self)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // If this fails, the terminal is gone.
        let _ = disable_raw_mode();
    }
}

/// Passes standard input to the console, and the console's output to standard output, until the
/// user types Ctrl-] or the VM ends.
pub(super) fn console(context: &Context, client: &Client, name: &str) -> anyhow::Result<ExitCode> {
    if context.json_argument().is_some() {
        let why = "the serial console of a VM has no JSON; leave out --json\n";
        clap::Error::raw(clap::error::ErrorKind::ArgumentConflict, why).exit();
    }
    let path = format!("/v1/vms/{}/console", segment(name)?);
    let (mut stream, first) = client.upgrade(&path, CONSOLE_PROTOCOL, &())?;
    let is_terminal = std::io::stdin().is_terminal();
    if is_terminal {
        memfold_host::say!("connected to the console of '{name}'; Ctrl-] ends the connection");
    }
    if is_terminal {
        restore_at_signals()?;
    }
    let raw = is_terminal.then(Raw::set).transpose()?;
    let input = stream.try_clone()?;
    // This thread may wait for a key when the VM has ended; it then ends with the process.
    std::thread::spawn(move || pass_keys(input));
    let mut out = std::io::stdout().lock();
    let mut written = write_all(&mut out, &first);
    let mut buffer = [0; 4096];
    while matches!(written, Ok(true)) {
        written = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => write_all(&mut out, &buffer[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            // The daemon has ended.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => Err(error),
        };
    }
    drop(raw);
    if is_terminal {
        memfold_host::say!("\nconnection to the console of '{name}' closed");
    }
    written?;
    Ok(ExitCode::SUCCESS)
}

/// Starts a thread that restores the terminal and ends this process at a signal, with exit code 128
/// plus the signal's number. The main thread may wait for the reader of standard output for ever.
fn restore_at_signals() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let kinds = [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
    ];
    let [mut interrupted, mut terminated, mut hung_up] = {
        let _inside = runtime.enter();
        let [first, second, third] = kinds.map(signal);
        [first?, second?, third?]
    };
    std::thread::spawn(move || {
        let ended_by = runtime.block_on(async {
            tokio::select! {
                _ = interrupted.recv() => kinds[0],
                _ = terminated.recv() => kinds[1],
                _ = hung_up.recv() => kinds[2],
            }
        });
        // If this fails, the terminal is gone.
        let _ = disable_raw_mode();
        std::process::exit(128 + ended_by.as_raw_value());
    });
    Ok(())
}

/// Writes bytes at once. Returns `false` if the reader has closed standard output.
fn write_all(out: &mut impl std::io::Write, bytes: &[u8]) -> std::io::Result<bool> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true),
    }
}

/// Passes standard input to the console. At Ctrl-], closes the connection. At the end of the input,
/// the console's output continues.
fn pass_keys(mut console: UnixStream) {
    let mut input = std::io::stdin().lock();
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = input.read(&mut buffer) {
        let keys = &buffer[..read];
        let end = keys.iter().position(|&key| key == END);
        let sent = console.write_all(&keys[..end.unwrap_or(read)]);
        if end.is_some() || sent.is_err() {
            // This fails only if the connection is closed already.
            let _ = console.shutdown(Shutdown::Both);
            return;
        }
    }
}

/// Prints the logs of a VM.
pub(super) fn logs(context: &Context, client: &Client, name: &str) -> anyhow::Result<ExitCode> {
    let logs: VmLogs = client.get(&format!("/v1/vms/{}/logs", segment(name)?))?;
    context.print(&logs, |logs| {
        let [qemu, console] = [&logs.qemu, &logs.console].map(|log| printable(log));
        let text = format!("==> QEMU <==\n{qemu}\n\n==> serial console <==\n{console}");
        text.trim_end().to_owned()
    })
}

/// Removes escape sequences and other control characters, with which a guest could control the
/// user's terminal.
fn printable(log: &str) -> String {
    let mut text = anstream::adapter::strip_str(log).to_string();
    text.retain(|c| !c.is_control() || matches!(c, '\n' | '\t'));
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_of_a_guest_do_not_reach_the_terminal() {
        let log = "\u{1b}[0;32mOK\u{1b}[0m\u{1b}]52;c;Zm9v\u{7} a\u{8}b\tc\r\nend\u{9b}2J\r\n\n";
        let text = printable(log);
        assert!(text.starts_with("OK"), "{text:?}");
        assert!(text.contains("ab\tc\nend"), "{text:?}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n' && c != '\t'));
    }
}
