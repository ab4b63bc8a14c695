//! A fake daemon: a Unix socket that gives each connection the next of a list of responses.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::support::program;

/// What the fake daemon does with a connection.
pub enum Reaction {
    /// Answers the request with these bytes, and closes the connection.
    Answer(String),
    /// Closes the connection without an answer.
    Close,
    /// Answers the request, and keeps the connection open until the client closes it.
    Stay(String),
}

/// Returns a response with JSON.
pub fn json(status: u16, body: &Value) -> Reaction {
    let body = body.to_string();
    Reaction::Answer(format!(
        "HTTP/1.1 {status} Status\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    ))
}

/// A fake daemon. After its last reaction, nobody serves its socket.
pub struct FakeDaemon(TempDir);

impl FakeDaemon {
    pub fn start(reactions: Vec<Reaction>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        std::thread::spawn(move || {
            for reaction in reactions {
                let (stream, _) = listener.accept().unwrap();
                // The client may be gone.
                let _ = react(stream, &reaction);
            }
        });
        Self(directory)
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program();
        command.arg("--socket").arg(self.0.path().join("s"));
        command.args(arguments);
        command
    }
}

fn react(mut stream: UnixStream, reaction: &Reaction) -> std::io::Result<()> {
    let (Reaction::Answer(answer) | Reaction::Stay(answer)) = reaction else {
        return Ok(());
    };
    let mut request = BufReader::new(stream.try_clone()?);
    let mut length = 0;
    loop {
        let mut line = String::new();
        request.read_line(&mut line)?;
        let line = line.trim_end().to_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    request.read_exact(&mut vec![0; length])?;
    stream.write_all(answer.as_bytes())?;
    if let Reaction::Stay(_) = reaction {
        request.read_to_end(&mut Vec::new())?;
    }
    Ok(())
}
