//! Finds the files in which libvirt stores the XML of persistent domains. To look for a changed
//! domain costs one `stat` a domain and no call of libvirt.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Directory in which libvirt stores the XML of each persistent domain, as `NAME.xml` (`configDir`
/// in libvirt's `src/qemu/qemu_conf.c`).
pub const DEFAULT_STORED: &str = "/etc/libvirt/qemu";

/// Longest XML that libvirt accepts from a client, in bytes (`REMOTE_STRING_MAX` in libvirt's
/// `src/remote/remote_protocol.x`).
const LONGEST_XML: u64 = 4 << 20;

/// The version of a file: libvirt writes a new file for each change of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Version {
    fn of(file: &Metadata) -> Self {
        Self {
            inode: file.ino(),
            bytes: file.len(),
            modified: (file.mtime(), file.mtime_nsec()),
        }
    }
}

/// The file in which libvirt stores a domain's XML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Name of the domain.
    pub domain: String,
    /// Version of the file.
    pub version: Version,
    path: PathBuf,
}

impl Stored {
    /// Returns the files of all persistent domains in `directory`, except files that are longer
    /// than any XML that libvirt accepts; none if the directory does not exist.
    pub fn all(directory: &Path) -> io::Result<Vec<Self>> {
        let entries = match std::fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for entry in entries {
            // A domain may be undefined meanwhile.
            found.extend(Self::of(entry?.path()));
        }
        Ok(found)
    }

    fn of(path: PathBuf) -> Option<Self> {
        path.extension().filter(|kind| *kind == "xml")?;
        let file = path.metadata().ok().filter(Metadata::is_file)?;
        if file.len() > LONGEST_XML {
            return None;
        }
        Some(Self {
            domain: path.file_stem()?.to_str()?.to_owned(),
            version: Version::of(&file),
            path,
        })
    }

    /// Reads the file, or its beginning if it has become too long.
    pub fn read(&self) -> io::Result<String> {
        let mut text = String::new();
        let file = File::open(&self.path)?;
        file.take(LONGEST_XML).read_to_string(&mut text)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_domains_are_found_by_their_files_and_a_new_file_is_a_new_version() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::create_dir(at("networks")).unwrap();
        std::fs::create_dir(at("odd.xml")).unwrap();
        for name in ["Web 1.xml", "Web 2.xml.new", "notes"] {
            std::fs::write(at(name), "<domain/>").unwrap();
        }
        let found = Stored::all(place.path()).unwrap();
        let [web] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(web.domain, "Web 1");
        assert_eq!(web.read().unwrap(), "<domain/>");
        assert_eq!(Stored::all(place.path()).unwrap(), found);
        std::fs::write(at("new"), "<domain/>").unwrap();
        std::fs::rename(at("new"), at("Web 1.xml")).unwrap();
        let changed = Stored::all(place.path()).unwrap();
        assert_ne!(changed[0].version, web.version);
        assert_eq!(Stored::all(&at("none")).unwrap(), []);
    }

    #[test]
    fn a_file_longer_than_any_xml_of_libvirt_is_not_read() {
        let place = tempfile::tempdir().unwrap();
        let file = File::create(place.path().join("big.xml")).unwrap();
        file.set_len(LONGEST_XML).unwrap();
        let found = Stored::all(place.path()).unwrap();
        file.set_len(1 << 40).unwrap();
        assert_eq!(found[0].read().unwrap().len() as u64, LONGEST_XML);
        assert_eq!(Stored::all(place.path()).unwrap(), []);
    }
}
