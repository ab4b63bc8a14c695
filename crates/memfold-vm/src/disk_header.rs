//! Records which files the header of a qcow2 disk names, and refuses to start a VM if the header
//! names others now.
//!
//! A guest that has taken over its QEMU can write any header into a disk that the VM writes in
//! place. At the VM's next start, QEMU opens the named files before it gives up root's rights. So
//! memfold records the names before the first start, in an extended attribute of the disk that only
//! root can change (`trusted.*`, xattr(7)). File systems without such attributes keep no record.

use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;

use super::qcow2;
use super::spec::{DiskFormat, DiskSpec};

/// Name of the attribute with the record.
const ATTRIBUTE: &str = "trusted.memfold.header";

/// Longest record: two names of at most 1,023 bytes, of which each takes up to four when escaped,
/// and the words around them.
const LONGEST_RECORD: usize = 16 << 10;

/// Most files of a disk's chain that are checked.
const MOST_FILES: usize = 200;

/// The header of a disk, or of one of its backing files, names other files than memfold recorded.
#[derive(Debug, thiserror::Error)]
#[error(
    "the header of {disk} names {now}, but named {then} when memfold first started a VM that writes it: a guest may have taken over its QEMU; if you have changed the header or made the disk anew, remove the record ('setfattr -x {ATTRIBUTE} {disk}', of the package attr)",
    disk = disk.display()
)]
pub struct ChangedHeader {
    disk: PathBuf,
    then: String,
    now: String,
}

/// Compares the headers of a VM's qcow2 disks, and of their backing files, with the records, and
/// records those of disks that this VM will write in place.
pub(super) fn check(disks: &[DiskSpec]) -> Result<(), ChangedHeader> {
    let here = disks.iter().filter(|disk| disk.streamed.is_none());
    for disk in here.filter(|disk| disk.format() == DiskFormat::Qcow2) {
        if !disk.snapshot && !disk.read_only {
            record(&disk.path);
        }
        let mut next = Some(disk.path.clone());
        for _ in 0..MOST_FILES {
            let Some(file) = next.take() else { break };
            compare(&file)?;
            next = qcow2::below(&file);
        }
    }
    Ok(())
}

/// Records what a disk's header names, if there is no record yet.
fn record(disk: &Path) {
    let Some(named) = qcow2::named_files(disk) else {
        return;
    };
    match setxattr(disk, ATTRIBUTE, named.as_bytes(), XattrFlags::CREATE) {
        // A daemon without root's rights starts a QEMU that has no more rights than its guest.
        Ok(()) | Err(Errno::EXIST | Errno::OPNOTSUPP | Errno::PERM) => {}
        Err(error) => {
            tracing::warn!(disk = %disk.display(), %error, "cannot record which files the header of a disk names, so a guest that takes over its QEMU could name others; check the file system");
        }
    }
}

fn compare(file: &Path) -> Result<(), ChangedHeader> {
    let mut then = vec![0; LONGEST_RECORD];
    let Ok(length) = getxattr(file, ATTRIBUTE, &mut then[..]) else {
        return Ok(());
    };
    then.truncate(length);
    let now = qcow2::named_files(file);
    if now.as_ref().is_some_and(|now| now.as_bytes() == then) {
        return Ok(());
    }
    Err(ChangedHeader {
        disk: file.to_owned(),
        then: String::from_utf8_lossy(&then).into_owned(),
        now: now.unwrap_or_else(|| "something that memfold cannot read".into()),
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::fs::removexattr;

    use super::*;

    /// Runs `qemu-img` with these arguments, divided by spaces.
    fn qemu_img(arguments: &str) {
        let mut command = Command::new("qemu-img");
        let output = command.args(arguments.split(' ')).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    #[test]
    fn a_disk_whose_header_names_other_files_than_at_the_first_start_is_refused() {
        if Command::new("qemu-img").arg("--version").output().is_err() {
            memfold_testkit::skip!("no qemu-img");
        }
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
        let (base, disk) = (path("base"), path("disk.qcow2"));
        qemu_img(&format!("create -q {base} 1M"));
        qemu_img(&format!("create -q -f qcow2 -F raw -b {base} {disk}"));
        match setxattr(&disk, "trusted.memfold.test", b"", XattrFlags::CREATE) {
            Err(Errno::PERM | Errno::OPNOTSUPP) => {
                memfold_testkit::skip!("no trusted attributes")
            }
            other => other.unwrap(),
        }
        let mut spec = DiskSpec::new(&disk);
        spec.format = Some(DiskFormat::Qcow2);
        let disks = [spec.clone()];
        let rebase = |base: &str| {
            qemu_img(&format!("rebase -q -u -f qcow2 -F raw -b {base} {disk}"));
        };

        // A disk that no VM writes in place is not recorded.
        spec.snapshot = true;
        check(&[spec]).unwrap();
        rebase("/etc/hosts");
        check(&disks).unwrap();
        check(&disks).unwrap();
        // The user says that the change is his own.
        rebase(&base);
        check(&disks).unwrap_err();
        removexattr(&disk, ATTRIBUTE).unwrap();
        check(&disks).unwrap();

        for changed in ["/etc/shadow", "json:{}"] {
            rebase(changed);
            let error = check(&disks).unwrap_err().to_string();
            assert!(error.contains(&base) && error.contains(changed), "{error}");
        }
        // Also below another disk.
        let above = path("above.qcow2");
        qemu_img(&format!(
            "create -q -u -f qcow2 -F qcow2 -b disk.qcow2 {above} 1M"
        ));
        let mut spec = DiskSpec::new(&above);
        spec.format = Some(DiskFormat::Qcow2);
        let error = check(&[spec]).unwrap_err().to_string();
        assert!(error.contains(&base), "{error}");
        std::fs::write(&disk, b"no header").unwrap();
        let error = check(&disks).unwrap_err().to_string();
        assert!(error.contains("cannot read"), "{error}");
    }
}
