//! memfold's own files on this host: the library for QEMU and the guest images.

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

/// The library: what `MEMFOLD_QEMU_LIBRARY` names, else beside the running program (or one directory up, for tests), else in
/// `/usr/lib/memfold`. `NotFound` tells where it was looked for.
pub fn library() -> io::Result<PathBuf> {
    let candidates = match std::env::var_os(LIBRARY_VARIABLE) {
        Some(path) => vec![PathBuf::from(path)],
        None => {
            let program = std::env::current_exe()?;
            let beside = program.ancestors().skip(1).take(2).map(|d| d.join(LIBRARY));
            beside
                .chain([Path::new("/usr/lib/memfold").join(LIBRARY)])
                .collect()
        }
    };
    match candidates.iter().find(|p| p.is_file()) {
        Some(path) => path.canonicalize(),
        None => {
            let places: Vec<_> = candidates.iter().map(|p| p.display().to_string()).collect();
            Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("no {LIBRARY} at {}", places.join(", ")),
            ))
        }
    }
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

/// The directory of guest images: `MEMFOLD_CACHE`, else `memfold` in `XDG_CACHE_HOME` or `~/.cache`.
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

/// The guest images that `make setup` built, by name, with absolute paths; only those whose files are all there.
pub fn guest_images() -> io::Result<BTreeMap<String, GuestImage>> {
    let directory = image_directory()?;
    let text = std::fs::read(directory.join("images.json"))?;
    let entries: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&text)?;
    // Data disks (the kernel's source) are listed there too; they have no kernel to boot.
    let bootable = entries
        .into_iter()
        .filter(|(_, entry)| entry.get("kernel").is_some());
    let mut images = bootable
        .map(|(name, entry)| Ok((name, serde_json::from_value(entry)?)))
        .collect::<serde_json::Result<BTreeMap<String, GuestImage>>>()?;
    for image in images.values_mut() {
        for path in [&mut image.disk, &mut image.kernel, &mut image.initrd] {
            *path = directory.join(&*path);
        }
    }
    images.retain(|_, i| [&i.disk, &i.kernel, &i.initrd].iter().all(|p| p.is_file()));
    Ok(images)
}
