//! Drops listed files from the guest's page cache, in the order of the list, until a deadline. The
//! daemon uses this before it saves a snapshot that shall not contain the page cache.
//! `/proc/sys/vm/drop_caches` is no substitute: it drops everything and cannot be interrupted.

use std::io::{self, BufRead};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};

use crate::file_list::{find, paths};

/// Bytes that are dropped between two checks of the deadline.
const PIECE_BYTES: u64 = 32 << 20;

/// Most threads. Each thread drops another file, because the kernel locks a file's page cache.
const MAX_THREADS: usize = 4;

/// Drops the clean pages of files from the page cache. `input` lists the files, one path in each
/// line; pages that a process has mapped stay. Returns whether all files were dropped within
/// `limit`, counted from this call.
pub fn drop_files(limit: Duration, input: &mut (impl BufRead + Send)) -> io::Result<bool> {
    let end = Instant::now() + limit;
    let (files, is_late) = (Mutex::new(paths(input)), AtomicBool::new(false));
    let next = || match files.lock() {
        Ok(mut files) => files.next().transpose(),
        Err(_) => Ok(None),
    };
    let work = || -> io::Result<()> {
        while let Some(path) = next()? {
            // A file that no longer exists has no cached pages.
            if !drop_file(&path, end).unwrap_or(true) {
                is_late.store(true, Ordering::Relaxed);
                break;
            }
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(MAX_THREADS))
            .map(|_| scope.spawn(work))
            .collect();
        let own = work();
        others.into_iter().fold(own, |done, thread| {
            done.and(
                thread
                    .join()
                    .unwrap_or_else(|_| Err(io::ErrorKind::Other.into())),
            )
        })
    })?;
    Ok(!is_late.into_inner())
}

/// Drops one file. Returns whether it was dropped before `end`.
fn drop_file(path: &[u8], end: Instant) -> io::Result<bool> {
    let Some(named) = find(path)? else {
        return Ok(true);
    };
    let file = named.open()?;
    let length = u64::try_from(named.facts.st_size).unwrap_or(0);
    let mut at = 0;
    while at < length {
        if Instant::now() >= end {
            return Ok(false);
        }
        fadvise(
            &file,
            at,
            std::num::NonZeroU64::new(PIECE_BYTES),
            Advice::DontNeed,
        )?;
        at += PIECE_BYTES;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::ffi::OsStrExt;

    use memfold_sys::page_cache::cached_pages;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn files_are_dropped_from_the_page_cache_in_list_order_until_the_deadline() {
        // The directory must not be in memory, because a tmpfs keeps its pages.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut list = b"relative\n/gone\n/dev/null\n".to_vec();
        let mut files = Vec::new();
        for name in ["first", "a b\\", "last"] {
            let path = directory.path().join(name);
            std::fs::write(&path, vec![7; 64 << 12]).unwrap();
            let file = File::open(&path).unwrap();
            file.sync_all().unwrap();
            let escaped = path.as_os_str().as_bytes().escape_ascii().to_string();
            list.extend(escaped.replace("\\\\", "\\134").bytes());
            list.push(b'\n');
            files.push(file);
        }
        let cached = || -> io::Result<Vec<u64>> { files.iter().map(cached_pages).collect() };
        match cached() {
            Ok(pages) if pages == [64; 3] => {}
            Ok(pages) => memfold_testkit::skip!("the file system caches {pages:?} pages"),
            Err(error) => memfold_testkit::skip!("cachestat(2): {error}"),
        }
        assert!(!drop_files(Duration::ZERO, &mut &list[..]).unwrap());
        assert_eq!(cached().unwrap(), [64; 3]);
        assert!(drop_files(HOUR, &mut &list[..]).unwrap());
        assert_eq!(cached().unwrap(), [0; 3]);
        assert!(drop_files(HOUR, &mut &b""[..]).unwrap());
    }
}
