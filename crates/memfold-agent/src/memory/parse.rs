//! Parses the kernel's text files about memory.
//!
//! A missing line leaves its figure at zero, because older kernels lack some lines.

use memfold_wire::memory::{AGE_CLASSES_S, LruGen, MemoryReading, Pressure};

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n')
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|b| *b == b' ').filter(|word| !word.is_empty())
}

/// Returns the number at the beginning of `word`; `None` if there is none, or if it exceeds `u64`.
fn number(word: &[u8]) -> Option<u64> {
    let digits = word.iter().take_while(|b| b.is_ascii_digit());
    let mut found = None;
    for digit in digits {
        let before = found.unwrap_or(0_u64).checked_mul(10)?;
        found = Some(before.checked_add(u64::from(digit - b'0'))?);
    }
    found
}

/// Reads `/proc/meminfo` (`proc_meminfo(5)`) into `reading`.
pub fn meminfo(text: &[u8], reading: &mut MemoryReading) {
    for line in lines(text) {
        let mut words = words(line);
        let (Some(name), Some(kib)) = (words.next(), words.next().and_then(number)) else {
            continue;
        };
        let figure = match name {
            b"MemTotal:" => &mut reading.mem_total_kib,
            b"MemFree:" => &mut reading.mem_free_kib,
            b"MemAvailable:" => &mut reading.mem_available_kib,
            b"Dirty:" => &mut reading.dirty_kib,
            b"AnonPages:" => &mut reading.anon_pages_kib,
            b"Cached:" => &mut reading.cached_kib,
            b"Shmem:" => &mut reading.shmem_kib,
            b"SwapTotal:" => &mut reading.swap_total_kib,
            b"SwapFree:" => &mut reading.swap_free_kib,
            _ => continue,
        };
        *figure = kib;
    }
}

/// Reads `/proc/vmstat` (`proc_vmstat(5)`) into `reading`. Sums begin at what `reading` holds.
pub fn vmstat(text: &[u8], reading: &mut MemoryReading) {
    for line in lines(text) {
        let mut words = words(line);
        let (Some(name), Some(count)) = (words.next(), words.next().and_then(number)) else {
            continue;
        };
        let figure = match name {
            b"workingset_refault_file" => &mut reading.workingset_refault_file,
            b"workingset_refault_anon" => &mut reading.workingset_refault_anon,
            b"workingset_activate_file" => &mut reading.workingset_activate_file,
            b"workingset_activate_anon" => &mut reading.workingset_activate_anon,
            b"pgscan_kswapd" | b"pgscan_direct" => &mut reading.pgscan,
            b"pgsteal_kswapd" | b"pgsteal_direct" => &mut reading.pgsteal,
            b"pswpin" => &mut reading.pswpin,
            b"pswpout" => &mut reading.pswpout,
            b"oom_kill" => &mut reading.oom_kill,
            name if name.starts_with(b"allocstall_") => &mut reading.allocstall,
            _ => continue,
        };
        *figure = figure.saturating_add(count);
    }
}

/// Returns whether `text`, the beginning of `/proc/vmstat`, has all lines that [`vmstat`] looks
/// for. The last of them is `oom_kill` in all kernels (`vmstat_text` in `mm/vmstat.c`).
#[must_use]
pub fn has_all_of_vmstat(text: &[u8]) -> bool {
    // The last line may be cut off. In a text that ends with a whole line, it is empty.
    let mut whole_lines = text.rsplit(|b| *b == b'\n').skip(1);
    whole_lines.any(|line| line.starts_with(b"oom_kill "))
}

/// Parses `/proc/pressure/memory` (the kernel's `Documentation/accounting/psi.rst`). `None`: this
/// is no such file.
#[must_use]
pub fn pressure(text: &[u8]) -> Option<Pressure> {
    let mut found = Pressure::default();
    let mut has_some = false;
    for line in lines(text) {
        let mut words = words(line);
        let (total_us, avg10) = match words.next() {
            Some(b"some") => {
                has_some = true;
                (&mut found.some_us, &mut found.some_avg10)
            }
            Some(b"full") => (&mut found.full_us, &mut found.full_avg10),
            _ => continue,
        };
        for word in words {
            if let Some(text) = word.strip_prefix(b"avg10=") {
                *avg10 = hundredths(text)?;
            } else if let Some(text) = word.strip_prefix(b"total=") {
                *total_us = number(text)?;
            }
        }
    }
    has_some.then_some(found)
}

/// Parses a percentage with two decimals, in hundredths.
fn hundredths(text: &[u8]) -> Option<u16> {
    let mut parts = text.splitn(2, |b| *b == b'.');
    let whole = number(parts.next()?)?;
    let decimals = match parts.next() {
        Some([a, b, ..]) if a.is_ascii_digit() && b.is_ascii_digit() => {
            u64::from(a - b'0') * 10 + u64::from(b - b'0')
        }
        _ => 0,
    };
    u16::try_from(whole.checked_mul(100)?.checked_add(decimals)?).ok()
}

/// Parses `/sys/kernel/debug/lru_gen` (the kernel's
/// `Documentation/admin-guide/mm/multigen_lru.rst`) and sums pages of all control groups and nodes
/// by the age of their generation. `None`: there is no generation.
#[must_use]
pub fn lru_gen(text: &[u8]) -> Option<[LruGen; AGE_CLASSES_S.len()]> {
    let mut classes = [LruGen::default(); AGE_CLASSES_S.len()];
    let mut has_generation = false;
    for line in lines(text) {
        // Number of the generation, age in milliseconds, anonymous pages, pages of files. Other
        // lines begin with `memcg` or `node`.
        let mut numbers = words(line).map(number);
        let columns: [Option<u64>; 4] = std::array::from_fn(|_| numbers.next().flatten());
        let [Some(_), Some(age_ms), Some(anon), Some(file)] = columns else {
            continue;
        };
        let is_older = |class: &&u32| u64::from(**class) * 1000 <= age_ms;
        let at = AGE_CLASSES_S.iter().take_while(is_older).count() - 1;
        classes[at].anon = classes[at].anon.saturating_add(anon);
        classes[at].file = classes[at].file.saturating_add(file);
        has_generation = true;
    }
    has_generation.then_some(classes)
}

/// Parses a limit of a control group (`memory.max`, `memory.high`), in bytes. `None`: no limit.
#[must_use]
pub fn limit(text: &[u8]) -> Option<u64> {
    number(text)
}

/// Figures of a control group from its `memory.stat` (the kernel's
/// `Documentation/admin-guide/cgroup-v2.rst`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStat {
    /// Pages of files that were used recently, in bytes.
    pub active_file: u64,
    /// Pages of files that were not used recently, in bytes.
    pub inactive_file: u64,
    /// Pages of files that are not on disk yet or are being written, in bytes.
    pub unwritten: u64,
    /// Number of pages that the kernel has reclaimed from the group since it was made.
    pub pgsteal: u64,
}

impl GroupStat {
    /// Parses `memory.stat`.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let mut stat = Self::default();
        for line in lines(text) {
            let mut words = words(line);
            let (Some(name), Some(count)) = (words.next(), words.next().and_then(number)) else {
                continue;
            };
            let figure = match name {
                b"active_file" => &mut stat.active_file,
                b"inactive_file" => &mut stat.inactive_file,
                b"file_dirty" | b"file_writeback" => &mut stat.unwritten,
                b"pgsteal" => &mut stat.pgsteal,
                _ => continue,
            };
            *figure = figure.saturating_add(count);
        }
        stat
    }

    /// Returns the size of the group's clean pages of files, in bytes.
    #[must_use]
    pub const fn clean_file(&self) -> u64 {
        let file = self.active_file.saturating_add(self.inactive_file);
        file.saturating_sub(self.unwritten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! fixture {
        ($name:literal) => {
            include_bytes!(concat!("../../tests/fixtures/memory/", $name))
        };
    }

    #[test]
    fn the_memory_files_of_debian_13_are_parsed() {
        let mut reading = MemoryReading::default();
        meminfo(fixture!("meminfo"), &mut reading);
        vmstat(fixture!("vmstat"), &mut reading);
        let expected = MemoryReading {
            mem_total_kib: 478_104,
            mem_free_kib: 61_948,
            mem_available_kib: 320_132,
            dirty_kib: 1_472,
            anon_pages_kib: 74_132,
            cached_kib: 270_356,
            shmem_kib: 2_820,
            swap_total_kib: 262_140,
            swap_free_kib: 258_556,
            workingset_refault_file: 5_131,
            workingset_refault_anon: 402,
            workingset_activate_file: 3_001,
            workingset_activate_anon: 11,
            pgscan: 70_913 + 512,
            pgsteal: 64_002 + 498,
            pswpin: 402,
            pswpout: 1_298,
            allocstall: 9,
            oom_kill: 1,
            ..MemoryReading::default()
        };
        assert_eq!(reading, expected);
    }

    #[test]
    fn the_beginning_of_vmstat_suffices_if_it_has_the_whole_line_of_the_last_figure() {
        let text = &fixture!("vmstat")[..];
        assert!(has_all_of_vmstat(text));
        assert!(has_all_of_vmstat(&[text, &b"numa_pte_upd"[..]].concat()));
        for cut in [1, 2, 200, text.len()] {
            assert!(!has_all_of_vmstat(&text[..text.len() - cut]), "{cut}");
        }
    }

    #[test]
    fn memory_pressure_is_read_in_microseconds_and_hundredths_of_a_percent() {
        let found = pressure(fixture!("pressure")).unwrap();
        let expected = Pressure {
            some_us: 8_123_456,
            full_us: 6_000_001,
            some_avg10: 1_203,
            full_avg10: 807,
        };
        assert_eq!(found, expected);
        for no_pressure in [
            &b""[..],
            b"full avg10=0.00 total=1\n",
            b"some avg10=0.00 total=x",
        ] {
            assert_eq!(pressure(no_pressure), None);
        }
    }

    #[test]
    fn pages_of_the_multi_gen_lru_are_summed_by_age_over_all_control_groups() {
        let found = lru_gen(fixture!("lru_gen")).unwrap();
        let of = |anon, file| LruGen { anon, file };
        assert_eq!(
            found,
            [
                of(128 + 4_096, 512 + 2_000),
                of(900, 11_000),
                of(0, 7_300),
                of(2_201, 30_004 + 6_000)
            ]
        );
        assert_eq!(lru_gen(b"memcg     1 /\n node     0\n"), None);
    }

    #[test]
    fn a_control_group_s_limit_is_none_if_it_says_max() {
        assert_eq!(limit(b"max\n"), None);
        assert_eq!(limit(b"1073741824\n"), Some(1 << 30));
        assert_eq!(limit(b"99999999999999999999999\n"), None);
    }

    #[test]
    fn the_clean_page_cache_of_a_control_group_excludes_dirty_pages_and_files_in_memory() {
        let stat = GroupStat::parse(fixture!("memory.stat"));
        assert_eq!(
            stat.clean_file(),
            150_994_944 + 41_943_040 - 4_194_304 - 4_096
        );
        assert_eq!(stat.pgsteal, 1_234);
    }
}
