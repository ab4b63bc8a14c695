//! `userfaultfd(2)`: catches page faults, and moves pages out of a range and back.
//!
//! Sources: `include/uapi/linux/userfaultfd.h`, `Documentation/admin-guide/mm/userfaultfd.rst`,
//! `mm/userfaultfd.c`.
//!
//! memfold's library in QEMU uses userfaultfd in two ways. While it freezes pages for folding,
//! nobody reads events from the descriptor. A thread that touches a frozen page sleeps in the
//! kernel until [`Userfaultfd::wake`], and then faults again. While it saves old pages for a
//! snapshot, a thread reads the events ([`Userfaultfd::next_fault`]) and copies each page before
//! the VM writes to it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use memfold_units::{Hva, PAGE_SIZE};
use rustix::io::Errno;

use crate::region::Area;
use crate::result::{check, descriptor};

#[repr(C)]
struct Api {
    version: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// The structures `struct uffdio_copy` and `struct uffdio_move`, which have the same layout.
#[repr(C)]
struct Transfer {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// The kind `UFFD_EVENT_PAGEFAULT` of an event.
const EVENT_PAGEFAULT: u8 = 0x12;

const fn request(direction: u64, number: u64, size: usize) -> libc::c_ulong {
    direction << 30 | (size as u64) << 16 | 0xAA << 8 | number
}
const READ: u64 = 2;
const READ_WRITE: u64 = 3;

const UFFDIO_API: libc::c_ulong = request(READ_WRITE, 0x3F, size_of::<Api>());
const UFFDIO_REGISTER: libc::c_ulong = request(READ_WRITE, 0x00, size_of::<Register>());
const UFFDIO_UNREGISTER: libc::c_ulong = request(READ, 0x01, size_of::<Range>());
const UFFDIO_WAKE: libc::c_ulong = request(READ, 0x02, size_of::<Range>());
const UFFDIO_COPY: libc::c_ulong = request(READ_WRITE, 0x03, size_of::<Transfer>());
const UFFDIO_MOVE: libc::c_ulong = request(READ_WRITE, 0x05, size_of::<Transfer>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = request(READ_WRITE, 0x06, size_of::<WriteProtect>());
/// Request number `_IO(0xAA, 0x00)` on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = request(0, 0, 0);

const _: () = assert!(UFFDIO_API == 0xC018_AA3F);
const _: () = assert!(UFFDIO_REGISTER == 0xC020_AA00);
const _: () = assert!(UFFDIO_UNREGISTER == 0x8010_AA01);
const _: () = assert!(UFFDIO_WAKE == 0x8010_AA02);
const _: () = assert!(UFFDIO_COPY == 0xC028_AA03);
const _: () = assert!(UFFDIO_MOVE == 0xC028_AA05);
const _: () = assert!(UFFDIO_WRITEPROTECT == 0xC018_AA06);
const _: () = assert!(USERFAULTFD_IOC_NEW == 0xAA00);

const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const FEATURE_MOVE: u64 = 1 << 16;
const FEATURES_WP: u64 =
    FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED;

/// Kind of page fault that a userfaultfd catches in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Faults on missing pages (`UFFDIO_REGISTER_MODE_MISSING`).
    Missing,
    /// Writes to pages that [`Userfaultfd::write_protect`] protects (`UFFDIO_REGISTER_MODE_WP`).
    WriteProtect,
}

/// A userfaultfd that also catches faults from kernel mode (KVM, vhost, `read(2)` into guest
/// memory).
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    features: u64,
    /// Whether KSM may merge all memory of this process (`PR_SET_MEMORY_MERGE`, systemd's
    /// `MemoryKSM=`).
    merged: bool,
}

impl Userfaultfd {
    /// Opens a userfaultfd for this process. Tries first `device` (an open `/dev/userfaultfd` that
    /// this process got from another), then the system call, then `/dev/userfaultfd`.
    ///
    /// # Errors
    ///
    /// The error of the system call, if all three ways fail.
    pub fn open(device: Option<RawFd>) -> io::Result<Self> {
        // If the kernel lacks one feature, it refuses the whole handshake, and then permits another
        // attempt.
        Self::open_with(
            device,
            &[FEATURES_WP | FEATURE_MOVE, FEATURE_MOVE, FEATURES_WP, 0],
        )
    }

    /// Opens a userfaultfd for tracking writes (Linux >= 6.7), as [`Self::open`] does. Its write
    /// protection stops no thread: the kernel lifts the protection of a page that is written to,
    /// and `PAGEMAP_SCAN` shows such pages.
    pub fn open_async(device: Option<RawFd>) -> io::Result<Self> {
        Self::open_with(device, &[FEATURES_WP | FEATURE_WP_ASYNC])
    }

    fn open_with(device: Option<RawFd>, features: &[u64]) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let from_device = |raw: RawFd| {
            // SAFETY: the request takes no pointer, and a wrong descriptor gives an error.
            descriptor(unsafe { libc::ioctl(raw, USERFAULTFD_IOC_NEW as libc::Ioctl, flags) }).ok()
        };
        let own_device = || {
            let file = File::options()
                .read(true)
                .write(true)
                .open("/dev/userfaultfd");
            from_device(file.ok()?.as_raw_fd())
        };
        let fd = match device.and_then(from_device) {
            Some(fd) => fd,
            // Without UFFD_USER_MODE_ONLY, because with it faults from KVM and system calls fail.
            // SAFETY: the system call only takes flags.
            None => descriptor(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })
                .or_else(|error| own_device().ok_or(error))?,
        };
        let mut last = Errno::INVAL;
        for &features in features {
            let mut api = Api {
                version: 0xAA,
                features,
                ioctls: 0,
            };
            match ioctl(fd.as_fd(), UFFDIO_API, &mut api) {
                Ok(()) => {
                    return Ok(Self {
                        fd,
                        features,
                        merged: is_merged(),
                    });
                }
                Err(errno) => last = errno,
            }
        }
        Err(last.into())
    }

    /// Returns whether [`Self::move_pages`] works (Linux >= 6.8).
    #[must_use]
    pub const fn can_move(&self) -> bool {
        self.features & FEATURE_MOVE != 0
    }

    /// Returns whether [`Self::write_protect`] works on anonymous and shmem mappings (Linux >=
    /// 6.4).
    #[must_use]
    pub const fn can_write_protect(&self) -> bool {
        self.features & FEATURES_WP == FEATURES_WP
    }

    /// Returns whether write protection works, and stays in place in memory that is not
    /// `MADV_MERGEABLE`. KSM replaces a protected page by an unprotected one (`replace_page` in
    /// `mm/ksm.c`); the result is false if KSM may do so in all memory of this process.
    #[must_use]
    pub const fn protection_lasts(&self) -> bool {
        self.can_write_protect() && !self.merged
    }

    /// Starts to catch faults of `mode` in `area`.
    ///
    /// # Errors
    ///
    /// `EBUSY` if another userfaultfd is registered in the area, `EINVAL` if faults of a mapping
    /// cannot be caught (a file other than shmem), `ENOMEM` if there are too many mappings
    /// (`vm.max_map_count`).
    pub fn register(&self, area: Area, mode: Mode) -> Result<(), Errno> {
        let mut register = Register {
            range: range(area),
            mode: match mode {
                Mode::Missing => 1,
                Mode::WriteProtect => 2,
            },
            ioctls: 0,
        };
        ioctl(self.fd.as_fd(), UFFDIO_REGISTER, &mut register)
    }

    /// Stops catching faults in `area` and lifts write protection there. Wakes threads that wait
    /// for missing pages; threads that wait for the end of write protection need [`Self::wake`].
    pub fn unregister(&self, area: Area) -> Result<(), Errno> {
        ioctl(self.fd.as_fd(), UFFDIO_UNREGISTER, &mut range(area))
    }

    /// Wakes the threads that wait for a page of `area`, so that they access the page again. Works
    /// on any range, registered or not.
    pub fn wake(&self, area: Area) -> Result<(), Errno> {
        ioctl(self.fd.as_fd(), UFFDIO_WAKE, &mut range(area))
    }

    /// Moves the pages of `from` to `to` (`UFFDIO_MOVE`). `to` must have the same length, hold no
    /// pages, and be registered with this userfaultfd. Each page leaves and arrives atomically; a
    /// swapped page stays in swap. The move wakes no thread.
    ///
    /// Returns the number of pages moved, counted from the start, and the reason if the move
    /// stopped early:
    ///
    /// * `ENOENT`: a page is not in memory.
    /// * `EBUSY`: a page is pinned (DMA), shared after `fork(2)` or merged by KSM.
    /// * `EAGAIN`: call again. The kernel also returns `EAGAIN` if any page but the first stops the
    ///   move; the next call then returns the reason.
    /// * `EINVAL`: the range is not one anonymous mapping.
    ///
    /// In Linux 6.18 the number may be too small: pages that the next call finds at their target
    /// (`EEXIST`) may have been moved by this call.
    pub fn move_pages(&self, from: Area, to: Area) -> (u64, Option<Errno>) {
        /// Flag `UFFDIO_MOVE_MODE_DONTWAKE`.
        const DONTWAKE: u64 = 1;
        self.transfer(UFFDIO_MOVE, from, to, DONTWAKE)
    }

    /// Fills the missing pages of `to`, which is registered for [`Mode::Missing`], with the bytes
    /// of `from`. Each page appears atomically (`UFFDIO_COPY`).
    pub fn copy(&self, from: Area, to: Area) -> Result<(), Errno> {
        let (_, stopped) = self.transfer(UFFDIO_COPY, from, to, 0);
        stopped.map_or(Ok(()), Err)
    }

    /// Returns the number of pages moved or copied, and why that stopped early.
    fn transfer(
        &self,
        request: libc::c_ulong,
        from: Area,
        to: Area,
        mode: u64,
    ) -> (u64, Option<Errno>) {
        let pages = from.pages().min(to.pages());
        let mut argument = Transfer {
            dst: to.start().0,
            src: from.start().0,
            len: pages * PAGE_SIZE,
            mode,
            done: 0,
        };
        match ioctl(self.fd.as_fd(), request, &mut argument) {
            Ok(()) => (pages, None),
            Err(errno) => {
                let done = u64::try_from(argument.done).unwrap_or(0);
                (done / PAGE_SIZE, Some(errno))
            }
        }
    }

    /// Lifts the write protection of `area`, and wakes the threads that wait to write there.
    pub fn lift(&self, area: Area) -> Result<(), Errno> {
        self.set_protection(area, 0)
    }

    /// Reads the next event. Returns the address of the page for which a thread waits; `None` if
    /// there is no event, or if the event is no page fault.
    pub fn next_fault(&self) -> Result<Option<Hva>, Errno> {
        // The structure `struct uffd_msg`: the kind of event at 0, the address of a fault at 16.
        let mut message = [0; 32];
        match rustix::io::read(&self.fd, &mut message) {
            Ok(_) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno),
        }
        let address = message[16..]
            .first_chunk()
            .map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        let page = Hva(address - address % PAGE_SIZE);
        Ok((message[0] == EVENT_PAGEFAULT).then_some(page))
    }

    /// Protects every page of `area` against writes, missing pages included. The area must be
    /// registered for [`Mode::WriteProtect`].
    pub fn write_protect(&self, area: Area) -> Result<(), Errno> {
        self.set_protection(area, 1)
    }

    fn set_protection(&self, area: Area, mode: u64) -> Result<(), Errno> {
        let mut argument = WriteProtect {
            range: range(area),
            mode,
        };
        ioctl(self.fd.as_fd(), UFFDIO_WRITEPROTECT, &mut argument)
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns whether KSM may merge all memory of this process. Kernels before 6.4 lack this setting
/// and never do.
fn is_merged() -> bool {
    // SAFETY: takes no pointer.
    unsafe { libc::prctl(libc::PR_GET_MEMORY_MERGE, 0, 0, 0, 0) == 1 }
}

fn range(area: Area) -> Range {
    Range {
        start: area.start().0,
        len: area.bytes(),
    }
}

// Request numbers have 32 bits. With musl, `libc::Ioctl` is an `int`, which keeps them.
fn ioctl<T>(fd: BorrowedFd<'_>, request: libc::c_ulong, argument: &mut T) -> Result<(), Errno> {
    // SAFETY: every request above carries the size of `T` as the kernel knows it, and `argument`
    // lives through the call. What the requests do to memory, the makers of the `Area`s in them
    // have agreed to.
    check(unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            request as libc::Ioctl,
            std::ptr::from_mut(argument),
        )
    })
}
