//! Reports which files the guests cache, according to memfold's agents in them: how much of each
//! file (for `memfold segment rank`), at which addresses (for `memfold estimate`), and the paths of
//! files (for snapshots).

use foldhash::{HashMap, HashMapExt};
use memfold_wire::agent::FileNumber;

use super::cached_pages::{CachedPages, PageRun};
use super::guest::VmId;
use super::member::{ContentId, Member};
use super::state::Engine;

/// Number of pages of one file that one VM's page cache holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUse {
    /// Name of the VM.
    pub vm: String,
    /// Trust domain of the VM, or `vm/NAME` for a VM without one.
    pub domain: String,
    /// Absolute path of the file in the guest. If files with several paths have the same bytes, one
    /// of these paths stands for all.
    pub path: Vec<u8>,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Number of the file's pages in the VM's page cache.
    pub cached_pages: u64,
}

/// Files that guests cache, and the runs of guest pages that cache them, for all VMs whose agents
/// have completed an inventory of the page cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CachedFiles {
    /// Path and length in bytes of each cached file. Files of one trust domain that probably have
    /// the same bytes are one entry.
    pub files: Vec<(Vec<u8>, u64)>,
    /// Name of each VM, and its runs of cached pages. In these runs, `PageRun::file` is an index
    /// into `CachedFiles::files`.
    pub vms: Vec<(String, Vec<PageRun>)>,
}

impl Engine {
    /// Returns which runs of pages cache which files, for every VM. Files without a known path are
    /// left out.
    pub(super) fn cached_files(&self) -> CachedFiles {
        let mut all = CachedFiles::default();
        let mut numbers: HashMap<(&str, ContentId), u32> = HashMap::new();
        for (&id, vm) in &self.vms {
            let (Some(domain), true) = (self.domains.get(&vm.domain), vm.stats.agent_ready) else {
                continue;
            };
            let mut runs = Vec::new();
            for run in vm.table.copy_cached().runs() {
                let content = domain.contents.of(Member {
                    vm: id,
                    file: run.file,
                });
                let known = content.and_then(|id| Some((id, domain.contents.get(id)?)));
                let Some((content, known)) = known else {
                    continue;
                };
                let file = *numbers.entry((&vm.domain, content)).or_insert_with(|| {
                    all.files.push((known.path.to_vec(), known.size()));
                    u32::try_from(all.files.len() - 1).unwrap_or(u32::MAX)
                });
                runs.push(PageRun { file, ..run });
            }
            all.vms.push((vm.stats.name.clone(), runs));
        }
        all
    }

    /// Returns the cached pages of one VM; `None` before its agent's first inventory.
    pub(super) fn cached_pages(&self, id: VmId) -> Option<CachedPages> {
        let vm = self.vms.get(&id).filter(|vm| vm.stats.agent_ready)?;
        Some(vm.table.copy_cached())
    }

    /// Returns the paths of files of one VM; a path is empty if it is unknown.
    pub(super) fn file_paths(&self, id: VmId, files: &[FileNumber]) -> Vec<Vec<u8>> {
        let vm = self.vms.get(&id);
        let contents = vm.and_then(|vm| Some(&self.domains.get(&vm.domain)?.contents));
        let path = |file| contents.and_then(|contents| contents.path(Member { vm: id, file }));
        let paths = files.iter().map(|&file| path(file).unwrap_or_default());
        paths.map(<[u8]>::to_vec).collect()
    }

    /// Returns the number of cached pages for each VM and file. Files without a known path are left
    /// out.
    pub(super) fn file_uses(&self) -> Vec<FileUse> {
        let mut uses = Vec::new();
        for (&id, vm) in &self.vms {
            let Some(domain) = self.domains.get(&vm.domain) else {
                continue;
            };
            let mut cached: HashMap<FileNumber, u64> = HashMap::new();
            for (_, pages, file, _) in vm.table.all_cached() {
                *cached.entry(file).or_default() += u64::from(pages);
            }
            for (file, cached_pages) in cached {
                let content = domain.contents.of(Member { vm: id, file });
                let Some(content) = content.and_then(|id| domain.contents.get(id)) else {
                    continue;
                };
                uses.push(FileUse {
                    vm: vm.stats.name.clone(),
                    domain: vm.domain.clone(),
                    path: content.path.to_vec(),
                    file_bytes: content.size(),
                    cached_pages,
                });
            }
        }
        uses
    }
}
