//! Which files VMs cache, by what their agents say: for whoever chooses files (`memfold segment rank`), and where they lie in memory
//! (`memfold estimate`).

use foldhash::{HashMap, HashMapExt};
use memfold_wire::agent::FileNumber;

use super::cached_files::{CachedFiles, CachedRun, FileUse};
use super::content::{ContentId, Member};
use super::state::Engine;
use super::vm_table::Index;

impl Engine {
    /// Where every VM caches which file. Files whose path isn't known are left out.
    pub(super) fn cached_files(&self) -> CachedFiles {
        let mut all = CachedFiles::default();
        let mut numbers: HashMap<(&str, ContentId), u32> = HashMap::new();
        for (&id, vm) in &self.vms {
            let (Some(domain), true) = (self.domains.get(&vm.domain), vm.stats.agent_ready) else {
                continue;
            };
            let mut runs: Vec<CachedRun> = Vec::new();
            let mut last: Option<(Index, FileNumber, u32)> = None;
            for at in 0..vm.table.pages() {
                let Some((file, page)) = vm.table.cached(at) else {
                    continue;
                };
                let follows = last.is_some_and(|(before, of, in_file)| {
                    vm.table.adjacent(before, at)
                        && of == file
                        && in_file.checked_add(1) == Some(page)
                });
                last = Some((at, file, page));
                if let (true, Some(run)) = (follows, runs.last_mut()) {
                    run.pages += 1;
                    continue;
                }
                let content = domain.contents.of(Member { vm: id, file });
                let known = content.and_then(|id| Some((id, domain.contents.get(id)?)));
                let (Some((content, known)), Some(hva)) = (known, vm.table.hva(at)) else {
                    // The next page is not to join the run before.
                    last = None;
                    continue;
                };
                let file = *numbers.entry((&vm.domain, content)).or_insert_with(|| {
                    all.files.push((known.path.to_vec(), known.size()));
                    u32::try_from(all.files.len() - 1).unwrap_or(u32::MAX)
                });
                runs.push(CachedRun {
                    hva,
                    pages: 1,
                    file,
                    page,
                });
            }
            all.vms.push((vm.stats.name.clone(), runs));
        }
        all
    }

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
