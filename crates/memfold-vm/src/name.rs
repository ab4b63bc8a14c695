//! Checks the names of VMs, trust domains and other objects. A name must be usable as the name of a
//! directory.

use super::spec_error::SpecError;

/// Longest name of a VM or trust domain, in bytes.
pub const MAX_NAME: usize = 64;

/// Checks a name of a VM, trust domain or user: 1 to 64 characters of a-z, 0-9 and `._-`, of which
/// the first is a letter or digit. `field`: what is named, for the error message.
pub fn check_name(field: &'static str, name: &str) -> Result<(), SpecError> {
    let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let good = (1..=MAX_NAME).contains(&name.len())
        && name.starts_with(letters)
        && name.chars().all(|c| letters(c) || "._-".contains(c));
    if good {
        Ok(())
    } else {
        Err(SpecError::Name {
            field,
            value: name.chars().take(100).collect(),
        })
    }
}

/// Maximum length of a host name (`HOST_NAME_MAX`, `gethostname(2)`).
const HOST_NAME_MAX: usize = 63;

/// Returns the host name of the guest of the VM `name`: its letters and digits, and `-` for other
/// characters.
#[must_use]
pub fn host_name(name: &str) -> String {
    let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let end = name.len().min(HOST_NAME_MAX);
    name[..end].trim_matches('-').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_names_that_could_escape_their_directory_are_refused() {
        for bad in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "A",
            "a b",
            "a,b",
            "-a",
            &"a".repeat(65),
        ] {
            assert!(check_name("name", bad).is_err(), "{bad} was accepted");
        }
        for good in ["a", "web-1", "db_2.test", &"a".repeat(64)] {
            check_name("name", good).unwrap();
        }
    }
}
