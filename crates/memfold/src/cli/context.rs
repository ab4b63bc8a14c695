//! What every command is given: the options of all commands, and the output that they choose.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use anyhow::Context as _;
use memfold_api::{Client, ClientError};

use super::output::write_line;

/// The options of all commands.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) socket: PathBuf,
    /// Print JSON instead of text.
    pub(super) json: bool,
    /// Write JSON here.
    json_file: Option<PathBuf>,
}

impl Context {
    /// `json` is what `--json` was given: `-` prints instead of text, anything else is a file.
    pub(super) fn new(socket: PathBuf, json: Option<String>) -> Self {
        Self {
            socket,
            json: json.as_deref() == Some("-"),
            json_file: json.filter(|file| file != "-").map(PathBuf::from),
        }
    }

    /// `--json` as it was given, for another program.
    pub(super) fn json_argument(&self) -> Option<OsString> {
        let file = self.json_file.as_ref().map(|file| file.as_os_str());
        let to = file.or_else(|| self.json.then(|| OsStr::new("-")));
        let mut argument = OsString::from("--json=");
        argument.push(to?);
        Some(argument)
    }

    /// A client of the daemon.
    pub(super) fn client(&self) -> Result<Client, ClientError> {
        Client::new(&self.socket)
    }

    /// Writes the file that was asked for.
    pub(super) fn write_file<T: serde::Serialize>(&self, value: &T) -> anyhow::Result<()> {
        if let Some(path) = &self.json_file {
            let mut text = serde_json::to_vec_pretty(value)?;
            text.push(b'\n');
            std::fs::write(path, text)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// Prints `value` as JSON if that was asked for, else what `text` makes of it; writes the file
    /// that was asked for.
    pub(super) fn print<T: serde::Serialize>(
        &self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        self.write_file(value)?;
        let text = if self.json {
            serde_json::to_string_pretty(value)?
        } else {
            text(value)
        };
        write_line(&text)
    }
}
