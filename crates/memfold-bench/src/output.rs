//! Writes the results of studies, demo and self-test, as JSON for programs or as text for people.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;

/// Destination and format of results.
#[derive(Args, Debug)]
pub struct Output {
    /// Write the results to FILE as JSON; without FILE or with '-', print them instead of text
    // The program 'memfold' puts its own --json first, so the last one counts.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", overrides_with = "json")]
    pub json: Option<String>,
}

impl Output {
    /// Fails if the file that the user named cannot be written.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.json.as_deref() {
            None | Some("-") => Ok(()),
            Some(file) => check_writable(Path::new(file)),
        }
    }

    /// Prints `value`: as JSON if the user asked for JSON on standard output, else as the text that
    /// `text` makes. If the user named a file, also writes `value` to this file as JSON.
    pub fn print<T: Serialize>(
        &self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        let words = match self.json.as_deref() {
            Some("-") => serde_json::to_string_pretty(value)?,
            Some(file) => {
                let mut json = serde_json::to_vec_pretty(value)?;
                json.push(b'\n');
                std::fs::write(file, json).with_context(|| format!("cannot write {file}"))?;
                text(value)
            }
            None => text(value),
        };
        let mut out = std::io::stdout().lock();
        match writeln!(out, "{words}").and_then(|()| out.flush()) {
            // It is no error if the reader has closed the output (`| head`).
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            result => Ok(result?),
        }
    }
}

/// Fails if `file` cannot be written. Called before something runs for an hour, so that its results
/// are not lost then. Leaves what the file holds as it is.
pub fn check_writable(file: &Path) -> anyhow::Result<()> {
    let existed = file.exists();
    let opened = OpenOptions::new().append(true).create(true).open(file);
    opened.with_context(|| format!("cannot write {}", file.display()))?;
    if !existed {
        std::fs::remove_file(file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_refused_before_and_others_are_left_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let check = |file: &str| {
            let json = Some(file.to_owned());
            Output { json }
                .check()
                .map_err(|error| format!("{error:#}"))
        };
        let refused = check(directory.path().to_str().unwrap()).unwrap_err();
        assert!(refused.contains("cannot write"), "{refused}");
        let file = directory.path().join("results.json");
        check(file.to_str().unwrap()).unwrap();
        assert!(!file.exists());
        std::fs::write(&file, "of before").unwrap();
        check(file.to_str().unwrap()).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "of before");
        check("-").unwrap();
    }
}
