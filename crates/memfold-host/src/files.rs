//! Locations of memfold's own files on this host: the library for QEMU, guest images, and programs.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// File name of the library.
pub const LIBRARY: &str = "libmemfold_qemu.so";

/// Environment variable that names the library.
pub const LIBRARY_VARIABLE: &str = "MEMFOLD_QEMU_LIBRARY";

/// Environment variable that names the directory of guest images.
pub const CACHE_VARIABLE: &str = "MEMFOLD_CACHE";

/// The library: what `MEMFOLD_QEMU_LIBRARY` names, else beside the running program (or one
/// directory up, for tests), else in `/usr/lib/memfold`. `NotFound` tells where it was looked for.
pub fn library() -> io::Result<PathBuf> {
    let candidates = if let Some(path) = std::env::var_os(LIBRARY_VARIABLE) {
        vec![PathBuf::from(path)]
    } else {
        let program = std::env::current_exe()?;
        let beside = program.ancestors().skip(1).take(2).map(|d| d.join(LIBRARY));
        beside
            .chain([Path::new("/usr/lib/memfold").join(LIBRARY)])
            .collect()
    };
    if let Some(path) = candidates.iter().find(|p| p.is_file()) {
        return path.canonicalize();
    }
    let places: Vec<_> = candidates.iter().map(|p| p.display().to_string()).collect();
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("no {LIBRARY} at {}", places.join(", ")),
    ))
}

/// A guest image. Its files are never written: use an overlay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestImage {
    /// Raw ext4 file system, the guest's `/dev/vda`.
    pub disk: PathBuf,
    /// Its kernel.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initrd: PathBuf,
    /// The kernel's version.
    pub kernel_version: String,
}

/// The directory of guest images: `MEMFOLD_CACHE`, else `memfold` in `XDG_CACHE_HOME` or
/// `~/.cache`.
pub fn image_directory() -> io::Result<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    set(CACHE_VARIABLE)
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("memfold")))
        .or_else(|| Some(set("HOME")?.join(".cache/memfold")))
        .ok_or_else(|| io::Error::other("neither MEMFOLD_CACHE, XDG_CACHE_HOME nor HOME is set"))
}

/// An entry of `images.json`; data disks have no kernel.
#[derive(Deserialize)]
struct Entry {
    disk: PathBuf,
    kernel: Option<PathBuf>,
    initrd: Option<PathBuf>,
    #[serde(default)]
    kernel_version: String,
}

fn entries() -> io::Result<BTreeMap<String, Entry>> {
    let directory = image_directory()?;
    let path = directory.join("images.json");
    let text = std::fs::read(&path)
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    let mut entries: BTreeMap<String, Entry> = serde_json::from_slice(&text)
        .map_err(|e| io::Error::other(format!("{}: {e}", path.display())))?;
    for entry in entries.values_mut() {
        let optional = [entry.kernel.as_mut(), entry.initrd.as_mut()];
        for file in optional.into_iter().flatten().chain([&mut entry.disk]) {
            *file = directory.join(&*file);
        }
    }
    Ok(entries)
}

/// The bootable guest images that `make setup` built, by name, with absolute paths; only those
/// whose files are all there.
pub fn guest_images() -> io::Result<BTreeMap<String, GuestImage>> {
    let bootable = |entry: Entry| {
        let image = GuestImage {
            disk: entry.disk,
            kernel: entry.kernel?,
            initrd: entry.initrd?,
            kernel_version: entry.kernel_version,
        };
        let files = [&image.disk, &image.kernel, &image.initrd];
        files.iter().all(|p| p.is_file()).then_some(image)
    };
    let found = entries()?.into_iter();
    Ok(found
        .filter_map(|(name, e)| Some((name, bootable(e)?)))
        .collect())
}

/// The disks that `make setup` built and that hold data alone, by name (`linux-source`).
pub fn data_disks() -> io::Result<BTreeMap<String, PathBuf>> {
    let found = entries()?.into_iter();
    Ok(found
        .filter(|(_, e)| e.kernel.is_none() && e.disk.is_file())
        .map(|(name, e)| (name, e.disk))
        .collect())
}

/// Where the shell would find `name`; also looks where programs for the administrator are, which a
/// user's `PATH` lacks.
#[must_use]
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|d| d.join(name))
        .find(|p| p.is_file())
}

/// The path by which this program is started again: its own, or in a test of it the one beside.
///
/// # Errors
/// There is none: this is another program.
pub fn own_program() -> io::Result<PathBuf> {
    const NAME: &str = "memfold";
    let own = std::env::current_exe()?;
    let name = own.file_name().and_then(|name| name.to_str());
    if name == Some(NAME) {
        return Ok(own);
    }
    if name == Some("memfold (deleted)") {
        // Another version has taken its place; this one is still there to be started.
        return Ok("/proc/self/exe".into());
    }
    // target/release/deps, target/release
    let beside = own.ancestors().skip(1).take(2).map(|d| d.join(NAME));
    beside
        .into_iter()
        .find(|path| path.is_file())
        .ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("no program '{NAME}' beside {}", own.display()),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_data_disks_have_no_kernel() {
        let text = r#"{"a": {"disk": "d", "kernel": "k", "initrd": "i", "kernel_version": "6.12", "base_key": "x"},
                       "linux-source": {"disk": "s", "kernel_version": "6.12"}}"#;
        let entries: BTreeMap<String, Entry> = serde_json::from_str(text).unwrap();
        assert!(entries["a"].kernel.is_some() && entries["linux-source"].kernel.is_none());
    }

    #[test]
    fn a_shell_is_found_and_nonsense_is_not() {
        assert!(program("sh").is_some());
        assert_eq!(program("no-such-program-of-memfold"), None);
    }
}
