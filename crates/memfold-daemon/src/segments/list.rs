//! Lists, verifies and removes segments, finds them by name, and checks whether a VM may map a
//! segment.

use std::collections::BTreeSet;
use std::path::PathBuf;

use memfold_segment::{Manifest, Reference, SegmentError, SegmentInfo};
use memfold_vm::{SegmentSpec, VmSpec};
use rustix::process::Pid;

use crate::error::{DaemonError, impossible};
use crate::segments::Segments;
use crate::snapshot_locks::{Use, being_saved};

impl Segments {
    /// Returns all segments, with their users and sizes.
    pub fn list(&self) -> Result<Vec<SegmentInfo>, DaemonError> {
        let all = self.shelf.all()?;
        let users = self.shelf.users(&all)?;
        // The table of VMs is not locked while the segments' files are read.
        let known = self.registry.machines();
        let named = |pid: Pid| match known.iter().find(|machine| machine.pid() == pid) {
            Some(machine) => machine.name().to_owned(),
            None => format!("process {}", pid.as_raw_nonzero()),
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

    /// Compares a segment's image with the digest that its manifest records. Returns the problem;
    /// `None` if the image is intact.
    pub fn verify(&self, name: &str) -> Result<Option<String>, DaemonError> {
        let _kept = self.shared();
        match self.shelf.verify(&Reference::parse(name)?) {
            Ok(()) => Ok(None),
            Err(SegmentError::Broken { why, .. }) => Ok(Some(why)),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes one generation (build) of a segment, or all its generations. Returns the names of
    /// the removed generations.
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

    /// Finds the segments of a VM that is about to be started. The segments cannot be removed until
    /// the result is dropped.
    pub(crate) fn take(&self, spec: &mut VmSpec) -> Result<Vec<Use<'_>>, DaemonError> {
        let _kept = self.shared();
        self.find(spec)?;
        let used = |segment: &SegmentSpec| self.locks.begin(&being_saved(&segment.name));
        let uses = spec.segments.iter().map(used);
        Ok(uses.collect::<Result<Vec<_>, _>>()?)
    }

    /// Finds the images of the segments in a VM's description, and verifies the images.
    ///
    /// # Errors
    ///
    /// A [`SegmentError`] if an image is broken, if it differs from the recorded digest, or if the
    /// VM may not map it.
    pub(crate) fn find(&self, spec: &mut VmSpec) -> Result<(), DaemonError> {
        let (vm, domain) = (spec.name.clone(), spec.domain.clone());
        for segment in &mut spec.segments {
            let (found, image) = self.find_one(&segment.name, &vm, domain.as_deref())?;
            if segment.root && !found.root {
                return Err(impossible(format!(
                    "segment '{}' contains no root file system; build a segment with --root",
                    found.reference()
                )));
            }
            let then = segment.digest.as_ref();
            if then.is_some_and(|then| *then != found.digest) {
                let why = "its content differs from the segment that this VM was saved with".into();
                let name = found.reference();
                return Err(SegmentError::Broken { name, why }.into());
            }
            segment.name = found.reference();
            segment.bytes = found.image_bytes;
            segment.digest = Some(found.digest);
            segment.image = Some(image);
        }
        Ok(())
    }

    pub(super) fn find_one(
        &self,
        name: &str,
        vm: &str,
        domain: Option<&str>,
    ) -> Result<(Manifest, PathBuf), DaemonError> {
        let reference = Reference::parse(name)?;
        let manifest = self.shelf.manifest(&reference)?;
        if domain != Some(&manifest.domain) {
            return Err(SegmentError::Foreign {
                segment: manifest.reference(),
                domain: manifest.domain,
                vm: vm.to_owned(),
                other: domain.map_or_else(|| "none".to_owned(), |domain| format!("'{domain}'")),
            }
            .into());
        }
        if let Some(writer) = self.writer(&manifest.name).filter(|writer| writer != vm) {
            let name = manifest.name;
            return Err(SegmentError::Written { name, writer }.into());
        }
        // The generation is chosen here, even if a newer one is built meanwhile.
        let reference = Reference::parse(&manifest.reference())?;
        Ok(self.shelf.image(&reference)?)
    }
}
