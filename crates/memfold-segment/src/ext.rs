//! Unpacks a disk image with an ext2, ext3 or ext4 file system, from which a segment is built.
//! `debugfs` (e2fsprogs) reads the image, so neither a loop device nor a mount is needed.
//!
//! `debugfs` does not restore all file attributes. These attributes are queried separately and set
//! afterwards, so that builds are reproducible and programs keep their set-user-ID bits and
//! capabilities.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::fs::{Timespec, XattrFlags, lsetxattr};

use super::error::{SegmentError, failed};
use super::tools::{confined, output, run_in, tool};
use super::tree::{ATTRIBUTES, set_times};

/// Version of access lists on disk (`EXT4_ACL_VERSION`, `fs/ext4/acl.h`). The next constant:
/// version of the lists that the kernel accepts (`POSIX_ACL_XATTR_VERSION`,
/// `include/uapi/linux/posix_acl_xattr.h`).
const STORED_ACL: u32 = 1;
const ACL: u32 = 2;

/// Tags of access list entries for a named user or group (`include/uapi/linux/posix_acl.h`).
/// Entries with other tags have no number on disk.
const ACL_USER: u16 = 2;
const ACL_GROUP: u16 = 8;

/// Number of files that one run of debugfs is asked about. It prints about 600 bytes for each, and
/// the output of a program is limited (`memfold_host::helper`).
const BATCH: usize = 20_000;

/// Facts about a file, as debugfs reports them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Permission bits, set-user-ID bits included.
    pub mode: u32,
    /// Modification time: seconds since 1970, and nanoseconds.
    pub modified: (i64, i64),
    /// Extended attributes, as the kernel accepts them: name and value.
    pub attributes: Vec<(&'static str, Vec<u8>)>,
}

/// Unpacks the files of the ext2, ext3 or ext4 file system in `image` into the empty directory
/// `room`.
pub fn unpack(image: &Path, room: &Path) -> Result<(), SegmentError> {
    unpack_in_batches(image, room, BATCH)
}

/// Unpacks the files of an image as [`unpack`] does, and asks for the attributes of `batch` files
/// at once.
fn unpack_in_batches(image: &Path, room: &Path, batch: usize) -> Result<(), SegmentError> {
    let debugfs = tool("debugfs", "reads ext4 images", "e2fsprogs")?;
    for path in [image, room] {
        // The language of debugfs cannot express these characters.
        if path.to_string_lossy().contains(['"', '\n', '\\']) {
            return Err(SegmentError::Source {
                from: path.display().to_string(),
                why: "its path has a quotation mark, a backslash or a line feed".into(),
            });
        }
    }
    let request = format!("rdump / \"{}\"", room.display());
    let mut command = confined(&debugfs, room)?;
    let said = run_in("debugfs", command.args(["-R", &request]).arg(image), room)?;
    // debugfs always exits with 0. The lines that it prints, except its version, are errors.
    let errors: Vec<&str> = said
        .lines()
        .filter(|line| !line.starts_with("debugfs ") && !line.contains("lost+found"))
        .collect();
    if let Some(first) = errors.first() {
        return Err(wrong(format!("{first} ({} lines)", errors.len())));
    }
    restore_all(&debugfs, image, room, batch)
}

fn wrong(why: String) -> SegmentError {
    let program = "debugfs";
    SegmentError::Tool { program, why }
}

/// Restores the times of symbolic links, the set-user-ID bits of programs, and capabilities and
/// access lists of all files. Asks for those of `batch` files at once.
fn restore_all(
    debugfs: &Path,
    image: &Path,
    room: &Path,
    batch: usize,
) -> Result<(), SegmentError> {
    let mut found = Vec::new();
    find_all(room, &mut found).map_err(failed(room))?;
    // The language of debugfs cannot express these characters.
    let is_plain = |text: &str| !text.contains(['"', '\n', '\r', '\\']);
    found.retain(|path| path.to_str().is_some_and(is_plain));
    // A directory comes after its contents also across batches, so that its time is set last.
    for files in found.chunks(batch) {
        let told = ask(debugfs, image, room, files)?;
        for (path, facts) in files.iter().zip(told) {
            restore(path, &facts).map_err(failed(path))?;
        }
    }
    Ok(())
}

/// Asks debugfs for the facts about the files in `image` that were unpacked to the paths `files` in
/// `room`.
fn ask(
    debugfs: &Path,
    image: &Path,
    room: &Path,
    files: &[PathBuf],
) -> Result<Vec<Facts>, SegmentError> {
    let requests = room.with_extension("requests");
    let stat = |path: &PathBuf| {
        let path = path.strip_prefix(room).unwrap_or(path);
        format!("stat \"/{}\"\n", path.display())
    };
    let text: String = files.iter().map(stat).collect();
    fs::write(&requests, text).map_err(failed(&requests))?;
    let mut command = confined(debugfs, room)?;
    command.arg("-f").args([&requests, image]);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
    let said = output(command.stderr(Stdio::null()), || Ok(()));
    let said = said.map_err(|error| wrong(error.to_string()))?;
    fs::remove_file(&requests).map_err(failed(&requests))?;
    let told = facts(&String::from_utf8_lossy(&said.stdout)).map_err(wrong)?;
    if told.len() != files.len() {
        let why = format!("debugfs reported {} of {} files", told.len(), files.len());
        return Err(wrong(why));
    }
    Ok(told)
}

/// Finds all links, regular files and directories; a directory comes after its contents.
fn find_all(place: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            find_all(&entry.path(), found)?;
        }
        if kind.is_dir() || kind.is_symlink() || kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(())
}

/// Parses the facts about several files that debugfs prints for `stat`.
///
/// # Errors
///
/// The line that cannot be parsed, as text.
pub fn facts(said: &str) -> Result<Vec<Facts>, String> {
    let mut files: Vec<Facts> = Vec::new();
    for line in said.lines() {
        if let Some(mode) = mode(line) {
            files.push(Facts {
                mode,
                ..Facts::default()
            });
        }
        let Some(file) = files.last_mut() else {
            continue;
        };
        if let Some(time) = modified(line) {
            file.modified = time;
        }
        for name in ATTRIBUTES {
            if let Some((length, value)) = attribute(line, name) {
                let value = decode(name, length, value)
                    .ok_or_else(|| format!("debugfs reported '{}' for a file", line.trim()))?;
                file.attributes.push((name, value));
            }
        }
    }
    Ok(files)
}

/// Parses the mode in a line such as `Inode: 12   Type: regular    Mode:  04755   Flags: 0x80000`.
fn mode(line: &str) -> Option<u32> {
    let (_, rest) = line.strip_prefix("Inode: ")?.split_once("Mode:")?;
    u32::from_str_radix(rest.split_ascii_whitespace().next()?, 8).ok()
}

/// Parses a line such as ` mtime: 0x68f3b2a1:5f5e1000 -- Sat Oct 18 ...`: seconds since 1970, and
/// after the colon their upper two bits and the nanoseconds (`ext4_decode_extra_time`).
fn modified(line: &str) -> Option<(i64, i64)> {
    let time = line.trim_start().strip_prefix("mtime: 0x")?;
    let time = time.split(' ').next()?;
    let (low, extra) = time.split_once(':').unwrap_or((time, "0"));
    // From 2038 on, the lower half looks negative, and the upper bits correct that.
    let low = i64::from(u32::from_str_radix(low, 16).ok()?);
    let low = if low >= 1 << 31 { low - (1 << 32) } else { low };
    let extra = i64::from(u32::from_str_radix(extra, 16).ok()?);
    Some((low + ((extra & 3) << 32), extra >> 2))
}

/// Parses length and value in a line such as `  security.capability (20) = 01 00 00 02 ...`.
fn attribute<'a>(line: &'a str, name: &str) -> Option<(&'a str, &'a str)> {
    line.trim_start()
        .strip_prefix(name)?
        .strip_prefix(" (")?
        .split_once(") = ")
}

fn decode(name: &str, length: &str, value: &str) -> Option<Vec<u8>> {
    let bytes = value.split_ascii_whitespace();
    let bytes = bytes.map(|hex| u8::from_str_radix(hex, 16).ok());
    let bytes: Vec<u8> = bytes.collect::<Option<_>>()?;
    if length.parse() != Ok(bytes.len()) {
        return None;
    }
    if name.starts_with("system.posix_acl") {
        access_list(&bytes)
    } else {
        Some(bytes)
    }
}

/// Converts an access list from its form on disk to the form that the kernel accepts. On disk, only
/// entries for named users and groups have a number.
fn access_list(stored: &[u8]) -> Option<Vec<u8>> {
    let (version, mut rest) = stored.split_first_chunk()?;
    if u32::from_le_bytes(*version) != STORED_ACL {
        return None;
    }
    let mut list = ACL.to_le_bytes().to_vec();
    while let Some((entry, more)) = rest.split_first_chunk::<4>() {
        rest = more;
        list.extend_from_slice(entry);
        let tag = u16::from_le_bytes([entry[0], entry[1]]);
        let mut number = u32::MAX.to_le_bytes();
        if tag == ACL_USER || tag == ACL_GROUP {
            let (named, more) = rest.split_first_chunk()?;
            (number, rest) = (*named, more);
        }
        list.extend_from_slice(&number);
    }
    rest.is_empty().then_some(list)
}

fn restore(path: &Path, facts: &Facts) -> io::Result<()> {
    let now = fs::symlink_metadata(path)?;
    if !now.is_symlink() {
        if now.permissions().mode() & 0o7777 != facts.mode {
            fs::set_permissions(path, fs::Permissions::from_mode(facts.mode))?;
        }
        for (name, value) in &facts.attributes {
            lsetxattr(path, *name, value, XattrFlags::empty())?;
        }
    }
    let (tv_sec, tv_nsec) = facts.modified;
    set_times(path, Timespec { tv_sec, tv_nsec })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::tools::run;
    use memfold_host::files::program;

    #[test]
    fn modification_times_of_files_are_parsed_from_the_output_of_debugfs() {
        assert_eq!(
            modified(" mtime: 0x68f3b2a1:5f5e1000 -- Sat Oct 18 15:30:09 2025"),
            Some((0x68f3_b2a1, 400_000_000))
        );
        assert_eq!(
            modified(" mtime: 0x00000005 -- Thu Jan  1 00:00:05 1970"),
            Some((5, 0))
        );
        assert_eq!(
            modified(" mtime: 0xf4865700:00000001 -- 2100"),
            Some((4_102_444_800, 0))
        );
        let line = "Inode: 12   Type: regular    Mode:  04755   Flags: 0x80000";
        assert_eq!(
            (mode(line), mode("Generation: 7    Version: 0")),
            (Some(0o4755), None)
        );
        assert_eq!(modified(" ctime: 0x68f3b2a1:5f5e1000 -- Sat"), None);
    }

    #[test]
    fn if_debugfs_prints_a_malformed_security_attribute_this_is_an_error() {
        let file = "Inode: 12   Type: regular    Mode:  0755   Flags: 0x80000\n";
        let with = |line: &str| facts(&format!("{file}  {line}\n"));
        assert_eq!(
            with("security.capability (3) = 01 0a ff").unwrap()[0].attributes,
            [("security.capability", vec![1, 10, 255])]
        );
        assert_eq!(with("user.name (3) = \"abc\"").unwrap().len(), 1);
        for bad in [
            "security.capability (3) = \"abc\"",
            "security.capability (4) = 01 0a ff",
            "system.posix_acl_access (6) = 01 00 00 00 02 00",
            "system.posix_acl_access (4) = 02 00 00 00",
        ] {
            let error = with(bad).unwrap_err();
            assert_eq!(error, format!("debugfs reported '{bad}' for a file"));
        }
    }

    /// Returns whether an ext4 image can be made and unpacked here.
    fn has_tools() -> bool {
        let programs = ["mke2fs", "debugfs", "bwrap"];
        programs.iter().all(|name| program(name).is_some()) && rustix::process::getuid().is_root()
    }

    #[test]
    fn modes_and_times_are_right_if_debugfs_is_asked_about_the_files_in_several_batches() {
        if !has_tools() {
            memfold_testkit::skip!("no mke2fs, debugfs or bwrap, or not root");
        }
        let place = tempfile::tempdir().unwrap();
        let [from, image, room] = ["from", "image", "room"].map(|name| place.path().join(name));
        fs::create_dir(&room).unwrap();
        let mut paths = Vec::new();
        for directory in ["usr/bin", "usr/lib", "usr"] {
            fs::create_dir_all(from.join(directory)).unwrap();
            for number in 0..9 {
                let path = format!("{directory}/file{number}");
                fs::write(from.join(&path), &path).unwrap();
                paths.push(path);
            }
            paths.push(directory.to_owned());
        }
        // A directory comes after its files here, whose creation changed its time.
        for (path, number) in paths.iter().zip(1..) {
            let path = from.join(path);
            let mode = if path.is_dir() {
                0o2755
            } else {
                0o4700 + number
            };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let time = Timespec {
                tv_sec: 1000 + i64::from(number),
                tv_nsec: 0,
            };
            set_times(&path, time).unwrap();
        }
        fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-t", "ext4", "-d"]);
        run("mke2fs", mke2fs.args([&from, &image])).unwrap();
        unpack_in_batches(&image, &room, 4).unwrap();
        for path in &paths {
            let [was, is] = [&from, &room].map(|root| fs::metadata(root.join(path)).unwrap());
            let modes = [&was, &is].map(|facts| facts.permissions().mode());
            assert_eq!(modes[0], modes[1], "{path}");
            assert_eq!(was.modified().unwrap(), is.modified().unwrap(), "{path}");
        }
    }

    #[test]
    fn capabilities_access_lists_modes_and_times_are_extracted_from_an_ext4_image() {
        if !has_tools() {
            memfold_testkit::skip!("no mke2fs, debugfs or bwrap, or not root");
        }
        let place = tempfile::tempdir().unwrap();
        let (from, image, room) = (
            place.path().join("from"),
            place.path().join("image"),
            place.path().join("room"),
        );
        fs::create_dir_all(from.join("usr/bin")).unwrap();
        fs::create_dir(&room).unwrap();
        let ping = from.join("usr/bin/ping");
        fs::write(&ping, "ping").unwrap();
        fs::set_permissions(&ping, fs::Permissions::from_mode(0o2755)).unwrap();
        // A `struct vfs_cap_data` with CAP_NET_RAW; and an access list with an entry for a named
        // user.
        let mut capability = vec![1, 0, 0, 2, 0, 0x20];
        capability.resize(20, 0);
        let mut list = ACL.to_le_bytes().to_vec();
        for (tag, number) in [
            (1_u16, u32::MAX),
            (2, 1000),
            (4, u32::MAX),
            (16, u32::MAX),
            (32, u32::MAX),
        ] {
            list.extend_from_slice(&tag.to_le_bytes());
            list.extend_from_slice(&5_u16.to_le_bytes());
            list.extend_from_slice(&number.to_le_bytes());
        }
        let set = |path: &Path, name: &str, value: &[u8]| {
            lsetxattr(path, name, value, XattrFlags::empty()).is_ok()
        };
        let has = set(&ping, "security.capability", &capability)
            && set(&from.join("usr"), "system.posix_acl_default", &list)
            && set(&ping, "system.posix_acl_access", &list);
        if !has {
            memfold_testkit::skip!("this file system has no capabilities or access lists");
        }
        // mke2fs does not copy fractions of seconds.
        let time = Timespec {
            tv_sec: 1000,
            tv_nsec: 0,
        };
        for path in ["usr/bin/ping", "usr/bin", "usr"] {
            set_times(&from.join(path), time).unwrap();
        }
        fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-t", "ext4", "-d"]);
        run("mke2fs", mke2fs.args([&from, &image])).unwrap();
        unpack(&image, &room).unwrap();
        let value = |path: &Path, name: &str| {
            let mut value = vec![0; 256];
            let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
            value.truncate(length);
            value
        };
        let out = room.join("usr/bin/ping");
        assert_eq!(value(&out, "security.capability"), capability);
        assert_eq!(value(&out, "system.posix_acl_access"), list);
        assert_eq!(value(&room.join("usr"), "system.posix_acl_default"), list);
        for path in ["usr/bin/ping", "usr/bin", "usr"] {
            let (was, is) = (
                fs::metadata(from.join(path)).unwrap(),
                fs::metadata(room.join(path)).unwrap(),
            );
            assert_eq!(was.permissions().mode(), is.permissions().mode(), "{path}");
            assert_eq!(was.modified().unwrap(), is.modified().unwrap(), "{path}");
        }
    }
}
