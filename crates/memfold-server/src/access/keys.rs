//! The secrets with which users and programs log in to the daemon's API over TCP: tokens, login
//! codes and sessions.
//!
//! Each secret is 32 random bytes in hexadecimal. The daemon keeps only BLAKE3 hashes of secrets,
//! and compares hashes. The comparison takes the same time wherever two hashes differ
//! (`blake3::Hash`).

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blake3::Hash;
use memfold_api::Role;

use super::private_file;

/// Time for which a login code is valid.
pub(crate) const CODE_LIFE: Duration = Duration::from_secs(120);
/// Longest duration of a session, counted from the login.
pub(crate) const SESSION_LIFE: Duration = Duration::from_secs(12 * 3600);
/// Time after which a session without requests ends.
const SESSION_IDLE: Duration = Duration::from_secs(3600);
/// Largest number of sessions. A further login ends a session: readers' sessions first, then the
/// least recently used one.
const MOST_SESSIONS: usize = 64;
/// Largest number of login codes. A further code replaces an older one.
const MOST_CODES: usize = 16;
/// Length of a token in characters.
const TOKEN_LENGTH: usize = 64;

/// A session, identified by its cookie.
#[derive(Clone, Debug)]
struct Session {
    hash: Hash,
    role: Role,
    /// Name of the session in the audit log.
    label: String,
    began: Instant,
    used: Instant,
}

/// A session that a login has just begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    /// Value of the session's cookie.
    pub cookie: String,
    /// Role of the session: what its user may do.
    pub role: Role,
    /// Name of the session in the audit log.
    pub label: String,
}

#[derive(Clone, Debug)]
struct Code {
    hash: Hash,
    role: Role,
    /// User who made the login code.
    by: String,
    until: Instant,
}

/// Secrets that give access over TCP: tokens, login codes, sessions.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    tokens: Vec<(Hash, Role)>,
    codes: Vec<Code>,
    sessions: Vec<Session>,
    made: u64,
}

/// Makes a secret: 32 random bytes in hexadecimal.
pub(super) fn secret() -> io::Result<String> {
    let mut bytes = [0; TOKEN_LENGTH / 2];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(Hash::from_bytes(bytes).to_hex().to_string())
}

pub(super) fn hash(text: &str) -> Hash {
    blake3::hash(text.as_bytes())
}

/// Returns the path of a role's token file.
pub(super) fn token_file(directory: &Path, role: Role) -> PathBuf {
    directory.join(format!("{}.token", role.name()))
}

impl Keys {
    /// Reads the tokens in `directory`. Missing token files are created (mode 0600).
    ///
    /// # Errors
    /// An I/O error if a file cannot be read or created, is invalid, or is readable by other users.
    pub(crate) fn with_tokens(directory: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let mut keys = Self::default();
        for role in [Role::Read, Role::Operate] {
            let path = token_file(directory, role);
            let told = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            };
            let token = read_or_make(&path).map_err(told)?;
            keys.tokens.push((hash(&token), role));
        }
        Ok(keys)
    }

    /// Returns the role of a token; `None` if there is no such token. The token is compared with
    /// all tokens, so that the time does not depend on the match.
    pub(super) fn role_of_token(&self, token: &str) -> Option<Role> {
        let asked = hash(token);
        let mut role = None;
        for (known, of) in &self.tokens {
            if *known == asked {
                role = Some(*of);
            }
        }
        role
    }

    /// Makes a code for one login. `by`: the user who asked for the code.
    pub(crate) fn new_code(&mut self, role: Role, by: &str, now: Instant) -> io::Result<String> {
        let code = secret()?;
        self.codes.retain(|code| now < code.until);
        if self.codes.len() >= MOST_CODES {
            // Codes of readers are replaced before codes of operators.
            let oldest = self.codes.iter().position(|code| code.role == Role::Read);
            self.codes.remove(oldest.unwrap_or(0));
        }
        self.codes.push(Code {
            hash: hash(&code),
            role,
            // If a session made this code, its creator is the user who began that session.
            by: by.rsplit(" of ").next().unwrap_or(by).to_owned(),
            until: now + CODE_LIFE,
        });
        Ok(code)
    }

    /// Begins a session with a token or a login code; a code can be used once. Returns `None` if
    /// `secret_text` is neither.
    pub(crate) fn log_in(&mut self, secret_text: &str, now: Instant) -> io::Result<Option<Begun>> {
        let asked = hash(secret_text);
        self.codes.retain(|code| now < code.until);
        let code = self.codes.iter().position(|code| code.hash == asked);
        let known = match code.map(|at| self.codes.remove(at)) {
            Some(code) => Some((code.role, code.by)),
            None => self
                .role_of_token(secret_text)
                .map(|role| (role, format!("the {} token", role.name()))),
        };
        let Some((role, by)) = known else {
            return Ok(None);
        };
        let cookie = secret()?;
        self.drop_old(now);
        if self.sessions.len() >= MOST_SESSIONS {
            let oldest = (0..self.sessions.len())
                .min_by_key(|&at| (self.sessions[at].role, self.sessions[at].used));
            oldest.map(|at| self.sessions.remove(at));
        }
        self.made += 1;
        let label = format!("session {} of {by}", self.made);
        self.sessions.push(Session {
            hash: hash(&cookie),
            role,
            label: label.clone(),
            began: now,
            used: now,
        });
        Ok(Some(Begun {
            cookie,
            role,
            label,
        }))
    }

    /// Returns role and audit name of the session with this cookie; `None` if there is none. The
    /// session counts as used now.
    pub(super) fn session(&mut self, cookie: &str, now: Instant) -> Option<(Role, String)> {
        let asked = hash(cookie);
        self.drop_old(now);
        let session = self.sessions.iter_mut().find(|s| s.hash == asked)?;
        session.used = now;
        Some((session.role, session.label.clone()))
    }

    /// Ends the session with this cookie.
    pub(crate) fn log_out(&mut self, cookie: &str) {
        let asked = hash(cookie);
        self.sessions.retain(|session| session.hash != asked);
    }

    fn drop_old(&mut self, now: Instant) {
        self.sessions.retain(|session| {
            now.duration_since(session.began) < SESSION_LIFE
                && now.duration_since(session.used) < SESSION_IDLE
        });
    }
}

fn read_or_make(path: &Path) -> io::Result<String> {
    match File::open(path) {
        Ok(file) => {
            if file.metadata()?.permissions().mode() & 0o077 != 0 {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "other users may read this token; remove the file, and the daemon creates a new token",
                ));
            }
            let mut text = String::new();
            file.take(TOKEN_LENGTH as u64 + 2)
                .read_to_string(&mut text)?;
            let token = text.trim_end();
            if token.len() != TOKEN_LENGTH || !token.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the file contains no token; remove it, and the daemon creates a new token",
                ));
            }
            Ok(token.to_owned())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let token = secret()?;
            private_file::replace(path, format!("{token}\n").as_bytes())?;
            Ok(token)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    fn token(directory: &Path, role: Role) -> String {
        let text = std::fs::read_to_string(token_file(directory, role)).unwrap();
        text.trim().to_owned()
    }

    #[test]
    fn access_tokens_are_created_once_in_private_files_and_each_grants_its_role() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("access");
        Keys::with_tokens(&place).unwrap();
        let (read, operate) = (token(&place, Role::Read), token(&place, Role::Operate));
        assert_ne!(read, operate);
        let mode = |role| {
            let facts = std::fs::metadata(token_file(&place, role)).unwrap();
            facts.permissions().mode() & 0o777
        };
        assert_eq!((mode(Role::Read), mode(Role::Operate)), (0o600, 0o600));
        let again = Keys::with_tokens(&place).unwrap();
        assert_eq!(again.role_of_token(&read), Some(Role::Read));
        assert_eq!(again.role_of_token(&operate), Some(Role::Operate));
        for wrong in ["", "0", &read[..63], &format!("{read} ")] {
            assert_eq!(again.role_of_token(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_world_readable_or_malformed_token_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = token_file(directory.path(), Role::Operate);
        std::fs::write(&path, "secret\n").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let error = Keys::with_tokens(directory.path()).unwrap_err().to_string();
        assert!(error.contains("other users may read"), "{error}");
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let error = Keys::with_tokens(directory.path()).unwrap_err().to_string();
        assert!(error.contains("no token"), "{error}");
    }

    #[test]
    fn a_login_code_works_once_within_two_minutes() {
        let mut keys = Keys::default();
        let now = Instant::now();
        let code = keys.new_code(Role::Read, "uid 7", now).unwrap();
        let late = keys
            .new_code(Role::Operate, "session 3 of uid 8", now)
            .unwrap();
        let begun = keys.log_in(&code, now).unwrap().unwrap();
        assert_eq!(
            (begun.role, begun.label.as_str()),
            (Role::Read, "session 1 of uid 7")
        );
        assert_eq!(keys.log_in(&code, now).unwrap(), None);
        assert_eq!(keys.log_in(&late, now + CODE_LIFE).unwrap(), None);
        let next = keys
            .new_code(Role::Read, "session 3 of uid 8", now)
            .unwrap();
        let begun = keys.log_in(&next, now).unwrap().unwrap();
        assert_eq!(begun.label, "session 2 of uid 8");
        for _ in 0..100 {
            keys.new_code(Role::Read, "uid 7", now).unwrap();
        }
        assert_eq!(keys.codes.len(), MOST_CODES);
    }

    #[test]
    fn a_browser_session_ends_if_it_is_idle_old_or_logged_out_or_there_are_too_many() {
        let mut keys = Keys::default();
        let now = Instant::now();
        let begin = |keys: &mut Keys, at| {
            let code = keys.new_code(Role::Operate, "uid 7", at).unwrap();
            keys.log_in(&code, at).unwrap().unwrap().cookie
        };
        let minutes = |n: u64| Duration::from_secs(60 * n);
        let cookie = begin(&mut keys, now);
        assert!(keys.session(&cookie, now + minutes(59)).is_some());
        assert!(keys.session(&cookie, now + minutes(118)).is_some());
        assert!(keys.session(&cookie, now + minutes(179)).is_none(), "idle");
        let cookie = begin(&mut keys, now);
        for quarter in 1..48 {
            let at = now + minutes(15 * quarter);
            assert!(keys.session(&cookie, at).is_some(), "{quarter}");
        }
        assert!(keys.session(&cookie, now + SESSION_LIFE).is_none(), "old");
        let cookie = begin(&mut keys, now);
        keys.log_out(&cookie);
        assert!(keys.session(&cookie, now).is_none(), "ended");
        let first = begin(&mut keys, now);
        for _ in 0..MOST_SESSIONS {
            begin(&mut keys, now + minutes(1));
        }
        assert_eq!(keys.sessions.len(), MOST_SESSIONS);
        assert!(keys.session(&first, now + minutes(1)).is_none());
    }
}
