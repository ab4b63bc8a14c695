//! Creates tap devices: Ethernet interfaces of the host whose frames a process reads and writes.
//!
//! Sources: `Documentation/networking/tuntap.rst`, `include/uapi/linux/if_tun.h`.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::result::check;

/// Request number `_IOW('T', 202, int)`; the kernel reads and writes a `struct ifreq` there.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;

const IFF_TAP: libc::c_short = 0x0002;
const IFF_NO_PI: libc::c_short = 0x1000;
const IFF_VNET_HDR: libc::c_short = 0x4000;

/// Creates a tap whose frames have offload headers (`struct virtio_net_hdr`), as QEMU's virtio
/// network card wants them. The kernel removes the tap when the last copy of the descriptor is
/// closed. `pattern`: name of the interface, at most 15 bytes, in which `%d` is the lowest free
/// number. Returns the descriptor and the interface's name.
///
/// # Errors
///
/// `PermissionDenied` without the right `CAP_NET_ADMIN`; `NotFound` if the kernel has no taps.
pub fn create(pattern: &str) -> io::Result<(OwnedFd, String)> {
    // SAFETY: all bits zero is a valid `ifreq`, which consists of integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte of the name stays zero.
    if pattern.is_empty() || pattern.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(pattern.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    let tun = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: the kernel reads and writes one `ifreq`, which lives during the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
    let name = request.ifr_name.map(|byte| byte.to_ne_bytes()[0]);
    let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
    Ok((tun.into(), name.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::skip;

    #[test]
    fn a_tap_exists_until_its_descriptor_is_closed() {
        if !rustix::process::geteuid().is_root() {
            skip!("only root can make taps");
        }
        let (tap, name) = create("mfsys%d").unwrap();
        assert!(name.starts_with("mfsys") && name.len() > 5, "{name}");
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::DGRAM,
            None,
        )
        .unwrap();
        let exists = || rustix::net::netdevice::name_to_index(&socket, &name).is_ok();
        assert!(exists());
        drop(tap);
        assert!(!exists());
        let error = create("a-name-of-16-byt").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
