//! Hosts that may call the lease registry over TCP. Each host has a token of its own.
//!
//! memfold shows a token once, when the token is made, and stores only its hash (`hosts.json`, mode
//! 0600). The file is kept over a reboot of this host, so that other hosts need no new tokens.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use blake3::Hash;

use super::keys::{hash, secret};
use super::private_file;

/// Largest number of hosts that may have a token.
const MOST: usize = 4096;

/// Names of the hosts that may call the registry, and hashes of their tokens.
#[derive(Debug)]
pub(crate) struct Hosts {
    file: PathBuf,
    by_name: BTreeMap<String, Hash>,
}

impl Hosts {
    /// Reads the hosts and the hashes of their tokens from `file`, if the file exists.
    ///
    /// # Errors
    /// An I/O error if the file cannot be read or is invalid.
    pub(crate) fn open(file: PathBuf) -> io::Result<Self> {
        let told = |why: String| {
            let text = format!("{}: {why}", file.display());
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        let text = match std::fs::read(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => b"{}".to_vec(),
            read => read.map_err(|error| told(error.to_string()))?,
        };
        let read: BTreeMap<String, String> =
            serde_json::from_slice(&text).map_err(|error| told(error.to_string()))?;
        let parse = |(name, hex): (String, String)| Some((name, Hash::from_hex(hex).ok()?));
        let by_name: Option<BTreeMap<_, _>> = read.into_iter().map(parse).collect();
        let by_name = by_name.ok_or_else(|| told("a token's hash is not valid".into()))?;
        Ok(Self { file, by_name })
    }

    /// Makes a token for a host and returns it. An earlier token of this host becomes invalid.
    pub(crate) fn add(&mut self, name: &str) -> io::Result<String> {
        if self.by_name.len() >= MOST && !self.by_name.contains_key(name) {
            return Err(io::Error::other("too many hosts have tokens"));
        }
        let token = secret()?;
        let mut by_name = self.by_name.clone();
        by_name.insert(name.to_owned(), hash(&token));
        self.replace(by_name)?;
        Ok(token)
    }

    /// Removes a host's token. Returns whether the host had one.
    pub(crate) fn remove(&mut self, name: &str) -> io::Result<bool> {
        let mut by_name = self.by_name.clone();
        let was = by_name.remove(name).is_some();
        if was {
            self.replace(by_name)?;
        }
        Ok(was)
    }

    /// Returns the names of all hosts that have a token.
    pub(crate) fn names(&self) -> Vec<String> {
        self.by_name.keys().cloned().collect()
    }

    /// Returns the host with this token. The token is compared with those of all hosts, so that the
    /// time does not depend on the match.
    pub(super) fn with_token(&self, token: &str) -> Option<&str> {
        let asked = hash(token);
        let mut found = None;
        for (name, known) in &self.by_name {
            if *known == asked {
                found = Some(name.as_str());
            }
        }
        found
    }

    /// Replaces the hosts on disk, and then in memory: a change that is only in memory would be
    /// lost with the daemon.
    fn replace(&mut self, by_name: BTreeMap<String, Hash>) -> io::Result<()> {
        let text: BTreeMap<&String, String> = by_name
            .iter()
            .map(|(name, hash)| (name, hash.to_hex().to_string()))
            .collect();
        if let Some(directory) = self.file.parent() {
            std::fs::create_dir_all(directory)?;
        }
        private_file::replace(&self.file, &serde_json::to_vec_pretty(&text)?)?;
        self.by_name = by_name;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_the_newest_token_of_a_host_is_accepted_and_none_once_the_host_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("records/hosts.json");
        let mut hosts = Hosts::open(file.clone()).unwrap();
        let (first, other) = (hosts.add("a").unwrap(), hosts.add("b").unwrap());
        let second = hosts.add("a").unwrap();
        // The next daemon reads the same file.
        let mut hosts = Hosts::open(file.clone()).unwrap();
        assert_eq!(hosts.names(), ["a", "b"]);
        assert_eq!(hosts.with_token(&first), None);
        assert_eq!(hosts.with_token(&second), Some("a"));
        assert_eq!(hosts.with_token(&other), Some("b"));
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains(&second) && !text.contains(&other));
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(hosts.remove("a").unwrap() && !hosts.remove("a").unwrap());
        let hosts = Hosts::open(file.clone()).unwrap();
        assert_eq!(hosts.with_token(&second), None);
        std::fs::write(&file, "{\"a\": \"x\"}").unwrap();
        let error = Hosts::open(file).unwrap_err().to_string();
        assert!(error.contains("hosts.json"), "{error}");
    }
}
