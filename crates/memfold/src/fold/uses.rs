//! Which files VMs cache, by what their agents say: for whoever chooses files (`memfold segment rank`).

use foldhash::{HashMap, HashMapExt};
use memfold_wire::agent::FileNumber;

use super::content::Member;
use super::engine::Engine;

/// What one VM caches of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUse {
    /// The VM's name.
    pub vm: String,
    /// Its trust domain, or `vm/NAME` of one that has none.
    pub domain: String,
    /// Absolute path in the guest; where files of several paths have the same bytes, one of these.
    pub path: Vec<u8>,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Pages of it in the guest's page cache.
    pub cached_pages: u64,
}

impl Engine {
    /// What every VM caches, by file. A file whose path isn't known is left out.
    pub(super) fn file_uses(&self) -> Vec<FileUse> {
        let mut uses = Vec::new();
        for (&id, vm) in &self.vms {
            let Some(domain) = self.domains.get(&vm.domain) else {
                continue;
            };
            let mut cached: HashMap<FileNumber, u64> = HashMap::new();
            for at in 0..vm.table.pages() {
                if let Some((file, _)) = vm.table.cached(at) {
                    *cached.entry(file).or_default() += 1;
                }
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
