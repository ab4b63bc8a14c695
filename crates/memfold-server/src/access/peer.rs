//! Finds out which user is at the other end of a connection to the daemon's Unix socket, and which
//! groups of users may use that socket.

use std::io;
use std::net::SocketAddr;

use memfold_api::Role;
use memfold_sys::peer::{group_id, groups};
use tokio::net::UnixStream;

/// Default group whose members may read memfold's state over the Unix socket. The group need not
/// exist.
pub const READ_GROUP: &str = "memfold-read";
/// Default group whose members may operate memfold over the Unix socket. The group need not exist.
pub const OPERATE_GROUP: &str = "memfold-operate";

/// Why the groups of users for the Unix socket cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum GroupsError {
    /// No group has this name.
    #[error("no group '{0}' on this host; create it with 'groupadd --system {0}'")]
    Unknown(String),
    /// The host's user database cannot be read.
    #[error("cannot look up group '{name}'")]
    Lookup {
        /// Name of the group.
        name: String,
        /// Error that the lookup in the user database returned.
        #[source]
        source: io::Error,
    },
}

/// Groups of users that may use the Unix socket. Root may always use it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// GID of the group whose members may read; `None`: no group.
    pub read: Option<u32>,
    /// GID of the group whose members may operate; `None`: no group.
    pub operate: Option<u32>,
}

impl Groups {
    /// Finds the groups with the names `read` and `operate`. In place of a name that is `None`, the
    /// default group is used if it exists.
    ///
    /// # Errors
    /// [`GroupsError`] if a named group does not exist, or a lookup fails.
    pub fn find(read: Option<&str>, operate: Option<&str>) -> Result<Self, GroupsError> {
        let find = |named: Option<&str>, usual: &str| {
            let name = named.unwrap_or(usual);
            match group_id(name) {
                Ok(None) if named.is_some() => Err(GroupsError::Unknown(name.to_owned())),
                Ok(found) => Ok(found),
                Err(source) => Err(GroupsError::Lookup {
                    name: name.to_owned(),
                    source,
                }),
            }
        };
        Ok(Self {
            read: find(read, READ_GROUP)?,
            operate: find(operate, OPERATE_GROUP)?,
        })
    }

    /// Returns whether a group may use the Unix socket, so that users other than root have access.
    #[must_use]
    pub const fn any(self) -> bool {
        self.read.is_some() || self.operate.is_some()
    }

    /// Returns the role of user `user`, who is in the groups `of`. `own`: the daemon's own user.
    fn role(self, user: u32, of: &[u32], own: u32) -> Option<Role> {
        let member = |group: Option<u32>| group.is_some_and(|group| of.contains(&group));
        if user == 0 || user == own || member(self.operate) {
            Some(Role::Operate)
        } else if member(self.read) {
            Some(Role::Read)
        } else {
            None
        }
    }
}

/// The program or host at the other end of a connection.
#[derive(Clone, Debug)]
pub(crate) enum Peer {
    /// A process of this host, connected to the Unix socket.
    Unix {
        /// User and process number, as text.
        who: String,
        /// Role of the process's user; `None`: no access.
        role: Option<Role>,
    },
    /// A TCP client, which must present a token or a session.
    Tcp {
        /// Address of the client.
        address: SocketAddr,
        /// Whether the connection uses TLS.
        tls: bool,
    },
}

impl Peer {
    /// Returns the role that is known before a request; `None` for TCP.
    pub(super) const fn known_role(&self) -> Option<Role> {
        match self {
            Self::Unix { role, .. } => *role,
            Self::Tcp { .. } => None,
        }
    }

    /// Identifies the peer of a Unix connection, from the credentials that the kernel reports.
    pub(super) fn of(stream: &UnixStream, allowed: Groups) -> io::Result<Self> {
        let process = stream.peer_cred()?;
        let mut of = groups(stream)?;
        of.push(process.gid());
        let own = rustix::process::geteuid().as_raw();
        let pid = process.pid().map_or("?".to_owned(), |pid| pid.to_string());
        Ok(Self::Unix {
            who: format!("uid {} (process {pid})", process.uid()),
            role: allowed.role(process.uid(), &of, own),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_role_of_a_client_of_the_unix_socket_follows_from_its_user_and_groups() {
        let groups = Groups {
            read: Some(10),
            operate: Some(20),
        };
        let of = |user, of: &[u32]| groups.role(user, of, 7);
        assert_eq!(of(0, &[]), Some(Role::Operate));
        assert_eq!(of(7, &[]), Some(Role::Operate));
        assert_eq!(of(1000, &[5, 10]), Some(Role::Read));
        assert_eq!(of(1000, &[10, 20]), Some(Role::Operate));
        assert_eq!(of(1000, &[5]), None);
        assert_eq!(Groups::default().role(1000, &[0, 10, 20], 7), None);
    }

    #[test]
    fn a_group_for_access_to_the_daemon_that_does_not_exist_is_refused() {
        let error = Groups::find(Some("no-such-group-here"), None).unwrap_err();
        assert!(error.to_string().contains("groupadd"), "{error}");
        assert_eq!(Groups::find(Some("root"), None).unwrap().read, Some(0));
    }
}
