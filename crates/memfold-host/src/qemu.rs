//! Finds the QEMU program, and reads its version and capabilities.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::{files, helper};

/// Time limit for QEMU to report its capabilities.
const LIMIT: Duration = Duration::from_secs(30);

/// Environment variable with the path of the QEMU program that memfold uses instead of the QEMU in
/// `PATH`.
pub const PROGRAM_VARIABLE: &str = "MEMFOLD_QEMU";

/// File name of the QEMU program that memfold looks up in `PATH`.
pub const PROGRAM: &str = "qemu-system-x86_64";

/// Oldest version of QEMU that memfold supports: major, minor, micro.
pub const OLDEST: (u64, u64, u64) = (10, 0, 0);

/// Why a QEMU program cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// The QEMU program cannot be started.
    #[error("cannot run {program}")]
    Run {
        /// Path of the QEMU program.
        program: PathBuf,
        /// Error that the kernel returned.
        #[source]
        source: io::Error,
    },
    /// The output of the QEMU program cannot be parsed.
    #[error("cannot parse the output of '{program} {argument}': {text}")]
    Text {
        /// Path of the QEMU program.
        program: PathBuf,
        /// Option with which QEMU was called to print its output.
        argument: &'static str,
        /// Beginning of the output that cannot be parsed.
        text: String,
    },
}

/// Path, version and capabilities of a QEMU program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QemuFacts {
    /// Path of the QEMU program.
    pub program: PathBuf,
    /// Version of QEMU: major, minor, micro.
    pub version: (u64, u64, u64),
    /// Newest versioned q35 machine type that QEMU has, such as `pc-q35-10.0`.
    pub machine: String,
    /// Names of the accelerators that QEMU has, such as `kvm` and `tcg`.
    pub accelerators: Vec<String>,
}

/// Identity of a program file, which changes when another version is installed: path, device,
/// inode, time of the last change.
type Stamp = (PathBuf, u64, u64, (i64, i64));

fn stamp(program: &Path) -> Option<Stamp> {
    let facts = std::fs::metadata(program).ok()?;
    let changed = (facts.ctime(), facts.ctime_nsec());
    Some((program.into(), facts.dev(), facts.ino(), changed))
}

impl QemuFacts {
    /// Asks the QEMU program at the path `MEMFOLD_QEMU`, or else the one in `PATH`, for its version
    /// and capabilities. The answer is cached until the program's file changes, because the three
    /// starts of QEMU take longer than the start of a clone.
    pub fn probe() -> Result<Self, QemuError> {
        static KNOWN: Mutex<Option<(Stamp, QemuFacts)>> = Mutex::new(None);
        let named = std::env::var_os(PROGRAM_VARIABLE).map(PathBuf::from);
        let program = named.or_else(|| files::program(PROGRAM));
        let program = &program.unwrap_or_else(|| PROGRAM.into());
        let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(program);
        let earlier = known().clone();
        if let Some((_, facts)) = earlier.filter(|(then, _)| Some(then) == stamp.as_ref()) {
            return Ok(facts);
        }
        let facts = Self::ask(program)?;
        if let Some(stamp) = stamp {
            *known() = Some((stamp, facts.clone()));
        }
        Ok(facts)
    }

    fn ask(program: &Path) -> Result<Self, QemuError> {
        let unclear = |argument, text: &str| QemuError::Text {
            program: program.into(),
            argument,
            text: text.chars().take(200).collect(),
        };
        let version = output(program, "--version", &[])?;
        let machines = output(program, "-machine", &["help"])?;
        let accelerators = output(program, "-accel", &["help"])?;
        let accelerators = accelerators.lines().skip(1);
        Ok(Self {
            program: program.into(),
            version: parse_version(&version).ok_or_else(|| unclear("--version", &version))?,
            machine: newest_q35(&machines).ok_or_else(|| unclear("-machine", &machines))?,
            accelerators: accelerators.map(|l| l.trim().to_owned()).collect(),
        })
    }

    /// Returns whether QEMU's version is at least [`OLDEST`].
    #[must_use]
    pub fn is_supported(&self) -> bool {
        self.version >= OLDEST
    }

    /// Returns whether QEMU's balloon supports free page reporting.
    pub fn has_free_page_reporting(&self) -> Result<bool, QemuError> {
        let help = output(&self.program, "-device", &["virtio-balloon-pci,help"])?;
        Ok(help.contains(" free-page-reporting="))
    }

    /// Returns whether QEMU was built with the seccomp sandbox (`-sandbox`).
    pub fn has_sandbox(&self) -> Result<bool, QemuError> {
        Ok(output(&self.program, "-help", &[])?.contains("-sandbox on"))
    }
}

fn output(program: &Path, argument: &str, more: &[&str]) -> Result<String, QemuError> {
    let mut command = Command::new(program);
    command.arg(argument).args(more).stdin(Stdio::null());
    let output = helper::output(&mut command, LIMIT).map_err(|source| QemuError::Run {
        program: program.into(),
        source,
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses the version in a line such as `QEMU emulator version 10.0.2 (Debian ...)`.
fn parse_version(text: &str) -> Option<(u64, u64, u64)> {
    let (_, rest) = text.split_once("version ")?;
    let number = rest
        .split(|c: char| !c.is_ascii_digit() && c != '.')
        .next()?;
    let mut parts = number.split('.').map(|p| p.parse().ok());
    let mut next = || parts.next().flatten();
    Some((next()?, next()?, next().unwrap_or(0)))
}

fn newest_q35(help: &str) -> Option<String> {
    help.lines()
        .filter_map(|l| l.split_whitespace().next())
        .filter_map(|name| {
            let numbers = name.strip_prefix("pc-q35-")?.split('.');
            let version: Result<Vec<u64>, _> = numbers.map(str::parse).collect();
            Some((version.ok()?, name))
        })
        .max()
        .map(|(_, name)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_qemu_version_is_parsed_from_the_version_output() {
        let debian =
            "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\nCopyright";
        assert_eq!(parse_version(debian), Some((10, 0, 2)));
        assert_eq!(parse_version("QEMU emulator version 9.2"), Some((9, 2, 0)));
        assert_eq!(parse_version("busybox"), None);
    }

    #[test]
    fn machine_type_version_10_of_qemu_counts_as_newer_than_version_9() {
        let help = "pc-q35-9.2  Standard PC\nq35  Standard PC (alias of pc-q35-10.0)\npc-q35-10.0  Standard PC\npc-q35-4.0.1  x\n";
        assert_eq!(newest_q35(help).as_deref(), Some("pc-q35-10.0"));
        assert_eq!(newest_q35("microvm"), None);
    }
}
