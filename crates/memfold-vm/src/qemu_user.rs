//! The user that a VM's QEMU runs as. A daemon that is root gives each QEMU a user of its own,
//! unless the VM's description names a user.
//!
//! QEMU opens disks, sockets and devices of its command line as root, and then switches to its user
//! (`-run-with user=`). Later it gets other files as descriptors, or files that belong to its user.

use std::io;
use std::path::Path;

use memfold_host::qemu_users::{self, UsersError};
use memfold_sys::peer;
use serde::{Deserialize, Serialize};

use super::spec::VmSpec;

/// Name of the user with which a VM description asks for a QEMU that keeps the daemon's rights.
pub const ROOT: &str = "root";

/// The numbers of the user and group that a QEMU has switched to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuUser {
    /// Number of the user.
    pub uid: u32,
    /// Number of the user's primary group.
    pub gid: u32,
}

/// Why no user for a VM's QEMU was found.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// No user number can be allotted.
    #[error(transparent)]
    Allot(#[from] UsersError),
    /// The description names a user that does not exist.
    #[error("cannot use user '{name}'; create the user, or leave out user (--user)")]
    Named {
        /// The user's name.
        name: String,
        /// Error of the look-up.
        #[source]
        source: io::Error,
    },
}

impl VmSpec {
    /// Returns whether QEMU of a VM with this description keeps the rights of the daemon's user,
    /// which is this process's user.
    #[must_use]
    pub fn keeps_rights(&self) -> bool {
        match self.user.as_deref() {
            Some(name) => name == ROOT,
            None => !rustix::process::geteuid().is_root(),
        }
    }
}

impl QemuUser {
    /// Chooses the user for the QEMU of a VM that is about to start; `None`: QEMU keeps the
    /// daemon's user.
    pub(super) fn choose(spec: &VmSpec) -> Result<Option<Self>, UserError> {
        match &spec.user {
            _ if spec.keeps_rights() => Ok(None),
            Some(name) => Self::named(name).map(Some).map_err(|source| {
                let name = name.clone();
                UserError::Named { name, source }
            }),
            None => {
                let number = qemu_users::allot()?;
                Ok(Some(Self {
                    uid: number,
                    gid: number,
                }))
            }
        }
    }

    pub(super) fn named(name: &str) -> io::Result<Self> {
        let none = || io::Error::other(format!("no user '{name}' on this host"));
        let (uid, gid) = peer::user_ids(name)?.ok_or_else(none)?;
        Ok(Self { uid, gid })
    }

    /// Returns the option for QEMU that makes it switch to this user. A user that the description
    /// names also gets the groups that the host's databases give the user.
    pub(super) fn option(self, spec: &VmSpec) -> String {
        match &spec.user {
            Some(name) => format!("user={name}"),
            None => format!("user={}:{}", self.uid, self.gid),
        }
    }
}

/// Changes the owner of a temporary file or socket to the user that the VM's QEMU switches to, if
/// there is one: QEMU opens an overlay again when a snapshot freezes it, and no longer has root's
/// rights then. `path` is not followed if it is a symbolic link.
pub fn give(path: &Path, user: Option<QemuUser>) -> io::Result<()> {
    let Some(QemuUser { uid, gid }) = user else {
        return Ok(());
    };
    std::os::unix::fs::lchown(path, Some(uid), Some(gid))
}

#[cfg(test)]
mod tests {
    use memfold_units::ByteSize;

    use super::*;

    #[test]
    fn only_user_root_or_a_daemon_without_roots_rights_lets_qemu_keep_its_rights() {
        let mut spec = VmSpec::new("a", ByteSize::mib(64));
        let is_root = rustix::process::geteuid().is_root();
        assert_eq!(spec.keeps_rights(), !is_root);
        spec.user = Some(ROOT.into());
        assert!(spec.keeps_rights());
        assert_eq!(QemuUser::choose(&spec).unwrap(), None);
        spec.user = Some("nobody".into());
        assert!(!spec.keeps_rights());
        let nobody = QemuUser::choose(&spec).unwrap().unwrap();
        assert_eq!(nobody.option(&spec), "user=nobody");
        spec.user = Some("no-such-user-here".into());
        let error = QemuUser::choose(&spec).unwrap_err().to_string();
        assert!(error.contains("'no-such-user-here'"), "{error}");
    }
}
