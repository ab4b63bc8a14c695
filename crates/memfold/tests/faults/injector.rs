//! Injects faults into a daemon: a library in C that the daemon preloads, and the file through
//! which the test tells the library which file operation fails, and what time it is.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the operation does instead of its work, as the library reads it: kind, error number, and
/// whether all later operations fail, too.
#[derive(Clone, Copy, Debug)]
pub struct Fault(i64, i64, i64);

impl Fault {
    /// The disk is full from the operation on.
    pub const FULL_DISK: Self = Self(1, 28, 1);
    /// The operation fails with an I/O error, and later ones do not.
    pub const IO_ERROR: Self = Self(1, 5, 0);
    /// The file system is read-only from the operation on.
    pub const READ_ONLY: Self = Self(1, 30, 1);
    /// A write writes half of its bytes.
    pub const SHORT_WRITE: Self = Self(2, 0, 0);

    pub const ALL: [Self; 4] = [
        Self::IO_ERROR,
        Self::FULL_DISK,
        Self::READ_ONLY,
        Self::SHORT_WRITE,
    ];

    /// Returns whether only writes fail, so that a number of operations does not say whether there
    /// are more.
    pub fn is_of_writes(self) -> bool {
        self.0 == Self::SHORT_WRITE.0
    }
}

/// What has happened since [`Injector::arm`].
#[derive(Debug)]
pub struct Fired {
    /// Number of operations that failed.
    pub faults: i64,
    /// The first of them: a function of libc, and a path below the place.
    pub what: String,
    /// Whether all operations after it failed, too, also those that clean up.
    pub is_lasting: bool,
}

impl std::fmt::Display for Fired {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

/// Injects faults into programs that run with [`Injector::environment`].
#[derive(Debug)]
pub struct Injector {
    library: PathBuf,
    control: PathBuf,
    file: File,
    place: PathBuf,
    record: Option<PathBuf>,
}

const CONTROL: &str = "MEMFOLD_FAULT_CONTROL";
const PLACE: &str = "MEMFOLD_FAULT_PLACE";

impl Injector {
    /// Compiles the library, into `directory`. Operations below `place` can fail. `None`: this
    /// machine has no C compiler.
    pub fn new(directory: &Path, place: &Path) -> Option<Self> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults/shim.c");
        let library = directory.join("shim.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]);
        let output = compiler.arg(&library).arg(source).arg("-ldl").output();
        let output = output.ok()?;
        assert!(output.status.success(), "{output:?}");
        let control = directory.join("control");
        fs::write(&control, [0; 4096]).unwrap();
        Some(Self::with(library, &control, place))
    }

    /// Returns the injector of this process, which another injector has started.
    pub fn of_environment() -> Self {
        let [library, control, place] = ["LD_PRELOAD", CONTROL, PLACE]
            .map(|name| PathBuf::from(std::env::var_os(name).unwrap()));
        Self::with(library, &control, &place)
    }

    fn with(library: PathBuf, control: &Path, place: &Path) -> Self {
        let file = File::options().read(true).write(true).open(control);
        Self {
            library,
            control: control.to_owned(),
            file: file.unwrap(),
            place: place.to_owned(),
            record: None,
        }
    }

    /// Lets programs record their file operations, from their start on.
    pub fn record(&mut self, file: &Path) {
        File::create(file).unwrap();
        // QEMUs run as users of their own.
        fs::set_permissions(file, fs::Permissions::from_mode(0o666)).unwrap();
        self.record = Some(file.to_owned());
    }

    /// Returns the environment of a program into which faults are injected.
    pub fn environment(&self) -> Vec<(&str, &Path)> {
        let record = self.record.iter();
        let record = record.map(|file| ("MEMFOLD_FAULT_RECORD", file.as_path()));
        let all = [
            ("LD_PRELOAD", self.library.as_path()),
            (PLACE, &self.place),
            (CONTROL, &self.control),
        ];
        all.into_iter().chain(record).collect()
    }

    /// Puts the clock of programs named `memfold` ahead of the host's by `seconds`.
    pub fn set_clock(&self, seconds: i64) {
        self.write(304, &[seconds]);
    }

    /// Lets operation number `at` from now on fail; 0: none.
    pub fn arm(&self, at: i64, fault: Fault) {
        self.write(0, &[0]);
        self.write(8, &[0, 0, fault.0, fault.1, fault.2]);
        self.file.write_all_at(&[0; 256], 48).unwrap();
        self.write(0, &[at]);
    }

    /// Ends the faults, and returns what failed.
    pub fn disarm(&self) -> Fired {
        self.write(0, &[0]);
        let mut bytes = [0; 304];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        let what = bytes[48..].split(|byte| *byte == 0).next().unwrap();
        Fired {
            faults: i64::from_le_bytes(bytes[16..24].try_into().unwrap()),
            what: String::from_utf8_lossy(what).into_owned(),
            is_lasting: bytes[40] != 0,
        }
    }

    /// Writes numbers of the library's `struct control`.
    fn write(&self, at: u64, numbers: &[i64]) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.file.write_all_at(&bytes, at).unwrap();
    }
}
