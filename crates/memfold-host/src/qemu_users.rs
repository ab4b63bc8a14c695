//! User numbers for QEMU. The daemon runs as root and gives each VM's QEMU a user number of its
//! own, so that a guest that takes over its QEMU has no rights to anything else on the host.
//!
//! The numbers need no entry in `/etc/passwd`. They come from a range that neither systemd (users,
//! containers), nor `subuid`, nor directory services (at most 2,000,200,000 with SSSD's defaults)
//! use (systemd's UIDS-GIDS). [`RANGE_VARIABLE`] replaces the range.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

/// Variable with another range of user and group numbers for QEMU, as `FIRST-LAST`.
pub const RANGE_VARIABLE: &str = "MEMFOLD_QEMU_USERS";

/// Default range of the numbers: forty million, so that a number is rarely used twice on a host.
pub const DEFAULT_RANGE: RangeInclusive<u32> = 2_100_000_000..=2_139_999_999;

/// Random numbers that are tried before all numbers are tried in order.
const RANDOM_TRIES: usize = 64;

/// Why no user number for QEMU can be had.
#[derive(Debug, thiserror::Error)]
pub enum UsersError {
    /// The variable's text is not a range.
    #[error(
        "{RANGE_VARIABLE}='{0}' is not a range of user numbers; set FIRST-LAST with 1 <= FIRST <= LAST < 4294967295, or unset the variable"
    )]
    Range(String),
    /// The user namespace of the daemon lacks numbers of the range.
    #[error(
        "user and group numbers {} to {} do not all exist in the daemon's user namespace ({map}); set {RANGE_VARIABLE}=FIRST-LAST to numbers that exist there and that nobody else uses, or start VMs with user = \"root\"",
        range.start(), range.end()
    )]
    Unmapped {
        /// The range of numbers.
        range: RangeInclusive<u32>,
        /// The file that shows which numbers exist.
        map: &'static str,
    },
    /// All numbers of the range are in use.
    #[error(
        "processes use all user numbers {} to {}; set {RANGE_VARIABLE}=FIRST-LAST to a larger range, or stop VMs",
        .0.start(), .0.end()
    )]
    Exhausted(RangeInclusive<u32>),
    /// The kernel's files cannot be read.
    #[error("cannot read {what}")]
    Read {
        /// The file or directory.
        what: &'static str,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

/// Returns the range of user and group numbers for QEMU, after a check that all of them exist in
/// this process's user namespace.
pub fn range() -> Result<RangeInclusive<u32>, UsersError> {
    let range = match std::env::var(RANGE_VARIABLE) {
        Ok(text) if !text.is_empty() => parse(&text).ok_or(UsersError::Range(text))?,
        _ => DEFAULT_RANGE,
    };
    for map in ["/proc/self/uid_map", "/proc/self/gid_map"] {
        let text = std::fs::read_to_string(map);
        let text = text.map_err(|source| UsersError::Read { what: map, source })?;
        if !is_mapped(&text, &range) {
            return Err(UsersError::Unmapped { range, map });
        }
    }
    Ok(range)
}

fn parse(text: &str) -> Option<RangeInclusive<u32>> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (1 <= first && first <= last && last < u32::MAX).then_some(first..=last)
}

/// Returns whether one line of a `uid_map` (`user_namespaces(7)`) has all numbers of `range`.
fn is_mapped(map: &str, range: &RangeInclusive<u32>) -> bool {
    map.lines().any(|line| {
        let mut words = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(inside)), Some(Ok(_)), Some(Ok(count))) =
            (words.next(), words.next(), words.next())
        else {
            return false;
        };
        inside <= u64::from(*range.start()) && u64::from(*range.end()) < inside + count
    })
}

/// Returns a number that no process uses, and that this process has not returned before unless
/// all others are in use. The number is that of a user and of a group.
pub fn allot() -> Result<u32, UsersError> {
    static ALLOTTED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
    let range = range()?;
    let used = used().map_err(|source| UsersError::Read {
        what: "/proc",
        source,
    })?;
    let mut allotted = ALLOTTED.lock().unwrap_or_else(PoisonError::into_inner);
    let chosen = choose(&range, &used, &allotted).or_else(|| {
        allotted.clear();
        choose(&range, &used, &allotted)
    });
    let chosen = chosen.ok_or(UsersError::Exhausted(range))?;
    allotted.insert(chosen);
    Ok(chosen)
}

/// Chooses a number at random, because an earlier VM's number may still own files on the host's
/// disks, for example after a power failure.
fn choose(
    range: &RangeInclusive<u32>,
    used: &BTreeSet<u32>,
    allotted: &BTreeSet<u32>,
) -> Option<u32> {
    let is_free = |number: &u32| !used.contains(number) && !allotted.contains(number);
    let count = u64::from(range.end() - range.start()) + 1;
    let random = || {
        let number = RandomState::new().build_hasher().finish() % count;
        range.start() + u32::try_from(number).unwrap_or(0)
    };
    std::iter::repeat_with(random)
        .take(RANDOM_TRIES)
        .find(is_free)
        .or_else(|| range.clone().find(is_free))
}

/// Returns the user numbers of all processes.
fn used() -> io::Result<BTreeSet<u32>> {
    let mut used = BTreeSet::new();
    for process in std::fs::read_dir("/proc")? {
        let place = process?.path();
        let name = place.file_name().and_then(|name| name.to_str());
        if !name.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
            continue;
        }
        // The process may have ended meanwhile.
        let Ok(status) = std::fs::read_to_string(place.join("status")) else {
            continue;
        };
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        let numbers = line.into_iter().flat_map(str::split_whitespace);
        used.extend(numbers.filter_map(|number| number.parse::<u32>().ok()));
    }
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_user_numbers_never_includes_root_or_the_number_that_means_none() {
        assert_eq!(parse("70000-79999"), Some(70_000..=79_999));
        assert_eq!(parse(" 5 - 5 "), Some(5..=5));
        for bad in [
            "",
            "5",
            "0-5",
            "6-5",
            "5-4294967295",
            "a-b",
            "-5",
            "5-",
            "5-99999999999",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_range_that_a_user_namespace_maps_only_in_part_is_not_usable() {
        let whole = "         0          0 4294967295\n";
        assert!(is_mapped(whole, &DEFAULT_RANGE));
        let container = "0 100000 65536\n";
        assert!(!is_mapped(container, &DEFAULT_RANGE));
        assert!(is_mapped(container, &(60_000..=65_535)));
        assert!(!is_mapped(container, &(60_000..=65_536)));
        assert!(!is_mapped("", &(1..=1)) && !is_mapped("0 0\nx y z\n", &(1..=1)));
    }

    #[test]
    fn numbers_in_use_and_numbers_given_before_are_not_chosen() {
        let set = |numbers: &[u32]| numbers.iter().copied().collect::<BTreeSet<_>>();
        let (taken, given) = (set(&[10, 12]), set(&[13]));
        assert_eq!(choose(&(10..=13), &taken, &given), Some(11));
        assert_eq!(choose(&(12..=13), &taken, &given), None);
        assert!(
            used()
                .unwrap()
                .contains(&rustix::process::getuid().as_raw())
        );
    }

    #[test]
    fn two_virtual_machines_never_get_the_same_user_number() {
        let mut seen = BTreeSet::new();
        for _ in 0..20 {
            match allot() {
                Ok(number) => assert!(DEFAULT_RANGE.contains(&number) && seen.insert(number)),
                Err(UsersError::Unmapped { .. }) => {
                    memfold_testkit::skip!("the user namespace lacks the default range")
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}
