//! Finds where a QEMU process has mapped its guest's RAM, and reads KSM's figures of each mapping,
//! from `/proc/PID/smaps`.
//!
//! Source: `fs/proc/task_mmu.c` (`show_smap_vma_flags`), `mm/ksm.c` (`vma_ksm_compatible`).

use std::fs;
use std::io;
use std::path::Path;

use memfold_units::PAGE_SIZE;

/// Adjacent mappings count as guest memory if their total length is at least this many bytes.
/// QEMU's own mappings are smaller, or executable.
const GUEST_BYTES: u64 = 16 << 20;

/// A mapping of a process, as `/proc/PID/smaps` shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapping {
    /// Address of the mapping's first byte.
    pub start: u64,
    /// Address after the mapping's last byte.
    pub end: u64,
    /// Permissions of the mapping in the form `rwxp` (private) or `rwxs` (shared), with `-` for
    /// each missing one.
    pub permissions: String,
    /// Path of the mapped file; empty for anonymous memory.
    pub path: String,
    /// Flags of the mapping, two letters each, from the line `VmFlags`.
    pub flags: Vec<String>,
    /// Number of the mapping's pages in memory (`Rss`).
    pub resident_pages: u64,
    /// Number of the mapping's anonymous pages in memory (`Anonymous`).
    pub anonymous_pages: u64,
    /// Number of the mapping's 4 KiB pages that are in transparent huge pages (`AnonHugePages`).
    pub huge_pages: u64,
    /// Number of the mapping's pages in swap (`Swap`).
    pub swapped_pages: u64,
    /// Number of the mapping's pages that KSM has merged (`KSM`); `None` before Linux 6.6.
    pub merged_pages: Option<u64>,
}

impl Mapping {
    /// Returns the length of the mapping in pages.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        (self.end - self.start) / PAGE_SIZE
    }

    /// Returns whether the mapping has the flag `name` in `VmFlags`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.flags.iter().any(|flag| flag == name)
    }

    /// Returns whether KSM may merge pages of the mapping (flag `mg`).
    #[must_use]
    pub fn is_mergeable(&self) -> bool {
        self.has("mg")
    }

    /// Returns whether the mapping is private anonymous memory that was not offered to KSM.
    fn is_unadvised(&self) -> bool {
        let anonymous = self.path.is_empty() && !self.permissions.ends_with('s');
        anonymous && !self.is_mergeable() && !self.has("ht")
    }

    fn may_be_guest(&self) -> bool {
        let may = |at: usize, letter: u8| self.permissions.as_bytes().get(at) == Some(&letter);
        // Libraries, the heap and TCG's translated code are QEMU's own, not the guest's.
        let own = self.path.starts_with('[') || !(may(1, b'w') || may(3, b's'));
        // The page store is QEMU's own, too: memfold's library maps the store to compare pages.
        let own = own || (may(3, b's') && self.path.contains("memfold:"));
        may(0, b'r') && !may(2, b'x') && !own
    }
}

/// Returns the mappings of guest memory in QEMU process `pid`, sorted by address. `ram` contains
/// the known address ranges of RAM (first byte, byte after the last); if `ram` is empty, all large
/// mappings that may be guest memory are returned.
///
/// # Errors
/// Fails if the process has ended or may not be read.
pub fn guest(proc_root: &Path, pid: i32, ram: &[(u64, u64)]) -> io::Result<Vec<Mapping>> {
    let text = fs::read_to_string(proc_root.join(pid.to_string()).join("smaps"))?;
    Ok(guest_of(parse(&text), ram))
}

fn guest_of(mut mappings: Vec<Mapping>, ram: &[(u64, u64)]) -> Vec<Mapping> {
    mappings.retain(Mapping::may_be_guest);
    let mut found = Vec::new();
    for span in mappings.chunk_by(|a, b| a.end == b.start) {
        let is_large = span.iter().map(|m| m.end - m.start).sum::<u64>() >= GUEST_BYTES;
        let guest = span.iter().filter(|m| is_large || is_known(ram, m));
        found.extend(guest.cloned());
    }
    // QEMU's own large buffers are anonymous and not offered to KSM, like RAM that must not merge.
    // Such RAM is recognized by its address, or because nothing else was offered.
    let offered = found.iter().any(Mapping::is_mergeable);
    found.retain(|m| !m.is_unadvised() || is_known(ram, m) || (ram.is_empty() && !offered));
    found
}

fn is_known(ram: &[(u64, u64)], mapping: &Mapping) -> bool {
    ram.iter()
        .any(|(start, end)| mapping.start < *end && *start < mapping.end)
}

/// Parses the text of `/proc/PID/smaps`. Lines of an unknown form are skipped.
#[must_use]
pub fn parse(text: &str) -> Vec<Mapping> {
    let mut all: Vec<Mapping> = Vec::new();
    for line in text.lines() {
        if !line.starts_with(|c: char| c.is_ascii_uppercase()) {
            all.extend(first_line(line));
            continue;
        }
        let (Some(mapping), Some((key, value))) = (all.last_mut(), line.split_once(':')) else {
            continue;
        };
        let pages = || {
            let kib = value.trim().strip_suffix(" kB")?.trim();
            Some(kib.parse::<u64>().ok()? / (PAGE_SIZE / 1024))
        };
        match key {
            "Rss" => mapping.resident_pages = pages().unwrap_or(0),
            "Anonymous" => mapping.anonymous_pages = pages().unwrap_or(0),
            "AnonHugePages" => mapping.huge_pages = pages().unwrap_or(0),
            "Swap" => mapping.swapped_pages = pages().unwrap_or(0),
            "KSM" => mapping.merged_pages = pages(),
            "VmFlags" => {
                mapping.flags = value.split_whitespace().map(str::to_owned).collect();
            }
            _ => {}
        }
    }
    all
}

/// Parses the first line of a mapping: `start-end perms offset dev inode path`
/// (`proc_pid_maps(5)`).
fn first_line(line: &str) -> Option<Mapping> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let mut fields = rest.splitn(5, ' ');
    let permissions = fields.next()?.to_owned();
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        permissions,
        path: fields.nth(3).unwrap_or("").trim().to_owned(),
        ..Mapping::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d000000000-55d000800000 rw-p 00000000 00:00 0                          [heap]
Rss:                4096 kB
VmFlags: rd wr mr mw me ac
7f0000000000-7f0001000000 rw-p 00000000 00:00 0
Rss:               16384 kB
Anonymous:         16384 kB
KSM:                  12 kB
AnonHugePages:     4096 kB
Swap:                 8 kB
VmFlags: rd wr mr mw me ac dd hg mg
7f0001000000-7f0001001000 rw-p 00000000 00:01 77                         /memfd:memfold:lab (deleted)
Rss:                   4 kB
VmFlags: rd wr mr mw me ac dd
7f0001001000-7f0001002000 ---p 00000000 00:00 0
VmFlags: mr mw me
7f1000000000-7f1002000000 rwxp 00000000 00:00 0
Rss:               32768 kB
VmFlags: rd wr ex mr mw me ac
";

    #[test]
    fn guest_ram_is_found_in_smaps_with_the_files_mapped_into_it() {
        let found = guest_of(parse(SMAPS), &[]);
        assert_eq!(found.len(), 2, "{found:?}");
        let ram = &found[0];
        assert!(ram.is_mergeable() && ram.has("hg") && !ram.has("ht"));
        assert_eq!(
            (
                ram.pages(),
                ram.huge_pages,
                ram.merged_pages,
                ram.swapped_pages
            ),
            (4096, 1024, Some(3), 2)
        );
        assert_eq!(found[1].path, "/memfd:memfold:lab (deleted)");
        assert_eq!((found[1].pages(), found[1].merged_pages), (1, None));
    }

    #[test]
    fn a_small_mapping_in_smaps_counts_as_guest_ram_if_its_address_is_known() {
        let ram = [(0x55d0_0000_0000, 0x55d0_0000_1000)];
        let smaps = SMAPS.replace("[heap]", "");
        assert_eq!(guest_of(parse(&smaps), &ram).len(), 3);
        let buffer =
            "7e0000000000-7e0004000000 rw-p 00000000 00:00 0\nVmFlags: rd wr mr mw me ac\n";
        assert_eq!(guest_of(parse(&(smaps.clone() + buffer)), &[]).len(), 2);
        assert_eq!(guest_of(parse(buffer), &[]).len(), 1);
        let store = "6fd648000000-7fd647ffe000 r--s 00000000 00:28 2                /memfold:lab (deleted)\n";
        assert_eq!(guest_of(parse(store), &[]), []);
        assert_eq!(guest_of(parse(&smaps), &[]).len(), 2);
    }
}
