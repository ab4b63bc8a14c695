//! Builds segments. Each new build of a segment is called a generation. Also ranks files of the
//! VMs, to show which files would save the most memory in a segment.

use std::collections::BTreeSet;

use memfold_api::{BuildRequest, BuildResult, RankRequest};
use memfold_fold::Command;
use memfold_segment::{Ranked, Reference, Request, SegmentError, rank};
use tracing::info;

use crate::error::DaemonError;
use crate::segments::Segments;
use crate::segments::copy_out::IMAGE;

impl Segments {
    /// Builds a new generation of a segment. Builds nothing if the content would equal that of the
    /// newest generation.
    pub fn build(&self, request: &BuildRequest) -> Result<BuildResult, DaemonError> {
        // The name is checked before it becomes part of a path.
        Reference::parse(&request.name)?;
        let progress = self.locks.begin(&format!("segment {}", request.name))?;
        let vm = match request.from.as_slice() {
            [from] => from.strip_prefix("vm:"),
            _ => None,
        };
        if let Some(writer) = self.writer(&request.name).filter(|w| vm != Some(w)) {
            let name = request.name.clone();
            return Err(SegmentError::Written { name, writer }.into());
        }
        let top = match request.top_files_bytes {
            None => None,
            Some(bytes) => {
                let ranked = self.rank(&RankRequest {
                    domain: Some(request.domain.clone()),
                    for_vms: request.for_vms,
                    include: request.include.clone(),
                    ..RankRequest::default()
                })?;
                Some((memfold_units::ByteSize(bytes), ranked))
            }
        };
        let mut wanted = Request {
            name: request.name.clone(),
            domain: request.domain.clone(),
            from: request.from.clone(),
            origin: vm.is_some().then(|| request.from.join(" ")),
            include: request.include.clone(),
            exclude: request.exclude.clone(),
            top,
            root: request.root,
            pinned: request.pinned,
        };
        memfold_segment::check(&self.shelf, &wanted)?;
        let copy = vm
            .map(|vm| self.copy_out(vm, request, &progress))
            .transpose()?;
        if let Some(copy) = &copy {
            wanted.from = vec![copy.path().join(IMAGE).display().to_string()];
        }
        let (segment, is_new) = memfold_segment::build(&self.shelf, &wanted, &progress)?;
        if is_new {
            info!(
                segment = segment.reference(),
                bytes = segment.image_bytes,
                files = segment.files,
                "segment built"
            );
            self.drop_old(&segment.name);
        }
        Ok(BuildResult { segment, is_new })
    }

    /// Ranks files of running VMs by the memory that a segment with these files would save.
    ///
    /// # Errors
    ///
    /// [`DaemonError::NoSuchVm`] if a VM of the request does not run.
    pub fn rank(&self, request: &RankRequest) -> Result<Vec<Ranked>, DaemonError> {
        let mut uses = self.folding.ask(Command::FileUses)?;
        for vm in &request.vms {
            self.registry.machine(vm)?;
        }
        uses.retain(|used| {
            let domain = request.domain.as_ref();
            let of_domain = domain.is_none_or(|domain| *domain == used.domain);
            let of_vm = request.vms.is_empty() || request.vms.contains(&used.vm);
            of_domain && of_vm
        });
        let looked_at: BTreeSet<String> = uses.iter().map(|used| used.vm.clone()).collect();
        let chosen = rank::chosen(&request.include)?;
        uses.retain(|used| chosen(&used.path));
        Ok(rank::rank(&uses, looked_at.len() as u64, request.for_vms))
    }
}
