//! Reads what a kernel's release (`uname -r`) says about the fixes that the kernel contains.
//!
//! | release | numbering |
//! |---|---|
//! | `6.18.44`, `6.12.57+deb13-amd64`, `6.17.9-300.fc43.x86_64` | third number: stable release |
//! | `6.17.0-8-generic` (Ubuntu), `6.17.2-1-pve`, `6.1.0-37-amd64` (Debian 12) | more fixes than the number says |
//! | `6.12.0-55.el10.x86_64`, `6.4.0-150600.23-default` (SUSE) | more fixes and more features |

use std::fmt;

/// Version of a stable or mainline release of Linux, such as 6.18.44. 6.18 is (6, 18, 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u16, pub u16, pub u16);

impl Version {
    /// Returns the stable series that the version belongs to, such as (6, 18).
    #[must_use]
    pub const fn series(self) -> (u16, u16) {
        (self.0, self.1)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(major, minor, patch) = self;
        write!(f, "{major}.{minor}")?;
        if *patch > 0 {
            write!(f, ".{patch}")?;
        }
        Ok(())
    }
}

/// What the numbers of a kernel's release say about its fixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// The kernel has the fixes of this stable release: kernel.org, Debian, Fedora, Arch.
    Stable,
    /// A release candidate: the kernel has a part of this release.
    Candidate,
    /// The kernel has at least the fixes of this version, and more that the number does not show:
    /// Ubuntu, Proxmox VE, Debian's kernels that are named by their ABI.
    MoreFixes,
    /// The kernel also has newer code, and with it perhaps newer faults: RHEL, SUSE.
    MoreCode,
}

/// Release of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// Version of Linux that the kernel is based on.
    pub version: Version,
    /// Whether the version says which fixes the kernel has.
    pub numbering: Numbering,
}

impl Release {
    /// Parses a kernel's release, as in `uname -r`. Returns `None` if the text does not begin with
    /// a version of Linux.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_number = |c: char| c.is_ascii_digit() || c == '.';
        let end = text.find(|c| !is_number(c)).unwrap_or(text.len());
        let (numbers, rest) = text.split_at(end);
        let mut numbers = numbers.split('.').map(|number| number.parse().ok());
        let (major, minor) = (numbers.next()??, numbers.next()??);
        let patch = match numbers.next() {
            Some(patch) => Some(patch?),
            None => None,
        };
        // An ABI number follows a third number that never changes: 6.17.0-8-generic.
        let after_dash = rest.strip_prefix('-').unwrap_or("");
        let has_abi = patch == Some(0) && after_dash.starts_with(|c: char| c.is_ascii_digit());
        let numbering = if rest.contains(".fc") {
            Numbering::Stable
        } else if rest.contains(".el") || rest.ends_with("-default") {
            Numbering::MoreCode
        } else if rest.starts_with("-rc") {
            Numbering::Candidate
        } else if patch.is_none() || has_abi || rest.ends_with("-pve") {
            Numbering::MoreFixes
        } else {
            Numbering::Stable
        };
        Some(Self {
            version: Version(major, minor, patch.unwrap_or(0)),
            numbering,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_distributions_tell_their_version_and_whether_it_shows_all_fixes() {
        use Numbering::{Candidate, MoreCode, MoreFixes, Stable};
        for (text, version, numbering) in [
            ("6.18.44", Version(6, 18, 44), Stable),
            ("6.18.0", Version(6, 18, 0), Stable),
            ("6.18.44-fc-v669", Version(6, 18, 44), Stable),
            ("6.12.57+deb13-amd64", Version(6, 12, 57), Stable),
            ("6.12.57+deb13-cloud-amd64", Version(6, 12, 57), Stable),
            ("6.12.38+deb12-amd64", Version(6, 12, 38), Stable),
            ("6.12.9+bpo-amd64", Version(6, 12, 9), Stable),
            ("6.17.9-300.fc43.x86_64", Version(6, 17, 9), Stable),
            ("6.14.0-63.fc42.x86_64", Version(6, 14, 0), Stable),
            ("6.17.9-arch1-1", Version(6, 17, 9), Stable),
            ("6.12.55-74.119.amzn2023.x86_64", Version(6, 12, 55), Stable),
            (
                "6.6.87.2-microsoft-standard-WSL2",
                Version(6, 6, 87),
                Stable,
            ),
            ("6.19.0-rc3", Version(6, 19, 0), Candidate),
            ("6.18-rc7-amd64", Version(6, 18, 0), Candidate),
            ("6.8.0-71-generic", Version(6, 8, 0), MoreFixes),
            ("6.17.0-1005-aws", Version(6, 17, 0), MoreFixes),
            ("6.1.0-37-amd64", Version(6, 1, 0), MoreFixes),
            ("6.12-amd64", Version(6, 12, 0), MoreFixes),
            ("6.8.12-13-pve", Version(6, 8, 12), MoreFixes),
            ("6.17.2-1-pve", Version(6, 17, 2), MoreFixes),
            ("6.12.0-55.9.1.el10_0.x86_64", Version(6, 12, 0), MoreCode),
            ("5.14.0-570.el9.x86_64", Version(5, 14, 0), MoreCode),
            ("6.4.0-150600.23.65-default", Version(6, 4, 0), MoreCode),
        ] {
            let release = Release { version, numbering };
            assert_eq!(Release::parse(text), Some(release), "{text}");
        }
    }

    #[test]
    fn a_release_that_does_not_begin_with_a_version_of_linux_is_not_parsed() {
        for text in [
            "",
            "6",
            "6.",
            ".6",
            "6.x",
            "x6.18",
            "6..1",
            "6.18.",
            "6.99999.1",
            "-1.2",
            "ö",
            "6.1ö",
        ] {
            let parsed = Release::parse(text);
            // A version of two numbers and any other text is a version.
            assert_eq!(parsed.is_some(), text == "6.1ö", "{text}: {parsed:?}");
        }
    }

    #[test]
    fn a_version_without_third_number_is_shown_as_two_numbers() {
        assert_eq!(Version(6, 18, 0).to_string(), "6.18");
        assert_eq!(Version(6, 18, 44).to_string(), "6.18.44");
        assert!(Version(6, 9, 12) < Version(6, 12, 1));
        assert_eq!(Version(6, 9, 12).series(), (6, 9));
    }
}
