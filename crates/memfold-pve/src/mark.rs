//! A mark: the file that enables memfold for a VM.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The content of a mark, in TOML. An empty file enables the VM without a trust domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// Trust domain of the VM; `None`: the VM shares memory with no other VM.
    pub domain: Option<String>,
    /// UUID of the VM (`smbios1`) when it was enabled. Proxmox VE gives a deleted VM's number to a
    /// new VM, which must not get into the trust domain of the deleted VM. `None`: unknown.
    pub uuid: Option<String>,
}

/// Reason why a mark cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum MarkError {
    /// The file cannot be read, written or removed.
    #[error("cannot read or change {path}; run this command as root")]
    File {
        /// Path of the mark.
        path: PathBuf,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// The file's content is no mark.
    #[error("{path} is not valid; write the file again with 'memfold pve enable'")]
    Content {
        /// Path of the mark.
        path: PathBuf,
        /// What is wrong, and in which line.
        source: toml::de::Error,
    },
}

impl Mark {
    /// Returns whether the mark was made for the VM with this UUID.
    #[must_use]
    pub fn fits(&self, uuid: Option<&str>) -> bool {
        let same = |own: &String| uuid.is_some_and(|uuid| own.eq_ignore_ascii_case(uuid));
        self.uuid.as_ref().is_none_or(same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_does_not_fit_a_new_vm_with_the_number_of_a_deleted_vm() {
        let mark: Mark = toml::from_str("domain = 'shop'\nuuid = '7b10d7af'").unwrap();
        assert!(mark.fits(Some("7B10D7AF")));
        assert!(!mark.fits(Some("00000000")));
        assert!(!mark.fits(None));
        // An empty file was made by hand, for any VM with this number.
        assert!(toml::from_str::<Mark>("").unwrap().fits(Some("7b10d7af")));
        toml::from_str::<Mark>("domian = 'shop'").unwrap_err();
    }
}
