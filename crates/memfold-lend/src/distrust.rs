//! Remembers lenders that returned other bytes than were written to their RAM. The daemon borrows
//! nothing from such a lender for an hour, unless an operator trusts the lender again.
//!
//! One case is enough, because RAM that flips bits will do so again. Other leases of the same
//! lender continue. Their bytes are checked as well, and a lease ends when the lender returns wrong
//! bytes for it.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// How long the daemon borrows nothing from a lender that returned wrong data.
pub const FOR: Duration = Duration::from_secs(3600);

/// A lender that returned wrong data, and from which the daemon therefore borrows nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distrusted {
    /// Host name of the lender.
    pub lender: String,
    /// How often the lender has returned wrong data since it was last trusted.
    pub lies: u64,
    /// Name of the VM that received the lender's last wrong data.
    pub vm: String,
    /// What was wrong with the lender's last wrong data, as text.
    pub what: String,
    /// Time until which the daemon borrows nothing from the lender, in seconds since 1970.
    pub until_unix_s: u64,
}

/// All lenders from which the daemon borrows nothing because they returned wrong data. The list is
/// kept in a file, so that it survives a restart of the daemon.
#[derive(Debug)]
pub struct Distrust {
    file: PathBuf,
    lenders: Vec<Distrusted>,
    lies: u64,
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Distrust {
    /// Reads the list from the file that the previous daemon wrote. If the file is absent or
    /// unreadable, the list is empty.
    #[must_use]
    pub fn open(file: &Path) -> Self {
        let known = std::fs::read(file).ok();
        let lenders = known.and_then(|text| serde_json::from_slice(&text).ok());
        Self {
            file: file.to_owned(),
            lenders: lenders.unwrap_or_default(),
            lies: 0,
        }
    }

    fn write(&self) {
        if let Err(error) = crate::files::write_json(&self.file, &self.lenders) {
            tracing::warn!(file = %self.file.display(), %error, "cannot record which lenders served wrong bytes; free space in the state directory");
        }
    }

    /// Records that a lender returned wrong data to a VM. `what`: what was wrong, as text.
    pub fn lied(&mut self, lender: &str, vm: &str, what: &str) {
        self.lied_at(lender, vm, what, now());
        self.write();
    }

    fn lied_at(&mut self, lender: &str, vm: &str, what: &str, now: u64) {
        self.lies += 1;
        let before = self.lenders.iter().position(|one| one.lender == lender);
        let before = before.map(|at| self.lenders.swap_remove(at));
        self.lenders.push(Distrusted {
            lender: lender.to_owned(),
            lies: before.map_or(0, |one| one.lies) + 1,
            vm: vm.to_owned(),
            what: what.to_owned(),
            until_unix_s: now + FOR.as_secs(),
        });
        self.lenders.sort_by(|a, b| a.lender.cmp(&b.lender));
    }

    /// Returns the lenders from which the daemon borrows nothing now. Entries older than an hour
    /// are dropped.
    pub fn now(&mut self) -> Vec<Distrusted> {
        self.at(now())
    }

    fn at(&mut self, now: u64) -> Vec<Distrusted> {
        // If the clock was set back, an entry expires instead of lasting longer than [`FOR`].
        let holds =
            |one: &Distrusted| now < one.until_unix_s && one.until_unix_s <= now + FOR.as_secs();
        self.lenders.retain(holds);
        self.lenders.clone()
    }

    /// Lets the daemon borrow from a lender again. Returns whether the lender was on the list.
    pub fn trust(&mut self, lender: &str) -> bool {
        let before = self.now().len();
        self.lenders.retain(|one| one.lender != lender);
        self.write();
        self.lenders.len() < before
    }

    /// Returns how often lenders have returned wrong data since this daemon's start.
    #[must_use]
    pub const fn lies(&self) -> u64 {
        self.lies
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lender_that_returned_wrong_data_is_distrusted_for_one_hour() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("distrusted.json");
        let mut distrust = Distrust::open(&file);
        assert!(distrust.now().is_empty());
        distrust.lied("b", "v", "block 1");
        distrust.lied("a", "v", "block 2");
        distrust.lied("b", "w", "block 3");
        let mut next = Distrust::open(&file);
        let known = next.now();
        let words: Vec<_> = known
            .iter()
            .map(|d| (&*d.lender, d.lies, &*d.vm, &*d.what))
            .collect();
        assert_eq!(words, [("a", 1, "v", "block 2"), ("b", 2, "w", "block 3")]);
        assert_eq!((distrust.lies(), next.lies()), (3, 0));
        assert!(next.trust("a") && !next.trust("a"));
        assert_eq!(Distrust::open(&file).now().len(), 1);
        let begun = now();
        let mut alone = Distrust::open(&directory.path().join("none"));
        alone.lied_at("c", "v", "block 4", begun);
        assert_eq!(alone.at(begun + FOR.as_secs() - 1).len(), 1);
        assert!(alone.at(begun + FOR.as_secs()).is_empty());
        alone.lied_at("c", "v", "block 4", begun);
        assert!(alone.at(begun - 1).is_empty());
    }
}
