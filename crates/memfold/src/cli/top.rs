//! `memfold top`: the ledger, drawn again each second.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use clap::Args;

use super::{Context, write_on};
use crate::api::{Client, FullReport};
use crate::ledger::{Report, table};

/// Time between two drawings.
const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
pub(super) struct Arguments {}

/// `--json`: a report a line each second, until the reader goes away.
fn json_lines(client: &Client) -> anyhow::Result<ExitCode> {
    loop {
        let report: FullReport = client.get("/v1/report")?;
        if !write_on(&serde_json::to_string(&report)?)? {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(INTERVAL);
    }
}

pub(super) fn run(context: &Context, _arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    if context.json {
        return json_lines(&client);
    }
    live(|| Ok(client.get::<FullReport>("/v1/report")?.ledger))?;
    Ok(ExitCode::SUCCESS)
}

/// The terminal's other screen, without cursor; left on drop, so that an error leaves the terminal as it was.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Self> {
        put("\x1b[?1049h\x1b[?25l")?;
        Ok(Self)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Nothing is left to do for a terminal that is gone.
        let _ = put("\x1b[?25h\x1b[?1049l");
    }
}

fn put(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Fetches and draws a report each second until Ctrl-C, which ends it without error. In a pipe: one report after the other.
///
/// # Errors
/// What `fetch` fails with, or the terminal.
pub(crate) fn live(mut fetch: impl FnMut() -> anyhow::Result<Report>) -> anyhow::Result<()> {
    let stop = interrupts()?;
    let terminal = io::stdout().is_terminal();
    let _screen = terminal.then(Screen::enter).transpose()?;
    loop {
        let text = table::render(&fetch()?);
        if terminal {
            put(&frame(&text))?;
        } else if !write_on(&text)? {
            return Ok(());
        }
        match stop.recv_timeout(INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(result) => return Ok(result?),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// Receives once, at Ctrl-C, which from now on doesn't end the process by itself.
pub(super) fn interrupts() -> io::Result<mpsc::Receiver<io::Result<()>>> {
    let (send, receive) = mpsc::channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    std::thread::Builder::new()
        .name("ctrl-c".to_owned())
        .spawn(move || {
            // Nobody receives any more when the view ended by an error.
            let _ = send.send(runtime.block_on(tokio::signal::ctrl_c()));
        })?;
    Ok(receive)
}

/// One drawing: from the top left, each line cleared behind its end, the rest of the screen cleared.
fn frame(text: &str) -> String {
    let mut frame = String::from("\x1b[H");
    for line in text.lines() {
        let _ = write!(frame, "{line}\x1b[K\r\n");
    }
    frame.push_str("\x1b[J");
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_overwrites_a_longer_one() {
        assert_eq!(frame("a\nb\n"), "\x1b[Ha\x1b[K\r\nb\x1b[K\r\n\x1b[J");
    }

    #[test]
    fn an_error_of_fetch_ends_it() {
        let error = live(|| Err(anyhow::anyhow!("no daemon"))).unwrap_err();
        assert_eq!(error.to_string(), "no daemon");
    }
}
