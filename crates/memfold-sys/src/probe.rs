//! What this kernel's userfaultfd offers, asked by making one.
//!
//! Sources: `Documentation/admin-guide/mm/userfaultfd.rst`, `include/uapi/linux/userfaultfd.h`.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`: write protection.
pub const FEATURE_WRITE_PROTECT: u64 = 1 << 0;
/// `UFFD_FEATURE_MOVE`: `UFFDIO_MOVE`, Linux >= 6.8.
pub const FEATURE_MOVE: u64 = 1 << 16;

/// `UFFD_API`
const API: u64 = 0xAA;
/// `_IO(0xAA, 0x00)` on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xAA00;
/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}
const _: () = assert!(size_of::<Api>() == 24);

/// How a userfaultfd that takes kernel-mode faults (KVM, vhost, system calls) can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `userfaultfd(2)`: root, or `vm.unprivileged_userfaultfd=1`.
    SystemCall,
    /// `/dev/userfaultfd`, for those who may open it.
    Device,
}

/// A userfaultfd that takes kernel-mode faults: how it was had, and the kernel's `UFFD_FEATURE_*` bits.
/// An error when neither way is open; it is the device's.
pub fn userfault() -> io::Result<(Source, u64)> {
    match by_system_call() {
        Ok(fd) => Ok((Source::SystemCall, features(&fd)?)),
        Err(_) => {
            let fd = by_device()?;
            Ok((Source::Device, features(&fd)?))
        }
    }
}

fn by_system_call() -> io::Result<OwnedFd> {
    // SAFETY: the call takes flags only and makes a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    owned(fd)
}

fn by_device() -> io::Result<OwnedFd> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")?;
    // SAFETY: the request takes flags by value and makes a new descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC) };
    owned(fd.into())
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(fd) {
        // SAFETY: the kernel just made this descriptor for us and nobody else knows it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn features(fd: &OwnedFd) -> io::Result<u64> {
    let mut api = Api {
        api: API,
        features: 0,
        ioctls: 0,
    };
    // SAFETY: the argument has the layout that the kernel expects and lives through the call.
    let status = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut api) };
    if status == 0 {
        Ok(api.features)
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_moves_pages_also_write_protects_them() {
        match userfault() {
            // MOVE (6.8) is younger than write protection (5.7).
            Ok((_, features)) if features & FEATURE_MOVE != 0 => {
                assert_ne!(features & FEATURE_WRITE_PROTECT, 0);
            }
            Ok(_) => eprintln!("skipped: this kernel has no UFFDIO_MOVE"),
            Err(e) => eprintln!("skipped: no userfaultfd here: {e}"),
        }
    }
}
