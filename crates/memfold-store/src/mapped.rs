//! Finds the processes that map a page store or have a file open, and where they map it, in
//! `/proc`. A restarted daemon recognizes folded pages in this way.

use std::fs::{DirEntry, File};
use std::io;

use memfold_sys::region::Mapping;
use memfold_units::{Hva, PAGE_SIZE};
use rustix::io::Errno;
use rustix::process::Pid;

use super::{IMAGE_PREFIX, StoreIdentity};

/// A process's private mapping of consecutive pages of a page store, or of another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMapping {
    /// Device (major, minor) and inode number of the mapped file, as `/proc/PID/maps` shows them.
    pub file: (u32, u32, u64),
    /// Address in the process of the mapping's first page.
    pub hva: Hva,
    /// Length of the mapping in pages.
    pub pages: u64,
    /// Offset of the mapping in the file, in pages.
    pub file_page: u64,
    /// Whether the mapped file is a snapshot's RAM image, judged by its name.
    pub is_image: bool,
}

impl FileMapping {
    /// Opens the mapped file of process `pid` for reading, even if the file has no name any more.
    /// Needs `CAP_CHECKPOINT_RESTORE` (root).
    pub fn open(&self, pid: Pid) -> io::Result<File> {
        let (start, end) = (self.hva.0, self.hva.add_pages(self.pages).0);
        File::open(format!(
            "/proc/{}/map_files/{start:x}-{end:x}",
            pid.as_raw_nonzero()
        ))
    }
}

/// A process's private mappings of files, and the number of all its mappings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mappings {
    /// Private mappings of the page store, sorted by address. Shared read-only mappings, through
    /// which memfold's library compares pages, are not included.
    pub store: Vec<FileMapping>,
    /// Private mappings of files other than the page store, sorted by address.
    pub others: Vec<FileMapping>,
    /// Number of the process's mappings of all kinds, which the kernel setting `vm.max_map_count`
    /// limits.
    pub total: usize,
}

/// Reads `/proc/PID/maps` of process `pid`, and separates the mappings of page store `store` from
/// those of other files.
pub fn read(pid: Pid, store: StoreIdentity) -> io::Result<Mappings> {
    let text = std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()))?;
    Ok(parse(&text, store))
}

/// Returns every process, except this one, that maps a part of the page store in any way.
pub fn processes(store: StoreIdentity) -> io::Result<Vec<Pid>> {
    Ok(processes_with(&[vec![identity_text(store)]])?.concat())
}

/// Returns, for each group of texts, the processes (except this one) of which a line in
/// `/proc/PID/maps` contains one of the group's texts. Each process is read once; a process with
/// thousands of mappings takes milliseconds.
pub fn processes_with(groups: &[Vec<String>]) -> io::Result<Vec<Vec<Pid>>> {
    let mut found = vec![Vec::new(); groups.len()];
    for pid in other_processes()? {
        let maps = match std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero())) {
            Ok(maps) => maps,
            Err(error) if is_no_user(&error) => continue,
            Err(error) => return Err(error),
        };
        for (group, found) in groups.iter().zip(&mut found) {
            if group.iter().any(|text| maps.contains(text)) {
                found.push(pid);
            }
        }
    }
    Ok(found)
}

/// Returns the processes (except this one) that have one of these files open.
pub fn processes_with_open(files: &[StoreIdentity]) -> io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for pid in other_processes()? {
        let open = match std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())) {
            Ok(open) => open,
            Err(error) if is_no_user(&error) => continue,
            Err(error) => return Err(error),
        };
        // A descriptor may be closed meanwhile.
        let mut open = open
            .flatten()
            .flat_map(|entry| std::fs::metadata(entry.path()));
        if open.any(|facts| files.contains(&(&facts).into())) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Returns all processes except this one.
fn other_processes() -> io::Result<impl Iterator<Item = Pid>> {
    let own = rustix::process::getpid();
    let number = |entry: DirEntry| entry.file_name().to_str()?.parse().ok();
    let pids = std::fs::read_dir("/proc")?.flatten().filter_map(number);
    Ok(pids
        .filter_map(Pid::from_raw)
        .filter(move |pid| *pid != own))
}

/// Returns whether the mappings or descriptors of a process cannot be read because it has ended, or
/// because root has no right to (in a container, for a process from outside, which is no VM of
/// memfold's).
fn is_no_user(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    let of_others = [Errno::NOENT, Errno::SRCH, Errno::ACCESS, Errno::PERM];
    errno.is_some_and(|errno| of_others.contains(&errno))
}

/// Separates the private mappings of page store `store` in `/proc/PID/maps` from those of other
/// files.
#[must_use]
pub fn parse(text: &str, store: StoreIdentity) -> Mappings {
    let store = identity_text(store);
    let mut mappings = Mappings::default();
    for line in text.lines() {
        mappings.total += 1;
        // Searching for the text first is fast, even with thousands of lines.
        if line.contains(&store) {
            mappings.store.extend(private_mapping(line));
        } else if !line.contains(" 00:00 0 ") {
            mappings.others.extend(private_mapping(line));
        }
    }
    mappings
}

/// Returns the text by which a line of `/proc/PID/maps` names a file: device and inode number.
#[must_use]
pub fn identity_text(file: StoreIdentity) -> String {
    let (major, minor) = (rustix::fs::major(file.dev), rustix::fs::minor(file.dev));
    format!(" {major:02x}:{minor:02x} {} ", file.ino)
}

/// Returns the identity of a file as lines of `/proc/PID/maps` show it. For files on btrfs and on
/// some overlay file systems, `stat(2)` reports another device number. If that is possible (the
/// number is of no block device), the file is mapped for a moment, and this mapping's line is read.
pub fn identity_in_maps(file: &File) -> io::Result<StoreIdentity> {
    let identity = StoreIdentity::of(file)?;
    if rustix::fs::major(identity.dev) != 0 {
        return Ok(identity);
    }
    let view = Mapping::window(file, 1)?;
    let begin = format!("{:x}-", view.area().start().0);
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let device = maps.lines().find(|line| line.starts_with(&begin));
    let device = device.and_then(|line| line.split_ascii_whitespace().nth(3)?.split_once(':'));
    let number = |hex| u32::from_str_radix(hex, 16).map_err(io::Error::other);
    let (major, minor) = device.ok_or(io::ErrorKind::NotFound)?;
    Ok(StoreIdentity {
        dev: rustix::fs::makedev(number(major)?, number(minor)?),
        ..identity
    })
}

/// Parses a line such as `start-end perms offset major:minor inode path` (`proc_pid_maps(5)`).
fn private_mapping(line: &str) -> Option<FileMapping> {
    let mut fields = line.split_ascii_whitespace();
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (number(start)?, number(end)?);
    let private = fields.next()?.ends_with('p');
    let offset = number(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let device = |hex| u32::try_from(number(hex)?).ok();
    let is_image = line.ends_with("/ram") || line.contains(&format!(" /memfd:{IMAGE_PREFIX}"));
    private.then_some(FileMapping {
        is_image,
        file: (device(major)?, device(minor)?, fields.next()?.parse().ok()?),
        hva: Hva(start),
        pages: end.checked_sub(start)? / PAGE_SIZE,
        file_page: offset / PAGE_SIZE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000004000 rw-p 00000000 00:00 0 
7f0000004000-7f0000006000 rw-p 00010000 00:01 1043                       /memfd:memfold:web (deleted)
7f0000006000-7f0000007000 rw-p 00010000 00:02 1043                       /memfd:other (deleted)
7f0000007000-7f0000009000 r--s 00000000 00:01 1043                       /memfd:memfold:web (deleted)
7f0000009000-7f000000a000 rw-p 00000000 00:00 0                          [heap]
";

    #[test]
    fn only_private_mappings_of_the_given_page_store_are_listed() {
        let store = StoreIdentity {
            dev: rustix::fs::makedev(0, 1),
            ino: 1043,
        };
        let mappings = parse(MAPS, store);
        assert_eq!(mappings.total, 5);
        let other = FileMapping {
            file: (0, 2, 1043),
            hva: Hva(0x7f00_0000_6000),
            pages: 1,
            file_page: 0x10,
            is_image: false,
        };
        assert_eq!(mappings.others, [other]);
        for (path, is_image) in [
            ("/shelf/a/ram", true),
            ("/memfd:memfold-image:1:7 (deleted)", true),
            ("/shelf/a/disk0.qcow2", false),
            ("/program", false),
        ] {
            let line = format!("7f0000000000-7f0000004000 rw-p 00000000 08:01 7 {path}\n");
            assert_eq!(parse(&line, store).others[0].is_image, is_image, "{path}");
        }
        assert_eq!(
            mappings.store,
            [FileMapping {
                file: (0, 1, 1043),
                hva: Hva(0x7f00_0000_4000),
                pages: 2,
                file_page: 0x10,
                is_image: false,
            }]
        );
    }

    #[test]
    fn malformed_lines_of_proc_pid_maps_are_skipped() {
        let store = StoreIdentity { dev: 1, ino: 7 };
        let broken = parse(
            "x 7 y\n-  7 \n zz-zz rw-p 7 7 7 \n2-1 rw-p 0 0:1 7 x\n",
            store,
        );
        assert_eq!((broken.store, broken.others), (vec![], vec![]));
    }
}
