//! The keys with which snapshots are encrypted: their names, and where each comes from. A key is
//! read each time that it is needed, and is not kept.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

use memfold_host::helper;
use zeroize::Zeroizing;

use super::encryption::OperatorKey;

/// Time limit of a command that prints a key.
const COMMAND_LIMIT: Duration = Duration::from_secs(30);

/// Longest text of a key that is read, in bytes.
const LARGEST: usize = 4096;

/// Environment variable with the directory of the credentials of a systemd unit (`systemd.exec(5)`,
/// `LoadCredential=`).
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";

/// Error of a key of snapshots.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages explain the variants
pub enum KeyError {
    #[error(
        "no key for snapshots is configured; pass --snapshot-key NAME=file:PATH to 'memfold serve', or set snapshot_key in memfold.toml"
    )]
    None,
    #[error(
        "several keys for snapshots are configured ({names}); name one of them with --encrypt=NAME"
    )]
    Several { names: String },
    #[error(
        "no key for snapshots is named '{name}'; the keys are: {names}. Pass --snapshot-key {name}=SOURCE to 'memfold serve', or set snapshot_key in memfold.toml"
    )]
    Unknown { name: String, names: String },
    #[error("two keys for snapshots are named '{0}'; give each --snapshot-key another name")]
    Twice(String),
    #[error("cannot read key '{name}' for snapshots from {place}")]
    File {
        name: String,
        place: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the file {place} of key '{name}' for snapshots may be read by others; chmod 600 {place}",
        place = place.display()
    )]
    Open { name: String, place: PathBuf },
    #[error(
        "key '{name}' for snapshots is a credential, and the daemon has none: its systemd unit needs LoadCredential={credential}:PATH"
    )]
    NoCredentials { name: String, credential: String },
    #[error("cannot run the command {program} of key '{name}' for snapshots")]
    Run {
        name: String,
        program: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "the command {program} of key '{name}' for snapshots failed ({status}); run it by hand to see why"
    )]
    Failed {
        name: String,
        program: String,
        status: std::process::ExitStatus,
    },
    #[error("key '{name}' for snapshots cannot be used: {why}")]
    Format { name: String, why: &'static str },
}

/// Where a key comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A file that only its owner may read.
    File(PathBuf),
    /// A credential of the daemon's systemd unit.
    Credential(String),
    /// The output of a program: the words of its command line.
    Command(Vec<String>),
}

/// A key's name, and where the key comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedKey {
    /// Name of the key, which snapshots record.
    pub name: String,
    /// Where the key comes from.
    pub source: KeySource,
}

impl FromStr for NamedKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "give NAME=file:PATH, NAME=credential:NAME or NAME=command:PROGRAM ARGUMENT ...";
        let (name, source) = text.split_once('=').ok_or(form)?;
        memfold_vm::check_name("key", name).map_err(|error| error.to_string())?;
        let (kind, rest) = source.split_once(':').ok_or(form)?;
        let source = match kind {
            "file" if Path::new(rest).is_absolute() => KeySource::File(rest.into()),
            "file" => return Err("the path of the key's file must begin with /".into()),
            "credential" => {
                let is_name = !rest.is_empty() && !rest.contains('/') && !rest.starts_with('.');
                if !is_name {
                    return Err("a credential's name has no / and does not begin with a dot".into());
                }
                KeySource::Credential(rest.into())
            }
            "command" => {
                let words = shlex::split(rest).ok_or("the command's quotes do not match")?;
                let program = words.first().ok_or(form)?;
                if !Path::new(program).is_absolute() {
                    return Err("the path of the key's program must begin with /".into());
                }
                KeySource::Command(words)
            }
            _ => return Err(form.into()),
        };
        Ok(Self {
            name: name.into(),
            source,
        })
    }
}

/// All keys that the daemon may use.
#[derive(Clone, Debug, Default)]
pub struct Keys(BTreeMap<String, KeySource>);

impl Keys {
    /// Takes keys, each with a name of its own.
    ///
    /// # Errors
    ///
    /// [`KeyError::Twice`] if two keys have the same name.
    pub fn new(keys: impl IntoIterator<Item = NamedKey>) -> Result<Self, KeyError> {
        let mut all = BTreeMap::new();
        for NamedKey { name, source } in keys {
            if all.insert(name.clone(), source).is_some() {
                return Err(KeyError::Twice(name));
            }
        }
        Ok(Self(all))
    }

    /// Returns the name of the key that a request asks for; without a name, of the only one.
    ///
    /// # Errors
    ///
    /// [`KeyError::Unknown`], or without a name, [`KeyError::None`] and [`KeyError::Several`].
    pub fn choose(&self, asked: Option<&str>) -> Result<String, KeyError> {
        let mut names = self.0.keys();
        match (asked, names.next(), names.next()) {
            (_, None, _) => Err(KeyError::None),
            (Some(name), ..) if self.0.contains_key(name) => Ok(name.into()),
            (Some(name), ..) => Err(self.unknown(name)),
            (None, Some(only), None) => Ok(only.clone()),
            (None, ..) => Err(KeyError::Several {
                names: self.names(),
            }),
        }
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.0.keys().map(String::as_str).collect();
        if names.is_empty() {
            return "none".into();
        }
        names.join(", ")
    }

    fn unknown(&self, name: &str) -> KeyError {
        KeyError::Unknown {
            name: name.into(),
            names: self.names(),
        }
    }

    /// Reads the key `name`.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if there is no such key, or if it cannot be read, or others may read it. No
    /// error contains a part of the key.
    pub fn load(&self, name: &str) -> Result<OperatorKey, KeyError> {
        let source = self.0.get(name).ok_or_else(|| self.unknown(name))?;
        let text = match source {
            KeySource::File(path) => read(name, path, true)?,
            KeySource::Credential(credential) => {
                let none = || KeyError::NoCredentials {
                    name: name.into(),
                    credential: credential.clone(),
                };
                let place = std::env::var_os(CREDENTIALS).ok_or_else(none)?;
                // systemd gives the files of a credential only to the unit.
                read(name, &Path::new(&place).join(credential), false)?
            }
            KeySource::Command(words) => output(name, words)?,
        };
        OperatorKey::parse(&text).map_err(|why| KeyError::Format {
            name: name.into(),
            why,
        })
    }

    /// Returns the first key that cannot be read, with the reason.
    #[must_use]
    pub fn unusable(&self) -> Option<KeyError> {
        self.0.keys().find_map(|name| self.load(name).err())
    }
}

fn read(name: &str, place: &Path, is_private: bool) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    let failed = |source| KeyError::File {
        name: name.into(),
        place: place.into(),
        source,
    };
    let file = File::open(place).map_err(failed)?;
    let facts = file.metadata().map_err(failed)?;
    if is_private && facts.permissions().mode() & 0o077 != 0 {
        return Err(KeyError::Open {
            name: name.into(),
            place: place.into(),
        });
    }
    let mut text = Zeroizing::new(Vec::with_capacity(LARGEST));
    let read = file.take(LARGEST as u64).read_to_end(&mut text);
    read.map_err(failed)?;
    Ok(text)
}

fn output(name: &str, words: &[String]) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    let (name, program) = (name.to_owned(), words.first().cloned().unwrap_or_default());
    let mut command = Command::new(&program);
    command
        .args(words.get(1..).unwrap_or_default())
        .stdin(Stdio::null());
    let done = match helper::output(&mut command, COMMAND_LIMIT) {
        Ok(done) => done,
        Err(source) => {
            return Err(KeyError::Run {
                name,
                program,
                source,
            });
        }
    };
    let text = Zeroizing::new(done.stdout);
    // What the program says of its failure may contain the key, so it is not shown.
    if !done.status.success() {
        return Err(KeyError::Failed {
            name,
            program,
            status: done.status,
        });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const TEXT: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n";

    fn keys(all: &[&str]) -> Keys {
        Keys::new(all.iter().map(|text| text.parse().unwrap())).unwrap()
    }

    #[test]
    fn a_key_comes_from_a_file_a_credential_or_a_command() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("key");
        fs::write(&file, TEXT).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let keys = keys(&[
            &format!("a=file:{}", file.display()),
            "b=credential:snapshots",
            &format!("c=command:/usr/bin/printf '%s' {}", TEXT.trim()),
        ]);
        keys.load("a").unwrap();
        keys.load("c").unwrap();
        let why = keys.load("b").unwrap_err().to_string();
        assert!(why.contains("LoadCredential=snapshots:PATH"), "{why}");
        let wrong = |key: &Keys, name: &str| key.load(name).unwrap_err().to_string();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(wrong(&keys, "a").contains("may be read by others"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        for text in [
            "",
            "00",
            &TEXT[2..],
            &TEXT.replace('0', "g"),
            &"00".repeat(32),
        ] {
            fs::write(&file, text).unwrap();
            let why = wrong(&keys, "a");
            assert!(why.contains("openssl rand -hex 32"), "{why}");
        }
        fs::remove_file(&file).unwrap();
        assert!(wrong(&keys, "a").contains("cannot read key 'a'"));
    }

    #[test]
    fn a_failed_key_command_is_named_and_its_output_is_not() {
        let keys = keys(&["a=command:/bin/sh -c 'echo hidden; echo hidden >&2; exit 3'"]);
        let error = keys.load("a").unwrap_err();
        let told = format!("{error} {error:?}");
        assert!(told.contains("/bin/sh") && told.contains('3'), "{told}");
        assert!(!told.contains("hidden"), "{told}");
        let none = Keys::new(["a=command:/nowhere/x".parse().unwrap()]).unwrap();
        assert!(matches!(none.load("a"), Err(KeyError::Run { .. })));
    }

    #[test]
    fn without_a_name_the_only_key_is_chosen_and_otherwise_the_error_names_all_keys() {
        let (none, one) = (Keys::default(), keys(&["a=file:/a"]));
        let two = keys(&["a=file:/a", "b=file:/b"]);
        assert!(matches!(none.choose(None), Err(KeyError::None)));
        assert!(matches!(none.choose(Some("a")), Err(KeyError::None)));
        assert_eq!(one.choose(None).unwrap(), "a");
        assert_eq!(two.choose(Some("b")).unwrap(), "b");
        for why in [two.choose(None), two.choose(Some("c"))] {
            let why = why.unwrap_err().to_string();
            assert!(why.contains("a, b"), "{why}");
        }
        let twice = ["a=file:/a", "a=file:/b"].map(|text| text.parse().unwrap());
        assert!(matches!(Keys::new(twice), Err(KeyError::Twice(_))));
    }

    #[test]
    fn a_key_without_a_name_a_source_or_an_absolute_path_is_refused() {
        for text in [
            "",
            "a",
            "=file:/a",
            "a=/a",
            "a=file:a",
            "a=credential:",
            "a=credential:../b",
            "a=command:",
            "a=command:cat /a",
            "a=command:/bin/cat '",
            "a/b=file:/a",
        ] {
            assert!(text.parse::<NamedKey>().is_err(), "{text}");
        }
    }
}
