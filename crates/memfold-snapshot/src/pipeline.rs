//! Processes the bytes of snapshots on all cores in parallel: to save, verify, compress and search
//! RAM images, and to compute checksums of disks.
//!
//! ```text
//!            +- worker 1: read a piece, hash it, find its zeroes, write it -+
//!   chunks --+- worker 2: the same, of the next chunk                       +--> page cache --> Writeback --> disk
//!            +- ...       one for each core                                -+       (one fsync at the end, by Draft::commit)
//! ```
//! 1. Each worker (a thread) takes the next unprocessed chunk of 2 MiB and runs all stages on it.
//!    One worker reads while another writes.
//! 2. A worker processes a chunk in pieces that fit its core's cache, so that memory is read only
//!    once.
//! 3. A separate thread starts writeback from the page cache to the disk. Workers never wait for
//!    the disk, so a stopped VM does not wait for it either.
//!
//! Invariants: after the first error or panic, each worker ends after its present chunk. Each
//! worker has one buffer of at most two chunks (4 MiB). There are at most [`MAX_WORKERS`] workers.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::JoinHandle;

use memfold_sys::writeback;

use super::ranges::joined;

/// Number of bytes of a RAM image that one call writes to a file. Linux 6.18 gives a write of 2 MiB
/// to ext4 one folio of 2 MiB; on a host that is itself a VM, the copy into such a folio takes ten
/// times the CPU time of pieces of this size (decision 37).
pub const PIECE_BYTES: usize = 256 << 10;

/// Maximum number of workers. More workers would only compete for the host's memory.
const MAX_WORKERS: usize = 8;

/// Number of bytes that [`read_ahead`] reads at once, and maximum number of such pieces that it is
/// ahead.
const AHEAD_BYTES: usize = 1 << 20;
const AHEAD_PIECES: usize = 3;

/// Returns the number of worker threads for work of any size: one for each core that this process
/// may use (`sched_setaffinity(2)`, cgroup quota), at most 8.
#[must_use]
pub fn workers() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores.min(MAX_WORKERS)
}

/// Guard that keeps all workers from taking another task if its thread panics.
struct EndOnPanic<'a> {
    next: &'a AtomicU64,
    tasks: u64,
}

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.next.store(self.tasks, Ordering::Relaxed);
        }
    }
}

/// Runs `work` for each task number in `0..tasks`, on all workers in parallel. `work` also gets its
/// worker's buffer of `buffer_bytes` bytes. Returns the first error, after which no further task
/// begins.
pub fn run(
    tasks: u64,
    buffer_bytes: usize,
    work: impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let next = AtomicU64::new(0);
    let worker = || {
        let _end = EndOnPanic { next: &next, tasks };
        let mut buffer = vec![0; buffer_bytes];
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return Ok(());
            }
            if let Err(error) = work(task, &mut buffer) {
                next.store(tasks, Ordering::Relaxed);
                return Err(error);
            }
        }
    };
    let workers = workers().min(usize::try_from(tasks).unwrap_or(usize::MAX));
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..workers).map(|_| scope.spawn(worker)).collect();
        let own = worker();
        let ended = |thread: std::thread::ScopedJoinHandle<'_, io::Result<()>>| {
            let panicked = |_| Err(io::Error::other("a worker thread panicked"));
            thread.join().unwrap_or_else(panicked)
        };
        others.into_iter().map(ended).fold(own, Result::and)
    })
}

/// Writes `bytes` to a file at offset `at`, in pieces of [`PIECE_BYTES`].
pub fn write_all_at(file: &File, bytes: &[u8], mut at: u64) -> io::Result<()> {
    for piece in bytes.chunks(PIECE_BYTES) {
        file.write_all_at(piece, at)?;
        at += piece.len() as u64;
    }
    Ok(())
}

/// Thread that makes the kernel write a file's pages to the disk while other threads write to the
/// file. Dropping this value ends the thread. Bytes that are still in the page cache then go to the
/// disk with the next `fsync(2)`, which also reports errors.
#[derive(Debug)]
pub struct Writeback {
    written: Option<Sender<Range<u64>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writeback {
    /// Starts the writeback thread for a file that is still empty.
    pub fn start(file: &File) -> io::Result<Self> {
        let file = file.try_clone()?;
        let (written, ranges) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        let thread = std::thread::Builder::new()
            .name("writeback".into())
            .spawn(move || write_back(&file, &ranges, &over))?;
        Ok(Self {
            written: Some(written),
            is_over,
            thread: Some(thread),
        })
    }

    /// Tells the writeback thread that this range of bytes of the file was written and is in the
    /// page cache.
    pub fn add(&self, bytes: Range<u64>) {
        if let Some(written) = &self.written {
            // The thread has ended if the file system does not support writeback of ranges.
            let _ = written.send(bytes);
        }
    }
}

impl Drop for Writeback {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.written = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn write_back(file: &File, written: &Receiver<Range<u64>>, is_over: &AtomicBool) {
    while let Ok(first) = written.recv() {
        let mut ranges = vec![first];
        ranges.extend(written.try_iter());
        ranges.sort_unstable_by_key(|range| range.start);
        for range in joined(ranges) {
            if is_over.load(Ordering::Relaxed) || writeback::begin(file, range).is_err() {
                return;
            }
        }
    }
}

/// Reads a whole file, and passes its bytes to `each` piece by piece, in order. Another thread
/// reads the next pieces meanwhile. Returns the length of the file in bytes.
pub fn read_ahead(file: &File, mut each: impl FnMut(&[u8])) -> io::Result<u64> {
    let mut first = vec![0; AHEAD_BYTES];
    let length = fill(file, &mut first, 0)?;
    each(&first[..length]);
    // Most files are small and need no thread.
    if length < AHEAD_BYTES {
        return Ok(length as u64);
    }
    let (filled, pieces) = sync_channel::<io::Result<(Vec<u8>, usize)>>(AHEAD_PIECES);
    let (emptied, free) = channel();
    let mut buffers = vec![first];
    buffers.resize_with(AHEAD_PIECES, || vec![0; AHEAD_BYTES]);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut at = length as u64;
            while let Some(mut buffer) = buffers.pop().or_else(|| free.recv().ok()) {
                let piece = fill(file, &mut buffer, at);
                let is_last = !matches!(piece, Ok(AHEAD_BYTES));
                at += AHEAD_BYTES as u64;
                if filled.send(piece.map(|length| (buffer, length))).is_err() || is_last {
                    return;
                }
            }
        });
        let mut bytes = length as u64;
        for piece in pieces {
            let (buffer, length) = piece?;
            each(&buffer[..length]);
            bytes += length as u64;
            // After the last piece, nobody receives the buffer.
            let _ = emptied.send(buffer);
        }
        Ok(bytes)
    })
}

/// Reads from `at` on until the buffer is full or the file ends. Returns the number of bytes.
fn fill(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use memfold_testkit::wait_until;

    use super::*;

    const TASKS: u64 = 1 << 40;

    #[test]
    fn parallel_workers_execute_each_task_of_a_save_once() {
        let done = Mutex::new(Vec::new());
        run(1000, 16, |task, buffer| {
            assert_eq!(buffer.len(), 16);
            done.lock().unwrap().push(task);
            Ok(())
        })
        .unwrap();
        let mut done = done.into_inner().unwrap();
        done.sort_unstable();
        assert!(done.into_iter().eq(0..1000));
        run(0, 16, |_, _| Err(io::Error::other("no task"))).unwrap();
    }

    #[test]
    fn the_first_error_of_a_worker_stops_all_parallel_workers_of_a_save() {
        let ended = run(TASKS, 16, |task, _| match task {
            1000 => Err(io::Error::from_raw_os_error(28)),
            _ => Ok(()),
        });
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn a_panic_of_one_worker_stops_all_parallel_workers_of_a_save() {
        let caught = std::panic::catch_unwind(|| {
            run(TASKS, 16, |task, _| {
                assert!(task != 1000, "as a test wants it");
                Ok(())
            })
        });
        // The first worker is the caller's own thread, whose panic goes on to the caller.
        assert!(!matches!(caught, Ok(Ok(()))));
    }

    #[test]
    fn reading_ahead_returns_the_bytes_of_a_file_of_any_length_in_order() {
        let piece = AHEAD_BYTES as u64;
        for length in [0, 1, piece - 1, piece, piece + 1, 4 * piece, 9 * piece + 5] {
            let file = tempfile::tempfile().unwrap();
            let bytes: Vec<u8> = (1..=251)
                .cycle()
                .take(usize::try_from(length).unwrap())
                .collect();
            write_all_at(&file, &bytes, 0).unwrap();
            let mut read = Vec::new();
            assert_eq!(
                read_ahead(&file, |piece| read.extend_from_slice(piece)).unwrap(),
                length
            );
            assert!(read == bytes, "{length} bytes");
        }
        let directory = File::open("/").unwrap();
        assert!(read_ahead(&directory, |_| {}).is_err());
    }

    #[test]
    fn during_a_save_the_kernel_writes_new_bytes_to_the_disk_without_a_sync() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let writeback = Writeback::start(&file).unwrap();
        write_all_at(&file, &vec![7; 2 << 20], 0).unwrap();
        // With delayed allocation, a file gets its blocks at writeback, which the kernel begins
        // after 30 s.
        if !has_delayed_blocks(&file) {
            memfold_testkit::skip!("the file system of /var/tmp allocates blocks at once");
        }
        writeback.add(0..1 << 20);
        writeback.add(1 << 20..2 << 20);
        wait_until("the file has its blocks", Duration::from_secs(10), || {
            !has_delayed_blocks(&file)
        });
        // The thread waits for further bytes until the value is dropped.
        assert!(!writeback.thread.as_ref().unwrap().is_finished());
        drop(writeback);
    }

    /// Returns whether blocks of a file have no place on the disk yet (`FIEMAP_EXTENT_DELALLOC`, as
    /// `filefrag` shows it).
    fn has_delayed_blocks(file: &File) -> bool {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let output = std::process::Command::new("filefrag")
            .args(["-v", &path])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).contains("delalloc")
    }
}
