//! Writes the results of studies, demo and self-test, as JSON for programs or as text for people.

use std::io::{ErrorKind, Write as _};

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
