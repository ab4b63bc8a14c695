//! Lists, verifies and removes segments.

use std::collections::BTreeSet;

use memfold_segment::{Manifest, Reference, SegmentError, SegmentInfo};
use rustix::process::Pid;

use crate::error::DaemonError;
use crate::segments::Segments;

impl Segments {
    /// Returns all segments, with their users and sizes.
    pub fn list(&self) -> Result<Vec<SegmentInfo>, DaemonError> {
        let all = self.shelf.all()?;
        let users = self.shelf.users(&all)?;
        // The table of VMs is not locked while the segments' files are read.
        let known = self.registry.machines();
        let named = |pid: Pid| {
            let vm = known.iter().find(|machine| machine.pid() == pid);
            vm.map_or_else(
                || format!("process {}", pid.as_raw_nonzero()),
                |machine| machine.name().to_owned(),
            )
        };
        Ok(all
            .into_iter()
            .zip(users)
            .map(|(segment, users)| SegmentInfo {
                writer: self.writer(&segment.name),
                // Sorted by name, because the kernel reuses process numbers.
                users: Vec::from_iter(users.into_iter().map(named).collect::<BTreeSet<_>>()),
                resident_bytes: self.shelf.resident_bytes(&segment),
                struct_page_bytes: segment.struct_page_bytes().0,
                protection: self.shelf.protection(&segment).to_owned(),
                problem: self.shelf.problem(&segment),
                segment,
            })
            .collect())
    }

    /// Compares a segment's image with its digest. Returns the problem, or `None` if the image is
    /// intact.
    pub fn verify(&self, name: &str) -> Result<Option<String>, DaemonError> {
        let _kept = self.shared();
        match self.shelf.verify(&Reference::parse(name)?) {
            Ok(()) => Ok(None),
            Err(SegmentError::Broken { why, .. }) => Ok(Some(why)),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes one generation of a segment, or all of them. Returns the names of the removed
    /// generations.
    ///
    /// # Errors
    ///
    /// [`SegmentError::InUse`] if any of the generations has users; then no generation is removed.
    pub fn remove(&self, name: &str) -> Result<Vec<String>, DaemonError> {
        let reference = Reference::parse(name)?;
        let _alone = self.exclusive();
        let mut chosen = self.shelf.all()?;
        chosen.retain(|m| {
            m.name == reference.name && reference.generation.is_none_or(|g| g == m.generation)
        });
        if chosen.is_empty() {
            return Err(SegmentError::Unknown(name.to_owned()).into());
        }
        // All generations are checked before one is removed.
        for manifest in &chosen {
            let users = self.users_of(manifest)?;
            if !users.is_empty() {
                let (name, users) = (manifest.reference(), users.join(", "));
                return Err(SegmentError::InUse { name, users }.into());
            }
        }
        for manifest in &chosen {
            self.shelf.remove(manifest)?;
        }
        Ok(chosen.iter().map(Manifest::reference).collect())
    }
}
