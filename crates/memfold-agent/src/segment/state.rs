//! The agent's own files about segments: their paths, the lock that protects them, and the record
//! of the segments that must be mounted again after a reboot.
//!
//! ```text
//!   /run/memfold/segments.lock              held by a process that changes any of these files
//!   /run/memfold/segments/NAME@GEN/         the image, mounted (mode 0700 above: old setuid programs stay out of reach)
//!   /var/lib/memfold/segments/NAME/laid     how to mount the segment again after a reboot: "generation 3", "content 0", "max-differing 25", "lay /usr"
//!   /var/lib/memfold/segments/NAME/layers/ESCAPED-DIR/{mask,upper,work}
//!                                  .../layers/ESCAPED-DIR/verified   empty: the mounted overlay was checked
//! ```

use std::cell::Cell;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::error::{During, Error, Result};
use super::manifest::{check_directory, check_name};

/// Longest wait for the lock, which another run of the agent may hold.
const LOCK_PATIENCE: Duration = Duration::from_secs(120);

/// Paths of the directories that segment operations use. Tests use other paths.
#[derive(Clone, Debug)]
pub struct Places {
    /// Path of the guest's root directory: `/`.
    pub root: PathBuf,
    /// Path of the directory for the lock and the mounted images: `/run/memfold`.
    pub run: PathBuf,
    /// Path of the directory for records and overlay directories: `/var/lib/memfold/segments`.
    pub state: PathBuf,
    /// Path of the directory with device files: `/dev`.
    pub dev: PathBuf,
    /// Counter of changes on disk, by which tests simulate a power cut.
    pub steps: Steps,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            root: "/".into(),
            run: "/run/memfold".into(),
            state: "/var/lib/memfold/segments".into(),
            dev: "/dev".into(),
            steps: Steps::default(),
        }
    }
}

/// Counter of changes on disk that fails once, after a number of steps, to simulate a power cut. It
/// never fails outside of tests.
#[derive(Clone, Debug, Default)]
pub struct Steps(Cell<Option<u64>>);

impl Steps {
    /// Creates a counter whose step `number` (from 0) fails.
    pub const fn ending_at(number: u64) -> Self {
        Self(Cell::new(Some(number)))
    }

    /// Counts a step; fails if the test ends here. Call this before each change on disk.
    pub fn step(&self) -> io::Result<()> {
        let left = self.0.get();
        self.0.set(left.and_then(|left| left.checked_sub(1)));
        match left {
            Some(0) => Err(io::Error::other("this is where the test ends it")),
            _ => Ok(()),
        }
    }
}

impl Places {
    /// Returns the path by which the agent opens the guest directory `directory`; another path only
    /// in tests.
    pub fn own(&self, directory: &[u8]) -> PathBuf {
        let inner = directory.strip_prefix(b"/").unwrap_or(directory);
        self.root.join(std::ffi::OsStr::from_bytes(inner))
    }

    /// Returns the path of the directory below which segments' images are mounted.
    pub fn segments(&self) -> PathBuf {
        self.run.join("segments")
    }

    /// Returns the path at which the image of segment `name`, `generation` is mounted.
    pub fn mounted(&self, name: &str, generation: u64) -> PathBuf {
        self.segments().join(format!("{name}@{generation}"))
    }

    /// Returns the directory that holds all layers of the segment `name`. A layer is the set of
    /// overlay directories (`mask`, `upper`, `work`) for one guest directory over which the segment
    /// is mounted.
    pub fn layers(&self, name: &str) -> PathBuf {
        self.state.join(name).join("layers")
    }

    /// Returns the directory that holds the overlay directories (`mask`, `upper`, `work`) of
    /// segment `name` for one guest directory.
    pub fn layer(&self, name: &str, directory: &[u8]) -> PathBuf {
        let escaped = std::ffi::OsString::from_vec(escape(directory));
        self.layers(name).join(escaped)
    }

    /// Returns the guest directories for which the segment `name` has overlay directories on disk,
    /// mounted or left over, sorted.
    pub fn layer_directories(&self, name: &str) -> Result<Vec<Vec<u8>>> {
        let names = file_names(&self.layers(name))?;
        let found = names.iter().filter_map(|n| unescape(n));
        let mut found: Vec<Vec<u8>> = found.filter(|d| check_directory(d).is_ok()).collect();
        found.sort();
        Ok(found)
    }

    /// Returns the names of all segments that have files on the guest's disk, sorted.
    pub fn known(&self) -> Result<Vec<String>> {
        let names = file_names(&self.state)?;
        let mut names: Vec<String> = names.iter().filter_map(|n| check_name(n).ok()).collect();
        names.sort();
        Ok(names)
    }

    /// Creates the agent's directories and takes the lock of segments. The lock is released when
    /// the returned file is dropped. Waits up to two minutes for another run of the agent.
    pub fn lock(&self) -> Result<File> {
        let make = |path: &Path, mode| {
            DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(path)
                .during(|| format!("making {}", path.display()))
        };
        make(&self.run, 0o755)?;
        make(&self.segments(), 0o700)?;
        let path = self.run.join("segments.lock");
        let what = || format!("locking {}", path.display());
        let file = File::create(&path).during(what)?;
        let start = Instant::now();
        while let Err(e) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if e != rustix::io::Errno::WOULDBLOCK {
                return Err(e).during(what);
            }
            if start.elapsed() > LOCK_PATIENCE {
                return Err(Error::refused(
                    format!("another run has held {} for two minutes", path.display()),
                    "check what that run is doing, or end it",
                ));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(file)
    }

    /// Records how the segment `name` is to be mounted again after a reboot.
    pub fn write_record(&self, name: &str, record: &Record) -> Result<()> {
        let path = self.state.join(name).join("laid");
        let what = || format!("writing {}", path.display());
        let mut text = format!(
            "generation {}\ncontent {}\nmax-differing {}\n",
            record.generation,
            u8::from(record.content),
            record.max_differing
        )
        .into_bytes();
        for directory in &record.lay {
            text.extend(b"lay ");
            text.extend(directory);
            text.push(b'\n');
        }
        self.steps.step().during(what)?;
        let temporary = path.with_extension("new");
        let mut file = File::create(&temporary).during(what)?;
        file.write_all(&text).during(what)?;
        file.sync_all().during(what)?;
        fs::rename(&temporary, &path).during(what)
    }

    /// Reads the record of how the segment `name` is to be mounted again; `None` if there is none
    /// or if it is malformed.
    pub fn record(&self, name: &str) -> Option<Record> {
        let text = fs::read(self.state.join(name).join("laid")).ok()?;
        let mut record = Record::default();
        let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<u64>().ok();
        for line in text.split(|b| *b == b'\n') {
            if let Some(directory) = line.strip_prefix(b"lay ") {
                check_directory(directory).ok()?;
                record.lay.push(directory.to_vec());
            } else if let Some(text) = line.strip_prefix(b"generation ") {
                record.generation = number(text)?;
            } else if let Some(text) = line.strip_prefix(b"content ") {
                record.content = number(text)? != 0;
            } else if let Some(text) = line.strip_prefix(b"max-differing ") {
                record.max_differing = number(text)?.try_into().ok()?;
            }
        }
        (!record.lay.is_empty()).then_some(record)
    }

    /// Removes the record of segment `name`, so that the segment is not mounted again after a
    /// reboot.
    pub fn remove_record(&self, name: &str) -> Result<()> {
        let path = self.state.join(name).join("laid");
        let what = || format!("removing {}", path.display());
        self.steps.step().during(what)?;
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).during(what),
            _ => Ok(()),
        }
    }

    /// Removes the directories of segment `name` on the guest's disk if they are empty.
    pub fn forget_if_empty(&self, name: &str) {
        let _ = fs::remove_dir(self.layers(name));
        let _ = fs::remove_dir(self.state.join(name));
    }
}

/// Content of a segment's file `laid`: how to mount the segment again after a reboot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Number of the segment's generation (build) that was mounted.
    pub generation: u64,
    /// Whether the bytes of the segment's and the guest's files are compared before mounting.
    pub content: bool,
    /// Maximum percentage of the segment's files that may differ from the guest's, 0 to 100.
    pub max_differing: u8,
    /// Paths of the guest directories over which the segment was mounted.
    pub lay: Vec<Vec<u8>>,
}

fn file_names(directory: &Path) -> Result<Vec<Vec<u8>>> {
    let what = || format!("reading {}", directory.display());
    match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries
            .during(what)?
            .map(|entry| Ok(entry.during(what)?.file_name().into_vec()))
            .collect(),
    }
}

/// Escapes `/usr/my-lib` as `usr-my%2dlib`: a file name without `:` and `,`, which separate
/// overlayfs' options.
fn escape(directory: &[u8]) -> Vec<u8> {
    let inner = directory.strip_prefix(b"/").unwrap_or(directory);
    let mut out = Vec::new();
    for byte in inner {
        match byte {
            b'/' => out.push(b'-'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => out.push(*byte),
            // This also encodes dots, because "." and ".." are no file names.
            _ => out.extend(format!("%{byte:02x}").bytes()),
        }
    }
    out
}

fn unescape(name: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![b'/'];
    let mut rest = name;
    while let Some((byte, tail)) = rest.split_first() {
        rest = tail;
        out.push(match byte {
            b'-' => b'/',
            b'%' => {
                let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
                rest = &tail[2..];
                u8::from_str_radix(digits, 16).ok()?
            }
            other => *other,
        });
    }
    (escape(&out) == name).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_directory_path_that_is_escaped_to_a_file_name_unescapes_to_the_same_path(path in proptest::collection::vec(any::<u8>(), 1..66)) {
            let mut directory = vec![b'/'];
            directory.extend(&path);
            let name = escape(&directory);
            prop_assert!(name.len() < 256 && !name.contains(&b'/') && !name.contains(&b':') && !name.contains(&b','));
            prop_assert_eq!(unescape(&name), Some(directory));
        }

        #[test]
        fn unescaping_an_arbitrary_file_name_never_causes_a_panic(name in proptest::collection::vec(any::<u8>(), 0..20)) {
            unescape(&name);
        }
    }

    #[test]
    fn a_record_of_a_mounted_segment_reads_back_equal_after_it_was_saved() {
        let directory = tempfile::tempdir().unwrap();
        let places = Places {
            state: directory.path().into(),
            ..Places::default()
        };
        fs::create_dir(directory.path().join("web")).unwrap();
        let record = Record {
            generation: 3,
            content: true,
            max_differing: 40,
            lay: vec![b"/usr".to_vec(), b"/opt".to_vec()],
        };
        places.write_record("web", &record).unwrap();
        assert_eq!(places.record("web"), Some(record));
        assert_eq!(places.known().unwrap(), ["web"]);
        places.remove_record("web").unwrap();
        assert_eq!(places.record("web"), None);
    }
}
