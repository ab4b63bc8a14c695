//! Installs the wrapper script for QEMU. A libvirt domain for which memfold is enabled names this
//! script, instead of QEMU, as its `<emulator>`. The script starts QEMU with memfold's library and
//! with a QMP socket for the daemon.
//!
//! The script is in QEMU's directory. Its name is the name of the QEMU program with the prefix
//! `memfold-`.

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// The wrapper script, which packages install as `/usr/bin/memfold-qemu-system-x86_64`.
const SCRIPT: &str = include_str!("../../../deploy/libvirt/memfold-qemu-system-x86_64");
/// Beginning of the script's line that names the path of the library.
const LIBRARY_LINE: &str = "library=";
/// Line by which a file is recognized as a wrapper script.
const SIGN: &str = "# A QEMU for libvirt that has memfold's library in it";

const PREFIX: &str = "memfold-";

/// Reason why the wrapper script, which starts QEMU with memfold's library, could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum WrapperError {
    /// The domain's `<emulator>`, at this path, is not a file on this host.
    #[error("the domain's <emulator> '{0}' is not a program on this host")]
    Emulator(PathBuf),
    /// A file that memfold did not create is at the path of the wrapper script.
    #[error(
        "{0} exists and was not created by memfold; remove the file, or give the domain another <emulator>"
    )]
    Taken(PathBuf),
    /// The wrapper script cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// Path of the wrapper script.
        path: PathBuf,
        /// The error of writing the wrapper script.
        #[source]
        source: io::Error,
    },
    /// memfold's library is missing, or QEMU could not read it; the text says which.
    #[error("{0}")]
    Library(String),
}

/// Returns the path of the wrapper script for the QEMU program `emulator`: the same directory, and
/// the name with the prefix `memfold-`.
#[must_use]
pub fn of(emulator: &Path) -> PathBuf {
    let name = emulator.file_name().unwrap_or_default().to_string_lossy();
    emulator.with_file_name(format!("{PREFIX}{name}"))
}

/// Returns the path of the QEMU program that a wrapper script starts; `None` if the file name lacks
/// the prefix `memfold-`.
#[must_use]
pub fn emulator(wrapper: &Path) -> Option<PathBuf> {
    let name = wrapper.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    Some(wrapper.with_file_name(name))
}

/// Installs the wrapper script for the QEMU program `emulator`, unless the script exists, and
/// returns the script's path.
pub fn ensure(emulator: &Path) -> Result<PathBuf, WrapperError> {
    if !emulator.is_file() {
        return Err(WrapperError::Emulator(emulator.to_owned()));
    }
    let path = of(emulator);
    let write = |source| WrapperError::Write {
        path: path.clone(),
        source,
    };
    // A package that was removed leaves a link to QEMU in the wrapper's place.
    let is_link = path.canonicalize().ok() == emulator.canonicalize().ok();
    match std::fs::read(&path) {
        Ok(there) if !is_link => {
            let there = String::from_utf8_lossy(&there);
            if !there.contains(SIGN) {
                return Err(WrapperError::Taken(path));
            }
            // The wrapper exists: it came with a package, or was written here before.
            if library_of(&there).is_some_and(Path::is_file) {
                return Ok(path);
            }
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(write(error)),
        _ => {}
    }
    let script = script(&library()?);
    let directory = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(directory).map_err(write)?;
    file.write_all(script.as_bytes()).map_err(write)?;
    let mode = std::fs::Permissions::from_mode(0o755);
    file.as_file().set_permissions(mode).map_err(write)?;
    file.persist(&path).map_err(|error| write(error.error))?;
    Ok(path)
}

/// Returns the path of the library, if a QEMU that runs as an unprivileged user can read it.
fn library() -> Result<PathBuf, WrapperError> {
    let path = memfold_host::library().map_err(|error| WrapperError::Library(error.to_string()))?;
    let refuse = |why: &str| {
        WrapperError::Library(format!(
            "libvirt's QEMU could not use {}: {why}; move the file to /usr/lib/memfold",
            path.display()
        ))
    };
    // The preloader would split the path at other characters (ld.so(8)), and the shell would
    // interpret them.
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@".contains(c);
    if !path.to_string_lossy().chars().all(plain) {
        return Err(refuse(
            "the path has characters other than letters, digits and /._-+@",
        ));
    }
    for place in path.ancestors() {
        let wanted = if place == path { 0o004 } else { 0o001 };
        let mode = place.metadata().map(|facts| facts.permissions().mode());
        if !mode.is_ok_and(|mode| mode & wanted != 0) {
            return Err(refuse(&format!(
                "QEMU runs as another user, who may not enter or read {}",
                place.display()
            )));
        }
    }
    Ok(path)
}

fn script(library: &Path) -> String {
    let line = |line: &str| match line.strip_prefix(LIBRARY_LINE) {
        Some(_) => format!("{LIBRARY_LINE}{}\n", library.display()),
        None => format!("{line}\n"),
    };
    SCRIPT.lines().map(line).collect()
}

fn library_of(script: &str) -> Option<&Path> {
    let path = script.lines().find_map(|l| l.strip_prefix(LIBRARY_LINE))?;
    Some(Path::new(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_libvirt_wrapper_script_is_in_the_directory_of_the_qemu_that_it_starts() {
        let wrapper = Path::new("/usr/bin/memfold-qemu-system-x86_64");
        let qemu = Path::new("/usr/bin/qemu-system-x86_64");
        assert_eq!(of(qemu), wrapper);
        assert_eq!(emulator(wrapper).as_deref(), Some(qemu));
        assert_eq!(emulator(qemu), None);
        let packaged = Path::new("/usr/lib/memfold/libmemfold_qemu.so");
        assert_eq!(library_of(SCRIPT), Some(packaged));
        assert_eq!(script(packaged), SCRIPT);
        assert!(SCRIPT.contains(SIGN));
    }

    /// Makes a directory with a program that prints how it was started in place of QEMU, and with
    /// its wrapper.
    fn wrapped(name: &str) -> (tempfile::TempDir, PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = place.path().join(file);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let said = "#!/bin/sh\nprintf '%s|' \"${LD_PRELOAD-none}\" \"${MEMFOLD_QEMU_SOCKET-none}\" \"$@\"\n";
        write("qemu", said);
        let library = write("library.so", "");
        let wrapper = write("memfold-qemu", &script(&library));
        std::fs::create_dir(place.path().join(name)).unwrap();
        (place, wrapper)
    }

    fn said(wrapper: &Path, directory: &Path, arguments: &[&str]) -> String {
        let output = Command::new(wrapper)
            .args(arguments)
            .env("XDG_CACHE_HOME", directory.join(".cache"))
            .output()
            .unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn the_libvirt_wrapper_preloads_the_library_for_a_vm_and_not_for_a_capability_probe() {
        let (place, wrapper) = wrapped("domain-1-a,b c");
        let directory = place.path().join("domain-1-a,b c");
        let at = place.path().display();
        assert_eq!(
            said(
                &wrapper,
                &directory,
                &["-name", "guest=a,b c,debug-threads=on", "it's"]
            ),
            format!(
                "{at}/library.so|{at}/domain-1-a,b c/memfold-library.sock|-name|guest=a,b c,debug-threads=on|it's|-chardev|\
                 socket,id=memfold-qmp,path={at}/domain-1-a,,b c/memfold-qmp.sock,server=on,wait=off|-mon|chardev=memfold-qmp,mode=control|"
            )
        );
        assert_eq!(
            said(&wrapper, &directory, &["-S", "-machine", "none"]),
            "none|none|-S|-machine|none|"
        );
    }

    #[test]
    fn if_a_part_of_memfold_is_missing_the_libvirt_wrapper_starts_qemu_unchanged() {
        let (place, wrapper) = wrapped(&"d".repeat(107));
        let name = ["-name", "guest=a"];
        let plain = "none|none|-name|guest=a|";
        let too_long = place.path().join("d".repeat(107));
        assert_eq!(said(&wrapper, &too_long, &name), plain);
        assert_eq!(said(&wrapper, &place.path().join("none"), &name), plain);
        assert!(said(&wrapper, place.path(), &name).ends_with("mode=control|"));
        std::fs::remove_file(place.path().join("library.so")).unwrap();
        assert_eq!(said(&wrapper, place.path(), &name), plain);
    }

    #[test]
    fn a_foreign_file_at_the_path_of_the_libvirt_wrapper_is_not_overwritten() {
        let place = tempfile::tempdir().unwrap();
        let qemu = place.path().join("qemu");
        assert!(matches!(ensure(&qemu), Err(WrapperError::Emulator(_))));
        std::fs::write(&qemu, "").unwrap();
        std::fs::write(of(&qemu), "#!/bin/sh\n").unwrap();
        assert!(matches!(ensure(&qemu), Err(WrapperError::Taken(_))));
        assert_eq!(std::fs::read_to_string(of(&qemu)).unwrap(), "#!/bin/sh\n");
    }
}
