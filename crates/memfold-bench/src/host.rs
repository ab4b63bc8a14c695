//! Helpers of studies, demo and self-test: check that VMs can run on this host, read `/proc`, and
//! run programs.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use memfold_api::DEFAULT_STATE;
use memfold_host::{HostFacts, examine, own_program};
use memfold_ksm as ksm;

use crate::output::Output;

/// Checks that VMs can run on this host. If they cannot, this process is replaced by
/// `memfold doctor`, which prints the reason and exits with code 3.
pub fn check_host(output: &Output) -> anyhow::Result<()> {
    if examine(HostFacts::probe(DEFAULT_STATE.as_ref())).can_run {
        return Ok(());
    }
    let mut doctor = Command::new(own_program()?);
    doctor.args(["doctor", "--state", DEFAULT_STATE]);
    doctor.args(output.json.iter().map(|file| format!("--json={file}")));
    Err(doctor.exec()).context(
        "VMs cannot run on this host; cannot start 'memfold doctor', which would print the reason",
    )
}

/// Returns each word of a text as a number; 0 for a word that is no number.
pub fn numbers(text: &str) -> Vec<f64> {
    let words = text.split_ascii_whitespace();
    words.map(|word| word.parse().unwrap_or(0.0)).collect()
}

/// Parses the output of a guest, which must be `N` numbers and nothing else.
pub fn numbers_said<const N: usize>(said: &str) -> anyhow::Result<[f64; N]> {
    let words = said.split_ascii_whitespace().map(str::parse);
    let numbers: Option<Vec<f64>> = words.map(Result::ok).collect();
    let numbers = numbers.and_then(|numbers| numbers.try_into().ok());
    numbers.with_context(|| format!("the guest did not answer with numbers: '{said}'"))
}

/// Fields of a process or thread, from its file `stat` in `/proc` (`proc_pid_stat(5)`).
pub struct Stat(Vec<u64>);

impl Stat {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        // Field 3 follows the name, which may contain any character.
        let words = text.rsplit(')').next().unwrap_or_default();
        let words = words.split_ascii_whitespace();
        let fields: Vec<u64> = words.map(|word| word.parse().unwrap_or(0)).collect();
        let is_known = fields.len() > 14;
        ensure!(is_known, "unexpected words in {}: {text}", path.display());
        Ok(Self(fields))
    }

    /// Returns field `number` of `stat`, counted from 1 as in `proc_pid_stat(5)` (3 to 17); 0 if
    /// the field is no number.
    pub fn field(&self, number: usize) -> u64 {
        self.0[number - 3]
    }
}

/// Returns the memory of a process in bytes (`VmRSS`), from its file `/proc/PID/status`.
pub fn memory(status: &Path) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(status)?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|text| text.trim().strip_suffix(" kB"));
    let kib: u64 = kib.context("the kernel tells no VmRSS")?.parse()?;
    Ok(kib << 10)
}

/// Runs a program and returns its output. `package`: Debian package with the program, for the error
/// message.
pub fn run_program(package: &str, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let done = Command::new(program).args(arguments).output();
    let done = done.with_context(|| format!("{program} is needed (apt install {package})"))?;
    let said = String::from_utf8_lossy(&done.stderr);
    let line = arguments.join(" ");
    let is_done = done.status.success();
    ensure!(is_done, "'{program} {line}' failed: {}", said.trim());
    Ok(String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

/// Starts KSM with these settings. KSM's former settings are restored when the result is stopped or
/// dropped.
pub fn start_ksm(settings: &ksm::Settings) -> anyhow::Result<ksm::Run> {
    let controls = ksm::Controls::default();
    Ok(ksm::Run::start(&controls, ksm::NOTES.as_ref(), settings)?)
}

/// Finds the kernel thread ksmd, to measure its CPU time.
pub fn ksmd() -> anyhow::Result<ksm::Ksmd> {
    ksm::Ksmd::find().context("cannot measure ksmd: no ksmd thread runs on this host")
}

/// Fails if KSM runs on this host, because a measurement would count the pages that KSM merges
/// elsewhere.
pub fn check_ksm_is_off() -> anyhow::Result<()> {
    ensure!(
        ksm::Controls::default().number::<u64>("run")? != Some(1),
        "KSM runs on this host, and what it merges would be counted; stop it first (echo 0 > /sys/kernel/mm/ksm/run)"
    );
    Ok(())
}
