//! What the guest's owner lets the host do: the list `allow` in the agent's configuration file.
//!
//! The file is read when the agent starts. If it cannot be read or parsed, nothing is allowed,
//! because the owner may have forbidden anything.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use memfold_wire::permission::{CONFIGURATION, Permission};
use serde::Deserialize;

/// Maximum number of unknown words that are named one by one, so that the list of problems stays
/// below [`MAX_PROBLEMS`](memfold_wire::agent::MAX_PROBLEMS).
const MAX_UNKNOWN_WORDS: usize = 16;

/// Maximum number of characters of an unknown word that are shown.
const MAX_SHOWN: usize = 64;

/// What the host may do in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consent {
    allowed: BTreeSet<Permission>,
    /// Mistakes in the configuration file, as text for people.
    pub problems: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Configuration {
    allow: Option<Vec<String>>,
}

impl Consent {
    /// Reads the configuration file.
    #[must_use]
    pub fn read() -> Self {
        Self::read_from(Path::new(CONFIGURATION))
    }

    /// Reads the configuration file at another path. A missing file allows the defaults.
    #[must_use]
    pub fn read_from(file: &Path) -> Self {
        match fs::read_to_string(file) {
            Ok(text) => Self::parse(&text, file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Self::defaults(),
            Err(e) => Self::nothing(format!(
                "nothing is allowed, because {} cannot be read: {e}",
                file.display()
            )),
        }
    }

    fn parse(text: &str, file: &Path) -> Self {
        let configuration: Configuration = match toml::from_str(text) {
            Ok(configuration) => configuration,
            Err(e) => {
                let line = e
                    .span()
                    .map_or(1, |at| 1 + text[..at.start].matches('\n').count());
                return Self::nothing(format!(
                    "nothing is allowed, because line {line} of {} is wrong: {}",
                    file.display(),
                    e.message()
                ));
            }
        };
        let Some(words) = configuration.allow else {
            return Self::defaults();
        };
        let mut consent = Self {
            allowed: BTreeSet::new(),
            problems: Vec::new(),
        };
        let mut unnamed = 0;
        for word in words {
            if let Some(permission) = Permission::from_word(&word) {
                consent.allowed.insert(permission);
            } else if consent.problems.len() == MAX_UNKNOWN_WORDS {
                unnamed += 1;
            } else {
                let shown: String = word.chars().take(MAX_SHOWN).collect();
                consent.problems.push(format!(
                    "unknown word '{}' in 'allow' of {}; known are: {}",
                    shown.escape_default(),
                    file.display(),
                    Permission::ALL.map(Permission::word).join(", ")
                ));
            }
        }
        if unnamed > 0 {
            consent.problems.push(format!(
                "{unnamed} more unknown words in 'allow' of {}",
                file.display()
            ));
        }
        consent
    }

    #[cfg(test)]
    pub(crate) fn of_permissions(allowed: &[Permission]) -> Self {
        Self {
            allowed: allowed.iter().copied().collect(),
            problems: Vec::new(),
        }
    }

    fn defaults() -> Self {
        Self {
            allowed: Permission::defaults(),
            problems: Vec::new(),
        }
    }

    fn nothing(problem: String) -> Self {
        Self {
            allowed: BTreeSet::new(),
            problems: vec![problem],
        }
    }

    /// Returns whether the owner allows this.
    #[must_use]
    pub fn allows(&self, permission: Permission) -> bool {
        self.allowed.contains(&permission)
    }

    /// Returns the words of what is allowed.
    pub fn words(&self) -> impl Iterator<Item = &'static str> {
        self.allowed.iter().map(|permission| permission.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (Vec<&'static str>, Vec<String>) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("agent.toml");
        fs::write(&file, text).unwrap();
        let consent = Consent::read_from(&file);
        (consent.words().collect(), consent.problems)
    }

    #[test]
    fn of_many_unknown_words_a_few_are_named_and_the_rest_counted() {
        let long = "x".repeat(10_000);
        let words = vec![format!("\"{long}\""); 100];
        let (allowed, problems) = parsed(&format!("allow = [{}, \"trim\"]", words.join(", ")));
        assert_eq!(allowed, ["trim"]);
        assert_eq!(problems.len(), MAX_UNKNOWN_WORDS + 1);
        assert!(problems[16].starts_with("84 more unknown words"));
        assert!(problems.iter().all(|problem| problem.len() < 1000));
    }

    #[test]
    fn without_a_list_the_agent_allows_all_but_commands_and_copies() {
        let none = Consent::read_from(Path::new("/nonexistent/agent.toml"));
        assert!(!none.allows(Permission::Exec) && !none.allows(Permission::Copy));
        assert_eq!(none.words().count(), Permission::ALL.len() - 2);
        assert_eq!(parsed("# no list\n").0.len(), Permission::ALL.len() - 2);
    }

    #[test]
    fn the_agent_allows_exactly_the_words_of_the_list_and_names_unknown_ones() {
        let (words, problems) = parsed("allow = [\"trim\", \"exec\"]\n");
        assert_eq!((words, problems), (vec!["exec", "trim"], Vec::new()));
        assert_eq!(parsed("allow = []").0, [""; 0]);
        let (words, problems) = parsed("allow = [\"trim\", \"Exec\\n\"]");
        assert_eq!(words, ["trim"]);
        assert!(problems[0].contains("'Exec\\n'") && problems[0].contains("drop-caches"));
    }

    #[test]
    fn if_the_configuration_is_wrong_or_unreadable_the_agent_allows_nothing_and_says_why() {
        for (text, line) in [
            ("# a\nalow = [\"exec\"]", "line 2"),
            ("allow = \"exec\"", "line 1"),
            ("# a\n# b\nallow = [exec]", "line 3"),
        ] {
            let (words, problems) = parsed(text);
            assert_eq!(words, [""; 0], "{text}");
            assert!(problems[0].contains(line), "{problems:?}");
        }
        let directory = tempfile::tempdir().unwrap();
        let unreadable = Consent::read_from(directory.path());
        assert_eq!(unreadable.words().count(), 0);
        assert!(unreadable.problems[0].contains("cannot be read"));
    }

    #[test]
    fn the_file_that_the_package_installs_allows_what_an_agent_without_a_file_does() {
        let packaged = include_str!("../../../packaging/agent/agent.toml");
        let (words, problems) = parsed(packaged);
        assert_eq!(problems, [""; 0]);
        assert!(words.iter().copied().eq(Consent::defaults().words()));
        let of_guests = include_str!("../../../guest/agent.toml");
        assert_eq!(parsed(of_guests).0.len(), Permission::ALL.len());
    }
}
