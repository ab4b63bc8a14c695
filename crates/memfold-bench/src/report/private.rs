//! Removes from the report's texts what tells whose machine it is: host and user names, paths,
//! network addresses, and identifiers such as serial numbers.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde_json::Value;

/// First number of users who are people, and the number after the last one (`login.defs(5)`).
const FIRST_USER: u32 = 1000;
const AFTER_LAST_USER: u32 = 60_000;

/// Number of hexadecimal digits from which on a word counts as an identifier. Commits that memfold
/// shows are shorter.
const ID_DIGITS: usize = 24;

/// Names that a report must not contain.
#[derive(Clone, Debug, Default)]
pub struct Private {
    names: BTreeSet<String>,
}

impl Private {
    /// Reads the names of this host and of its users.
    pub fn of_this_host() -> Self {
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy().into_owned();
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let variables = ["USER", "LOGNAME", "SUDO_USER"];
        let variables = variables.iter().filter_map(|name| std::env::var(name).ok());
        Self::new(host, people(&users).chain(variables))
    }

    fn new(host: String, users: impl IntoIterator<Item = String>) -> Self {
        let short = host.split('.').next().unwrap_or_default().to_owned();
        let names = [host, short].into_iter().chain(users);
        let names = names.map(|name| name.to_lowercase());
        // Every host has a root.
        let names = names.filter(|name| !name.is_empty() && name != "root" && name != "localhost");
        Self {
            names: names.collect(),
        }
    }

    /// Removes private words from all texts of a JSON value. Keys are memfold's own, and remain.
    pub fn remove_from(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.without(text),
            Value::Array(values) => values.iter_mut().for_each(|value| self.remove_from(value)),
            Value::Object(parts) => parts.values_mut().for_each(|value| self.remove_from(value)),
            _ => {}
        }
    }

    /// Returns the text with `[removed]` in place of each private word.
    pub fn without(&self, text: &str) -> String {
        let mut clean = String::new();
        let mut word = String::new();
        let of_word = |c: char| c.is_alphanumeric() || "._:/@-".contains(c);
        for c in text.chars().chain(['\0']) {
            if of_word(c) {
                word.push(c);
                continue;
            }
            let core = word.trim_end_matches(['.', ':']);
            if self.is_private(core) {
                clean.push_str("[removed]");
                clean.push_str(&word[core.len()..]);
            } else {
                clean.push_str(&word);
            }
            word.clear();
            if c != '\0' {
                clean.push(c);
            }
        }
        clean
    }

    fn is_private(&self, word: &str) -> bool {
        let parts = || word.split(['.', ':', '/', '@', '-']);
        let is_name = |part: &str| self.names.contains(&part.to_lowercase());
        let is_path = word.starts_with('/') && word.len() > 1;
        let is_mail = word
            .split_once('@')
            .is_some_and(|(to, at)| !to.is_empty() && !at.is_empty());
        let is_address = word.contains("//") || is_mail;
        is_path
            || is_address
            || is_name(word)
            || parts().any(is_name)
            || is_network(word)
            || is_identifier(word)
    }
}

/// Returns the names of people in a file like `/etc/passwd`.
fn people(passwd: &str) -> impl Iterator<Item = String> {
    passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let number: u32 = fields.nth(1)?.parse().ok()?;
        (FIRST_USER..AFTER_LAST_USER)
            .contains(&number)
            .then(|| name.to_owned())
    })
}

/// Returns whether a word is an IP address, also with a port or a prefix length, or a MAC address.
fn is_network(word: &str) -> bool {
    let is_v4 = |text: &str| text.parse::<Ipv4Addr>().is_ok();
    let first = word.split([':', '/']).next().unwrap_or_default();
    let unprefixed = word.split('/').next().unwrap_or_default();
    let is_mac = [':', '-'].into_iter().any(|mark| {
        let mut groups = word.split(mark);
        let is_byte = |group: &str| group.len() == 2 && is_hex(group);
        groups.clone().count() == 6 && groups.all(is_byte)
    });
    is_v4(first) || unprefixed.parse::<Ipv6Addr>().is_ok() || is_mac
}

/// Returns whether a word is a long number such as a machine ID, a UUID or a serial number.
fn is_identifier(word: &str) -> bool {
    let digits: String = word.chars().filter(|c| *c != '-').collect();
    digits.len() >= ID_DIGITS && is_hex(&digits)
}

fn is_hex(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn private() -> Private {
        let users = people(
            "root:x:0:0::/root:/bin/sh\nanna:x:1000:1000::/home/anna:/bin/sh\n_apt:x:42:1::/:/",
        );
        Private::new("Pluto.example.org".into(), users)
    }

    #[test]
    fn host_and_user_names_paths_addresses_and_identifiers_are_removed_from_texts() {
        for text in [
            "cannot write /home/anna/x: denied",
            "pluto is away",
            "kernel 6.12.9-pluto",
            "of PLUTO.example.org:",
            "by anna.",
            "at 192.168.1.7:8080, maybe",
            "on 10.0.0.0/8",
            "to fe80::1",
            "mac 52:54:00:12:34:56",
            "mac 52-54-00-12-34-56",
            "id 4c4c4544-0042-3510-8052-b4c04f4e3132",
            "machine 0123456789abcdef0123456789abcdef",
            "from https://server/path",
            "mail anna@example.org",
        ] {
            let clean = private().without(text);
            assert!(clean.contains("[removed]"), "{text} -> {clean}");
            for word in [
                "anna", "luto", "192.", "10.0", "fe80", "54", "4c4c", "0123", "server",
            ] {
                assert!(!clean.to_lowercase().contains(word), "{text} -> {clean}");
            }
        }
    }

    #[test]
    fn texts_without_private_words_are_unchanged() {
        for text in [
            "AMD EPYC 7B13 64-Core Processor",
            "Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz",
            "6.12.48+deb13-cloud-amd64",
            "1,024 pages/s at 10.0.2: 3.5 times; none wrong.",
            "root",
            "2026-11-27",
        ] {
            assert_eq!(private().without(text), text);
        }
    }

    #[test]
    fn private_words_are_removed_at_every_depth_of_a_json_value() {
        let mut value = json!({ "a": [{ "why": "no space in /var/tmp" }], "n": 1 });
        private().remove_from(&mut value);
        assert_eq!(
            value,
            json!({ "a": [{ "why": "no space in [removed]" }], "n": 1 })
        );
    }
}
