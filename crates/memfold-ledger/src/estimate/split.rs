//! Splits the pages that an estimate has read into classes: pages that could be shared (by one VM,
//! or by several), and pages that cannot.
//!
//! If a VM holds the same content in `f` page frames, and all VMs of a trust domain together in `F`
//! frames, then keeping one copy for the domain would save `F - 1` frames. (Frames are counted, not
//! pages: pages that are already shared count once.) The drawing shows how the saving is divided:
//!
//! ```text
//!   within    f - 1, added up over the domain's VMs                each VM alone could save this
//!   between   number of the domain's VMs with the content, less 1  each of m VMs is credited with (m - 1) / m
//!   across    number of domains with the content, less 1           must not be shared, and in no sum
//! ```
//! Pages of zeroes need no copy at all, and are a class of their own. A page that changed between
//! the two reads is *volatile*, whatever it contained.

use foldhash::{HashMap, HashSet};
use memfold_fold::HUGE_SPLIT_PAGES;

use super::facts::KnownFile;
use super::look::{LONERS, Looked, Pages};
use super::options::Options;
use super::sample::{Again, Frequent, Seen};
use super::statistics::Sum;
use super::targets::Target;

/// Number of 4 KiB pages in a huge page.
const WHOLE: u32 = 512;

/// Estimated numbers of one VM's pages, by class.
#[derive(Clone, Copy, Debug, Default)]
pub struct VmSplit {
    /// Number of the VM's pages that hold only zeroes.
    pub zero: Sum,
    /// Part of `zero` that memfold's library in QEMU gives back. A huge page stays whole unless all
    /// of it is zero, or folding splits it.
    pub zero_given_back: Sum,
    /// Number of pages whose content occurs several times in the VM: all copies but the first.
    pub within: Sum,
    /// Number of pages that the VM could save by sharing with other VMs of its trust domain: all
    /// copies but one could be saved, and this is the VM's part of them.
    pub between: Sum,
    /// Number of the VM's pages that changed between the two reads.
    pub volatile: Sum,
    /// Pages that KSM has already merged with other pages that were read. Of `k` pages in one
    /// frame, each counts as (k - 1) / k.
    pub merged: Sum,
    /// Number of huge pages of the VM that sharing would split.
    pub broken_huge_pages: Sum,
}

/// Estimated numbers of one trust domain's pages, by class. A VM without a domain counts as a
/// domain of its own.
#[derive(Clone, Debug, Default)]
pub struct DomainSplit {
    /// Name of the trust domain; `None` for a VM without one.
    pub name: Option<String>,
    /// Indexes of the domain's VMs in the list of targets.
    pub vms: Vec<usize>,
    /// Number of pages of the domain's VMs that hold only zeroes.
    pub zero: Sum,
    /// Number of pages whose content occurs several times in one VM of the domain: all copies but
    /// the first in each VM.
    pub within: Sum,
    /// Contents that several VMs of the domain hold: one page for each of these VMs but one.
    pub between: Sum,
    /// Sum of `zero`, `within` and `between`, kept separately because their errors are not
    /// independent.
    pub saved: Sum,
    /// Part of `within` and `between` that is page cache of files.
    pub of_files: Sum,
    /// Number of pages that folding would save: equal pages of equal files in several VMs.
    pub folded: Sum,
    /// Number of pages that KSM would save in memory that is offered to KSM.
    pub ksm: Sum,
    /// Number of pages that KSM would save if all memory were offered to KSM.
    pub ksm_if_offered: Sum,
}

/// Cached pages of one file in one trust domain, and the possible saving.
#[derive(Clone, Debug, PartialEq)]
pub struct FileSplit {
    /// Index of the file in the list of files that the daemon reported.
    pub file: u32,
    /// Index of the trust domain in [`Split::domains`].
    pub domain: usize,
    /// Number of the file's pages that VMs of the domain cache. A page that two VMs cache counts
    /// twice.
    pub cached_pages: u64,
    /// Number of cached pages of the file that sharing would save.
    pub saved: Sum,
}

/// Estimated numbers of pages by class, for VMs, trust domains and files.
#[derive(Debug, Default)]
pub struct Split {
    /// Pages of each VM by class, in the order of the targets.
    pub vms: Vec<VmSplit>,
    /// Pages of each trust domain by class.
    pub domains: Vec<DomainSplit>,
    /// Contents that several trust domains hold: one page for each of these domains but one.
    pub across: Sum,
    /// Cached pages of each file in each trust domain, largest saving first.
    pub files: Vec<FileSplit>,
}

/// Splits the pages that were read into classes. `files` are the files that VMs cache.
#[must_use]
pub fn split(looked: &Looked, files: &[KnownFile], options: &Options) -> Split {
    let mut splitter = Splitter::new(looked, options);
    for group in looked.sample.pages.chunk_by(|a, b| a.hash == b.hash) {
        splitter.content(group, looked.sample.weight());
    }
    for frequent in looked.sample.frequent.values() {
        if frequent.is_whole() {
            splitter.content(&frequent.kept, frequent.weight);
        } else {
            splitter.frequent(frequent);
        }
    }
    splitter.zero(&looked.sample.zero);
    splitter.end(files)
}

struct Splitter<'a> {
    targets: &'a [Target],
    pages: &'a [Pages],
    weight: f64,
    max_page_sharing: f64,
    use_zero_pages: bool,
    /// Number of each VM's trust domain.
    domain: Vec<usize>,
    split: Split,
    files: HashMap<(usize, u32), Sum>,
    /// Number of pages that would be shared, in each huge page.
    shared_in_huge: HashMap<(u32, u64), u32>,
    broken: HashSet<(u32, u64)>,
    /// Blocks of 2 MiB in which guests cache enough file pages for folding to split a huge page.
    splittable: HashSet<(u32, u64)>,
}

impl<'a> Splitter<'a> {
    fn new(looked: &'a Looked, options: &Options) -> Self {
        let targets = &looked.targets;
        let mut split = Split {
            vms: vec![VmSplit::default(); targets.len()],
            ..Split::default()
        };
        let mut groups: HashMap<String, usize> = HashMap::default();
        let mut domain = Vec::new();
        for (vm, target) in targets.iter().enumerate() {
            let number = *groups.entry(target.group()).or_insert_with(|| {
                split.domains.push(DomainSplit {
                    name: target.domain.clone(),
                    ..DomainSplit::default()
                });
                split.domains.len() - 1
            });
            split.domains[number].vms.push(vm);
            domain.push(number);
        }
        Self {
            targets,
            pages: &looked.vms,
            weight: looked.sample.weight(),
            max_page_sharing: options.max_page_sharing as f64,
            use_zero_pages: options.use_zero_pages,
            domain,
            split,
            files: HashMap::default(),
            shared_in_huge: HashMap::default(),
            broken: HashSet::default(),
            splittable: splittable(targets),
        }
    }

    /// Adds all copies of one content.
    fn content(&mut self, copies: &[Seen], weight: f64) {
        let alone = copies.len() == 1;
        let mut stable = Vec::with_capacity(copies.len());
        for &seen in copies {
            let volatile = &mut self.split.vms[seen.vm as usize].volatile;
            match seen.again {
                Again::Changed if alone => volatile.add(1.0, weight * f64::from(LONERS)),
                Again::Changed => volatile.add(1.0, weight),
                Again::Same | Again::NotLooked => stable.push(seen),
            }
        }
        if alone {
            // The content was seen in one domain only, so there is nothing to save.
            return;
        }
        stable.sort_unstable_by_key(|s| (self.domain[s.vm as usize], s.vm, s.page));
        let domain_of = |seen: &Seen| self.domain[seen.vm as usize];
        let domains: Vec<&[Seen]> = stable
            .chunk_by(|a, b| domain_of(a) == domain_of(b))
            .collect();
        let having = domains.len();
        for copies in domains {
            self.in_domain(copies, weight);
        }
        if having > 1 {
            self.split.across.add(having as f64 - 1.0, weight);
        }
    }

    /// Adds the copies of one content in VMs of one domain, sorted by VM.
    fn in_domain(&mut self, copies: &[Seen], weight: f64) {
        let number = self.domain[copies[0].vm as usize];
        let mut in_frame: HashMap<u64, u32> = HashMap::default();
        for seen in copies.iter().filter(|seen| seen.frame != 0) {
            *in_frame.entry(seen.frame).or_default() += 1;
        }
        let merged = |seen: &Seen| {
            let together = in_frame.get(&seen.frame).copied().unwrap_or(1);
            1.0 - 1.0 / f64::from(together)
        };
        let mut frames = HashSet::default();
        let (mut having, mut own) = (Vec::new(), Vec::new());
        for of_vm in copies.chunk_by(|a, b| a.vm == b.vm) {
            let before = own.len();
            own.extend(
                of_vm
                    .iter()
                    .filter(|seen| seen.frame == 0 || frames.insert(seen.frame)),
            );
            let new = own.len() - before;
            let vm = of_vm[0].vm as usize;
            let split = &mut self.split.vms[vm];
            split.merged.add(of_vm.iter().map(merged).sum(), weight);
            if new > 0 {
                having.push(vm);
                split.within.add(new as f64 - 1.0, weight);
            }
        }
        let saved = own.len() as f64 - 1.0;
        let of_files = self.of_files(number, &own, saved, weight);
        let folded = self.folded(&own);
        let offered = |seen: &&Seen| self.targets[seen.vm as usize].is_mergeable(seen.page);
        let offered_pages = copies.iter().filter(offered).count();
        let offered_own = own.iter().filter(|seen| offered(seen)).count();
        let ksm = self.merged(offered_pages as f64, offered_own as f64);
        let if_offered = self.merged(copies.len() as f64, own.len() as f64);
        self.book(number, &having, own.len() as f64, (ksm, if_offered), weight);
        let domain = &mut self.split.domains[number];
        domain.of_files.add(of_files, weight);
        domain.folded.add(folded, weight);
        if saved > 0.0 {
            for seen in copies.iter().filter(|seen| seen.huge) {
                *self.shared_in_huge.entry(seen.huge_page()).or_default() += 1;
            }
        }
    }

    /// Books a content that the VMs `having` of a domain hold in `frames` pages of memory, of which
    /// KSM would save the given numbers: with the memory that is offered to it, and with all.
    fn book(
        &mut self,
        number: usize,
        having: &[usize],
        frames: f64,
        (ksm, if_offered): (f64, f64),
        weight: f64,
    ) {
        let (saved, between) = (frames - 1.0, having.len() as f64 - 1.0);
        for &vm in having {
            let part = between / having.len() as f64;
            self.split.vms[vm].between.add(part, weight);
        }
        let domain = &mut self.split.domains[number];
        domain.within.add(saved - between, weight);
        domain.between.add(between, weight);
        domain.saved.add(saved, weight);
        domain.ksm.add(ksm, weight);
        domain.ksm_if_offered.add(if_offered, weight);
    }

    /// Returns how many frames KSM frees, of `frames` frames that hold `pages` pages of one
    /// content. One frame remains for every `max_page_sharing` pages.
    fn merged(&self, pages: f64, frames: f64) -> f64 {
        (frames - (pages / self.max_page_sharing).ceil()).max(0.0)
    }

    /// Credits files with their parts of the saving. Returns the sum of these parts.
    fn of_files(&mut self, domain: usize, own: &[&Seen], saved: f64, weight: f64) -> f64 {
        let mut files: Vec<u32> = own
            .iter()
            .filter_map(|seen| self.targets[seen.vm as usize].file_at(seen.page))
            .map(|(file, _)| file)
            .collect();
        files.sort_unstable();
        let each = saved / own.len() as f64;
        for of_file in files.chunk_by(|a, b| a == b) {
            let sum = self.files.entry((domain, of_file[0])).or_default();
            sum.add(of_file.len() as f64 * each, weight);
        }
        files.len() as f64 * each
    }

    /// Counts pages that cache the same page of the same file in several VMs: for each page of a
    /// file, all but one.
    fn folded(&self, own: &[&Seen]) -> f64 {
        let folds = |s: &&&Seen| !s.huge || self.splittable.contains(&s.huge_page());
        let mut places: Vec<((u32, u32), u32)> = own
            .iter()
            .filter(folds)
            .filter_map(|seen| Some((self.targets[seen.vm as usize].file_at(seen.page)?, seen.vm)))
            .collect();
        places.sort_unstable();
        places.dedup();
        let same_place = places.chunk_by(|a, b| a.0 == b.0);
        same_place.map(|vms| vms.len() as f64 - 1.0).sum()
    }

    /// Adds a content with many copies, of which some were read again.
    fn frequent(&mut self, frequent: &Frequent) {
        let looked = frequent.kept.len() as f64;
        if looked == 0.0 {
            return;
        }
        let same = frequent.kept.iter().filter(|s| s.again != Again::Changed);
        let same = same.count() as f64;
        let merged = frequent.kept.iter().filter(|s| s.merged).count() as f64;
        let (stable, own) = (same / looked, (same - merged).max(0.0) / looked);
        let mut domains = 0;
        for number in 0..self.split.domains.len() {
            let vms = self.split.domains[number].vms.clone();
            let (mut frames, mut having, mut offered, mut pages) = (0.0, Vec::new(), 0.0, 0.0);
            for vm in vms {
                let n = frequent.of(vm) as f64;
                if n == 0.0 {
                    continue;
                }
                let split = &mut self.split.vms[vm];
                split.volatile.add(n * (1.0 - stable), frequent.weight);
                split.merged.add(n * (stable - own), frequent.weight);
                split.within.add((n * own - 1.0).max(0.0), frequent.weight);
                frames += n * own;
                pages += n * stable;
                offered += n * stable * offered_share(&self.pages[vm]);
                having.push(vm);
            }
            if having.is_empty() || frames < 1.0 {
                continue;
            }
            domains += 1;
            let share = frames / pages.max(1.0);
            let ksm = self.merged(offered, offered * share);
            let if_offered = self.merged(pages, frames);
            self.book(number, &having, frames, (ksm, if_offered), frequent.weight);
        }
        if domains > 1 {
            let across = f64::from(domains) - 1.0;
            self.split.across.add(across, frequent.weight);
        }
        self.broken.extend(frequent.huge.keys());
    }

    fn zero(&mut self, zero: &Frequent) {
        for vm in 0..self.targets.len() {
            let of_vm = || zero.kept.iter().filter(|seen| seen.vm as usize == vm);
            let count = |is: &dyn Fn(&&Seen) -> bool| of_vm().filter(is).count() as u64;
            let looked = count(&|_| true);
            let changed = count(&|seen| seen.again == Again::Changed);
            let merged = count(&|seen| seen.again != Again::Changed && seen.merged);
            let population = zero.of(vm);
            // The unread pages are similar to the pages read, because the order was random.
            let pages = &self.pages[vm];
            let unread = pages.private as f64 / pages.read.max(1) as f64;
            let share = |found: u64| Sum::of_share(found, looked, population).times(unread);
            let (own, volatile, merged) = match looked {
                // No copy in this VM was sampled, so it has few.
                0 => {
                    let mut all = Sum::default();
                    all.add(population as f64, 1.0);
                    (all, Sum::default(), Sum::default())
                }
                _ => (
                    share(looked - changed - merged),
                    share(changed),
                    if merged > 0 {
                        share(merged)
                    } else {
                        Sum::default()
                    },
                ),
            };
            let offered = own.times(offered_share(pages));
            let in_whole_pages = zero.huge.iter().filter(|(place, pages)| {
                let whole = **pages == WHOLE || self.splittable.contains(*place);
                place.0 as usize == vm && !whole
            });
            let left_whole: u32 = in_whole_pages.map(|(_, pages)| pages).sum();
            let given = 1.0 - f64::from(left_whole) / population.max(1) as f64;
            let split = &mut self.split.vms[vm];
            split.zero = own;
            split.zero_given_back = own.times(given.max(0.0));
            split.volatile.join(volatile);
            split.merged.join(merged);
            // One page remains for every `max_page_sharing` pages, unless KSM maps all of them to
            // the kernel's zero page.
            let left = if self.use_zero_pages {
                1.0
            } else {
                1.0 - 1.0 / self.max_page_sharing
            };
            let domain = &mut self.split.domains[self.domain[vm]];
            domain.zero.join(own);
            domain.saved.join(own);
            domain.ksm.join(offered.times(left));
            domain.ksm_if_offered.join(own.times(left));
        }
        self.broken.extend(zero.huge.keys());
    }

    fn end(mut self, known: &[KnownFile]) -> Split {
        for &(vm, _) in &self.broken {
            let broken = &mut self.split.vms[vm as usize].broken_huge_pages;
            broken.add(1.0, 1.0);
        }
        let drawn = 1.0 / self.weight;
        for (place, pages) in &self.shared_in_huge {
            if self.broken.contains(place) {
                continue;
            }
            // The huge page has about this many shareable pages, and was found if one of them was
            // sampled.
            let pages = f64::from(*pages) / drawn;
            let found = 1.0 - (1.0 - drawn).powf(pages);
            let broken = &mut self.split.vms[place.0 as usize].broken_huge_pages;
            broken.add(1.0, 1.0 / found);
        }
        let mut cached: HashMap<(usize, u32), u64> = HashMap::default();
        for (vm, target) in self.targets.iter().enumerate() {
            for run in target.runs.iter().flatten() {
                let pages = cached.entry((self.domain[vm], run.file)).or_default();
                *pages += u64::from(run.pages);
            }
        }
        let files = self.files.into_iter().filter(|((_, file), saved)| {
            saved.total() > 0.0 && known.get(*file as usize).is_some()
        });
        self.split.files = files
            .map(|((domain, file), saved)| FileSplit {
                file,
                domain,
                cached_pages: cached.get(&(domain, file)).copied().unwrap_or(0),
                saved,
            })
            .collect();
        let order = |a: &FileSplit, b: &FileSplit| {
            let by_saving = b.saved.total().total_cmp(&a.saved.total());
            by_saving.then_with(|| (a.domain, a.file).cmp(&(b.domain, b.file)))
        };
        self.split.files.sort_unstable_by(order);
        self.split
    }
}

fn splittable(targets: &[Target]) -> HashSet<(u32, u64)> {
    let mut cached: HashMap<(u32, u64), u64> = HashMap::default();
    for (vm, target) in (0..).zip(targets) {
        for run in target.runs.iter().flatten() {
            let (mut page, end) = (run.hva >> 12, (run.hva >> 12) + u64::from(run.pages));
            while page < end {
                let border = ((page >> 9) + 1) << 9;
                *cached.entry((vm, page >> 9)).or_default() += border.min(end) - page;
                page = border;
            }
        }
    }
    let enough = cached
        .into_iter()
        .filter(|(_, pages)| *pages >= u64::from(HUGE_SPLIT_PAGES));
    enough.map(|(place, _)| place).collect()
}

/// Returns the part of a VM's private pages that is offered to KSM, 0 to 1.
fn offered_share(pages: &Pages) -> f64 {
    pages.mergeable as f64 / pages.private.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::super::sample::Sample;
    use super::super::targets::Range;
    use super::*;

    const OPTIONS: Options = Options {
        sample_pages: 1 << 20,
        seed: 0,
        max_page_sharing: 256,
        use_zero_pages: false,
        reads_files: false,
    };

    /// Makes two VMs of a domain and one of another. All of their memory is offered to KSM, and no
    /// page was sampled yet.
    fn looked() -> Looked {
        let target = |pid: i32, domain: &str| Target {
            pid,
            domain: Some(domain.to_owned()),
            ranges: vec![Range {
                start: 0,
                end: 1 << 40,
                mergeable: true,
                hugetlb: false,
            }],
            ..Target::default()
        };
        let pages = Pages {
            private: 100_000,
            mergeable: 100_000,
            read: 100_000,
            ..Pages::default()
        };
        Looked {
            targets: vec![target(1, "d"), target(2, "d"), target(3, "e")],
            vms: vec![pages; 3],
            sample: Sample::new(1 << 20),
            complete: true,
            again_pages: 0,
        }
    }

    fn seen(hash: u64, vm: u32, page: u64, frame: u64) -> Seen {
        Seen {
            hash,
            page,
            frame,
            vm,
            again: Again::Same,
            ..Seen::default()
        }
    }

    #[track_caller]
    fn is(sum: Sum, total: f64) {
        assert!((sum.total() - total).abs() < 1e-6, "{sum:?}, not {total}");
    }

    #[test]
    fn in_an_estimate_a_page_frame_that_is_already_shared_counts_once() {
        let mut looked = looked();
        looked.sample.pages = vec![
            // Three pages are in two frames, and the other VM maps one of these frames, too.
            seen(7, 0, 1, 50),
            seen(7, 0, 2, 51),
            seen(7, 0, 3, 51),
            seen(7, 1, 1, 51),
            seen(7, 1, 9, 52),
            // The same content in another domain.
            seen(7, 2, 1, 60),
            seen(7, 2, 2, 61),
        ];
        let split = split(&looked, &[], &OPTIONS);
        let d = &split.domains[0];
        is(d.saved, 2.0);
        is(d.within, 1.0);
        is(d.between, 1.0);
        is(d.ksm, 2.0);
        // Three pages are in one frame: each is credited with two thirds.
        is(split.vms[0].merged, 4.0 / 3.0);
        is(split.vms[1].merged, 2.0 / 3.0);
        is(split.vms[0].between, 0.5);
        is(split.domains[1].saved, 1.0);
        is(split.across, 1.0);
    }

    #[test]
    fn in_an_estimate_a_page_that_changes_between_two_reads_does_not_count_as_a_copy() {
        let mut looked = looked();
        let changed = |seen| Seen {
            again: Again::Changed,
            ..seen
        };
        looked.sample.pages = vec![
            seen(7, 0, 1, 50),
            changed(seen(7, 1, 1, 51)),
            // Of pages without a twin, one in eight is read again.
            changed(seen(8, 0, 2, 52)),
        ];
        let split = split(&looked, &[], &OPTIONS);
        is(split.domains[0].saved, 0.0);
        is(split.vms[1].volatile, 1.0);
        is(split.vms[0].volatile, 8.0);
    }

    #[test]
    fn the_estimate_for_ksm_keeps_one_page_for_each_256_copies_of_a_page_content() {
        let mut looked = looked();
        let mut frequent = Frequent::new(1.0, 64);
        for (vm, copies) in [(0, 10_000), (1, 5000), (2, 10)] {
            for page in 0..copies {
                frequent.add(seen(7, vm, page, u64::from(vm) << 32 | (page + 1)));
            }
        }
        assert!(!frequent.is_whole());
        looked.sample.frequent.insert(7, frequent);
        let all = split(&looked, &[], &OPTIONS);
        let d = &all.domains[0];
        is(d.saved, 14_999.0);
        is(d.within, 14_998.0);
        is(d.between, 1.0);
        is(d.ksm, 15_000.0 - 59.0);
        is(all.across, 1.0);
        // Of the copies whose place is known, a tenth was merged and a fifth changed.
        let frequent = looked.sample.frequent.get_mut(&7).unwrap();
        let (kept, n) = (&mut frequent.kept, frequent.pages[0] as f64);
        for (at, seen) in kept.iter_mut().enumerate() {
            seen.merged = at % 10 == 0;
            if at % 5 == 1 {
                seen.again = Again::Changed;
            }
        }
        let looked_at = kept.len() as f64;
        let of = |wanted: fn(&Seen) -> bool| {
            let found = kept.iter().filter(|seen| wanted(seen));
            found.count() as f64 / looked_at
        };
        let (merged, changed) = (of(|s| s.merged), of(|s| s.again == Again::Changed));
        let all = split(&looked, &[], &OPTIONS);
        is(all.vms[0].volatile, n * changed);
        is(all.vms[0].merged, n * merged);
        is(
            all.domains[0].saved,
            15_000.0 * (1.0 - merged - changed) - 1.0,
        );
    }

    #[test]
    fn the_estimate_counts_no_copy_for_zero_pages_except_for_ksm_without_use_zero_pages() {
        let mut looked = looked();
        for page in 0..2048 {
            let huge = page >= 1024;
            let zero = seen(0, 0, page, page + 1);
            looked.sample.zero.add(Seen { huge, ..zero });
        }
        // Only a part of the second huge page is zero.
        for page in 2048..2148 {
            let zero = seen(0, 0, page, page + 1);
            looked.sample.zero.add(Seen { huge: true, ..zero });
        }
        let all = split(&looked, &[], &OPTIONS);
        is(all.domains[0].zero, 2148.0);
        is(all.domains[0].ksm, 2148.0 * 255.0 / 256.0);
        is(all.vms[0].zero_given_back, 2048.0);
        is(all.vms[0].broken_huge_pages, 3.0);
        let options = Options {
            use_zero_pages: true,
            ..OPTIONS
        };
        is(split(&looked, &[], &options).domains[0].ksm, 2148.0);
    }

    #[test]
    fn the_estimate_for_folding_excludes_huge_pages_with_fewer_than_64_cached_pages() {
        use super::super::facts::FileRun;
        let mut looked = looked();
        // In each VM, 63 pages of a file are in one huge page, and 64 in the next.
        let run = |hva: u64, pages, page| FileRun {
            hva: hva << 12,
            pages,
            file: 0,
            page,
        };
        for vm in 0..2 {
            looked.targets[vm as usize].runs = Some(vec![run(512, 63, 0), run(1024, 64, 63)]);
            for (at, page) in (512..575).chain(1024..1088).enumerate() {
                let copy = seen(at as u64, vm, page, page << 1 | u64::from(vm));
                looked.sample.pages.push(Seen { huge: true, ..copy });
            }
        }
        looked.sample.pages.sort_unstable_by_key(|seen| seen.hash);
        let split = split(&looked, &[KnownFile::default()], &OPTIONS);
        is(split.domains[0].between, 127.0);
        is(split.domains[0].of_files, 127.0);
        is(split.domains[0].folded, 64.0);
        is(split.files[0].saved, 127.0);
        assert_eq!(split.files[0].cached_pages, 254);
    }
}
