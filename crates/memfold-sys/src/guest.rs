//! Kernel interfaces for the guest agent: file handles, page-cache residency, signals as a
//! descriptor, new random numbers, read-only devices.
//!
//! Sources: `open_by_handle_at(2)`, `cachestat(2)`, `mincore(2)`, `madvise(2)`, `signalfd(2)`,
//! `fcntl(2)`, `random(4)`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use memfold_units::{Hva, PAGE_SIZE};

/// Most bytes of a file handle (`MAX_HANDLE_SZ`).
pub const MAX_HANDLE: usize = 128;

/// The structure `struct file_handle` with space for the largest handle.
#[repr(C)]
struct FileHandle {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; MAX_HANDLE],
}
const _: () = assert!(std::mem::offset_of!(FileHandle, f_handle) == 8);

/// Opens the file with this handle, as an `O_PATH` descriptor, on the file system of `mount`. Needs
/// `CAP_DAC_READ_SEARCH`.
///
/// # Errors
///
/// `ESTALE` if there is no file with this handle, or if the file system does not know the type of
/// the handle.
pub fn open_by_handle(mount: impl AsFd, handle_type: i32, bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut handle = FileHandle {
        handle_bytes: 0,
        handle_type,
        f_handle: [0; MAX_HANDLE],
    };
    let room = handle
        .f_handle
        .get_mut(..bytes.len())
        .ok_or(io::ErrorKind::InvalidInput)?;
    room.copy_from_slice(bytes);
    handle.handle_bytes =
        u32::try_from(bytes.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    // SAFETY: the kernel reads 8 + handle_bytes bytes of a structure that has them.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            mount.as_fd().as_raw_fd(),
            &raw const handle,
            flags,
        )
    };
    descriptor(fd)
}

fn descriptor(fd: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(fd) {
        // SAFETY: a descriptor that the system call just made for us.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reseeds the kernel's random number generator from its pool (`RNDRESEEDCRNG`, `random(4)`). Needs
/// `CAP_SYS_ADMIN`.
pub fn reseed_random(urandom: impl AsFd) -> io::Result<()> {
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207;
    // SAFETY: this request has no argument.
    let result = unsafe { libc::ioctl(urandom.as_fd().as_raw_fd(), RNDRESEEDCRNG) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Makes a block device read-only for all processes (`BLKROSET`, `include/uapi/linux/fs.h`), like
/// `blockdev --setro`. Needs `CAP_SYS_ADMIN`.
pub fn set_read_only(device: impl AsFd) -> io::Result<()> {
    const BLKROSET: libc::Ioctl = 0x125d;
    let yes: libc::c_int = 1;
    // SAFETY: the kernel reads one integer, which lives through the call.
    let result = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKROSET, &raw const yes) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns whether any process has this regular file open for writing, or mapped for writing: the
/// kernel then refuses a read lease (`F_SETLEASE`, `fcntl(2)`). The lease ends at once, when `file`
/// is closed. `SIGIO` must be blocked, because the kernel sends it to this process if another
/// process opens the file at that moment. Needs `CAP_LEASE` for other users' files, and a `file`
/// that is open for reading only.
pub fn is_open_for_writing(file: OwnedFd) -> io::Result<bool> {
    // SAFETY: the argument of this request is a number.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) };
    let error = io::Error::last_os_error();
    drop(file);
    match error.raw_os_error() {
        _ if result == 0 => Ok(false),
        Some(libc::EAGAIN) => Ok(true),
        _ => Err(error),
    }
}

/// The structure `struct cachestat`: numbers of a file's pages in the page cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStat {
    /// Number of cached pages.
    pub nr_cache: u64,
    /// Number of dirty pages.
    pub nr_dirty: u64,
    /// Number of pages that are being written back.
    pub nr_writeback: u64,
    /// Number of evicted pages that the cache still remembers.
    pub nr_evicted: u64,
    /// Number of pages that were evicted recently. If they are read again, memory is short.
    pub nr_recently_evicted: u64,
}

/// The structure `struct cachestat_range`. A length of zero means: to the end of the file.
#[repr(C)]
struct CacheStatRange {
    offset: u64,
    length: u64,
}

/// Returns how much of a file is cached (Linux >= 6.5, else `ENOSYS`); for a file that is read in
/// place (DAX), no pages.
///
/// A DAX file is never passed to the kernel: `filemap_cachestat` would take its DAX entries for
/// those of evicted pages and dereference a null pointer (seen in Linux 6.12.117).
pub fn cachestat(file: impl AsFd) -> io::Result<CacheStat> {
    /// Number of the system call, the same on every architecture (it was added after the tables
    /// were unified). The libc crate does not define it everywhere.
    const SYS_CACHESTAT: libc::c_long = 451;
    let facts = rustix::fs::statx(
        &file,
        "",
        rustix::fs::AtFlags::EMPTY_PATH,
        rustix::fs::StatxFlags::empty(),
    )?;
    if facts
        .stx_attributes
        .contains(rustix::fs::StatxAttributes::DAX)
    {
        return Ok(CacheStat::default());
    }
    let range = CacheStatRange {
        offset: 0,
        length: 0,
    };
    let mut stat = CacheStat::default();
    // SAFETY: both structures have the kernel's layout and live through the call.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_fd().as_raw_fd(),
            &raw const range,
            &raw mut stat,
            0,
        )
    };
    if result == 0 {
        Ok(stat)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A mapping of a file for checking which of its pages are cached. The mapped bytes are never read,
/// so truncation of the file does no harm.
///
/// With `MADV_RANDOM`, an access to a page starts no readahead and, since Linux 6.3, does not count
/// as a use of the page.
#[derive(Debug)]
pub struct FileView {
    address: *mut libc::c_void,
    pages: u64,
}

impl FileView {
    /// Maps the first `pages` pages (at least one) of a file that is open for reading.
    pub fn new(file: impl AsFd, pages: u64) -> io::Result<Self> {
        let length = Self::length(pages)?;
        // SAFETY: a new mapping at a place the kernel chooses; nobody reads through it.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_fd().as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let view = Self { address, pages };
        view.advise(0, pages, libc::MADV_RANDOM)?;
        Ok(view)
    }

    fn length(pages: u64) -> io::Result<usize> {
        pages
            .checked_mul(PAGE_SIZE)
            .and_then(|l| usize::try_from(l).ok())
            .ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    fn place(&self, first: u64, count: u64) -> io::Result<(*mut libc::c_void, usize)> {
        if count == 0 || first.checked_add(count).is_none_or(|end| end > self.pages) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let offset = Self::length(first)?;
        Ok((
            self.address.cast::<u8>().wrapping_add(offset).cast(),
            Self::length(count)?,
        ))
    }

    fn advise(&self, first: u64, count: u64, advice: libc::c_int) -> io::Result<()> {
        let (address, length) = self.place(first, count)?;
        // SAFETY: inside our mapping, which nobody holds references into.
        if unsafe { libc::madvise(address, length, advice) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Sets bit 0 of one byte of `states` for each cached page, beginning with page `first`.
    pub fn resident(&self, first: u64, states: &mut [u8]) -> io::Result<()> {
        let (address, length) = self.place(first, states.len() as u64)?;
        // SAFETY: the kernel writes one byte a page of the range into `states`.
        if unsafe { libc::mincore(address, length, states.as_mut_ptr()) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Maps pages into the page tables, so that `/proc/self/pagemap` shows their frames
    /// (`MADV_POPULATE_READ`, Linux >= 5.14). Pages that are not cached would be read from disk, so
    /// check [`Self::resident`] first.
    pub fn populate(&self, first: u64, count: u64) -> io::Result<()> {
        self.advise(first, count, libc::MADV_POPULATE_READ)
    }

    /// Removes pages from the page tables, and so from this process's resident set.
    pub fn release(&self, first: u64, count: u64) -> io::Result<()> {
        self.advise(first, count, libc::MADV_DONTNEED)
    }

    /// Returns the address at which page `page` is mapped, for [`crate::pagemap::Pagemap`].
    pub fn hva(&self, page: u64) -> Hva {
        Hva(self.address.expose_provenance() as u64).add_pages(page)
    }
}

impl Drop for FileView {
    fn drop(&mut self) {
        if let Ok(length) = Self::length(self.pages) {
            // SAFETY: our own mapping; nothing refers to it any more.
            unsafe { libc::munmap(self.address, length) };
        }
    }
}

/// Blocks `signals` in this thread (and in threads that it starts later). Returns a descriptor that
/// becomes readable when one of them arrives.
pub fn signal_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: a zeroed sigset_t is valid, and sigemptyset makes it a proper empty set.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives through all of these calls.
    unsafe {
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        let error = libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        descriptor(
            libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC).into(),
        )
    }
}

/// Returns the number of one signal that `descriptor` (of [`signal_descriptor`]) holds; `None` if
/// it holds none.
pub fn next_signal(descriptor: impl AsFd) -> io::Result<Option<i32>> {
    /// Size of `struct signalfd_siginfo`, whose first field is the signal's number.
    const SIZE: usize = 128;
    let mut info = [0_u8; SIZE];
    match rustix::io::read(descriptor, &mut info) {
        Ok(SIZE) => {
            let number = [info[0], info[1], info[2], info[3]];
            Ok(Some(i32::from_ne_bytes(number)))
        }
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Signals that the agent waits for.
pub mod signal {
    /// Signal that announces an event on a descriptor of [`signal_changes`](super::signal_changes).
    pub const IO: i32 = libc::SIGIO;
    /// Signal that asks the program to end.
    pub const TERM: i32 = libc::SIGTERM;
    /// Signal of an interrupt from a terminal (Ctrl-C).
    pub const INT: i32 = libc::SIGINT;
}

/// Requests `SIGIO` for events on `file` (`F_SETOWN`, `O_ASYNC`). A virtio port sends this signal
/// when its host side opens or closes, and when data arrives (`send_sigio_to_port` in
/// `drivers/char/virtio_console.c`).
pub fn signal_changes(file: impl AsFd) -> io::Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: plain fcntl calls on an open descriptor, without pointers.
    let ok = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETOWN, libc::getpid()) == 0
            && flags >= 0
            && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC) == 0
    };
    if ok {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::Pagemap;
    use std::io::Write;

    #[test]
    fn written_pages_of_a_file_are_resident_and_have_page_frames() {
        let path = std::env::temp_dir().join(format!("memfold-view-{}", std::process::id()));
        let mut file = std::fs::File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(&vec![1; 8 * 4096]).unwrap();
        file.set_len(64 * 4096).unwrap();
        let view = FileView::new(&file, 64).unwrap();
        let mut states = [0; 64];
        view.resident(0, &mut states).unwrap();
        assert_eq!(states.iter().filter(|s| **s & 1 != 0).count(), 8);
        view.populate(0, 8).unwrap();
        let map = Pagemap::open(rustix::process::getpid()).unwrap();
        let here = |map: &Pagemap| {
            map.entries(view.hva(0), 8)
                .unwrap()
                .into_iter()
                .filter(|e| e >> 63 != 0)
                .count()
        };
        assert_eq!(here(&map), 8);
        view.release(0, 8).unwrap();
        assert_eq!(here(&map), 0);
        assert!(view.populate(60, 5).is_err());
        // The call exists since Linux 6.5.
        match cachestat(&file) {
            Ok(stat) => assert_eq!(stat.nr_cache, 8),
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                memfold_testkit::report_skip("in part: this kernel has no cachestat");
            }
            Err(error) => panic!("cachestat: {error}"),
        }
    }

    #[test]
    fn a_file_open_for_writing_is_detected() {
        let path = std::env::temp_dir().join(format!("memfold-writer-{}", std::process::id()));
        let writer = std::fs::File::create(&path).unwrap();
        let ask = || is_open_for_writing(std::fs::File::open(&path).unwrap().into()).unwrap();
        assert!(ask());
        drop(writer);
        assert!(!ask());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_blocked_signal_is_read_from_a_signal_descriptor() {
        let descriptor = signal_descriptor(&[signal::TERM]).unwrap();
        assert_eq!(next_signal(&descriptor).unwrap(), None);
        // SAFETY: sends a signal that this thread blocks.
        unsafe { libc::pthread_kill(libc::pthread_self(), signal::TERM) };
        assert_eq!(next_signal(&descriptor).unwrap(), Some(signal::TERM));
    }
}
