//! Drops every capability (`capabilities(7)`) that no allowed permission needs. The agent's shells
//! inherit the rest.
//!
//! The agent stays root with `CAP_SYS_ADMIN`: without that, `/proc/PID/pagemap` shows no page frame
//! numbers (`fs/proc/task_mmu.c`), and the kernel's trace files belong to root. What it gives up
//! limits what a mistake in the agent or in one of its scripts can break.

use std::io;

use memfold_wire::permission::Permission;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    remove_capability_from_bounding_set, set_capabilities,
};

use crate::consent::Consent;

/// Capabilities of every agent: page frame numbers and mounts (`SYS_ADMIN`); files of all users, by
/// handle, too, and which of their pages are cached (`mincore(2)`: `FOWNER`); normal priority for
/// commands (`SYS_NICE`).
const ALWAYS: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::SYS_NICE);

/// Capabilities for copies of files with their owners, modes, devices and capabilities.
const COPIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP);

/// Further capabilities for laying a segment over files: whether a file of another user is open for
/// writing (`LEASE`; `F_SETLEASE` in `fcntl(2)`), and files that root made immutable
/// (`LINUX_IMMUTABLE`).
const SEGMENTS: CapabilitySet = CapabilitySet::LEASE.union(CapabilitySet::LINUX_IMMUTABLE);

/// Gives up the capabilities that are not needed, for this thread and those that it starts.
///
/// # Errors
///
/// The kernel's error; some capabilities may be gone.
pub fn give_up(consent: &Consent) -> io::Result<()> {
    let kept = needed(consent);
    let has = capabilities(None)?;
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        // An error: the kernel has no such capability.
        let is_there = capability_is_in_bounding_set(capability).unwrap_or(false);
        if is_there && !kept.contains(capability) {
            remove_capability_from_bounding_set(capability)?;
        }
    }
    let sets = CapabilitySets {
        effective: has.effective & kept,
        permitted: has.permitted & kept,
        inheritable: has.inheritable & kept,
    };
    Ok(set_capabilities(None, sets)?)
}

fn needed(consent: &Consent) -> CapabilitySet {
    let of = |permission| match permission {
        // Commands of the host's operators may need anything.
        Permission::Exec => CapabilitySet::all(),
        Permission::Copy => COPIES,
        Permission::Segments => COPIES | SEGMENTS,
        Permission::Clock => CapabilitySet::SYS_TIME,
        Permission::Identity => CapabilitySet::NET_ADMIN,
        Permission::Power => CapabilitySet::SYS_BOOT,
        Permission::Inspect
        | Permission::Sync
        | Permission::DropCaches
        | Permission::Trim
        | Permission::Swap => CapabilitySet::empty(),
    };
    let allowed = Permission::ALL.into_iter().filter(|p| consent.allows(*p));
    allowed.fold(ALWAYS, |all, permission| all | of(permission))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(field: &str) -> CapabilitySet {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let bits = u64::from_str_radix(line.unwrap().trim(), 16).unwrap();
        CapabilitySet::from_bits_retain(bits)
    }

    fn after(words: &[Permission]) -> (CapabilitySet, CapabilitySet) {
        let consent = Consent::of_permissions(words);
        // The capabilities of a thread are its own.
        let thread = std::thread::spawn(move || {
            give_up(&consent).unwrap();
            (status("CapEff:"), status("CapBnd:"))
        });
        thread.join().unwrap()
    }

    #[test]
    fn the_agent_gives_up_the_capabilities_that_no_permission_of_the_guests_owner_needs() {
        let has = status("CapEff:");
        if !has.contains(CapabilitySet::SETPCAP | ALWAYS) {
            memfold_testkit::skip!("needs root");
        }
        let (effective, bounding) = after(&[Permission::Clock, Permission::Trim]);
        assert_eq!(effective, has & (ALWAYS | CapabilitySet::SYS_TIME));
        assert!(!bounding.contains(CapabilitySet::SYS_BOOT));
        assert!(!bounding.contains(CapabilitySet::SYS_MODULE));
        let (effective, _) = after(&[Permission::Segments]);
        assert_eq!(effective, has & (ALWAYS | COPIES | SEGMENTS));
        let (effective, _) = after(&[]);
        assert!(!effective.contains(CapabilitySet::SYS_TIME));
        // The other threads keep what they have.
        assert_eq!(status("CapEff:"), has);
    }

    #[test]
    fn an_agent_that_may_run_commands_keeps_all_capabilities() {
        let has = (status("CapEff:"), status("CapBnd:"));
        assert_eq!(after(&Permission::ALL), has);
    }

    #[test]
    fn the_page_on_permissions_says_how_many_capabilities_an_agent_with_the_defaults_keeps() {
        let defaults: Vec<Permission> = Permission::defaults().into_iter().collect();
        let kept = needed(&Consent::of_permissions(&defaults));
        let count = kept.bits().count_ones();
        assert_eq!(count, 14);
        let page = include_str!("../../../docs/operating/guest-permissions.md");
        let words: Vec<&str> = page.split_whitespace().collect();
        let sentence = format!("with the default list it keeps {count} of the 41");
        assert!(words.join(" ").contains(&sentence), "{sentence}");
    }
}
