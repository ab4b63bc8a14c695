use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;

use memfold_units::ByteSize;

use super::*;
use crate::encryption::DataKey;
use crate::image::SUMS;
use crate::keys::Keys;
use crate::manifest::{
    DEVICES, Encryption, FORMAT_OF_ENCRYPTION, INDEX, Packed, SEALED, tests::manifest,
};

/// A snapshot directory with the encrypted snapshot `s`, and the keys `a` and `b`. The snapshot has
/// key `a`.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        for name in ["a", "b"] {
            place.write_key(name, name);
        }
        place.save();
        place
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Makes the file `name` hold a key that belongs to `text`.
    fn write_key(&self, name: &str, text: &str) {
        let digits = blake3::hash(text.as_bytes()).to_hex();
        fs::write(self.file(name), digits.as_bytes()).unwrap();
        fs::set_permissions(self.file(name), Permissions::from_mode(0o600)).unwrap();
    }

    /// Opens the snapshot directory as a new daemon does.
    fn shelf(&self) -> Shelf {
        let key = |name: &str| format!("{name}=file:{}", self.file(name).display());
        let keys = ["a", "b"].map(|name| key(name).parse().unwrap());
        Shelf::open(&self.file("shelf")).with_keys(Keys::new(keys).unwrap())
    }

    fn snapshot(&self) -> PathBuf {
        self.file("shelf").join("s")
    }

    fn save(&self) {
        let shelf = self.shelf();
        let draft = shelf.draft("s").unwrap();
        let operator = shelf.keys().load("a").unwrap();
        let key = DataKey::random().unwrap();
        let write = |part: &str, bytes: &[u8]| {
            let mut file = draft.file(part).unwrap();
            file.write_all(bytes).unwrap();
            facts(file).unwrap()
        };
        let seal = |part: &str| {
            let sealed = key.seal_file(part, &[], part.as_bytes().to_vec());
            write(part, &sealed.unwrap())
        };
        write("disk0.qcow2", b"disk");
        let saved = Manifest {
            format: FORMAT_OF_ENCRYPTION,
            sums: seal(SUMS),
            devices: seal(DEVICES),
            packed: Some(Packed {
                bytes: write(SEALED, b"frames").bytes,
                index: seal(INDEX),
            }),
            encryption: Some(Encryption {
                key: "a".into(),
                header: write(KEY, &key.wrap(&operator).unwrap()),
                compressed: false,
                plain_disks: true,
            }),
            ..manifest("s", ByteSize::mib(64))
        };
        draft.commit(&saved).unwrap();
    }

    fn rekey(&self, to: &str) -> Result<Option<String>, SnapshotError> {
        let shelf = self.shelf();
        rekey(&shelf, &shelf.manifest("s")?, to)
    }

    /// Returns the snapshot's files: number of the inode, and contents.
    fn files(&self) -> BTreeMap<String, (u64, Vec<u8>)> {
        let files = fs::read_dir(self.snapshot()).unwrap().map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let inode = entry.metadata().unwrap().ino();
            (name, (inode, fs::read(entry.path()).unwrap()))
        });
        files.collect()
    }

    /// Asserts that the snapshot is whole, that it opens, and that nothing else is in its
    /// directory. Returns the name of its key.
    #[track_caller]
    fn key(&self) -> String {
        let shelf = self.shelf();
        let saved = shelf.manifest("s").unwrap();
        assert_eq!(shelf.changed_parts(&saved).unwrap(), [""; 0]);
        let mut state = String::new();
        shelf
            .devices(&saved)
            .unwrap()
            .read_to_string(&mut state)
            .unwrap();
        assert_eq!(state, DEVICES);
        let all = fs::read_dir(shelf.root()).unwrap();
        let names: Vec<_> = all.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["s"]);
        saved.encryption.unwrap().key
    }
}

#[test]
fn a_changed_key_opens_the_snapshot_without_the_old_one_and_all_other_files_are_the_same() {
    let place = Place::new();
    let (before, manifest_before) = (place.files(), place.shelf().manifest("s").unwrap());
    fs::write(place.snapshot().join("working-set.new"), "{").unwrap();
    assert_eq!(place.rekey("b").unwrap().as_deref(), Some("a"));
    fs::remove_file(place.file("a")).unwrap();
    assert_eq!(place.key(), "b");
    let after = place.files();
    let names = |files: &BTreeMap<String, _>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&after), names(&before));
    for (name, file) in &after {
        let is_changed = CHANGED.contains(&name.as_str());
        assert_eq!(before[name] != *file, is_changed, "{name}");
    }
    let mut now = place.shelf().manifest("s").unwrap();
    now.encryption.clone_from(&manifest_before.encryption);
    assert_eq!(now, manifest_before);
    // Once more: nothing is written.
    assert_eq!(place.rekey("b").unwrap(), None);
    assert_eq!(place.files(), after);
    // Back, with the old key.
    place.write_key("a", "a");
    assert_eq!(place.rekey("a").unwrap().as_deref(), Some("b"));
    assert_eq!(place.key(), "a");
}

#[test]
fn a_key_is_not_changed_if_the_old_or_the_new_one_is_missing_or_wrong_or_there_is_none() {
    let place = Place::new();
    let before = place.files();
    let refuses = |to: &str, words: &[&str]| {
        let told = place.rekey(to).unwrap_err().to_string();
        for word in words {
            assert!(told.contains(word), "{told}");
        }
        assert_eq!(place.files(), before);
    };
    refuses("c", &["'c'", "a, b", "--snapshot-key c=SOURCE"]);
    place.write_key("a", "other");
    for to in ["a", "b"] {
        refuses(to, &["'s'", "key 'a'", "not the one", "snapshot_key"]);
    }
    fs::remove_file(place.file("a")).unwrap();
    refuses("b", &["'s'", "cannot read key 'a'"]);
    place.write_key("a", "a");
    fs::write(place.file("b"), "short").unwrap();
    refuses("b", &["key 'b'", "64 hexadecimal digits"]);
    assert_eq!(place.key(), "a");
    let plain = manifest("plain", ByteSize::mib(64));
    let told = rekey(&place.shelf(), &plain, "b").unwrap_err().to_string();
    assert!(
        told.contains("'plain' is not encrypted") && told.contains("--encrypt=b"),
        "{told}"
    );
}

/// Copies the first `number` files of a directory.
fn copy(from: &Path, to: &Path, number: usize) {
    fs::create_dir(to).unwrap();
    let mut names: Vec<_> = fs::read_dir(from)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    for name in names.iter().take(number) {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

#[test]
fn a_change_of_a_key_that_ends_at_any_step_leaves_one_of_both_keys_and_can_be_repeated() {
    let place = Place::new();
    let draft = place.file("shelf").join(".s.draft");
    copy(&place.snapshot(), &place.file("old"), usize::MAX);
    place.rekey("b").unwrap();
    copy(&place.snapshot(), &place.file("new"), usize::MAX);
    let files = place.files().len();
    // Before the exchange, the directory beside has a part of the new files; afterwards, a part of
    // the old ones.
    for (now, beside, key) in [("old", "new", "a"), ("new", "old", "b")] {
        for number in 0..=files {
            fs::remove_dir_all(place.snapshot()).unwrap();
            copy(&place.file(now), &place.snapshot(), usize::MAX);
            copy(&place.file(beside), &draft, number);
            assert_eq!(place.key(), key, "{number}");
            let changed = place.rekey("b").unwrap();
            assert_eq!(changed.is_some(), key == "a", "{number}");
            assert_eq!(place.key(), "b", "{number}");
        }
    }
    // The same daemon, after a failure.
    let shelf = place.shelf();
    copy(&place.file("old"), &draft, files);
    let saved = shelf.manifest("s").unwrap();
    assert_eq!(rekey(&shelf, &saved, "a").unwrap().as_deref(), Some("b"));
    assert_eq!(place.key(), "a");
}
