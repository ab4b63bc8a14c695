//! Kernel interfaces that memfold's agent in the guest uses: file handles, which pages of a file
//! are cached, signals as a descriptor, new random numbers, read-only devices.
//!
//! Sources: `open_by_handle_at(2)`, `mincore(2)`, `madvise(2)`, `signalfd(2)`, `fcntl(2)`,
//! `random(4)`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use memfold_units::Hva;
use rustix::io::Errno;
use rustix::mm::Advice;

use crate::region::{Area, Mapping};
use crate::result::{check, descriptor};

/// Maximum length of a file handle, in bytes (`MAX_HANDLE_SZ`).
pub const MAX_HANDLE: usize = 128;

/// The structure `struct file_handle` with space for the largest handle.
#[repr(C)]
struct FileHandle {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; MAX_HANDLE],
}
const _: () = assert!(std::mem::offset_of!(FileHandle, f_handle) == 8);

/// Opens the file that a file handle names, as an `O_PATH` descriptor (`open_by_handle_at(2)`).
/// `mount` is an open file on the same file system; `bytes` is the handle without its header. Needs
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
    Ok(descriptor(fd)?)
}

/// Reseeds the kernel's random number generator from its entropy pool (`RNDRESEEDCRNG`,
/// `random(4)`). `urandom` is the open `/dev/urandom`. Needs `CAP_SYS_ADMIN`.
pub fn reseed_random(urandom: impl AsFd) -> io::Result<()> {
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207;
    // SAFETY: this request has no argument.
    let result = unsafe { libc::ioctl(urandom.as_fd().as_raw_fd(), RNDRESEEDCRNG) };
    Ok(check(result)?)
}

/// Makes a block device read-only for all processes (`BLKROSET`, `include/uapi/linux/fs.h`), like
/// `blockdev --setro`. Needs `CAP_SYS_ADMIN`.
pub fn set_read_only(device: impl AsFd) -> io::Result<()> {
    const BLKROSET: libc::Ioctl = 0x125d;
    let yes: libc::c_int = 1;
    // SAFETY: the kernel reads one integer, which lives through the call.
    let result = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKROSET, &raw const yes) };
    Ok(check(result)?)
}

/// Returns whether any process has this regular file open for writing, or mapped for writing. Such
/// a file gets no read lease from the kernel (`F_SETLEASE`, `fcntl(2)`). The function ends its
/// lease at once, by closing `file`. The caller must block `SIGIO`, because the kernel sends that
/// signal if another process opens the file during the lease. Needs `CAP_LEASE` for other users'
/// files, and a `file` that is open for reading only.
pub fn is_open_for_writing(file: OwnedFd) -> io::Result<bool> {
    // SAFETY: the argument of this request is a number.
    let lease = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) });
    drop(file);
    match lease {
        Ok(()) => Ok(false),
        Err(Errno::AGAIN) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// A mapping of a file, by which this process finds out which pages of the file are cached. The
/// mapped bytes are never read, so truncation of the file does no harm.
///
/// With `MADV_RANDOM`, an access to a page starts no readahead and, since Linux 6.3, does not count
/// as a use of the page.
#[derive(Debug)]
pub struct FileView(Mapping);

impl FileView {
    /// Maps the first `pages` pages (at least one) of a file that is open for reading.
    pub fn new(file: impl AsFd, pages: u64) -> io::Result<Self> {
        let mapping = Mapping::window(file, pages)?;
        mapping.area().advise(Advice::Random)?;
        Ok(Self(mapping))
    }

    fn part(&self, first: u64, count: u64) -> io::Result<Area> {
        let whole = self.0.area();
        if count == 0
            || first
                .checked_add(count)
                .is_none_or(|end| end > whole.pages())
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(whole.part(first, count))
    }

    /// Writes one byte to `states` for each page of the file, beginning with page `first`. Bit 0 of
    /// the byte is set if the page is cached (`mincore(2)`).
    pub fn resident(&self, first: u64, states: &mut [u8]) -> io::Result<()> {
        let part = self.part(first, states.len() as u64)?;
        // SAFETY: the kernel writes one byte a page of the range into `states`.
        let result = unsafe { libc::mincore(part.pointer(), part.length(), states.as_mut_ptr()) };
        Ok(check(result)?)
    }

    /// Maps `count` pages of the file, from page `first` on, into this process's page tables
    /// (`MADV_POPULATE_READ`, Linux >= 5.14). `/proc/self/pagemap` then shows their frames. Check
    /// [`Self::resident`] first, because the kernel would read pages that are not cached from disk.
    pub fn populate(&self, first: u64, count: u64) -> io::Result<()> {
        Ok(self.part(first, count)?.advise(Advice::LinuxPopulateRead)?)
    }

    /// Removes `count` pages of the file, from page `first` on, from this process's page tables,
    /// and so from its resident set.
    pub fn release(&self, first: u64, count: u64) -> io::Result<()> {
        Ok(self.part(first, count)?.advise(Advice::LinuxDontNeed)?)
    }

    /// Returns the address at which page `page` of the file is mapped, for
    /// [`crate::pagemap::Pagemap`].
    pub fn hva(&self, page: u64) -> Hva {
        self.0.area().start().add_pages(page)
    }
}

/// Blocks `signals` in this thread and in threads that it starts later. Returns a signalfd, which
/// is readable when one of these signals has arrived.
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
        let flags = libc::SFD_NONBLOCK | libc::SFD_CLOEXEC;
        Ok(descriptor(libc::signalfd(-1, &raw const set, flags))?)
    }
}

/// Reads one signal from a descriptor that [`signal_descriptor`] returned. Returns the signal's
/// number; `None` if no signal has arrived.
pub fn next_signal(descriptor: impl AsFd) -> io::Result<Option<i32>> {
    /// Size of `struct signalfd_siginfo`, whose first field is the signal's number.
    const SIZE: usize = 128;
    let mut info = [0_u8; SIZE];
    match rustix::io::read(descriptor, &mut info) {
        Ok(SIZE) => Ok(info.first_chunk().map(|number| i32::from_ne_bytes(*number))),
        Ok(_) | Err(Errno::AGAIN) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Numbers of the signals that the guest agent handles.
pub mod signal {
    /// Number of `SIGIO`, which announces an event on a file after
    /// [`signal_changes`](super::signal_changes).
    pub const IO: i32 = libc::SIGIO;
    /// Number of `SIGTERM`, which asks the program to end.
    pub const TERM: i32 = libc::SIGTERM;
    /// Number of `SIGHUP`, which a process gets when its terminal is closed.
    pub const HUP: i32 = libc::SIGHUP;
    /// Number of `SIGINT`, which Ctrl-C in a terminal sends.
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
    ok.then_some(()).ok_or_else(io::Error::last_os_error)
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
