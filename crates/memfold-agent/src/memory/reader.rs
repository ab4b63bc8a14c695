//! Reads the guest's memory figures, at a cost that allows it every second.
//!
//! The files stay open and are read from their beginning each time (`pread`), into one buffer, and
//! no further than to the last figure that is needed. Figures that change slowly, or cost more, are
//! read again only every [`SLOW_EVERY`] readings.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memfold_wire::memory::MemoryReading;

use super::parse;

/// Number of readings from one reading of the slow figures (multi-gen LRU, control groups' limits)
/// to the next.
const SLOW_EVERY: u32 = 10;

/// Most bytes that are read of one file.
const MOST: usize = 1 << 20;

/// A reader of the guest's memory figures.
#[derive(Debug)]
pub struct MemoryReader {
    root: PathBuf,
    meminfo: Option<File>,
    vmstat: Option<File>,
    pressure: Option<File>,
    lru_gen: Option<File>,
    limits: Vec<File>,
    buffer: Vec<u8>,
    readings: u32,
    /// The slow figures, as last read.
    slow: MemoryReading,
}

/// Returns the guest's memory in pages of 4 KiB, without what the kernel keeps for itself; 0 if it
/// is unknown.
pub(crate) fn total_pages() -> u32 {
    let mut reading = MemoryReading::default();
    parse::meminfo(&fs::read("/proc/meminfo").unwrap_or_default(), &mut reading);
    u32::try_from(reading.mem_total_kib / 4).unwrap_or(u32::MAX)
}

/// Reads `file` from its beginning into `buffer`, and returns the text. The text is empty if there
/// is no file, or if it cannot be read.
pub(super) fn read_again<'a>(file: Option<&File>, buffer: &'a mut Vec<u8>) -> &'a [u8] {
    read_until(file, buffer, |_| false)
}

/// Reads like [`read_again`] a file whose text the kernel makes as a whole for the first read
/// (`single_open` and `seq_read` in `fs/seq_file.c`), so that no second read has to find its end.
fn read_at_once<'a>(file: Option<&File>, buffer: &'a mut Vec<u8>) -> &'a [u8] {
    read_until(file, buffer, |_| true)
}

/// Reads like [`read_again`], but ends when the text is enough. The kernel returns longer files in
/// pieces of up to a page, and makes the text of each piece anew.
fn read_until<'a>(
    file: Option<&File>,
    buffer: &'a mut Vec<u8>,
    is_enough: impl Fn(&[u8]) -> bool,
) -> &'a [u8] {
    let Some(file) = file else {
        return &[];
    };
    let mut length = 0;
    loop {
        if length == buffer.len() {
            if length >= MOST {
                return &buffer[..length];
            }
            buffer.resize((length * 2).max(8 << 10), 0);
        }
        match file.read_at(&mut buffer[length..], length as u64) {
            Ok(0) => return &buffer[..length],
            Ok(n) => {
                length += n;
                // A text that fills the buffer may go on.
                if length < buffer.len() && is_enough(&buffer[..length]) {
                    return &buffer[..length];
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return &[],
        }
    }
}

impl MemoryReader {
    /// Opens the files of `/proc` below `root`, which is `/` but in tests.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        let open = |path: &str| File::open(root.join(path)).ok();
        Self {
            meminfo: open("proc/meminfo"),
            vmstat: open("proc/vmstat"),
            pressure: open("proc/pressure/memory"),
            lru_gen: None,
            limits: Vec::new(),
            buffer: Vec::new(),
            readings: 0,
            slow: MemoryReading::default(),
            root: root.to_owned(),
        }
    }

    /// Reads the guest's memory figures.
    #[cfg(test)]
    pub fn read(&mut self) -> MemoryReading {
        let mut reading = self.read_sizes();
        self.complete(&mut reading);
        reading
    }

    /// Reads only sizes and pressure, which cost little. The other figures of the reading are zero.
    pub(super) fn read_sizes(&mut self) -> MemoryReading {
        let mut reading = MemoryReading::default();
        let text = read_at_once(self.meminfo.as_ref(), &mut self.buffer);
        parse::meminfo(text, &mut reading);
        let text = read_at_once(self.pressure.as_ref(), &mut self.buffer);
        reading.pressure = parse::pressure(text);
        reading
    }

    /// Adds all other figures to a reading that [`Self::read_sizes`] has returned.
    pub(super) fn complete(&mut self, reading: &mut MemoryReading) {
        if self.readings % SLOW_EVERY == 0 {
            self.read_slow_figures();
        }
        self.readings = self.readings.wrapping_add(1);
        reading.lru_gen = self.slow.lru_gen;
        reading.cgroup_limit_kib = self.slow.cgroup_limit_kib;
        self.read_counters(reading);
    }

    /// Reads only the figures that change while the guest runs: those of `/proc`.
    pub(super) fn read_fast_figures(&mut self) -> MemoryReading {
        let mut reading = self.read_sizes();
        self.read_counters(&mut reading);
        reading
    }

    fn read_counters(&mut self, reading: &mut MemoryReading) {
        let vmstat = self.vmstat.as_ref();
        let text = read_until(vmstat, &mut self.buffer, parse::has_all_of_vmstat);
        parse::vmstat(text, reading);
    }

    fn read_slow_figures(&mut self) {
        // A service manager may have moved the agent, or mounted debugfs, since the last time.
        self.limits = limits(&self.root);
        self.lru_gen = self.lru_gen.take().or_else(|| lru_gen(&self.root));
        let text = read_again(self.lru_gen.as_ref(), &mut self.buffer);
        self.slow.lru_gen = parse::lru_gen(text);
        let buffer = &mut self.buffer;
        let mut limit_of = |file: &File| parse::limit(read_at_once(Some(file), buffer));
        let bytes = self.limits.iter().filter_map(&mut limit_of).min();
        self.slow.cgroup_limit_kib = bytes.map(|bytes| bytes / 1024);
    }
}

/// Opens the list of the multi-gen LRU's generations, if the kernel uses this LRU.
fn lru_gen(root: &Path) -> Option<File> {
    // Bit 0 of this file: the multi-gen LRU is used. The list exists in any case.
    let enabled = fs::read_to_string(root.join("sys/kernel/mm/lru_gen/enabled")).ok()?;
    let bits = u32::from_str_radix(enabled.trim().trim_start_matches("0x"), 16).ok()?;
    let list = root.join("sys/kernel/debug/lru_gen");
    (bits & 1 != 0).then(|| File::open(list).ok()).flatten()
}

/// Opens the limits of the agent's control group and of all groups above it (cgroup v2). The root
/// has none.
fn limits(root: &Path) -> Vec<File> {
    let text = fs::read(root.join("proc/self/cgroup")).unwrap_or_default();
    // The line of cgroup v2 is `0::PATH`.
    let own = text
        .split(|b| *b == b'\n')
        .find_map(|line| line.strip_prefix(b"0::/"));
    let Some(own) = own else {
        return Vec::new();
    };
    let mut files = Vec::new();
    let groups = root.join("sys/fs/cgroup");
    let mut group = groups.join(OsStr::from_bytes(own));
    while group != groups {
        for limit in ["memory.max", "memory.high"] {
            files.extend(File::open(group.join(limit)));
        }
        if !group.pop() {
            break;
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::time::Duration;

    use rustix::time::{ClockId, clock_gettime};

    fn guest() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/memory");
        for (file, fixture) in [
            ("proc/meminfo", "meminfo"),
            ("proc/vmstat", "vmstat"),
            ("proc/pressure/memory", "pressure"),
            ("sys/kernel/debug/lru_gen", "lru_gen"),
        ] {
            write(
                root.path(),
                file,
                &fs::read(fixtures.join(fixture)).unwrap(),
            );
        }
        write(root.path(), "sys/kernel/mm/lru_gen/enabled", b"0x0007\n");
        root
    }

    fn write(root: &Path, file: &str, text: &[u8]) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_memory_reading_has_the_figures_of_all_files_and_the_tightest_limit_above_the_agent() {
        let root = guest();
        let of = |group: &str, file: &str, text: &[u8]| {
            write(root.path(), &format!("sys/fs/cgroup/{group}/{file}"), text);
        };
        write(root.path(), "proc/self/cgroup", b"0::/a.slice/agent\n");
        of("a.slice/agent", "memory.max", b"max\n");
        of("a.slice/agent", "memory.high", b"max\n");
        of("a.slice", "memory.max", b"1073741824\n");
        of("a.slice", "memory.high", b"536870912\n");
        let mut reader = MemoryReader::new(root.path());
        let reading = reader.read();
        assert!(reading.mem_total_kib > 0 && reading.pgsteal > 0);
        assert!(reading.pressure.is_some() && reading.lru_gen.is_some());
        assert_eq!(reading.cgroup_limit_kib, Some(512 << 10));
        // The open files are read again from their beginning.
        write(
            root.path(),
            "proc/meminfo",
            b"MemTotal: 7 kB\nMemFree: 5 kB\n",
        );
        let again = reader.read();
        assert_eq!((again.mem_total_kib, again.mem_free_kib), (7, 5));
        assert_eq!(again.pgsteal, reading.pgsteal, "counters are not added up");
    }

    #[test]
    fn a_file_that_is_longer_than_the_buffer_is_read_whole() {
        let text = vec![b'x'; 20_000];
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &text).unwrap();
        let file = File::open(file.path()).unwrap();
        assert_eq!(read_again(Some(&file), &mut Vec::new()), text);
        assert_eq!(read_at_once(Some(&file), &mut Vec::new()), text);
        assert!(read_at_once(None, &mut vec![b'x'; 9]).is_empty());
    }

    #[test]
    fn a_kernel_that_lacks_psi_multi_gen_lru_and_control_groups_gives_a_reading_without_them() {
        let root = guest();
        write(root.path(), "sys/kernel/mm/lru_gen/enabled", b"0x0000\n");
        fs::remove_file(root.path().join("proc/pressure/memory")).unwrap();
        let reading = MemoryReader::new(root.path()).read();
        assert!(reading.mem_total_kib > 0);
        assert_eq!(
            (reading.pressure, reading.lru_gen, reading.cgroup_limit_kib),
            (None, None, None)
        );
    }

    #[test]
    fn a_memory_reading_each_second_costs_at_most_a_500th_of_a_cpu() {
        const READINGS: u32 = 100;
        let mut reader = MemoryReader::new(Path::new("/"));
        reader.read();
        let cpu = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
        let before = cpu();
        for _ in 0..READINGS {
            assert!(reader.read().mem_total_kib > 0);
        }
        let each = cpu().saturating_sub(before) / READINGS;
        println!("CPU time of a reading of the memory figures: {each:?}");
        assert!(each < Duration::from_millis(2), "{each:?}");
    }
}
