//! Makes fingerprints of VMs' memory (`memfold estimate --fingerprint`). The fingerprints of two
//! hosts tell how many page contents their VMs have in common, without revealing the contents. They
//! show which VMs should run on the same host.
//!
//! The method follows Memory Buddies (Wood et al., VEE 2009), with a sample in place of a Bloom
//! filter of all pages. The hash of a page's content decides whether the content is in the sample,
//! so it is then in the fingerprint of every VM that holds it. One content in 2^level is sampled.
//! Therefore the number of contents that two fingerprints have in common is multiplied by 2^level.
//! Contents are hashed with a secret key that the hosts share, so that a fingerprint alone cannot
//! be searched for a known page. A fingerprint stores each content as a number of 64 bits:
//!
//! ```text
//!   a content, 64 bits:   6: number of leading zero bits of its sampling hash (limited to 63)
//!                        58: from the BLAKE3 hash of its sampling hash, keyed; the sampling seed comes from the key too
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memfold_units::PAGE_SIZE;
use procfs::process::Process;
use serde::{Deserialize, Serialize};

use super::look::Looked;
use super::sample::Again;
use super::targets::Target;

/// Format number of the fingerprints that this code reads and writes.
pub const FORMAT: u32 = 1;

/// Most contents of one VM in a fingerprint. The computed common part of two VMs is then right
/// within about 1.5 % of either VM, at 95 % confidence.
const MOST_CONTENTS: usize = 1 << 14;

/// Greatest level that the 64 bits of a content can hold.
const MOST_LEVEL: u32 = 63;

/// Error of reading or creating a key file.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The key file cannot be read or created.
    #[error("cannot read or create the key file {path}")]
    File {
        /// Path of the key file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The file does not contain a key.
    #[error("{0} is not a key file; a key file contains one line of 64 hexadecimal digits")]
    Format(PathBuf),
    /// Users other than the owner may read the file.
    #[error("other users may read the key {0}; run 'chmod 600 {0}'")]
    Open(PathBuf),
}

impl KeyError {
    fn of(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        |source| Self::File { path, source }
    }
}

/// The secret key that hosts share to compare fingerprints.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Key").field(&self.id()).finish()
    }
}

impl Key {
    /// Reads the key from the file `path`, or creates this file with a new key. The boolean is true
    /// if the key is new.
    pub fn open(path: &Path) -> Result<(Self, bool), KeyError> {
        match File::open(path) {
            Ok(file) => Self::read(path, file).map(|key| (key, false)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok((Self::make(path).map_err(KeyError::of(path))?, true))
            }
            Err(error) => Err(KeyError::of(path)(error)),
        }
    }

    fn read(path: &Path, mut file: File) -> Result<Self, KeyError> {
        if file.metadata().map_err(KeyError::of(path))?.mode() & 0o077 != 0 {
            return Err(KeyError::Open(path.into()));
        }
        let mut text = String::new();
        // Whatever file was named, no more bytes are read than a key has.
        (&mut file)
            .take(128)
            .read_to_string(&mut text)
            .map_err(KeyError::of(path))?;
        let key = blake3::Hash::from_hex(text.trim());
        let key = key.map_err(|_| KeyError::Format(path.into()))?;
        Ok(Self(key.into()))
    }

    fn make(path: &Path) -> io::Result<Self> {
        let mut key = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        let text = format!("{}\n", blake3::Hash::from(key));
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        Ok(Self(key))
    }

    fn hash(&self, what: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.0, what)
    }

    /// Returns an identifier of the key: 16 hexadecimal digits of a hash, which do not reveal the
    /// key. Equal identifiers show that two fingerprints were made with the same key.
    #[must_use]
    pub fn id(&self) -> String {
        let hash = self.hash(b"memfold fingerprint: name of the key");
        hash.to_hex()[..16].to_owned()
    }

    /// Returns the seed of the hash that decides which contents are sampled. Hosts with the same
    /// key sample the same contents.
    #[must_use]
    pub fn seed(&self) -> u64 {
        first(self.hash(b"memfold fingerprint: seed of the sample"))
    }

    fn content(&self, hash: u64) -> u64 {
        let level = hash.leading_zeros().min(MOST_LEVEL);
        u64::from(level) << 58 | first(self.hash(&hash.to_le_bytes())) >> 6
    }
}

fn first(hash: blake3::Hash) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|at| hash.as_bytes()[at]))
}

/// Returns the highest sample level at which `content`, a number from [`VmPrint::contents`], is
/// sampled.
#[must_use]
pub const fn level_of(content: u64) -> u32 {
    (content >> 58) as u32
}

/// Fingerprint of one VM's memory: hashes of sampled page contents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmPrint {
    /// Name of the VM.
    pub name: String,
    /// Trust domain of the VM; null: the VM shares with no other VM.
    pub domain: Option<String>,
    /// Bytes of the VM's RAM that are in the host's memory, shared or not.
    pub ram_bytes: u64,
    /// Bytes that the VM's QEMU takes beside the VM's RAM (PSS).
    pub beside_bytes: u64,
    /// Sampled page contents of the VM as keyed hashes of 64 bits, each once, sorted.
    pub contents: Vec<u64>,
}

/// Fingerprint of the memory of all VMs on one host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// Number of the fingerprint's format, [`FORMAT`].
    pub format: u32,
    /// Name of the host.
    pub host: String,
    /// Identifier of the key with which the fingerprint was made, [`Key::id`].
    pub key: String,
    /// Level of the sample: one page content in 2^level was sampled.
    pub level: u32,
    /// `MemTotal` of the host, in bytes.
    pub memory_bytes: u64,
    /// Bytes that everything on the host except its VMs uses.
    pub others_bytes: u64,
    /// Fingerprints of the host's VMs.
    pub vms: Vec<VmPrint>,
}

/// Total and available memory of a host.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostMemory {
    /// `MemTotal` of the host, in bytes.
    pub total_bytes: u64,
    /// `MemAvailable` of the host, in bytes.
    pub available_bytes: u64,
}

/// Makes the fingerprint of the host named `host` from the pages in `looked`. The pages must have
/// been read with [`super::Options::reads_files`] set, and with the key's seed.
pub fn of(looked: &Looked, key: &Key, host: &str, memory: HostMemory) -> io::Result<Fingerprint> {
    let mut contents: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    // A page that changed between the two reads is not shareable.
    let stays = looked.sample.pages.iter();
    for seen in stays.filter(|seen| seen.again != Again::Changed) {
        let of_vm = contents.entry(seen.vm).or_default();
        of_vm.push(key.content(seen.hash));
    }
    let mut level = looked.sample.level();
    for (hash, frequent) in &looked.sample.frequent {
        for vm in 0..looked.targets.len() {
            let number = u32::try_from(vm).unwrap_or(u32::MAX);
            if frequent.of(vm) > 0 {
                contents.entry(number).or_default().push(key.content(*hash));
            }
        }
    }
    for of_vm in contents.values_mut() {
        of_vm.sort_unstable();
        of_vm.dedup();
    }
    // The level is the same for all VMs: a content is drawn for all VMs or for none.
    while contents
        .values()
        .any(|of_vm| of_vm.iter().filter(|&&c| level_of(c) >= level).count() > MOST_CONTENTS)
    {
        level += 1;
    }
    let (mut vms, mut taken) = (Vec::new(), 0);
    for ((number, target), pages) in (0..).zip(&looked.targets).zip(&looked.vms) {
        let mut of_vm = contents.remove(&number).unwrap_or_default();
        of_vm.retain(|&content| level_of(content) >= level);
        let (ram, beside) = match taken_by(target) {
            Ok(taken) => taken,
            // The VM has ended meanwhile.
            Err(_) if !Path::new(&format!("/proc/{}", target.pid)).exists() => continue,
            Err(error) => return Err(error),
        };
        taken += ram + beside;
        vms.push(VmPrint {
            name: target.name.clone(),
            domain: target.domain.clone(),
            ram_bytes: (pages.private + pages.file) * PAGE_SIZE,
            beside_bytes: beside,
            contents: of_vm,
        });
    }
    let used = memory.total_bytes.saturating_sub(memory.available_bytes);
    Ok(Fingerprint {
        format: FORMAT,
        host: host.to_owned(),
        key: key.id(),
        level,
        memory_bytes: memory.total_bytes,
        others_bytes: used.saturating_sub(taken),
        vms,
    })
}

/// Returns the PSS of a VM's RAM, and the PSS of the rest of its process, in bytes.
fn taken_by(target: &Target) -> io::Result<(u64, u64)> {
    let maps = Process::new(target.pid).and_then(|process| process.smaps());
    let maps = maps.map_err(io::Error::other)?;
    let (mut ram, mut beside) = (0, 0);
    for map in maps {
        let pss = map.extension.map.get("Pss").copied().unwrap_or(0);
        let (start, end) = map.address;
        let mut ranges = target.ranges.iter();
        let is_ram = ranges.any(|range| range.start < end && start < range.end);
        *(if is_ram { &mut ram } else { &mut beside }) += pss;
    }
    Ok((ram, beside))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::look::Pages;
    use super::super::sample::{Sample, Seen};
    use super::*;

    fn looked(contents: &[(u32, u64)], room: usize) -> Looked {
        let mut sample = Sample::new(room);
        for (page, &(vm, hash)) in contents.iter().enumerate() {
            sample.add(Seen {
                hash,
                vm,
                page: page as u64,
                ..Seen::default()
            });
        }
        let own = i32::try_from(std::process::id()).unwrap();
        let target = |name: &str| Target {
            name: name.into(),
            pid: own,
            domain: Some("d".into()),
            ..Target::default()
        };
        Looked {
            targets: vec![target("a"), target("b")],
            vms: vec![
                Pages {
                    private: 3,
                    file: 2,
                    ..Pages::default()
                };
                2
            ],
            sample,
            complete: true,
            again_pages: 0,
        }
    }

    fn key() -> Key {
        Key([7; 32])
    }

    fn scrambled(number: u64) -> u64 {
        xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes())
    }

    #[test]
    fn a_key_for_memory_fingerprints_is_created_once_and_only_its_owner_may_read_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("key");
        let (made, new) = Key::open(&path).unwrap();
        assert!(new);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let (read, new) = Key::open(&path).unwrap();
        assert!(!new);
        assert_eq!((made.id(), made.seed()), (read.id(), read.seed()));
        let (other, _) = Key::open(&place.path().join("other")).unwrap();
        assert_ne!((made.id(), made.seed()), (other.id(), other.seed()));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!format!("{made:?}").contains(&text[..16]), "it is a secret");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert!(matches!(Key::open(&path), Err(KeyError::Open(_))));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        for wrong in ["", "12", &"x".repeat(64), &"é".repeat(32)] {
            std::fs::write(&path, wrong).unwrap();
            assert!(
                matches!(Key::open(&path), Err(KeyError::Format(_))),
                "{wrong}"
            );
        }
        std::fs::set_permissions(place.path(), PermissionsExt::from_mode(0o700)).unwrap();
        assert!(matches!(
            Key::open(place.path()),
            Err(KeyError::File { .. })
        ));
    }

    #[test]
    fn the_memory_that_two_vms_share_can_be_estimated_from_their_sampled_fingerprints() {
        // Each of two VMs has 40,000 contents, of which 30,000 are the same.
        let contents: Vec<(u32, u64)> = (0..40_000)
            .flat_map(|number| [(0, scrambled(number)), (1, scrambled(number + 10_000))])
            .collect();
        let host = HostMemory {
            total_bytes: 1 << 40,
            available_bytes: 0,
        };
        let print = of(&looked(&contents, 1 << 20), &key(), "h", host).unwrap();
        assert!(print.level >= 2, "{}", print.level);
        let [a, b] = &print.vms[..] else { panic!() };
        assert!(a.contents.len() <= MOST_CONTENTS);
        assert!(a.contents.is_sorted());
        let common = a.contents.iter().filter(|c| b.contents.contains(c)).count();
        let estimate = common as f64 * f64::from(print.level).exp2();
        assert!((28_000.0..32_000.0).contains(&estimate), "{estimate}");
        assert_eq!(a.ram_bytes, 5 * PAGE_SIZE);
        // This process has no VM's RAM, so all of its memory counts as beside.
        assert!(a.beside_bytes > 0);
        assert!(print.others_bytes < 1 << 40);
        // With another key, other contents are drawn, and none of them equals a content of the
        // first fingerprint.
        let other = of(&looked(&contents, 1 << 20), &Key([8; 32]), "h", host).unwrap();
        assert_ne!(other.key, print.key);
        let found = other.vms[0]
            .contents
            .iter()
            .filter(|c| a.contents.contains(c));
        assert!(found.count() <= 2);
        let text = serde_json::to_string(&print).unwrap();
        assert_eq!(serde_json::from_str::<Fingerprint>(&text).unwrap(), print);
    }

    #[test]
    fn a_memory_fingerprint_has_a_frequent_page_once_and_no_page_that_changed_during_reading() {
        let mut contents = vec![(0, u64::MAX); 9];
        contents.push((1, 5));
        let mut looked = looked(&contents, 1 << 10);
        looked.sample.pages.last_mut().unwrap().again = Again::Changed;
        let print = of(&looked, &key(), "h", HostMemory::default()).unwrap();
        assert_eq!(print.vms[0].contents.len(), 1);
        assert!(print.vms[1].contents.is_empty());
        assert_eq!((print.level, print.others_bytes), (0, 0));
    }
}
