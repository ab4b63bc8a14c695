//! Reads and parses the files in `/proc` from which the ledger is made. The path of `/proc` can be
//! set, so that tests can read a captured copy.
//!
//! Sources: `Documentation/filesystems/proc.rst`; `fs/proc/task_mmu.c` (`smaps`), `mm/show_mem.c`
//! (`si_mem_available`).

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use memfold_store::{IMAGE_PREFIX, StoreIdentity};
use memfold_sys::pagemap::Pagemap;
use memfold_units::{ByteSize, Hva, PAGE_SIZE};
use rustix::process::Pid;

/// Error of reading a kernel file.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file could not be read: the process ended, or reading is not allowed.
    #[error("cannot read {path}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The file does not have the format of `proc(5)`.
    #[error("cannot parse {path}: unexpected text '{text}'")]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// The unexpected line or value.
        text: String,
    },
    /// The page map could not be scanned.
    #[error("cannot scan the page map of process {pid}")]
    Pagemap {
        /// Number of the process.
        pid: i32,
        /// The kernel's error.
        source: std::io::Error,
    },
}

/// Opens the page map of a process.
pub(super) fn pagemap_of(pid: i32) -> Result<Pagemap, ReadError> {
    Pid::from_raw(pid)
        .ok_or_else(|| std::io::ErrorKind::NotFound.into())
        .and_then(Pagemap::open)
        .map_err(|source| ReadError::Pagemap { pid, source })
}

impl ReadError {
    fn format(path: &Path, text: &[u8]) -> Self {
        Self::Format {
            path: path.to_owned(),
            text: String::from_utf8_lossy(&text[..text.len().min(120)]).into_owned(),
        }
    }
}

/// A mapping of a process, as in `/proc/PID/maps`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vma {
    /// Address of the mapping's first byte.
    pub start: Hva,
    /// Address after the mapping's last byte.
    pub end: Hva,
    /// Whether the mapping is writable.
    pub write: bool,
    /// Whether the mapping is executable.
    pub execute: bool,
    /// Offset in the file of the mapping's first byte.
    pub offset: u64,
    /// Device and inode of the mapped file; `None` for anonymous memory.
    pub file: Option<StoreIdentity>,
}

/// Figures of one mapping in `/proc/PID/smaps`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Smap {
    /// Mapping to which the figures belong.
    pub vma: Vma,
    /// `Rss` of the mapping: its pages in memory.
    pub rss_bytes: ByteSize,
    /// `Pss` of the mapping: its pages in memory, each divided by the number of processes that map
    /// it.
    pub pss_bytes: ByteSize,
    /// `Anonymous` of the mapping: its anonymous pages, including private copies of file pages.
    pub anonymous_bytes: ByteSize,
    /// `KSM` of the mapping: its pages that KSM has merged; `None` before Linux 6.6.
    pub ksm_bytes: Option<ByteSize>,
    /// Whether the mapped file is a memory file with the RAM image of a snapshot.
    pub is_image: bool,
}

/// Figures of a process in `/proc/PID/smaps_rollup`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rollup {
    /// `Pss` of the process: its pages in memory, each divided by the number of processes that map
    /// it.
    pub pss_bytes: ByteSize,
    /// `Pss_Anon` of the process: the part of its PSS that is anonymous memory.
    pub pss_anon_bytes: ByteSize,
    /// `Pss_Shmem` of the process: the part of its PSS that is shared memory, including tmpfs
    /// files.
    pub pss_shmem_bytes: ByteSize,
}

/// Figures of free memory from `/proc/zoneinfo`, summed over all memory zones of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zones {
    /// `totalreserve_pages`: free memory that `MemAvailable` excludes.
    pub total_reserve_bytes: ByteSize,
    /// Sum of the low watermarks of all zones.
    pub low_bytes: ByteSize,
    /// Free pages in the CPUs' own lists, which `MemFree` and `MemAvailable` do not count. Since
    /// Linux 6.7 tunes the length of these lists, they may hold more than a gigabyte after a large
    /// process has ended.
    pub per_cpu_free_bytes: ByteSize,
}

/// Values of a file with lines of the form `Key: value kB`, by key, in bytes.
pub type Fields = HashMap<String, ByteSize>;

/// Reader of a `/proc` directory: the real one or a captured copy.
#[derive(Clone, Debug)]
pub struct Proc {
    root: PathBuf,
    /// Names of all files that were read.
    #[cfg(test)]
    files_read: std::sync::Arc<std::sync::Mutex<Vec<String>>>,
}

impl Default for Proc {
    fn default() -> Self {
        Self::new("/proc")
    }
}

impl Proc {
    /// Creates a reader of the directory `root`, which is `/proc` or a copy of it.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            #[cfg(test)]
            files_read: std::sync::Arc::default(),
        }
    }

    /// Returns the names of all files that were read, in order.
    #[cfg(test)]
    pub(super) fn files_read(&self) -> Vec<String> {
        self.files_read.lock().unwrap().clone()
    }

    fn read(&self, file: &str) -> Result<(PathBuf, Vec<u8>), ReadError> {
        let path = self.root.join(file);
        #[cfg(test)]
        self.files_read.lock().unwrap().push(file.to_owned());
        match fs::read(&path) {
            Ok(bytes) => Ok((path, bytes)),
            Err(source) => Err(ReadError::File { path, source }),
        }
    }

    /// Returns the mappings of a process, sorted by address. This is cheap, because the kernel
    /// walks no page table.
    pub fn maps(&self, pid: i32) -> Result<Vec<Vma>, ReadError> {
        let (path, text) = self.read(&format!("{pid}/maps"))?;
        lines(&text)
            .map(|line| vma(line).ok_or_else(|| ReadError::format(&path, line)))
            .collect()
    }

    /// Returns the mappings of a process with their resident memory. The kernel walks all page
    /// tables, which takes about 0.1 µs per page.
    pub fn smaps(&self, pid: i32) -> Result<Vec<Smap>, ReadError> {
        let (path, text) = self.read(&format!("{pid}/smaps"))?;
        let mut all: Vec<Smap> = Vec::new();
        for line in lines(&text) {
            // A field begins with a capital letter, a mapping with a hexadecimal address in lower
            // case.
            if !line.first().is_some_and(u8::is_ascii_uppercase) {
                let vma = vma(line).ok_or_else(|| ReadError::format(&path, line))?;
                all.push(Smap {
                    vma,
                    is_image: is_image(line),
                    ..Smap::default()
                });
                continue;
            }
            let Some(smap) = all.last_mut() else {
                return Err(ReadError::format(&path, line));
            };
            let Some(colon) = line.iter().position(|b| *b == b':') else {
                return Err(ReadError::format(&path, line));
            };
            let value = &line[colon + 1..];
            let amount = || kilobytes(value).ok_or_else(|| ReadError::format(&path, line));
            match &line[..colon] {
                b"Rss" => smap.rss_bytes = amount()?,
                b"Pss" => smap.pss_bytes = amount()?,
                b"Anonymous" => smap.anonymous_bytes = amount()?,
                b"KSM" => smap.ksm_bytes = Some(amount()?),
                _ => {}
            }
        }
        Ok(all)
    }

    /// Returns a process's PSS, as a whole and by kind; `None` for a kernel thread, which has no
    /// memory.
    pub fn rollup(&self, pid: i32) -> Result<Option<Rollup>, ReadError> {
        let (path, text) = self.read(&format!("{pid}/smaps_rollup"))?;
        // The first line is the header of a mapping; its colon belongs to the device number.
        let fields = fields(&path, lines(&text).skip(1))?;
        let field = |key: &str| fields.get(key).copied().unwrap_or_default();
        Ok(fields.get("Pss").map(|pss| Rollup {
            pss_bytes: *pss,
            pss_anon_bytes: field("Pss_Anon"),
            pss_shmem_bytes: field("Pss_Shmem"),
        }))
    }

    /// Returns `VmPTE` of a process: the size of its page tables.
    pub fn page_tables(&self, pid: i32) -> Result<ByteSize, ReadError> {
        self.status(pid, "VmPTE:")
    }

    /// Returns `RssAnon` of a process: its anonymous pages in memory. This is readable even if
    /// `smaps_rollup` is not.
    pub fn rss_anon(&self, pid: i32) -> Result<ByteSize, ReadError> {
        self.status(pid, "RssAnon:")
    }

    fn status(&self, pid: i32, key: &str) -> Result<ByteSize, ReadError> {
        let (path, text) = self.read(&format!("{pid}/status"))?;
        let line = lines(&text)
            .find_map(|l| l.strip_prefix(key.as_bytes()))
            .ok_or_else(|| ReadError::format(&path, b"no memory: a kernel thread, or ended"))?;
        kilobytes(line).ok_or_else(|| ReadError::format(&path, line))
    }

    /// Returns the fields of `/proc/meminfo`, with values in bytes.
    pub fn meminfo(&self) -> Result<Fields, ReadError> {
        let (path, text) = self.read("meminfo")?;
        fields(&path, lines(&text))
    }

    /// Returns the numbers of all processes, kernel threads included.
    pub fn pids(&self) -> Result<Vec<i32>, ReadError> {
        let entries = fs::read_dir(&self.root).map_err(|source| ReadError::File {
            path: self.root.clone(),
            source,
        })?;
        Ok(entries
            .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
            .collect())
    }

    /// Returns `vm.max_map_count`: the largest number of mappings of a process.
    pub fn max_map_count(&self) -> Result<u64, ReadError> {
        let (path, text) = self.read("sys/vm/max_map_count")?;
        number(text.trim_ascii()).ok_or_else(|| ReadError::format(&path, &text))
    }

    /// Returns the figures of free memory in `/proc/zoneinfo`, computed like the kernel does in
    /// `mm/page_alloc.c` (`calculate_totalreserve_pages`) and `mm/show_mem.c` (`si_mem_available`).
    pub fn zones(&self) -> Result<Zones, ReadError> {
        #[derive(Default)]
        struct Zone {
            low: u64,
            high: u64,
            managed: u64,
            protection: u64,
            per_cpu: u64,
        }
        let (path, text) = self.read("zoneinfo")?;
        let mut zones: Vec<Zone> = Vec::new();
        for line in lines(&text) {
            if line.starts_with(b"Node ") {
                zones.push(Zone::default());
                continue;
            }
            let Some(zone) = zones.last_mut() else {
                return Err(ReadError::format(&path, line));
            };
            let mut words = line
                .split(|b| matches!(b, b' ' | b'(' | b')' | b',' | b':'))
                .filter(|w| !w.is_empty());
            let (key, rest) = (words.next(), words);
            let mut value = rest.filter_map(number);
            match key {
                Some(b"low") => zone.low = value.next().unwrap_or(0),
                // The lists of each CPU have a field `high:` as well, which comes after that of the
                // zone.
                Some(b"high") if zone.high == 0 => zone.high = value.next().unwrap_or(0),
                Some(b"managed") => zone.managed = value.next().unwrap_or(0),
                Some(b"count") => {
                    let count = value.next().unwrap_or(0);
                    zone.per_cpu = zone.per_cpu.saturating_add(count);
                }
                Some(b"protection") => zone.protection = value.max().unwrap_or(0),
                _ => {}
            }
        }
        let sum = |pages: fn(&Zone) -> u64| {
            let pages = zones.iter().map(pages).fold(0, u64::saturating_add);
            ByteSize(pages.saturating_mul(PAGE_SIZE))
        };
        Ok(Zones {
            total_reserve_bytes: sum(|z| z.protection.saturating_add(z.high).min(z.managed)),
            low_bytes: sum(|z| z.low),
            per_cpu_free_bytes: sum(|z| z.per_cpu),
        })
    }
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n').filter(|l| !l.is_empty())
}

fn fields<'a>(path: &Path, lines: impl Iterator<Item = &'a [u8]>) -> Result<Fields, ReadError> {
    lines
        .map(|line| {
            let bad = || ReadError::format(path, line);
            let colon = line.iter().position(|b| *b == b':').ok_or_else(bad)?;
            let key = String::from_utf8_lossy(&line[..colon]).into_owned();
            Ok((key, kilobytes(&line[colon + 1..]).ok_or_else(bad)?))
        })
        .collect()
}

/// Parses `   123 kB` into bytes. A value without unit (`HugePages_Total`) is returned unchanged.
fn kilobytes(text: &[u8]) -> Option<ByteSize> {
    let text = text.trim_ascii();
    match text.strip_suffix(b" kB") {
        Some(digits) => number(digits)?.checked_mul(1024).map(ByteSize),
        None => number(text).map(ByteSize),
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Parses a line such as `561038c76000-561038c78000 r--p 00000000 fe:00 247278    /usr/bin/head`.
fn vma(line: &[u8]) -> Option<Vma> {
    let hex = |t: &[u8]| u64::from_str_radix(std::str::from_utf8(t).ok()?, 16).ok();
    let mut words = line.split(|b| *b == b' ').filter(|w| !w.is_empty());
    let range = words.next()?;
    let dash = range.iter().position(|b| *b == b'-')?;
    let mode = words.next().filter(|m| m.len() == 4)?;
    let offset = hex(words.next()?)?;
    let device = words.next()?;
    let colon = device.iter().position(|b| *b == b':')?;
    let major = u32::try_from(hex(&device[..colon])?).ok()?;
    let minor = u32::try_from(hex(&device[colon + 1..])?).ok()?;
    let ino = number(words.next()?)?;
    Some(Vma {
        start: Hva(hex(&range[..dash])?),
        end: Hva(hex(&range[dash + 1..])?),
        write: mode[1] == b'w',
        execute: mode[2] == b'x',
        offset,
        file: (ino != 0).then(|| StoreIdentity {
            dev: rustix::fs::makedev(major, minor),
            ino,
        }),
    })
}

/// Returns whether a line of `/proc/PID/maps` names a memory file with the RAM image of a snapshot.
fn is_image(line: &[u8]) -> bool {
    let path = line.iter().position(|b| *b == b'/').map(|at| &line[at..]);
    let name = path.and_then(|path| path.strip_prefix(b"/memfd:"));
    name.is_some_and(|name| name.starts_with(IMAGE_PREFIX.as_bytes()))
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
