//! Finds the QEMU processes on the host whose memory an estimate of possible savings reads, with
//! their RAM ranges and trust domains.

use std::path::Path;

use memfold_ksm::{processes, ranges};
use memfold_vm::endpoints;
use rustix::process::Pid;

use super::error::{EstimateError, has_ended};
use super::facts::{FileRun, KnownVm, VmFacts};

/// A range of a QEMU process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Address of the range's first byte.
    pub start: u64,
    /// Address after the range's last byte.
    pub end: u64,
    /// Whether the range is offered to KSM (`MADV_MERGEABLE`).
    pub mergeable: bool,
    /// Whether the range consists of hugetlbfs pages, which cannot be shared.
    pub hugetlb: bool,
}

/// A VM whose memory an estimate reads.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// Name of the VM.
    pub name: String,
    /// Process number of QEMU.
    pub pid: i32,
    /// Trust domain of the VM; `None`: the VM shares with no other VM.
    pub domain: Option<String>,
    /// Ranges of the VM's memory in QEMU, sorted by address and without overlap.
    pub ranges: Vec<Range>,
    /// Runs of file pages that the guest caches, sorted by address; `None`: unknown.
    pub runs: Option<Vec<FileRun>>,
    /// `MemFree` of the guest, in bytes; `None`: unknown.
    pub free_bytes: Option<u64>,
}

impl Target {
    /// Returns a text that is equal for VMs that may share with each other. It names the trust
    /// domain, or the process of a VM without a domain.
    #[must_use]
    pub fn group(&self) -> String {
        match &self.domain {
            Some(domain) => format!("domain/{domain}"),
            None => format!("process/{}", self.pid),
        }
    }

    /// Returns which file page is cached at the address `page * 4096` in QEMU: the file's index
    /// ([`FileRun::file`]), and the page's number in the file. `None`: not known to be page cache.
    #[must_use]
    pub fn file_at(&self, page: u64) -> Option<(u32, u32)> {
        let runs = self.runs.as_deref()?;
        let at = runs.partition_point(|run| run.hva >> 12 <= page);
        let run = runs.get(at.checked_sub(1)?)?;
        let inside = page - (run.hva >> 12);
        (inside < u64::from(run.pages))
            .then(|| Some((run.file, run.page.checked_add(u32::try_from(inside).ok()?)?)))?
    }

    /// Returns whether the page at the address `page * 4096` in QEMU is offered to KSM.
    #[must_use]
    pub fn is_mergeable(&self, page: u64) -> bool {
        let address = page << 12;
        let at = self.ranges.partition_point(|range| range.end <= address);
        let range = self.ranges.get(at);
        range.is_some_and(|range| range.start <= address && range.mergeable)
    }
}

/// Trust domains that the user assigned to VMs on the command line.
#[derive(Clone, Debug, Default)]
pub struct Domains {
    /// Whether all VMs count as one trust domain.
    pub one: bool,
    /// Trust domains of single VMs, by the process number of QEMU. They replace those that the
    /// daemon reports.
    pub of: Vec<(i32, String)>,
}

impl Domains {
    fn of(&self, pid: i32, known: Option<&KnownVm>) -> Option<String> {
        if self.one {
            return Some("all".to_owned());
        }
        let said = self.of.iter().find(|(of, _)| *of == pid);
        let said = said.map(|(_, domain)| domain.clone());
        said.or_else(|| known?.domain.clone())
    }
}

/// Finds the QEMU processes of this host. If `selected` is not empty, only QEMUs whose VM name or
/// process number is in `selected` are returned.
///
/// # Errors
///
/// An [`EstimateError`] if a selected VM or no VM runs, or if the mappings of a QEMU may not be
/// read.
pub fn find(
    proc_root: &Path,
    selected: &[String],
    domains: &Domains,
    facts: &VmFacts,
) -> Result<Vec<Target>, EstimateError> {
    let qemus = processes::all(proc_root)?.into_iter().filter(|p| p.qemu);
    let mut found: Vec<_> = qemus.map(|p| (p.pid, name_of(p.pid, facts))).collect();
    if found.is_empty() && !rustix::process::geteuid().is_root() {
        return Err(EstimateError::NotRoot);
    }
    let is_found = |pid: &i32| found.iter().any(|(found, _)| found == pid);
    if let Some((pid, _)) = domains.of.iter().find(|(pid, _)| !is_found(pid)) {
        return Err(EstimateError::NoSuchVm(pid.to_string()));
    }
    if !selected.is_empty() {
        let mut chosen = Vec::new();
        for word in selected {
            let one = choose(&found, word)?;
            if !chosen.contains(&one) {
                chosen.push(one);
            }
        }
        found = chosen;
    }
    let mut targets = Vec::new();
    for (pid, name) in found {
        let known = facts.vms.iter().find(|vm| vm.pid == pid);
        match memory(proc_root, pid, known) {
            Ok(ranges) => targets.push(Target {
                name,
                pid,
                domain: domains.of(pid, known),
                ranges,
                runs: known.and_then(|vm| vm.runs.clone()).map(in_order),
                free_bytes: known.and_then(|vm| vm.free_bytes),
            }),
            // The VM has ended meanwhile.
            Err(error) if has_ended(&error) => {}
            Err(source) => return Err(EstimateError::of(pid, source)),
        }
    }
    if targets.is_empty() {
        return Err(EstimateError::NoVms);
    }
    Ok(targets)
}

fn in_order(mut runs: Vec<FileRun>) -> Vec<FileRun> {
    runs.sort_unstable_by_key(|run| run.hva);
    runs
}

fn choose(found: &[(i32, String)], word: &str) -> Result<(i32, String), EstimateError> {
    let number: Option<i32> = word.parse().ok();
    if let Some(one) = found.iter().find(|(pid, _)| number == Some(*pid)) {
        return Ok(one.clone());
    }
    let named: Vec<&(i32, String)> = found.iter().filter(|(_, name)| name == word).collect();
    match named[..] {
        [one] => Ok(one.clone()),
        [] => Err(EstimateError::NoSuchVm(word.to_owned())),
        _ => Err(EstimateError::Ambiguous {
            name: word.to_owned(),
            pids: named.iter().map(|(pid, _)| *pid).collect(),
        }),
    }
}

fn name_of(pid: i32, facts: &VmFacts) -> String {
    if let Some(vm) = facts.vms.iter().find(|vm| vm.pid == pid) {
        return vm.name.clone();
    }
    let words = Pid::from_raw(pid).and_then(|pid| endpoints::command_line(pid).ok());
    words
        .and_then(|words| endpoints::guest_name(&words))
        .unwrap_or_else(|| format!("process {pid}"))
}

/// Returns the ranges of guest memory, and of other mergeable memory of the process, including
/// small blocks such as video memory or ROMs.
fn memory(proc_root: &Path, pid: i32, known: Option<&KnownVm>) -> std::io::Result<Vec<Range>> {
    let ram = known.map_or(&[][..], |vm| &vm.ram);
    let mut mappings = ranges::guest(proc_root, pid, ram)?;
    let text = std::fs::read_to_string(proc_root.join(pid.to_string()).join("smaps"))?;
    mappings.extend(
        ranges::parse(&text)
            .into_iter()
            .filter(ranges::Mapping::is_mergeable),
    );
    mappings.sort_unstable_by_key(|mapping| (mapping.start, mapping.end));
    // The mappings were read twice, and may have been merged or split in between.
    let mut found: Vec<Range> = Vec::new();
    for mapping in mappings {
        let from = found.last().map_or(0, |last| last.end);
        if mapping.end > from {
            found.push(Range {
                start: mapping.start.max(from),
                end: mapping.end,
                mergeable: mapping.is_mergeable(),
                hugetlb: mapping.has("ht"),
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(hva: u64, pages: u32, file: u32, page: u32) -> FileRun {
        FileRun {
            hva,
            pages,
            file,
            page,
        }
    }

    #[test]
    fn the_file_and_the_memory_range_of_a_guest_page_are_found_by_its_address() {
        let range = |start: u64, end: u64, mergeable| Range {
            start: start << 12,
            end: end << 12,
            mergeable,
            hugetlb: false,
        };
        let target = Target {
            runs: Some(in_order(vec![
                run(20 << 12, 1, 9, 0),
                run(4 << 12, 3, 7, 100),
            ])),
            ranges: vec![range(0, 8, true), range(8, 16, false), range(20, 24, true)],
            ..Target::default()
        };
        let at: Vec<_> = [3, 4, 6, 7, 20, 21].map(|page| target.file_at(page)).into();
        assert_eq!(
            at,
            [
                None,
                Some((7, 100)),
                Some((7, 102)),
                None,
                Some((9, 0)),
                None
            ]
        );
        let mergeable = [0, 7, 8, 15, 16, 20, 24].map(|page| target.is_mergeable(page));
        assert_eq!(mergeable, [true, true, false, false, false, true, false]);
    }

    #[test]
    fn an_estimate_takes_trust_domains_from_the_daemon_unless_an_option_overrides_them() {
        let vm = KnownVm {
            domain: Some("d".into()),
            ..KnownVm::default()
        };
        let said = Domains {
            one: false,
            of: vec![(5, "x".into())],
        };
        assert_eq!(said.of(5, Some(&vm)).as_deref(), Some("x"));
        assert_eq!(said.of(6, Some(&vm)).as_deref(), Some("d"));
        assert_eq!(said.of(6, None), None);
        let one = Domains {
            one: true,
            ..Domains::default()
        };
        assert_eq!(one.of(6, None), one.of(5, Some(&vm)));
        let alone = |pid| Target {
            pid,
            ..Target::default()
        };
        assert_ne!(alone(1).group(), alone(2).group());
    }

    #[test]
    fn an_estimate_selects_a_vm_by_its_process_id_or_by_a_unique_name() {
        let found = [
            (5, "a".to_owned()),
            (6, "b".to_owned()),
            (7, "b".to_owned()),
        ];
        assert_eq!(choose(&found, "5").unwrap().1, "a");
        assert_eq!(choose(&found, "a").unwrap().0, 5);
        assert!(matches!(
            choose(&found, "c"),
            Err(EstimateError::NoSuchVm(_))
        ));
        let error = choose(&found, "b").unwrap_err().to_string();
        assert!(error.contains("[6, 7]"), "{error}");
    }
}
