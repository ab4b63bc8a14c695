//! Permissions: what a guest's owner lets the daemon on the host do in the guest. The owner lists
//! them in the agent's configuration; the agent refuses everything else.

use std::collections::BTreeSet;

/// The agent's configuration file in the guest, in which the owner lists the permissions.
pub const CONFIGURATION: &str = "/etc/memfold/agent.toml";

/// Maximum number of permissions in one message, and maximum length of the word of one in bytes.
pub(crate) const MAX_WORDS: (usize, usize) = (64, 64);

/// Something that the daemon may do in a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Permission {
    /// Run commands for the operators of the host.
    Exec,
    /// Copy files into the guest and out of it.
    Copy,
    /// Ask for memory figures, free pages, places of files on disks, and whether the guest has
    /// booted.
    Inspect,
    /// Have dirty pages written to the disks.
    Sync,
    /// Drop clean caches before a save, or while the host is short of memory.
    DropCaches,
    /// Reclaim clean page cache in small steps.
    Trim,
    /// Set the clock after a pause of the VM.
    Clock,
    /// Renew random numbers, MAC addresses, host name, machine ID and SSH host keys of a restored
    /// VM or a clone.
    Identity,
    /// Activate the VM's swap disk.
    Swap,
    /// Mount segments over the guest's files.
    Segments,
    /// Shut the guest down, or reboot it.
    Power,
}

impl Permission {
    /// All permissions.
    pub const ALL: [Self; 11] = [
        Self::Exec,
        Self::Copy,
        Self::Inspect,
        Self::Sync,
        Self::DropCaches,
        Self::Trim,
        Self::Clock,
        Self::Identity,
        Self::Swap,
        Self::Segments,
        Self::Power,
    ];

    /// Returns the word for the permission in the agent's configuration.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::Copy => "copy",
            Self::Inspect => "inspect",
            Self::Sync => "sync",
            Self::DropCaches => "drop-caches",
            Self::Trim => "trim",
            Self::Clock => "clock",
            Self::Identity => "identity",
            Self::Swap => "swap",
            Self::Segments => "segments",
            Self::Power => "power",
        }
    }

    /// Returns the permission that a word of the configuration stands for.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.word() == word)
    }

    /// Returns what the permission allows, as the end of a sentence: "the host may not ...".
    #[must_use]
    pub const fn action(self) -> &'static str {
        match self {
            Self::Exec => "run commands in it",
            Self::Copy => "copy its files",
            Self::Inspect => "ask for its memory, files and boot state",
            Self::Sync => "have its dirty pages written to its disks",
            Self::DropCaches => "drop its caches",
            Self::Trim => "trim its page cache",
            Self::Clock => "set its clock",
            Self::Identity => "renew its identity",
            Self::Swap => "activate its swap disk",
            Self::Segments => "mount segments in it",
            Self::Power => "shut it down or reboot it",
        }
    }

    /// Returns the message for an order that the guest's owner does not allow: which condition
    /// failed, and what the owner can change.
    #[must_use]
    pub fn refusal(self) -> String {
        format!(
            "the guest's owner does not let the host {}; to allow it, add \"{}\" to 'allow' in {CONFIGURATION} in the guest and restart memfold-agent",
            self.action(),
            self.word()
        )
    }

    /// Returns the permissions without a configuration file: all but those that let the host run
    /// any program or read any file.
    #[must_use]
    pub fn defaults() -> BTreeSet<Self> {
        let ask = |permission: &Self| !matches!(permission, Self::Exec | Self::Copy);
        Self::ALL.into_iter().filter(ask).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_permission_has_a_word_of_its_own_and_the_defaults_lack_only_exec_and_copy() {
        let words: BTreeSet<_> = Permission::ALL.into_iter().map(Permission::word).collect();
        assert_eq!(words.len(), Permission::ALL.len());
        for permission in Permission::ALL {
            assert_eq!(Permission::from_word(permission.word()), Some(permission));
            assert!(permission.word().len() <= MAX_WORDS.1);
            let is_default = Permission::defaults().contains(&permission);
            let is_open = matches!(permission, Permission::Exec | Permission::Copy);
            assert_ne!(is_default, is_open, "{permission:?}");
        }
        assert_eq!(Permission::from_word("Exec"), None);
    }

    #[test]
    fn the_refusal_of_an_order_names_the_word_and_the_file_that_allow_it() {
        let refusal = Permission::DropCaches.refusal();
        assert!(refusal.contains("drop its caches") && refusal.contains("\"drop-caches\""));
        assert!(refusal.contains("/etc/memfold/agent.toml"), "{refusal}");
    }
}
