//! What all commands of `memfold` have in common: the global options, and output in the form that
//! these options select. If the reader of standard output closes it (`| head`), this is no error.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use memfold_api::{Client, ClientError};

/// Values of the global options.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) socket: PathBuf,
    /// Whether JSON is printed to standard output instead of text.
    pub(super) json: bool,
    /// File to which the JSON is written beside the text; `None` without `--json=FILE`.
    json_file: Option<PathBuf>,
}

impl Context {
    /// Creates the context. `json`: the value of `--json`; `-` prints JSON instead of text, any
    /// other value is a file.
    pub(super) fn new(socket: PathBuf, json: Option<String>) -> Self {
        Self {
            socket,
            json: json.as_deref() == Some("-"),
            json_file: json.filter(|file| file != "-").map(PathBuf::from),
        }
    }

    /// Returns the argument `--json` as given, to be passed to another program.
    pub(super) fn json_argument(&self) -> Option<OsString> {
        let file = self.json_file.as_ref().map(|file| file.as_os_str());
        let to = file.or_else(|| self.json.then(|| OsStr::new("-")));
        let mut argument = OsString::from("--json=");
        argument.push(to?);
        Some(argument)
    }

    /// Creates a client of the daemon's socket.
    pub(super) fn client(&self) -> Result<Client, ClientError> {
        Client::new(&self.socket)
    }

    /// Writes `value` as JSON to the file of `--json=FILE`, if that was given.
    pub(super) fn write_file<T: serde::Serialize>(&self, value: &T) -> anyhow::Result<()> {
        if let Some(path) = &self.json_file {
            let mut text = serde_json::to_vec_pretty(value)?;
            text.push(b'\n');
            std::fs::write(path, text)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// Creates the file of `--json=FILE` anew, for a command that writes one line of JSON after the
    /// other; `None` without `--json=FILE`.
    pub(super) fn create_lines(&self) -> anyhow::Result<Option<JsonLines>> {
        let Some(path) = &self.json_file else {
            return Ok(None);
        };
        let file = File::create(path);
        let file = file.with_context(|| format!("cannot create {}", path.display()))?;
        let path = path.clone();
        Ok(Some(JsonLines { path, file }))
    }

    /// Prints `value` as JSON if the user gave `--json`, else the text that `text` makes. Also
    /// writes the file of `--json=FILE`. Returns the exit code of a success.
    pub(super) fn print<T: serde::Serialize>(
        &self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<ExitCode> {
        self.write_file(value)?;
        let text = if self.json {
            serde_json::to_string_pretty(value)?
        } else {
            text(value)
        };
        write_line(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The file of `--json=FILE` for a command that goes on: one JSON value in each line.
#[derive(Debug)]
pub(super) struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Appends a line at once, so that a reader of the file sees whole lines.
    pub(super) fn append(&mut self, json: &str) -> anyhow::Result<()> {
        let written = self.file.write_all(format!("{json}\n").as_bytes());
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Writes a line to standard output. It is no error if the reader has closed standard output
/// (`| head`).
pub(super) fn write_line(text: &str) -> anyhow::Result<()> {
    write_on(text).map(drop)
}

/// Writes a line to standard output. Returns `false` if the reader has closed standard output.
pub(super) fn write_on(text: &str) -> anyhow::Result<bool> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => Ok(result.map(|()| true)?),
    }
}
