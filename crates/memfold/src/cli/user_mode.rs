//! The daemon of a user without root's rights (`memfold serve --user`): its directories follow the
//! XDG Base Directory Specification, and commands of the same user find its socket.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use memfold_api::DEFAULT_SOCKET;
use rustix::process::geteuid;

/// Directories of a user's daemon.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UserDirectories {
    /// Sockets and files of running VMs, which are gone after a boot of the host.
    pub(super) state: PathBuf,
    /// Snapshots and segments.
    pub(super) data: PathBuf,
    /// Configuration file and definitions of VMs.
    pub(super) config: PathBuf,
    /// History, audit log and tokens.
    pub(super) records: PathBuf,
}

impl UserDirectories {
    /// Returns the directories of the user who runs this process.
    ///
    /// # Errors
    ///
    /// An error that names the variable that is missing in the environment.
    pub(super) fn find() -> anyhow::Result<Self> {
        Self::of(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn of(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> anyhow::Result<Self> {
        let runtime = variable("XDG_RUNTIME_DIR").context(
            "XDG_RUNTIME_DIR is not set; log in by a session of systemd (machinectl shell $USER@), or set it to a directory of your own on tmpfs",
        )?;
        let place = |name: &str, below_home: &str| {
            let home = || variable("HOME").map(|home| Path::new(&home).join(below_home));
            let found = variable(name).map(PathBuf::from).or_else(home);
            let found =
                found.with_context(|| format!("neither {name} nor HOME is set; set one"))?;
            anyhow::Ok(found.join("memfold"))
        };
        Ok(Self {
            state: Path::new(&runtime).join("memfold"),
            data: place("XDG_DATA_HOME", ".local/share")?,
            config: place("XDG_CONFIG_HOME", ".config")?,
            records: place("XDG_STATE_HOME", ".local/state")?,
        })
    }

    /// Returns the path of the daemon's socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.state.join("memfold.sock")
    }

    /// Returns the path of the configuration file.
    pub(super) fn config_file(&self) -> PathBuf {
        self.config.join("memfold.toml")
    }
}

/// Returns the socket for commands: for a user other than root who has a daemon of their own, and
/// who has not named a socket, that daemon's; otherwise `given`.
pub(super) fn socket(given: PathBuf) -> PathBuf {
    if given != Path::new(DEFAULT_SOCKET) || geteuid().is_root() {
        return given;
    }
    let own = UserDirectories::find().map(|directories| directories.socket());
    own.ok().filter(|own| own.exists()).unwrap_or(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_a_user_follow_the_xdg_specification_and_a_missing_variable_is_named() {
        let of = |variables: &[(&str, &str)]| {
            UserDirectories::of(|name| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).into())
            })
        };
        let found = of(&[
            ("XDG_RUNTIME_DIR", "/run/user/7"),
            ("HOME", "/home/u"),
            ("XDG_CONFIG_HOME", "/cfg"),
        ]);
        let found = found.unwrap();
        let wanted = UserDirectories {
            state: "/run/user/7/memfold".into(),
            data: "/home/u/.local/share/memfold".into(),
            config: "/cfg/memfold".into(),
            records: "/home/u/.local/state/memfold".into(),
        };
        assert_eq!(found, wanted);
        assert_eq!(
            found.socket(),
            Path::new("/run/user/7/memfold/memfold.sock")
        );
        for (variables, missing) in [
            (&[("HOME", "/h")][..], "XDG_RUNTIME_DIR"),
            (&[("XDG_RUNTIME_DIR", "/r")], "HOME"),
        ] {
            let error = of(variables).unwrap_err().to_string();
            assert!(error.contains(missing), "{error}");
        }
    }
}
