//! The seed disk of a VM: a small read-only disk with the file system `cidata`, from which
//! cloud-init in the guest reads its configuration (data source `NoCloud`). The image of a running
//! VM never changes.

use std::io::{self, Cursor, Write as _};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions, format_volume};

use super::cloud_init::Seed;
use super::directory::VmDirectory;
use super::overlay;
use super::qemu_line::Line;
use super::qemu_user::{self, QemuUser};
use super::spec::VmSpec;

/// ID of the seed disk's device in QEMU, and name of its block node.
pub const DEVICE: &str = "seed";

/// Serial number of the seed disk.
const SERIAL: &str = "memfold-seed";

/// Label of the seed's file system, by which cloud-init finds the disk.
const LABEL: [u8; 11] = *b"cidata     ";

/// Size of a seed's image without its files, in bytes.
const BASE_BYTES: usize = 1 << 20;

/// Creates the seed disk of a VM that is about to start, if it has one.
pub(super) fn make(
    directory: &VmDirectory,
    spec: &VmSpec,
    user: Option<QemuUser>,
) -> io::Result<()> {
    let Some(seed) = spec.cloud_init.as_ref().and_then(|of| of.seed.as_ref()) else {
        return Ok(());
    };
    let path = directory.seed();
    overlay::new_file(&path)?.write_all(&image(seed)?)?;
    qemu_user::give(&path, user)
}

/// Adds the seed disk to QEMU's command line, if the VM has one. The seed disk is the last disk.
pub(super) fn arguments(line: &mut Line, spec: &VmSpec, directory: &VmDirectory) {
    if spec.cloud_init.is_none() {
        return;
    }
    let file = format!("driver=file,node-name={DEVICE}-file,read-only=on,filename=");
    line.with_path("-blockdev", &file, &directory.seed())
        .add(
            "-blockdev",
            format!("driver=raw,node-name={DEVICE},file={DEVICE}-file,read-only=on"),
        )
        .add(
            "-device",
            format!("virtio-blk-pci,id={DEVICE},drive={DEVICE},serial={SERIAL}"),
        );
}

/// Returns the image of the seed disk. The same contents always give the same image.
fn image(seed: &Seed) -> io::Result<Vec<u8>> {
    let files = [
        ("user-data", seed.user_data.clone()),
        ("meta-data", seed.meta_data()),
    ];
    let bytes: usize = files.iter().map(|(_, text)| text.len()).sum();
    let size = (BASE_BYTES + bytes).next_multiple_of(BASE_BYTES);
    let mut disk = Cursor::new(vec![0; size]);
    format_volume(&mut disk, FormatVolumeOptions::new().volume_label(LABEL))?;
    let system = FileSystem::new(&mut disk, FsOptions::new())?;
    for (name, text) in files {
        let mut file = system.root_dir().create_file(name)?;
        file.write_all(text.as_bytes())?;
        file.flush()?;
    }
    system.unmount()?;
    Ok(disk.into_inner())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::cloud_init::MOST_BYTES;

    fn seed() -> Seed {
        let mut seed = Seed {
            user_data: "#!/bin/sh\necho hello\n".into(),
            ssh_keys: vec!["ssh-ed25519 AAAA me".into()],
            ..Seed::default()
        };
        seed.rename("web_1");
        seed
    }

    fn files(image: Vec<u8>) -> Vec<(String, String)> {
        let disk = FileSystem::new(Cursor::new(image), FsOptions::new()).unwrap();
        assert_eq!(disk.volume_label(), "cidata");
        let root = disk.root_dir();
        let entries = root.iter().map(|entry| {
            let entry = entry.unwrap();
            let mut text = String::new();
            entry.to_file().read_to_string(&mut text).unwrap();
            (entry.file_name(), text)
        });
        entries.collect()
    }

    #[test]
    fn a_seed_disk_has_the_user_data_unchanged_and_the_identity_of_its_vm() {
        let seed = seed();
        let found = files(image(&seed).unwrap());
        assert_eq!(found[0], ("user-data".to_owned(), seed.user_data.clone()));
        assert_eq!((found.len(), found[1].0.as_str()), (2, "meta-data"));
        let meta: serde_json::Value = serde_json::from_str(&found[1].1).unwrap();
        assert_eq!(meta["local-hostname"], "web-1");
        assert_eq!(meta["public-keys"][0], "ssh-ed25519 AAAA me");
        assert_eq!(meta["instance-id"], seed.instance);
        // The same VM has the same disk at each start; another VM another instance.
        assert_eq!(image(&seed).unwrap(), image(&seed).unwrap());
        let mut other = seed.clone();
        other.rename("web_2");
        assert_ne!(other.instance, seed.instance);
    }

    #[test]
    fn the_largest_seed_fits_on_its_disk() {
        let mut seed = seed();
        seed.user_data = "x".repeat(usize::try_from(MOST_BYTES).unwrap());
        assert_eq!(files(image(&seed).unwrap())[0].1, seed.user_data);
    }
}
