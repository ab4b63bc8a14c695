//! Lets the guest's kernel use memory that virtio-mem plugs, and give it back later.
//!
//! A kernel may leave plugged memory offline until somebody sets it online; Debian 12's does. And a
//! kernel that uses plugged memory for everything cannot unplug it: a single page that cannot move
//! holds a whole block. So the agent sets two parameters of the kernel
//! (`Documentation/admin-guide/mm/memory-hotplug.rst`), before the daemon plugs anything:
//!
//! - `auto_online_blocks = online`, if it is `offline`,
//! - `online_policy = auto-movable`: most of the plugged memory holds only pages that can move. The
//!   kernel keeps the rest for its own data, at least a quarter of all memory
//!   (`auto_movable_ratio`).

use std::fs;
use std::io;
use std::path::Path;

/// Number of the device type `virtio-mem` (`linux/virtio_ids.h`).
const VIRTIO_MEM: u32 = 24;

/// Says whether the kernel sets plugged memory online by itself.
const ONLINE: &str = "sys/devices/system/memory/auto_online_blocks";

/// Says in which zone plugged memory is set online.
const POLICY: &str = "sys/module/memory_hotplug/parameters/online_policy";

/// Sets the kernel's parameters, if the VM has a virtio-mem device. `root` is `/` but in tests.
/// Returns whether there is such a device.
///
/// # Errors
///
/// The kernel refused a parameter; the message names it.
pub(crate) fn prepare(root: &Path) -> io::Result<bool> {
    if !has_device(root) {
        return Ok(false);
    }
    set(&root.join(POLICY), "contig-zones", "auto-movable")?;
    set(&root.join(ONLINE), "offline", "online")?;
    Ok(true)
}

fn has_device(root: &Path) -> bool {
    let devices = fs::read_dir(root.join("sys/bus/virtio/devices"));
    let mut devices = devices.into_iter().flatten().flatten();
    devices.any(|device| {
        let text = fs::read_to_string(device.path().join("device")).unwrap_or_default();
        u32::from_str_radix(text.trim().trim_start_matches("0x"), 16) == Ok(VIRTIO_MEM)
    })
}

/// Sets a parameter that has the kernel's default. One that the owner has chosen stays, and so does
/// one that this kernel does not have.
fn set(file: &Path, default: &str, value: &str) -> io::Result<()> {
    match fs::read_to_string(file) {
        Ok(text) if text.trim() == default => {}
        Ok(_) => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(named(file, &e)),
    }
    fs::write(file, value).map_err(|e| named(file, &e))
}

fn named(file: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(device: &str, online: &str, policy: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sys/bus/virtio/devices/virtio0/device", "0x0003\n");
        write("sys/bus/virtio/devices/virtio1/device", device);
        write(ONLINE, online);
        write(POLICY, policy);
        root
    }

    fn parameters(root: &tempfile::TempDir) -> [String; 2] {
        [ONLINE, POLICY].map(|path| fs::read_to_string(root.path().join(path)).unwrap())
    }

    #[test]
    fn a_guest_with_a_virtio_mem_device_sets_plugged_memory_online_for_pages_that_can_move() {
        let debian12 = guest("0x0018\n", "offline\n", "contig-zones\n");
        assert!(prepare(debian12.path()).unwrap());
        assert_eq!(parameters(&debian12), ["online", "auto-movable"]);
    }

    #[test]
    fn parameters_that_the_owner_chose_and_those_of_guests_without_the_device_stay() {
        let chosen = guest("0x0018\n", "online_kernel\n", "auto-movable\n");
        assert!(prepare(chosen.path()).unwrap());
        assert_eq!(parameters(&chosen), ["online_kernel\n", "auto-movable\n"]);
        let other = guest("0x0005\n", "offline\n", "contig-zones\n");
        assert!(!prepare(other.path()).unwrap());
        assert_eq!(parameters(&other), ["offline\n", "contig-zones\n"]);
        let empty = tempfile::tempdir().unwrap();
        assert!(!prepare(empty.path()).unwrap());
    }
}
