//! Parses the name of an LVM logical volume (VG/LV), and checks whether a device holds swap space.
//! Only swap volumes may be put on lent RAM.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::str::FromStr;
use std::{fmt, io};

use serde::{Deserialize, Serialize};

use crate::registry_error::MAX_NAME;

/// Offset and text of the swap signature for pages of 4 KiB (`include/linux/swap.h`,
/// `union swap_header`).
const SWAP_SIGNATURE: (u64, &[u8; 10]) = (4096 - 10, b"SWAPSPACE2");

/// Maximum length of the name of a volume or a volume group (`lvm(8)`).
const LONGEST: usize = 127;

/// Name of a logical volume, written `VG/LV`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Volume {
    /// Name of the logical volume's volume group.
    pub group: String,
    /// Name of the logical volume, without its volume group.
    pub name: String,
}

impl fmt::Display for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.group, self.name)
    }
}

impl TryFrom<String> for Volume {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Volume {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // `lvm(8)`, "VALID NAMES", has these rules.
        let is_name = |name: &str| {
            (1..=LONGEST).contains(&name.len())
                && !name.starts_with('-')
                && !["..", "."].contains(&name)
                && name
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "+_.-".contains(c))
        };
        let path = text.strip_prefix("/dev/").unwrap_or(text);
        match path.split_once('/') {
            Some((group, name)) if is_name(group) && is_name(name) => Ok(Self {
                group: group.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err(format!(
                "'{text}' is not a logical volume; write VG/LV, the names of volume group and volume"
            )),
        }
    }
}

impl Volume {
    /// Returns the name under which the logical volume borrows: the registry has it in the field
    /// for a VM's name. At most 64 bytes.
    #[must_use]
    pub fn holder(&self) -> String {
        let mut name = format!("lvm.{}.{}", self.group, self.name).replace('+', "_");
        name.truncate(MAX_NAME);
        name
    }

    /// Returns the path of the logical volume's device, `/dev/VG/LV`.
    #[must_use]
    pub fn device(&self) -> String {
        format!("/dev/{self}")
    }
}

/// Returns whether a device begins with the signature of swap space (pages of 4 KiB).
pub fn is_swap(device: &str) -> io::Result<bool> {
    let (at, signature) = SWAP_SIGNATURE;
    let mut bytes = [0; 10];
    File::open(device)?.read_exact_at(&mut bytes, at)?;
    Ok(&bytes == signature)
}

impl From<Volume> for String {
    fn from(volume: Volume) -> Self {
        volume.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry_error::check_name;

    #[test]
    fn an_lvm_volume_name_is_parsed_and_converted_to_a_valid_registry_name() {
        let volume: Volume = "vg0/swap_1".parse().unwrap();
        assert_eq!(volume, "/dev/vg0/swap_1".parse().unwrap());
        assert_eq!(
            (volume.device().as_str(), volume.holder().as_str()),
            ("/dev/vg0/swap_1", "lvm.vg0.swap_1")
        );
        let long = format!("{}/+a", "v".repeat(100));
        for name in ["a+b/c", "_x/y", long.as_str()] {
            let volume: Volume = name.parse().unwrap();
            check_name("vm", &volume.holder()).unwrap();
        }
        for bad in [
            "", "swap", "a/", "/b", "a/b/c", "-a/b", "a/-b", "../b", "a/b c", "a/é",
        ] {
            bad.parse::<Volume>().unwrap_err();
        }
    }

    #[test]
    fn swap_space_is_recognised_by_its_signature() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("d");
        let path = path.to_str().unwrap();
        std::fs::write(path, vec![0; 8192]).unwrap();
        assert!(!is_swap(path).unwrap());
        let mut bytes = vec![0; 8192];
        bytes[4086..4096].copy_from_slice(b"SWAPSPACE2");
        std::fs::write(path, bytes).unwrap();
        assert!(is_swap(path).unwrap());
        std::fs::write(path, "short").unwrap();
        is_swap(path).unwrap_err();
    }
}
