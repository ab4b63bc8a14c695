//! Starts the measured process of the study `mappings`, sends it requests, and ends it.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use serde_json::Value;

use super::memory::Kind;
use super::process::Request;
use crate::host::Stat;

/// A measured process. It is killed when this value is dropped.
pub struct Handle {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Facts about the process's memory, as the process has told them.
    pub facts: Value,
}

impl Handle {
    /// Starts a process with so many runs, and waits until its memory is ready.
    pub fn start(runs: u64, kind: Kind) -> anyhow::Result<Self> {
        let kind = kind.to_possible_value().context("a kind without a name")?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["mappings-process", "--runs", &runs.to_string()])
            .args(["--memory", kind.get_name()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (requests, answers) = pipes.context("the measured process has no pipes")?;
        let mut handle = Self {
            child,
            requests,
            answers: BufReader::new(answers),
            facts: Value::Null,
        };
        handle.facts = handle.answer()?;
        Ok(handle)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn answer(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("the measured process has ended; its error stands above");
        }
        Ok(serde_json::from_str(&line)?)
    }

    pub fn ask(&mut self, request: &Request) -> anyhow::Result<Value> {
        writeln!(self.requests, "{}", serde_json::to_string(request)?)?;
        self.answer()
    }

    /// Kills the process. Returns the time until all its memory was freed, and the CPU time of that
    /// (in steps of 10 ms). The page store's file outlives the process, as it outlives a VM.
    pub fn kill(mut self) -> anyhow::Result<(Duration, Duration)> {
        let descriptor = self.facts["store_descriptor"].as_i64();
        let descriptor = descriptor.context("the measured process told no descriptor")?;
        let store = File::open(format!("/proc/{}/fd/{descriptor}", self.pid()))?;
        // CPU time of all ended children, and of the process and its children until now.
        let children = || cpu_time("/proc/self/stat", &[16, 17]);
        let own = cpu_time(&format!("/proc/{}/stat", self.pid()), &[14, 15, 16, 17])?;
        let before = children()? + own;
        let began = Instant::now();
        self.child.kill()?;
        self.child.wait()?;
        let took = began.elapsed();
        drop(store);
        Ok((took, children()?.saturating_sub(before)))
    }
}

/// Returns the sum of fields of a file `stat` that count ticks of 10 ms.
fn cpu_time(path: &str, fields: &[usize]) -> anyhow::Result<Duration> {
    const TICK_MS: u64 = 10;
    let stat = Stat::read(path.as_ref())?;
    let ticks: u64 = fields.iter().map(|&field| stat.field(field)).sum();
    Ok(Duration::from_millis(ticks * TICK_MS))
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
