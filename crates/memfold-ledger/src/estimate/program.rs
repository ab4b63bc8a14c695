//! Computes how much of a running program's memory several VMs could share, by the permissions of
//! its mappings (study A's Table 4).
//!
//! The study counts every mapping without `w` as shareable. That is too much where a page was
//! written before it was protected (relocations: `r--p`, but a private copy). It is too little
//! where a page of a writable private mapping was never written. `Anonymous` in `/proc/PID/smaps`
//! distinguishes these pages: a resident page that is not anonymous is the file's own page.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use memfold_units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use memfold_ksm::ranges::{self, Mapping};

/// Kind of a mapping, which determines who could share its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Executable and read-only pages of a file.
    Text,
    /// Read-only data of a file.
    ReadOnly,
    /// Pages of a private writable mapping of a file.
    PrivateFile,
    /// Shared memory, or a shared mapping of a file.
    Shared,
    /// Private anonymous memory, such as heap and stack.
    Anonymous,
}

/// Resident memory of a program in mappings of one kind with the same permissions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Mode {
    /// Kind of the program's mappings that are summed up.
    pub kind: Kind,
    /// Permissions of the mappings as in `/proc/PID/maps`, such as `r-xp`.
    pub permissions: String,
    /// Resident bytes of all mappings of this kind and with these permissions.
    pub resident_bytes: u64,
    /// Part of `resident_bytes` that is the file's own pages, which the program has not written.
    pub file_bytes: u64,
}

/// Resident memory of a program, and how much of it VMs could share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProgramReport {
    /// Requested name or process number of the program.
    pub program: String,
    /// Numbers of the program's processes. A page that several processes map is counted for each.
    pub pids: Vec<i32>,
    /// Resident memory by kind and permissions of the mappings.
    pub modes: Vec<Mode>,
    /// Resident bytes of all mappings of all processes of the program.
    pub resident_bytes: u64,
    /// Part of `resident_bytes` that is mapped without `w`: the study's measure.
    pub not_writable_bytes: u64,
    /// `not_writable_bytes` in percent of `resident_bytes`.
    pub not_writable_percent: f64,
    /// Part of `resident_bytes` that VMs could share: file pages of private mappings.
    pub shareable_bytes: u64,
    /// `shareable_bytes` in percent of `resident_bytes`.
    pub shareable_percent: f64,
}

fn kind(mapping: &Mapping) -> Kind {
    let has = |letter| mapping.permissions.contains(letter);
    if has('s') {
        Kind::Shared
    } else if !mapping.path.starts_with('/') {
        Kind::Anonymous
    } else if has('w') {
        Kind::PrivateFile
    } else if has('x') {
        Kind::Text
    } else {
        Kind::ReadOnly
    }
}

/// Returns the processes of a program: the process with that number, or all processes with that
/// name (`/proc/PID/comm`, which the kernel cuts at 15 bytes).
pub fn find(proc_root: &Path, program: &str) -> io::Result<Vec<i32>> {
    let number: Option<i32> = program.parse().ok();
    let name = &program.as_bytes()[..program.len().min(15)];
    let mut found = Vec::new();
    for entry in fs::read_dir(proc_root)?.flatten() {
        let pid = entry.file_name().to_str().and_then(|n| n.parse().ok());
        let Some(pid) = pid else { continue };
        let comm = fs::read(entry.path().join("comm")).unwrap_or_default();
        if number == Some(pid) || (number.is_none() && comm.trim_ascii_end() == name) {
            found.push(pid);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Reads the mappings of the processes `pids` and makes the report of the program named `program`.
/// A process that ends meanwhile is left out.
pub fn read(proc_root: &Path, program: &str, pids: &[i32]) -> io::Result<ProgramReport> {
    let mut report = ProgramReport {
        program: program.to_owned(),
        ..ProgramReport::default()
    };
    let mut modes: BTreeMap<(Kind, String), (u64, u64)> = BTreeMap::new();
    for &pid in pids {
        let smaps = match fs::read(proc_root.join(pid.to_string()).join("smaps")) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            Err(_) => continue,
        };
        report.pids.push(pid);
        for mapping in ranges::parse(&String::from_utf8_lossy(&smaps)) {
            let kind = kind(&mapping);
            let file = match kind {
                Kind::Anonymous => 0,
                _ => mapping
                    .resident_pages
                    .saturating_sub(mapping.anonymous_pages),
            };
            let resident = mapping.resident_pages * PAGE_SIZE;
            let writable = mapping.permissions.contains('w');
            report.resident_bytes += resident;
            report.not_writable_bytes += if writable { 0 } else { resident };
            if kind != Kind::Shared {
                report.shareable_bytes += file * PAGE_SIZE;
            }
            let mode = modes.entry((kind, mapping.permissions)).or_default();
            mode.0 += resident;
            mode.1 += file * PAGE_SIZE;
        }
    }
    let percent = |part: u64| part as f64 * 100.0 / report.resident_bytes.max(1) as f64;
    report.not_writable_percent = percent(report.not_writable_bytes);
    report.shareable_percent = percent(report.shareable_bytes);
    let resident = modes.into_iter().filter(|(_, (resident, _))| *resident > 0);
    report.modes = resident
        .map(|((kind, permissions), (resident_bytes, file_bytes))| Mode {
            kind,
            permissions,
            resident_bytes,
            file_bytes,
        })
        .collect();
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0-55d1 r-xp 00000000 08:01 5                          /usr/bin/program
Rss:                 400 kB
Anonymous:             0 kB
55d1-55d2 r--p 00000000 08:01 5                          /usr/bin/program
Rss:                 100 kB
Anonymous:            20 kB
55d2-55d3 rw-p 00000000 08:01 5                          /usr/bin/program
Rss:                  80 kB
Anonymous:            60 kB
55d3-55d4 rw-p 00000000 00:00 0                          [heap]
Rss:                 300 kB
Anonymous:           300 kB
7f00-7f01 rw-s 00000000 00:01 9                          /memfd:x (deleted)
Rss:                 120 kB
Anonymous:             0 kB
7f01-7f02 rw-p 00000000 00:00 0
Rss:                   0 kB
";

    #[test]
    fn the_estimate_for_a_program_does_not_count_written_pages_as_shareable() {
        let tree = tempfile::tempdir().unwrap();
        for (pid, comm) in [(5, "program"), (6, "other"), (7, "program")] {
            let directory = tree.path().join(pid.to_string());
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("comm"), format!("{comm}\n")).unwrap();
            fs::write(directory.join("smaps"), SMAPS).unwrap();
        }
        assert_eq!(find(tree.path(), "program").unwrap(), [5, 7]);
        assert_eq!(find(tree.path(), "6").unwrap(), [6]);
        assert!(find(tree.path(), "none").unwrap().is_empty());
        let report = read(tree.path(), "program", &[5]).unwrap();
        assert_eq!(report.resident_bytes, 1000 << 10);
        assert_eq!(report.not_writable_bytes, 500 << 10);
        assert_eq!(report.shareable_bytes, (400 + 80 + 20) << 10);
        assert!((report.shareable_percent - 50.0).abs() < 1e-9);
        let kinds: Vec<Kind> = report.modes.iter().map(|mode| mode.kind).collect();
        let wanted = [
            Kind::Text,
            Kind::ReadOnly,
            Kind::PrivateFile,
            Kind::Shared,
            Kind::Anonymous,
        ];
        assert_eq!(kinds, wanted);
        let both = read(tree.path(), "program", &[5, 7, 99]).unwrap();
        assert_eq!(both.pids, [5, 7]);
        assert_eq!(both.resident_bytes, 2 * report.resident_bytes);
    }
}
