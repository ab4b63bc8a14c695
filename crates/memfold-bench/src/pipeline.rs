//! The part `pipeline` of the study `snapshots`: measures how fast the RAM image of a snapshot is
//! written to disk, compared with the limits of this host's memory and disk.
//!
//! Another process keeps random bytes in memory. In each round, these speeds are measured one after
//! the other:
//!
//! | key | what is measured |
//! |---|---|
//! | `read`, `read_all` | `process_vm_readv` of that memory to a buffer in the core's cache, by one thread and by all workers |
//! | `hash`, `hash_all` | XXH3-128 of a buffer in the core's cache |
//! | `page_cache` | the same number of bytes written to a file's page cache, by one thread |
//! | `disk` | the same bytes written until all are on the disk: `fallocate`, writes of 1 MiB, `fsync`, as `dd conv=fsync` does |
//! | `disk_direct` | `fallocate`, then writes of 2 MiB by all workers that bypass the page cache, `fsync` |
//! | `file_all` | the same number of bytes read from a file in the page cache, to a buffer in the core's cache, by all workers |
//! | `copy` | memfold's RAM image, until it is in the page cache; a VM is stopped for this time |
//! | `save` | memfold's RAM image, until it is on the disk |
//! | `verify` | the image read again from the page cache, and its checksums compared |
//!
//! All values are in MB/s (10^6 bytes). Ratios are of values of one round. `rounds` holds the
//! number of rounds.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use memfold_snapshot::Progress;
use memfold_snapshot::image::Source;
use memfold_snapshot::pipeline::{self, PIECE_BYTES};
use memfold_snapshot::plan::Plan;
use memfold_snapshot::stored::{Pages, Stored};
use memfold_snapshot::writer::Writer;
use memfold_sys::memory;
use memfold_units::{ByteSize, Hva, PAGE_SIZE};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::process::Pid;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use crate::random::Random;
use crate::record::{median, spread};
use memfold_lab::wait_for;

/// Time limit for the other process to hold its bytes.
const FILL_LIMIT: Duration = Duration::from_secs(60);

/// Bytes of one write of `dd`. The next constant: bytes of one write that bypasses the page cache.
const DD_BYTES: usize = 1 << 20;
const DIRECT_BYTES: usize = 2 << 20;

/// A process (`tail`) that keeps the bytes of its input in memory, because they may be the last
/// ones. Dropping the value ends the process.
struct Holder(Child);

impl Holder {
    fn new(size: ByteSize) -> anyhow::Result<Self> {
        let mut command = Command::new("tail");
        command.args(["-c", &size.0.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut holder = Self(command.spawn().context("cannot start the program 'tail'")?);
        let input = holder.0.stdin.as_mut();
        let input = input.context("cannot write to 'tail': its standard input is not a pipe")?;
        Random::default().write(size.0, input)?;
        let late = format!("'tail' does not hold {size}");
        wait_for(late, (FILL_LIMIT, Duration::from_millis(20)), || {
            Ok((holder.heap()?.pages >= size.0 / PAGE_SIZE).then_some(()))
        })?;
        Ok(holder)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Returns the heap of the process, which holds the bytes.
    fn heap(&self) -> anyhow::Result<Source> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.0.id()))?;
        let heap = maps.lines().find(|line| line.ends_with("[heap]"));
        let range = heap.and_then(|line| line.split_once(' ')?.0.split_once('-'));
        let address = |text| u64::from_str_radix(text, 16).map(Hva);
        let (from, to) = range.unwrap_or(("0", "0"));
        let (from, to) = (address(from)?, address(to)?);
        Ok(Source {
            name: "heap".into(),
            hva: from,
            pages: to.pages_since(from),
        })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the speed of `work`, which handles `bytes` bytes, in MB/s.
fn speed<T>(bytes: u64, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(bytes as f64 / 1e6 / began.elapsed().as_secs_f64())
}

/// Creates a file without a name.
fn file(place: &Path) -> anyhow::Result<File> {
    tempfile::tempfile_in(place).with_context(|| format!("cannot write in {}", place.display()))
}

/// One round: speeds by key, and durations of the image's stages.
struct Round {
    speeds: Vec<(&'static str, f64)>,
    stages: [f64; 3],
}

impl Round {
    fn speed(&self, key: &str) -> f64 {
        let found = self.speeds.iter().find(|(name, _)| *name == key);
        found.map_or(f64::NAN, |(_, speed)| *speed)
    }

    /// Returns the speed of the faster way to the disk.
    fn disk(&self) -> f64 {
        self.speed("disk").max(self.speed("disk_direct"))
    }
}

/// Function that processes one piece of the data. Arguments: the number of the piece, and a buffer.
type Work<'a> = &'a (dyn Fn(u64, &mut [u8]) -> std::io::Result<()> + Sync);

fn measure(holder: &Holder, place: &Path) -> anyhow::Result<Round> {
    let heap = holder.heap()?;
    // The number of bytes is a multiple of the largest unit, so that every way handles the same
    // bytes.
    let chunks = heap.pages * PAGE_SIZE / DIRECT_BYTES as u64;
    let bytes = chunks * DIRECT_BYTES as u64;
    let mut speeds = Vec::new();

    let pieces = bytes / PIECE_BYTES as u64;
    let read = |piece: u64, buffer: &mut [u8]| {
        let at = Hva(heap.hva.0 + piece * PIECE_BYTES as u64);
        memory::read(holder.pid(), at, buffer).map(drop)
    };
    let hash = |_: u64, buffer: &mut [u8]| -> std::io::Result<()> {
        std::hint::black_box(xxh3_128(std::hint::black_box(buffer)));
        Ok(())
    };
    let mut buffer = vec![1; DIRECT_BYTES + DD_BYTES];
    let piece = &mut buffer[..PIECE_BYTES];
    let works: [(_, _, Work<'_>); 2] = [("read", "read_all", &read), ("hash", "hash_all", &hash)];
    for (one_key, all_key, work) in works {
        let one = || Ok((0..pieces).try_for_each(|number| work(number, piece))?);
        speeds.push((one_key, speed(bytes, one)?));
        let all = || Ok(pipeline::run(pieces, PIECE_BYTES, work)?);
        speeds.push((all_key, speed(bytes, all)?));
    }

    let written = file(place)?;
    let began = Instant::now();
    fallocate(&written, FallocateFlags::empty(), 0, bytes)?;
    for at in (0..bytes).step_by(DD_BYTES) {
        written.write_all_at(&buffer[..DD_BYTES], at)?;
    }
    let mb = bytes as f64 / 1e6;
    speeds.push(("page_cache", mb / began.elapsed().as_secs_f64()));
    written.sync_all()?;
    speeds.push(("disk", mb / began.elapsed().as_secs_f64()));
    drop(written);
    speeds.push(("disk_direct", direct(place, chunks, &buffer)?));

    let cached = file(place)?;
    pipeline::run(pieces, PIECE_BYTES, |piece, buffer| {
        cached.write_all_at(buffer, piece * PIECE_BYTES as u64)
    })?;
    let read =
        |piece: u64, buffer: &mut [u8]| cached.read_exact_at(buffer, piece * PIECE_BYTES as u64);
    let all = || Ok(pipeline::run(pieces, PIECE_BYTES, read)?);
    speeds.push(("file_all", speed(bytes, all)?));
    drop(cached);

    let ram = file(place)?;
    let mut sums = file(place)?;
    let began = Instant::now();
    let plan = Plan::new(holder.pid(), vec![heap.clone()], &[], None)?;
    let mut writer = Writer::new(&plan, &ram, None)?;
    writer.write_back()?;
    writer.blocks(&plan, &[0], None, &Progress::default())?;
    let stages = writer.stages();
    let copied = began.elapsed().as_secs_f64();
    let (_, counts) = writer.finish(&sums)?;
    ram.sync_all()?;
    let saved = began.elapsed().as_secs_f64();
    let mb = (counts.saved_pages * PAGE_SIZE) as f64 / 1e6;
    speeds.push(("copy", mb / copied));
    speeds.push(("save", mb / saved));

    let mut all = Vec::new();
    sums.rewind()?;
    sums.read_to_end(&mut all)?;
    let stored = Stored {
        bytes: ram.metadata()?.len(),
        sums: all,
        sums_of_pages: true,
        pages: Pages::plain(ram)?,
        references: Vec::new(),
        sources: Vec::new(),
    };
    let bytes = counts.saved_pages * PAGE_SIZE;
    let verify = || {
        let wrong = stored.verify(&Progress::default())?;
        ensure!(wrong.is_empty(), "the image has wrong chunks: {wrong:?}");
        Ok(())
    };
    speeds.push(("verify", speed(bytes, verify)?));
    Ok(Round {
        speeds,
        stages: [stages.read, stages.hash, stages.write].map(|stage| stage.as_secs_f64()),
    })
}

/// Returns the speed of writes that bypass the page cache, in MB/s; 0 if the file system does not
/// support them.
fn direct(place: &Path, chunks: u64, bytes: &[u8]) -> anyhow::Result<f64> {
    let written = file(place)?;
    let path = format!("/proc/self/fd/{}", written.as_raw_fd());
    let flags = i32::try_from(OFlags::DIRECT.bits())?;
    let Ok(past) = File::options().write(true).custom_flags(flags).open(path) else {
        return Ok(0.0);
    };
    let aligned = bytes.as_ptr().align_offset(4096);
    let bytes = &bytes[aligned..][..DIRECT_BYTES];
    let length = chunks * DIRECT_BYTES as u64;
    speed(length, || {
        fallocate(&written, FallocateFlags::empty(), 0, length)?;
        pipeline::run(chunks, 0, |chunk, _| {
            past.write_all_at(bytes, chunk * DIRECT_BYTES as u64)
        })?;
        Ok(written.sync_all()?)
    })
}

/// Measures how fast a process with `size` bytes in memory is copied to files in `place`. Returns
/// the speeds in MB/s by key.
pub fn run(size: ByteSize, rounds: usize, place: &Path) -> anyhow::Result<Value> {
    let holder = Holder::new(size)?;
    let mut all = Vec::new();
    for number in 1..=rounds {
        let round = measure(&holder, place)?;
        eprintln!("pipeline, round {number}: {}", in_short(&round));
        all.push(round);
    }
    Ok(results(size, &all))
}

fn results(size: ByteSize, all: &[Round]) -> Value {
    let values = |of: &dyn Fn(&Round) -> f64| all.iter().map(of).collect::<Vec<f64>>();
    let percent = |of: fn(&Round) -> f64| spread(values(&|round| of(round) * 100.0));
    let copy =
        |round: &Round| round.speed("copy") / round.speed("read").max(round.speed("read_all"));
    let mut results = json!({
        "mib": size.0 >> 20,
        "rounds": all.len(),
        "workers": pipeline::workers(),
        "copy_over_memory_percent": percent(copy),
        "save_over_disk_percent": percent(|round| round.speed("save") / round.disk()),
    });
    for (key, _) in all.first().map_or(&[][..], |round| &round.speeds) {
        results[format!("{key}_mb_per_s")] = spread(values(&|round| round.speed(key)));
    }
    for (stage, name) in ["read", "hash", "write"].into_iter().enumerate() {
        let share = |round: &Round| round.stages[stage] / round.stages.iter().sum::<f64>() * 100.0;
        results[format!("stage_{name}_percent")] = median(values(&share)).into();
    }
    results
}

fn in_short(round: &Round) -> String {
    let speeds = round.speeds.iter();
    let speeds = speeds.map(|(key, speed)| format!("{key} {speed:.0}"));
    let speeds: Vec<String> = speeds.collect();
    let [read, hash, write] = round.stages.map(|stage| stage * 1e3);
    format!(
        "{} MB/s; all workers read for {read:.0} ms, hashed for {hash:.0}, wrote for {write:.0}; the save has {:.0} % of the disk's speed",
        speeds.join(", "),
        round.speed("save") / round.disk() * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_save_benchmark_computes_speed_ratios_within_each_round_and_stages_in_percent() {
        let round = |save: f64, disk: f64, direct: f64| Round {
            speeds: vec![("save", save), ("disk", disk), ("disk_direct", direct)],
            stages: [2.0, 1.0, 1.0],
        };
        let rounds = [round(500.0, 1000.0, 0.0), round(900.0, 500.0, 1000.0)];
        let found = results(ByteSize::mib(64), &rounds);
        let ratio = &found["save_over_disk_percent"];
        assert!((ratio["min"].as_f64().unwrap() - 50.0).abs() < 1e-9);
        assert!((ratio["max"].as_f64().unwrap() - 90.0).abs() < 1e-9);
        assert!((found["stage_read_percent"].as_f64().unwrap() - 50.0).abs() < 1e-9);
    }

    #[test]
    fn the_save_benchmark_measures_every_speed_on_a_small_process_and_leaves_no_file() {
        let place = tempfile::tempdir().unwrap();
        let found = run(ByteSize::mib(16), 1, place.path()).unwrap();
        for key in ["read", "hash_all", "page_cache", "disk", "save", "verify"] {
            let speed = found[format!("{key}_mb_per_s")]["median"].as_f64().unwrap();
            assert!(speed.is_finite() && speed > 0.0, "{key}: {speed}");
        }
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
