//! The files of VMs' definitions: `NAME.toml` in one directory. Each file is replaced atomically,
//! and is on the disk before a request is answered, so that the definition survives a power
//! failure. Requests of several clients change one definition one after the other.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use memfold_vm::{Definition, LaunchError, SpecError, check_name, missing_is_fine};
use parking_lot::{Mutex, MutexGuard};

use crate::error::DaemonError;

/// The directory with the files of all definitions.
#[derive(Debug)]
pub(crate) struct DefinitionFiles {
    directory: PathBuf,
    /// Held while a file is changed: all writers use the same temporary file.
    changes: Mutex<()>,
}

impl DefinitionFiles {
    pub const fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            changes: Mutex::new(()),
        }
    }

    fn path(&self, name: &str) -> Result<PathBuf, DaemonError> {
        check_name("name", name).map_err(LaunchError::from)?;
        Ok(self.directory.join(format!("{name}.toml")))
    }

    /// Returns the names of all files without `.toml`, sorted. A file that a user has put there may
    /// have a name that no VM can have.
    pub fn names(&self) -> Result<Vec<String>, DaemonError> {
        let failed = failed(&self.directory);
        let entries = missing_is_fine(fs::read_dir(&self.directory).map(Some)).map_err(failed)?;
        let mut names = Vec::new();
        for entry in entries.into_iter().flatten() {
            let path = PathBuf::from(entry.map_err(failed)?.file_name());
            if path.extension() == Some(OsStr::new("toml")) {
                let name = path.file_stem().unwrap_or_default();
                names.push(name.to_string_lossy().into_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Reads a definition. The result is not validated yet.
    ///
    /// # Errors
    ///
    /// [`DaemonError::NoSuchDefinition`] if there is no file, [`DaemonError::Launch`] if the file
    /// is no definition, [`DaemonError::BadRequest`] if the file defines a VM of another name.
    pub fn read(&self, name: &str) -> Result<Definition, DaemonError> {
        let path = self.path(name)?;
        let definition = Definition::from_toml_file(&path).map_err(|error| match error {
            SpecError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                DaemonError::NoSuchDefinition(name.to_owned())
            }
            error => LaunchError::from(error).into(),
        })?;
        if definition.vm.name != name {
            return Err(DaemonError::BadRequest(format!(
                "{} defines VM '{}'; rename the file, or change its field 'name'",
                path.display(),
                definition.vm.name
            )));
        }
        Ok(definition)
    }

    /// Returns the definitions for which `uses` returns true, as text. A file that cannot be read
    /// counts, because its VM may start when the file is corrected. So does one for which `uses`
    /// cannot tell; it returns the reason then.
    pub fn users(
        &self,
        uses: impl Fn(&Definition) -> Result<bool, String>,
    ) -> Result<Vec<String>, DaemonError> {
        let mut found = Vec::new();
        for name in self.names()? {
            match self.read(&name) {
                Ok(definition) => match uses(&definition) {
                    Ok(true) => found.push(format!("the definition of VM '{name}'")),
                    Ok(false) => {}
                    Err(why) => {
                        found.push(format!("possibly the definition of VM '{name}' ({why})"));
                    }
                },
                Err(DaemonError::NoSuchDefinition(_)) => {}
                Err(_) => found.push(format!(
                    "possibly the definition of VM '{name}', which cannot be read"
                )),
            }
        }
        Ok(found)
    }

    /// Writes a definition, and replaces an older one of this VM.
    pub fn write(&self, definition: &Definition) -> Result<(), DaemonError> {
        self.write_locked(&self.changes.lock(), definition)
    }

    /// Writes `new` if the definition of this VM is still `before`. Returns whether it was. If not,
    /// another request has changed the definition since `before` was read.
    ///
    /// # Errors
    ///
    /// As [`Self::read`] and [`Self::write`].
    pub fn replace(&self, before: &Definition, new: &Definition) -> Result<bool, DaemonError> {
        let changes = self.changes.lock();
        if self.read(&new.vm.name)? != *before {
            return Ok(false);
        }
        self.write_locked(&changes, new)?;
        Ok(true)
    }

    fn write_locked(
        &self,
        _changes: &MutexGuard<'_, ()>,
        definition: &Definition,
    ) -> Result<(), DaemonError> {
        let name = &definition.vm.name;
        let path = self.path(name)?;
        let text = definition
            .to_toml()
            .map_err(|error| DaemonError::BadRequest(error.to_string()))?;
        let temporary = self.directory.join(format!(".{name}.new"));
        let written = fs::create_dir_all(&self.directory)
            .and_then(|()| write_private(&temporary, &text))
            .and_then(|()| fs::rename(&temporary, &path))
            .and_then(|()| self.sync());
        written.map_err(|error| {
            // The file exists only if the error came before it was renamed.
            let _ = fs::remove_file(&temporary);
            failed(&path)(error)
        })
    }

    /// Removes a definition.
    ///
    /// # Errors
    ///
    /// [`DaemonError::NoSuchDefinition`] if there is no file.
    pub fn remove(&self, name: &str) -> Result<(), DaemonError> {
        let _changes = self.changes.lock();
        let path = self.path(name)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(DaemonError::NoSuchDefinition(name.to_owned()))
            }
            removed => removed.and_then(|()| self.sync()).map_err(failed(&path)),
        }
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.directory)?.sync_all()
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> DaemonError + Copy + '_ {
    |source| DaemonError::Definition {
        path: path.to_owned(),
        source,
    }
}

/// Writes a file to the disk. Only root can read the file, because QEMU's arguments may contain
/// secrets.
fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use memfold_units::ByteSize;
    use memfold_vm::VmSpec;

    use super::*;

    fn definition(name: &str, order: u32) -> Definition {
        Definition {
            autostart: false,
            order,
            snapshot: None,
            vm: VmSpec::new(name, ByteSize::mib(64)),
        }
    }

    #[test]
    fn a_definition_is_written_replaced_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let files = DefinitionFiles::new(directory.path().join("vms"));
        assert_eq!(files.names().unwrap(), [""; 0]);
        for order in [1, 2] {
            let written = definition("web", order);
            files.write(&written).unwrap();
            assert_eq!(files.read("web").unwrap(), written);
        }
        files.write(&definition("db", 0)).unwrap();
        assert_eq!(files.names().unwrap(), ["db", "web"]);
        let mode = fs::metadata(files.directory.join("web.toml"))
            .unwrap()
            .permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&files.directory).unwrap().count(), 2);
        files.remove("web").unwrap();
        for gone in [files.remove("web"), files.read("web").map(drop)] {
            assert!(matches!(gone, Err(DaemonError::NoSuchDefinition(_))));
        }
    }

    #[test]
    fn a_definition_of_which_nobody_can_tell_whether_it_uses_something_counts_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let files = DefinitionFiles::new(directory.path().join("vms"));
        files.write(&definition("web", 1)).unwrap();
        let users = |uses: Result<bool, String>| files.users(|_| uses.clone()).unwrap();
        assert_eq!(users(Ok(false)), [""; 0]);
        assert_eq!(users(Ok(true)), ["the definition of VM 'web'"]);
        let unknown = users(Err("damaged".into()));
        assert_eq!(unknown, ["possibly the definition of VM 'web' (damaged)"]);
    }

    #[test]
    fn names_that_leave_the_directory_are_refused_and_files_with_wrong_names_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let files = DefinitionFiles::new(directory.path().join("vms"));
        files.write(&definition("web", 1)).unwrap();
        for name in ["../web", "/etc/passwd", "", ".web", "Web"] {
            for result in [
                files.read(name).map(drop),
                files.remove(name),
                files.write(&definition(name, 1)),
            ] {
                let error = memfold_host::chain(&result.unwrap_err());
                assert!(error.contains("1 to 64 characters"), "{name}: {error}");
            }
        }
        fs::rename(
            files.directory.join("web.toml"),
            files.directory.join("db.toml"),
        )
        .unwrap();
        let error = files.read("db").unwrap_err().to_string();
        assert!(error.contains("defines VM 'web'"), "{error}");
        fs::write(
            files.directory.join("bad.toml"),
            "name = 'bad'\nmemory = \n",
        )
        .unwrap();
        let error = memfold_host::chain(&files.read("bad").unwrap_err());
        assert!(
            error.contains("bad.toml") && error.contains("line 2"),
            "{error}"
        );
    }
    #[test]
    fn a_definition_that_two_requests_write_at_once_is_always_one_of_the_two() {
        let directory = tempfile::tempdir().unwrap();
        let files = DefinitionFiles::new(directory.path().join("vms"));
        let short = definition("web", 1);
        let mut long = short.clone();
        long.vm.qemu_args = vec!["-no-reboot".into(); 2000];
        files.write(&short).unwrap();
        std::thread::scope(|scope| {
            let writers = [&short, &long].map(|one| {
                let files = &files;
                scope.spawn(move || (0..100).for_each(|_| files.write(one).unwrap()))
            });
            while !writers
                .iter()
                .all(std::thread::ScopedJoinHandle::is_finished)
            {
                let read = files.read("web").unwrap();
                assert!(read == short || read == long, "{read:?}");
            }
        });
        assert_eq!(fs::read_dir(&files.directory).unwrap().count(), 1);
    }

    #[test]
    fn a_definition_that_was_changed_since_it_was_read_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let files = DefinitionFiles::new(directory.path().join("vms"));
        let [first, second, third] = [1, 2, 3].map(|order| definition("web", order));
        let is_gone = |result| matches!(result, Err(DaemonError::NoSuchDefinition(_)));
        assert!(is_gone(files.replace(&first, &second)));
        files.write(&first).unwrap();
        assert!(files.replace(&first, &second).unwrap());
        assert!(!files.replace(&first, &third).unwrap());
        assert_eq!(files.read("web").unwrap(), second);
        files.remove("web").unwrap();
        assert!(is_gone(files.replace(&second, &third)));
    }
}
