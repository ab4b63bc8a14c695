//! Reads the table of all mounts of the guest, from `/proc/thread-self/mountinfo`. The agent looks
//! there for mounted segments. ([`crate::mounts`] is a table of disk file systems only.)

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::error::{During, Result};
use crate::mounts::unescape;

/// One mount: a line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Path of the mount point.
    pub point: Vec<u8>,
    /// Type of the mounted file system, such as `ext4`.
    pub kind: Vec<u8>,
    /// Source of the mount: the mounted device or, for a file system without a device, the text in
    /// its place.
    pub source: Vec<u8>,
}

/// All mounts of a mount namespace, the newest last.
#[derive(Debug)]
pub struct MountTable(pub Vec<Mount>);

impl MountTable {
    /// Reads the mount table of this thread's mount namespace.
    pub fn read() -> Result<Self> {
        let path = "/proc/thread-self/mountinfo";
        Ok(Self::parse(
            &fs::read(path).during(|| format!("reading {path}"))?,
        ))
    }

    /// Parses the text of `/proc/PID/mountinfo`. Lines of an unknown form are skipped.
    pub fn parse(text: &[u8]) -> Self {
        Self(text.split(|b| *b == b'\n').filter_map(line).collect())
    }

    /// Returns the topmost mount whose mount point is exactly `path`.
    pub fn at(&self, path: &Path) -> Option<&Mount> {
        let path = path.as_os_str().as_bytes();
        self.0.iter().rev().find(|m| m.point == path)
    }

    /// Returns a mount whose mount point is below `path`, not at `path` itself; `None` if there is
    /// none.
    pub fn below(&self, path: &Path) -> Option<&Mount> {
        let mut prefix = path.as_os_str().as_bytes().to_vec();
        prefix.push(b'/');
        self.0.iter().find(|m| m.point.starts_with(&prefix))
    }
}

/// Parses one line of the mount table (`proc_pid_mountinfo(5)`).
fn line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|b| *b == b' ');
    let point = unescape(fields.nth(4)?);
    let mut fields = fields.skip_while(|f| *f != b"-").skip(1);
    Some(Mount {
        point,
        kind: fields.next()?.to_vec(),
        source: unescape(fields.next()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_several_mounts_cover_a_path_the_newest_mount_is_returned() {
        let table = MountTable::parse(
            b"22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
              23 22 0:40 / /usr rw - overlay memfold:web rw\n\
              24 22 0:41 / /usr/a\\040b rw master:1 - tmpfs x rw\n\
              25 23 0:42 / /usr rw - overlay other rw\n",
        );
        assert_eq!(table.at(Path::new("/usr")).unwrap().source, b"other");
        assert_eq!(
            table.below(Path::new("/usr")).unwrap().point,
            b"/usr/a b".to_vec()
        );
        assert!(table.below(Path::new("/us")).is_none());
    }
}
