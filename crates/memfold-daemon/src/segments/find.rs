//! Finds segments by name, and checks whether a VM may map them.

use std::path::PathBuf;

use memfold_segment::{Manifest, Reference, SegmentError};
use memfold_vm::{SegmentSpec, VmSpec};

use crate::error::{DaemonError, impossible};
use crate::segments::Segments;
use crate::snapshot_locks::{Use, being_saved};

impl Segments {
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
