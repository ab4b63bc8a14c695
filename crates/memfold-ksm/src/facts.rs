//! Reads from `/proc` and `/sys` the facts that explain why KSM merges a VM's memory or does not.

use std::fs;
use std::io;
use std::path::Path;

use super::controls::{Controls, Settings};
use super::error::KsmError;
use super::processes::{self, Process};
use super::ranges::{self, Mapping};
use super::status::{Ksmd, Status, stat_field};
use super::zeroes;

/// What the daemon knows about a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Name of the VM.
    pub name: String,
    /// Trust domain of the VM.
    pub domain: Option<String>,
    /// Address ranges of the VM's RAM in QEMU, each with its first byte and the byte after its
    /// last.
    pub ram: Vec<(u64, u64)>,
}

/// Figures of the host that determine what KSM merges: KSM's settings and counters, ksmd's CPU
/// time, and the amount of mergeable memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostSide {
    /// KSM's settings on the host, in `/sys/kernel/mm/ksm`.
    pub settings: Settings,
    /// KSM's counters for the whole host.
    pub status: Status,
    /// CPU time of ksmd since the host's boot, in seconds; `None` if it cannot be read.
    pub ksmd_cpu_s: Option<f64>,
    /// Number of anonymous pages in memory of all processes that have mergeable memory.
    pub mergeable_pages: u64,
    /// Number of NUMA nodes of the host.
    pub nodes: u64,
}

/// State of a daemon that steers KSM, that is, sets ksmd's scan rate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steered {
    /// Trust domain for which the daemon runs KSM.
    pub domain: String,
    /// Reason why the daemon has paused KSM; `None` if KSM runs.
    pub held: Option<String>,
    /// Number of full scans that ksmd has completed since the daemon began to steer KSM.
    pub scans: u64,
}

/// All facts that explain why KSM merges a VM's memory or does not.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Name of the VM.
    pub vm: String,
    /// Trust domain of the VM.
    pub domain: Option<String>,
    /// Whether a daemon knows the VM. Only then is the VM's trust domain meaningful.
    pub known: bool,
    /// KSM's figures of the VM's process.
    pub process: Process,
    /// Mappings of the VM's guest memory.
    pub mappings: Vec<Mapping>,
    /// Whether QEMU was told not to advise guest memory mergeable (`mem-merge=off`).
    pub merge_off: bool,
    /// Whether the QEMU process has a seccomp filter other than QEMU's own (`-sandbox`). QEMU's
    /// filter permits `madvise`; another may refuse it.
    pub filtered: bool,
    /// Number of zero pages in the VM's mergeable memory, estimated from a sample; `None` if
    /// unknown.
    pub zero_pages: Option<u64>,
    /// Time since the QEMU process started, in seconds.
    pub age_s: f64,
    /// Figures of the host that determine what KSM merges; `None` if the kernel has no KSM.
    pub host: Option<HostSide>,
    /// State of the daemon that steers KSM; `None` if no daemon steers KSM or no daemon was asked.
    pub steered: Option<Steered>,
}

impl HostSide {
    /// Reads KSM's figures of the host. Returns `None` if the host's kernel has no KSM.
    pub fn read(controls: &Controls, proc_root: &Path) -> Result<Option<Self>, KsmError> {
        let settings = match controls.settings() {
            Err(KsmError::Missing(_)) => return Ok(None),
            settings => settings?,
        };
        let processes = processes::mergeable(proc_root)?;
        Ok(Some(Self {
            settings,
            status: Status::read(controls)?,
            ksmd_cpu_s: Ksmd::find_in(proc_root)
                .and_then(|ksmd| ksmd.cpu_time().ok())
                .map(|time| time.as_secs_f64()),
            mergeable_pages: processes.iter().map(|p| p.anonymous_pages).sum(),
            nodes: nodes(Path::new("/sys/devices/system/node")),
        }))
    }
}

fn nodes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| {
        let name = entry.file_name();
        name.to_str()?.strip_prefix("node")?.parse::<u32>().ok()
    };
    (entries.filter_map(number).count() as u64).max(1)
}

impl Facts {
    /// Reads the facts about the QEMU process `pid`. `known` is what a daemon knows about the VM,
    /// if a daemon was asked. `steered` is the state of the daemon that steers KSM, if one does.
    ///
    /// # Errors
    /// Fails if the process has ended or may not be read.
    pub fn read(
        controls: &Controls,
        proc_root: &Path,
        pid: i32,
        known: Option<&Known>,
        steered: Option<Steered>,
    ) -> Result<Self, KsmError> {
        let directory = proc_root.join(pid.to_string());
        let failed = || KsmError::read(&directory);
        let gone = || failed()(io::ErrorKind::NotFound.into());
        let process = Process::read(proc_root, pid).ok_or_else(gone)?;
        let ram = known.map_or(&[][..], |known| &known.ram);
        let mappings = ranges::guest(proc_root, pid, ram).map_err(failed())?;
        let words = words(&directory).map_err(failed())?;
        let status = fs::read_to_string(directory.join("status")).map_err(failed())?;
        let vm = match known {
            Some(known) => known.name.clone(),
            None => memfold_vm::endpoints::guest_name(&words)
                .unwrap_or_else(|| format!("process {pid}")),
        };
        Ok(Self {
            vm,
            domain: known.and_then(|known| known.domain.clone()),
            known: known.is_some(),
            process,
            merge_off: merge_off(&words),
            filtered: filtered(&status, &words),
            zero_pages: zeroes::pages(pid, &mappings).ok(),
            mappings,
            age_s: age_s(proc_root, &directory).unwrap_or(0.0),
            host: HostSide::read(controls, proc_root)?,
            steered,
        })
    }
}

fn words(directory: &Path) -> io::Result<Vec<String>> {
    let bytes = fs::read(directory.join("cmdline"))?;
    let words = bytes.split(|b| *b == 0).filter(|word| !word.is_empty());
    Ok(words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect())
}

/// Returns whether a process has a seccomp filter (`proc_pid_status(5)`) besides QEMU's own, which
/// permits `madvise` (`system/qemu-seccomp.c`).
fn filtered(status: &str, words: &[String]) -> bool {
    let number = |name: &str| -> Option<u32> {
        let mut lines = status.lines();
        let value = lines.find_map(|line| line.strip_prefix(name))?;
        value.trim().parse().ok()
    };
    let is_sandbox = |pair: &[String]| {
        matches!(pair[0].as_str(), "-sandbox" | "--sandbox") && pair[1].starts_with("on")
    };
    let own = u32::from(words.windows(2).any(is_sandbox));
    // Linux reports the number of filters since version 5.9.
    number("Seccomp:") == Some(2) && number("Seccomp_filters:").is_none_or(|all| all > own)
}

/// Returns whether `mem-merge` is off in QEMU's command line. QEMU combines all `-machine` options,
/// and the last value counts. A memory backend's `merge=off` has no effect while the machine's
/// option is on (`ram_block_add` in `system/physmem.c` checks only the machine).
fn merge_off(words: &[String]) -> bool {
    let machine = words
        .windows(2)
        .filter(|pair| matches!(pair[0].as_str(), "-machine" | "--machine" | "-M" | "--M"));
    machine
        .flat_map(|pair| pair[1].split(','))
        .filter_map(|option| option.strip_prefix("mem-merge="))
        .next_back()
        .is_some_and(|value| matches!(value, "off" | "no" | "false"))
}

/// Returns the time since a process's start in seconds: `/proc/uptime` minus field 22 of the
/// process's `stat`.
fn age_s(proc_root: &Path, directory: &Path) -> Option<f64> {
    let uptime = fs::read_to_string(proc_root.join("uptime")).ok()?;
    let uptime: f64 = uptime.split(' ').next()?.parse().ok()?;
    let stat = fs::read_to_string(directory.join("stat")).ok()?;
    let began = stat_field(&stat, 22)? as f64 / rustix::param::clock_ticks_per_second() as f64;
    Some((uptime - began).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seccomp_filter_of_qemu_itself_does_not_count_as_a_foreign_filter() {
        let of = |filters: u32, line: &str| {
            let status = format!("Name:\tq\nSeccomp:\t2\nSeccomp_filters:\t{filters}\nCpus:\t1\n");
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            filtered(&status, &words)
        };
        assert!(!of(1, "qemu -sandbox on,spawn=deny -m 64"));
        assert!(of(2, "qemu -sandbox on"));
        assert!(of(1, "qemu -sandbox off"));
        assert!(of(1, "qemu -m 64"));
        assert!(!filtered("Seccomp:\t0\nSeccomp_filters:\t0\n", &[]));
        assert!(filtered("Seccomp:\t2\n", &[]));
    }

    #[test]
    fn mem_merge_off_is_recognised_in_every_form_of_the_qemu_command_line() {
        let off = |line: &str| merge_off(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(off("qemu -machine q35,mem-merge=off"));
        assert!(off("qemu -M pc -machine mem-merge=off"));
        assert!(!off(
            "qemu -object memory-backend-ram,id=r,size=1M,merge=off"
        ));
        assert!(!off(
            "qemu -machine q35,mem-merge=off -machine mem-merge=on"
        ));
        assert!(!off("qemu -machine q35 -name mem-merge=off"));
        assert!(!off("qemu"));
    }
}
