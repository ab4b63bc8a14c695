//! What cloud-init in a guest is told: the files of a VM's description, and their contents.
//!
//! ```text
//!   description   cloud_init.user_data, cloud_init.ssh_keys: files
//!        | read once, at the start
//!   Seed          their texts, instance ID and host name: in `spec.json` and in snapshots
//!        |
//!   seed.img      the seed disk (seed_disk.rs)
//! ```
//! A snapshot has the texts, so each VM that runs from the snapshot gets the same disk again, on
//! any host.
//!
//! Source: <https://docs.cloud-init.io/en/latest/reference/datasources/nocloud.html>.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::name::host_name;
use super::network::hash_on_this_host;
use super::spec_error::{SpecError, require, value};

/// Largest total size of a seed's files, in bytes.
pub(super) const MOST_BYTES: u64 = 256 << 10;

/// User data of a VM without any. cloud-init needs the file.
const NO_USER_DATA: &str = "#cloud-config\n";

/// What cloud-init in the guest is told. The guest finds it on a read-only disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloudInit {
    /// Path of a file with user data, such as `#cloud-config` or a script.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<PathBuf>,
    /// Paths of files with SSH public keys, which may log in as the image's default user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<PathBuf>,
    /// Contents of the seed disk of a running VM, or of the VM of a snapshot. memfold sets this; a
    /// user's description never does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<Seed>,
}

/// Contents of a VM's seed disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// Instance ID: cloud-init configures a guest again if it differs from the last one.
    pub instance: String,
    /// Host name of the guest.
    pub host_name: String,
    /// User data for cloud-init, unchanged from the user's file.
    pub user_data: String,
    /// SSH public keys, one each.
    pub ssh_keys: Vec<String>,
}

impl CloudInit {
    /// Reads the files, and checks them.
    pub(super) fn read(&self) -> Result<Seed, SpecError> {
        let user_data = self.user_data.as_deref();
        let user_data = user_data.map(|path| text("cloud_init.user_data", path));
        let mut ssh_keys = Vec::new();
        for path in &self.ssh_keys {
            ssh_keys.extend(keys(path)?);
        }
        let seed = Seed {
            user_data: user_data
                .transpose()?
                .unwrap_or_else(|| NO_USER_DATA.into()),
            ssh_keys,
            ..Seed::default()
        };
        let why = format!("the files have more than {} KiB in all", MOST_BYTES >> 10);
        require(seed.bytes() <= MOST_BYTES, "cloud_init", why)?;
        Ok(seed)
    }

    /// Reads the files for the start of the VM `name`. Does nothing if the contents are known, as
    /// in a VM that runs from a snapshot.
    pub(super) fn settle(&mut self, name: &str) -> Result<(), SpecError> {
        if self.seed.is_none() {
            let mut seed = self.read()?;
            seed.rename(name);
            self.seed = Some(seed);
        }
        // The files may change or disappear while the VM runs.
        self.user_data = None;
        self.ssh_keys.clear();
        Ok(())
    }
}

impl Seed {
    /// Gives the VM another identity: that of the VM `name` on this host.
    pub fn rename(&mut self, name: &str) {
        self.instance = format!("memfold-{:016x}", hash_on_this_host("instance", name));
        self.host_name = host_name(name);
    }

    fn bytes(&self) -> u64 {
        let keys = self.ssh_keys.iter().map(String::len);
        u64::try_from(self.user_data.len() + keys.sum::<usize>()).unwrap_or(u64::MAX)
    }

    /// Returns the file `meta-data`. JSON is valid YAML.
    pub(super) fn meta_data(&self) -> String {
        let data = json!({
            "instance-id": self.instance,
            "local-hostname": self.host_name,
            "public-keys": self.ssh_keys,
        });
        format!("{data:#}\n")
    }
}

/// Reads a text file.
fn text(field: &'static str, path: &Path) -> Result<String, SpecError> {
    let failed = |source| SpecError::File {
        field,
        path: path.into(),
        source,
    };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    let read = file.take(MOST_BYTES + 1).read_to_string(&mut text);
    read.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => value(field, format!("{} is not a text", path.display())),
        _ => failed(error),
    })?;
    Ok(text)
}

/// Reads a file of SSH public keys, one a line. Lines that begin with `#` are comments.
fn keys(path: &Path) -> Result<Vec<String>, SpecError> {
    let field = "cloud_init.ssh_keys";
    let text = text(field, path)?;
    let path = path.display();
    let why = format!("{path} has a private key; give the file of the public key ({path}.pub)");
    require(!text.contains("PRIVATE KEY"), field, why)?;
    let lines = text.lines().map(str::trim);
    let keys: Vec<String> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    let is_key = |key: &String| {
        let kind = ["ssh-", "ecdsa-", "sk-"]
            .iter()
            .any(|kind| key.starts_with(kind));
        kind && key.split_whitespace().count() >= 2
    };
    let why = format!(
        "{path} has no SSH public key, or a line that is none; a line looks like 'ssh-ed25519 AAAA... name'"
    );
    require(!keys.is_empty() && keys.iter().all(is_key), field, why)?;
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_files_for_a_seed_are_refused_with_field_and_fix() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = place.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let data = |path: PathBuf| CloudInit {
            user_data: Some(path),
            ..CloudInit::default()
        };
        let key = |path: PathBuf| CloudInit {
            ssh_keys: vec![path],
            ..CloudInit::default()
        };
        let key_text = "# mine\nssh-rsa AAAA me\n\necdsa-sha2-nistp256 BBBB\n";
        let good = key(file("good", key_text.as_bytes())).read().unwrap();
        assert_eq!(good.ssh_keys.len(), 2);
        assert_eq!(good.user_data, NO_USER_DATA);
        let large = vec![b'x'; 300 << 10];
        let private = b"-----BEGIN OPENSSH PRIVATE KEY-----\n";
        for (wrong, words) in [
            (
                data(place.path().join("none")),
                "cloud_init.user_data: cannot open",
            ),
            (data(file("binary", b"\xff\xfe")), "is not a text"),
            (data(file("large", &large)), "256 KiB"),
            (key(file("id", private)), ".pub"),
            (key(file("empty", b"# none\n")), "no SSH public key"),
            (
                key(file("other", b"ssh-rsa AAAA\nhello\n")),
                "line that is none",
            ),
        ] {
            let error = wrong.read().unwrap_err().to_string();
            assert!(error.starts_with("cloud_init"), "{error}");
            assert!(error.contains(words), "{error}");
        }
    }
}
