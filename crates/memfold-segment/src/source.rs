//! Opens the source from which a segment's files are taken: a directory, a disk image with a file
//! system, or Debian packages.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::error::{SegmentError, failed};
use super::ext;
use super::tools::{confined, run, run_in, run_with_input, tool};

/// Magic number of ext2, ext3 and ext4 at byte 1080 (`fs/ext4/ext4.h`).
const EXT_MAGIC: (u64, [u8; 2]) = (1080, [0x53, 0xEF]);
/// Offset (byte 1024) and bytes of the magic number of an EROFS image (`fs/erofs/erofs_fs.h`).
pub const EROFS_MAGIC: (u64, [u8; 4]) = (1024, [0xE2, 0xE1, 0xF5, 0xE0]);
/// Magic number of qcow2, QEMU's own format, at byte 0 (`docs/interop/qcow2.rst`).
const QCOW_MAGIC: [u8; 4] = *b"QFI\xFB";
/// Magic number of a partition table (MBR) at byte 510.
const MBR_MAGIC: [u8; 2] = [0x55, 0xAA];

/// Names in the root directory that are links into `/usr`, as in Debian since 12. Packages may
/// still name the old places.
const MERGED: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// A source of a segment's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Path of a directory that stands for the guest's root directory.
    Directory(PathBuf),
    /// Path of a raw image of an ext2, ext3 or ext4 file system.
    Ext(PathBuf),
    /// Path of an image of an EROFS file system.
    Erofs(PathBuf),
    /// Path of a Debian package file (`.deb`).
    PackageFile(PathBuf),
    /// Name of a Debian package, which apt fetches.
    Package(String),
}

impl Source {
    /// Parses the name of a source: the path of a directory, an image or a `.deb` file, or
    /// `package:NAME`. Fails if an image has an unknown format.
    pub fn find(text: &str) -> Result<Self, SegmentError> {
        let bad = |why: &str| SegmentError::Source {
            from: text.to_owned(),
            why: why.to_owned(),
        };
        if let Some(name) = text.strip_prefix("package:") {
            let letters =
                |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-.:".contains(c);
            if name.is_empty() || !name.chars().all(letters) || name.starts_with('-') {
                return Err(bad("that is not the name of a package"));
            }
            return Ok(Self::Package(name.to_owned()));
        }
        let path = Path::new(text).canonicalize().map_err(|error| {
            bad(&format!(
                "{error}; give a directory, a disk image, a .deb file, or package:NAME"
            ))
        })?;
        if path.is_dir() {
            return Ok(Self::Directory(path));
        }
        if path.extension().is_some_and(|e| e == "deb") {
            return Ok(Self::PackageFile(path));
        }
        let file = File::open(&path).map_err(|error| bad(&error.to_string()))?;
        let is_at = |at: u64, magic: &[u8]| {
            let mut found = vec![0; magic.len()];
            file.read_exact_at(&mut found, at).is_ok() && found == magic
        };
        if is_at(EXT_MAGIC.0, &EXT_MAGIC.1) {
            return Ok(Self::Ext(path));
        }
        if is_at(EROFS_MAGIC.0, &EROFS_MAGIC.1) {
            return Ok(Self::Erofs(path));
        }
        Err(bad(if is_at(0, &QCOW_MAGIC) {
            "the image is qcow2; convert it (qemu-img convert -O raw)"
        } else if is_at(510, &MBR_MAGIC) {
            "the image has partitions; give an image of the file system alone (cut it out with partx and dd)"
        } else {
            "the image contains neither an ext2, ext3 or ext4 nor an EROFS file system"
        }))
    }

    /// Returns the root directory of the source's files. Images and packages are unpacked into the
    /// empty directory `room`; a directory is used in place.
    pub fn open(&self, room: &Path) -> Result<PathBuf, SegmentError> {
        match self {
            Self::Directory(path) => return Ok(path.clone()),
            Self::Ext(image) => ext::unpack(image, room)?,
            Self::Erofs(image) => {
                let fsck = tool("fsck.erofs", "reads EROFS images", "erofs-utils")?;
                let mut command = confined(&fsck, room)?;
                command.arg(format!("--extract={}", room.display()));
                command.args(["--preserve", "--overwrite"]).arg(image);
                run_in("fsck.erofs", &mut command, room)?;
            }
            Self::PackageFile(file) => unpack_package(file, room)?,
            Self::Package(name) => {
                let apt = tool("apt-get", "fetches packages", "apt")?;
                let place = room.with_extension("packages");
                fs::create_dir(&place).map_err(failed(&place))?;
                let mut command = Command::new(apt);
                command.args(["-q", "download", name]);
                run("apt-get", command.current_dir(&place))?;
                for entry in fs::read_dir(&place).map_err(failed(&place))? {
                    unpack_package(&entry.map_err(failed(&place))?.path(), room)?;
                }
            }
        }
        Ok(room.to_owned())
    }
}

fn unpack_package(file: &Path, room: &Path) -> Result<(), SegmentError> {
    let dpkg = tool("dpkg-deb", "unpacks packages", "dpkg")?;
    // tar unpacks the files, because `dpkg-deb -x` refuses to write through the links made here.
    for name in MERGED {
        let (link, place) = (room.join(name), room.join("usr").join(name));
        if !link.exists() {
            fs::create_dir_all(&place).map_err(failed(&place))?;
            std::os::unix::fs::symlink(Path::new("usr").join(name), &link)
                .map_err(failed(&link))?;
        }
    }
    let tar = tool("tar", "unpacks packages", "tar")?;
    let mut unpacked = Command::new(dpkg)
        .arg("--fsys-tarfile")
        .arg(file)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed(file))?;
    let mut command = confined(&tar, room)?;
    command
        .args(["-x", "--numeric-owner", "--keep-directory-symlink", "-C"])
        .arg(room);
    if let Some(out) = unpacked.stdout.take() {
        command.stdin(out);
    }
    let taken = run_with_input("tar", &mut command);
    // This closes this process's end of the pipe; otherwise dpkg-deb would wait for a tar that has
    // failed.
    drop(command);
    if taken.is_err() {
        // dpkg-deb may hang. The kill fails only if it has ended.
        let _ = unpacked.kill();
    }
    let ended = unpacked.wait().map_err(failed(file))?;
    taken?;
    if ended.success() {
        return Ok(());
    }
    Err(SegmentError::Source {
        from: file.display().to_string(),
        why: "dpkg-deb cannot read the package".into(),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use memfold_host::files::program;

    use super::*;

    #[test]
    fn the_kind_of_a_segment_source_is_detected_from_its_magic_bytes() {
        let place = tempfile::tempdir().unwrap();
        let image = |name: &str, at: u64, magic: &[u8]| {
            let path = place.path().join(name);
            let mut file = File::create(&path).unwrap();
            file.set_len(4096).unwrap();
            file.write_all_at(magic, at).unwrap();
            file.flush().unwrap();
            Source::find(path.to_str().unwrap())
        };
        assert!(matches!(
            image("e", 1080, &[0x53, 0xEF]),
            Ok(Source::Ext(_))
        ));
        assert!(matches!(
            image("r", 1024, &EROFS_MAGIC.1),
            Ok(Source::Erofs(_))
        ));
        assert!(matches!(
            image("p.deb", 0, b"!<arch>"),
            Ok(Source::PackageFile(_))
        ));
        for (name, at, magic, word) in [
            ("q", 0, &QCOW_MAGIC[..], "qemu-img"),
            ("m", 510, &MBR_MAGIC[..], "partitions"),
            ("n", 0, &b"nothing"[..], "neither"),
        ] {
            let text = image(name, at, magic).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
        assert!(matches!(
            Source::find("package:apache2"),
            Ok(Source::Package(_))
        ));
        for (bad, why) in [
            ("package:", "not the name of a package"),
            ("package:-o", "not the name of a package"),
            ("package:a b", "not the name of a package"),
            ("/nowhere", "give a directory, a disk image"),
        ] {
            let error = Source::find(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
        assert_eq!(
            Source::find(place.path().to_str().unwrap()).unwrap(),
            Source::Directory(place.path().canonicalize().unwrap())
        );
    }

    #[test]
    fn debian_packages_are_unpacked_into_one_usr_merged_tree() {
        if program("dpkg-deb").is_none()
            || program("bwrap").is_none()
            || !rustix::process::getuid().is_root()
        {
            memfold_testkit::skip!("no dpkg-deb or no bwrap, or not root");
        }
        let place = tempfile::tempdir().unwrap();
        for (name, directory) in [("one", "usr/lib/one"), ("two", "lib/two")] {
            let root = place.path().join(name);
            fs::create_dir_all(root.join("DEBIAN")).unwrap();
            fs::create_dir_all(root.join(directory)).unwrap();
            fs::write(root.join(directory).join("file"), name).unwrap();
            let control = format!(
                "Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: a\nDescription: a\n"
            );
            fs::write(root.join("DEBIAN/control"), control).unwrap();
            run(
                "dpkg-deb",
                Command::new("dpkg-deb").arg("--build").arg(&root),
            )
            .unwrap();
        }
        let room = place.path().join("room");
        fs::create_dir(&room).unwrap();
        for name in ["one.deb", "two.deb"] {
            let source = Source::find(place.path().join(name).to_str().unwrap()).unwrap();
            assert_eq!(source.open(&room).unwrap(), room);
        }
        for name in ["one", "two"] {
            let file = room.join("usr/lib").join(name).join("file");
            assert_eq!(fs::read_to_string(file).unwrap(), name);
        }
    }
}
