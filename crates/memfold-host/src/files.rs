//! Finds memfold's own files on this host: the library for QEMU, guest images, and helper programs.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// File name of memfold's library that is preloaded into QEMU.
pub const LIBRARY: &str = "libmemfold_qemu.so";

/// Environment variable with the path of memfold's library for QEMU.
pub const LIBRARY_VARIABLE: &str = "MEMFOLD_QEMU_LIBRARY";

/// Environment variable with the directory that contains guest images.
pub const CACHE_VARIABLE: &str = "MEMFOLD_CACHE";

/// Finds memfold's library for QEMU: at the path `MEMFOLD_QEMU_LIBRARY` if that is set, else beside
/// the running program (or one directory up, for tests), else in `/usr/lib/memfold`.
///
/// # Errors
/// `NotFound` if the library is at none of these paths; the error names them.
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
    let why = format!("no {LIBRARY} at {}", places.join(", "));
    Err(io::Error::new(io::ErrorKind::NotFound, why))
}

/// A bootable guest image. VMs write to overlays, and never to the image's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestImage {
    /// Path of the guest's root disk: a raw ext4 file system, which the guest sees as `/dev/vda`.
    pub disk: PathBuf,
    /// Path of the guest's kernel.
    pub kernel: PathBuf,
    /// Path of the guest's initramfs.
    pub initrd: PathBuf,
    /// Version of the guest's kernel.
    pub kernel_version: String,
}

/// Returns the directory of guest images: `MEMFOLD_CACHE`, or else `memfold` in `XDG_CACHE_HOME` or
/// `~/.cache`.
pub fn image_directory() -> io::Result<PathBuf> {
    let set = |name| {
        Some(PathBuf::from(
            std::env::var_os(name).filter(|v| !v.is_empty())?,
        ))
    };
    set(CACHE_VARIABLE)
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("memfold")))
        .or_else(|| Some(set("HOME")?.join(".cache/memfold")))
        .ok_or_else(|| io::Error::other("neither MEMFOLD_CACHE, XDG_CACHE_HOME nor HOME is set"))
}

/// An entry of `images.json`. Data disks have no kernel.
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

/// Returns the bootable guest images built by `guest/build`, by name, with absolute paths. Images
/// with missing files are left out.
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

/// Returns the data disks built by `make setup`, by name, such as `linux-source`.
pub fn data_disks() -> io::Result<BTreeMap<String, PathBuf>> {
    let found = entries()?.into_iter();
    Ok(found
        .filter(|(_, e)| e.kernel.is_none() && e.disk.is_file())
        .map(|(name, e)| (name, e.disk))
        .collect())
}

/// Returns the program that builds guest images, as the package `memfold-bench` installs it:
/// `share/memfold/guest/build` beside the directory of the running program. `None` if the program
/// is not there; in a checkout, `make setup` builds guest images instead.
#[must_use]
pub fn image_builder() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let builder = own.ancestors().nth(2)?.join("share/memfold/guest/build");
    builder.is_file().then_some(builder)
}

/// Finds a program in `PATH`, `/usr/sbin` and `/sbin`. A user's `PATH` may lack the latter two.
#[must_use]
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|d| d.join(name))
        .find(|p| p.is_file())
}

/// Returns the path of the program `memfold`, for starting it. That is the running program, or in
/// tests the `memfold` beside the running program.
///
/// # Errors
/// An I/O error if the running program is not `memfold`, and there is no `memfold` beside it.
pub fn own_program() -> io::Result<PathBuf> {
    const NAME: &str = "memfold";
    let own = std::env::current_exe()?;
    let name = own.file_name().and_then(|name| name.to_str());
    if name == Some(NAME) {
        return Ok(own);
    }
    if name == Some("memfold (deleted)") {
        // The program's file was replaced by another version; the running version can still be
        // started.
        return Ok("/proc/self/exe".into());
    }
    // Tests run in target/release/deps, and `memfold` is in target/release.
    let mut beside = own.ancestors().skip(1).take(2).map(|d| d.join(NAME));
    beside.find(|path| path.is_file()).ok_or_else(|| {
        let why = format!("no program '{NAME}' beside {}", own.display());
        io::Error::new(io::ErrorKind::NotFound, why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_list_of_guest_images_the_entry_of_a_data_disk_has_no_kernel() {
        let text = r#"{"a": {"disk": "d", "kernel": "k", "initrd": "i", "kernel_version": "6.12", "base_key": "x"},
                       "linux-source": {"disk": "s", "kernel_version": "6.12"}}"#;
        let entries: BTreeMap<String, Entry> = serde_json::from_str(text).unwrap();
        assert!(entries["a"].kernel.is_some() && entries["linux-source"].kernel.is_none());
    }

    #[test]
    fn a_program_in_path_is_found_and_a_program_outside_path_is_not_found() {
        assert!(program("sh").is_some());
        assert_eq!(program("no-such-program-of-memfold"), None);
    }
}
