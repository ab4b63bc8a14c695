//! State of the display of `memfold top`, and how keys and data from the daemon change the state.
//! Code in this module neither draws nor blocks.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use memfold_units::ByteSize;

use memfold_api::VmSwap;
use memfold_ledger::memory_map::MemoryMap;
use memfold_ledger::{GuestMemory, Report, VmAccount};

/// Number of PSS samples that are kept for each VM.
pub(super) const SAMPLES: usize = 60;

/// A column of figures in the table: its name, its meaning, and its value.
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) meaning: &'static str,
    pub(super) of: fn(&VmAccount) -> ByteSize,
}

/// Columns in order of priority: if there is no room for all, the first ones are shown.
pub(super) const COLUMNS: [Column; 13] = [
    Column {
        name: "PSS",
        meaning: "all of the VM's process, each page divided by how many map it",
        of: |vm| vm.pss_bytes,
    },
    Column {
        name: "RAM",
        meaning: "guest RAM as QEMU made it",
        of: |vm| vm.ram_bytes,
    },
    Column {
        name: "folded",
        meaning: "mapped to the page store and not copied",
        of: |vm| vm.folded_bytes,
    },
    Column {
        name: "private",
        meaning: "its own",
        of: |vm| vm.private_bytes,
    },
    Column {
        name: "unfolded",
        meaning: "folded once, written to since then",
        of: |vm| vm.unfolded_bytes,
    },
    Column {
        name: "template",
        meaning: "of the snapshot's image that the VM runs from, in its page tables",
        of: |vm| vm.file_resident_bytes,
    },
    Column {
        name: "zero",
        meaning: "the kernel's zero page: costs nothing",
        of: |vm| vm.zero_bytes,
    },
    Column {
        name: "free",
        meaning: "never used, or given back",
        of: |vm| vm.free_bytes,
    },
    Column {
        name: "KSM",
        meaning: "merged by ksmd",
        of: |vm| vm.ksm_merged_bytes.unwrap_or_default(),
    },
    Column {
        name: "swapped",
        meaning: "on the host's swap",
        of: |vm| vm.swapped_bytes,
    },
    Column {
        name: "segments",
        meaning: "the VM's share of segments",
        of: |vm| vm.segment_pss_bytes,
    },
    Column {
        name: "QEMU",
        meaning: "the process beside guest RAM, with its page tables",
        of: VmAccount::overhead_bytes,
    },
    Column {
        name: "needs",
        meaning: "MemTotal - MemAvailable, as the guest reports them; 0: it does not",
        of: |vm| {
            let guest = vm.guest.as_ref();
            guest.map_or(ByteSize(0), GuestMemory::used_bytes)
        },
    },
];

/// Order of the table's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Name,
    Domain,
    /// Order by a figure, given as an index into [`COLUMNS`].
    Figure(usize),
}

impl Sort {
    /// Returns the order by the column `by` columns further to the right; the first column follows
    /// the last one.
    const fn step(self, by: usize) -> Self {
        let at = match self {
            Self::Name => 0,
            Self::Domain => 1,
            Self::Figure(number) => number + 2,
        };
        match (at + by) % (COLUMNS.len() + 2) {
            0 => Self::Name,
            1 => Self::Domain,
            at => Self::Figure(at - 2),
        }
    }

    fn compare(self, a: &VmAccount, b: &VmAccount) -> Ordering {
        match self {
            Self::Name => a.name.cmp(&b.name),
            Self::Domain => a.domain.cmp(&b.domain),
            // Rows with large figures come first, unless the order is reversed.
            Self::Figure(number) => (COLUMNS[number].of)(b).cmp(&(COLUMNS[number].of)(a)),
        }
    }
}

/// Action that a key requests from the main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Nothing,
    /// Fetch data now, possibly for another VM.
    Fetch,
    Quit,
}

/// Data that arrived from the daemon.
pub(super) enum News {
    Report(Box<Report>),
    Map(Box<MemoryMap>),
    /// Swap disk of the VM with this name.
    Swap(String, Option<VmSwap>),
    Failed(String),
}

/// State of the display.
pub(super) struct View {
    pub(super) report: Option<Report>,
    pub(super) error: Option<String>,
    pub(super) sort: Sort,
    pub(super) is_turned: bool,
    pub(super) is_paused: bool,
    pub(super) shows_help: bool,
    pub(super) interval: Duration,
    selected: Option<String>,
    /// Name of the VM whose details are shown; `None`: the table is shown.
    pub(super) detail: Option<String>,
    pub(super) map: Option<MemoryMap>,
    pub(super) swap: Option<VmSwap>,
    pub(super) history: BTreeMap<String, VecDeque<u64>>,
}

impl View {
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            report: None,
            error: None,
            sort: Sort::Figure(0),
            is_turned: false,
            is_paused: false,
            shows_help: false,
            interval,
            selected: None,
            detail: None,
            map: None,
            swap: None,
            history: BTreeMap::new(),
        }
    }

    /// Returns the VMs in display order.
    pub(super) fn rows(&self) -> Vec<&VmAccount> {
        let vms = self.report.iter().flat_map(|report| &report.vms);
        let mut rows: Vec<&VmAccount> = vms.collect();
        rows.sort_by(|a, b| {
            let order = self.sort.compare(a, b);
            let order = if self.is_turned {
                order.reverse()
            } else {
                order
            };
            order.then_with(|| a.name.cmp(&b.name))
        });
        rows
    }

    /// Returns the index of the selected row. The selection follows the VM.
    pub(super) fn selected_row(&self) -> Option<usize> {
        let rows = self.rows();
        let selected = self.selected.as_deref();
        let at = rows
            .iter()
            .position(|vm| Some(vm.name.as_str()) == selected);
        at.or_else(|| (!rows.is_empty()).then_some(0))
    }

    /// Returns the account of the VM whose details are shown; `None` if the VM has ended.
    pub(super) fn detail_vm(&self) -> Option<&VmAccount> {
        let name = self.detail.as_deref()?;
        let mut vms = self.report.as_ref()?.vms.iter();
        vms.find(|vm| vm.name == name)
    }

    pub(super) fn take(&mut self, news: News) {
        match news {
            News::Failed(words) => self.error = Some(words),
            // The map may be that of a VM that was displayed before.
            News::Map(map) => {
                // While the display is paused, the shown map stays. A VM that is opened during a
                // pause still gets its map.
                let keeps = self.is_paused && self.map.is_some();
                if self.detail.as_deref() == Some(map.vm.as_str()) && !keeps {
                    self.map = Some(*map);
                }
            }
            News::Swap(vm, swap) => {
                let keeps = self.is_paused && self.swap.is_some();
                if self.detail.as_deref() == Some(vm.as_str()) && !keeps {
                    self.swap = swap;
                }
            }
            News::Report(report) => {
                self.error = None;
                if self.is_paused && self.report.is_some() {
                    return;
                }
                self.history
                    .retain(|name, _| report.vms.iter().any(|vm| vm.name == *name));
                for vm in &report.vms {
                    let samples = self.history.entry(vm.name.clone()).or_default();
                    if samples.len() == SAMPLES {
                        samples.pop_front();
                    }
                    samples.push_back(vm.pss_bytes.0);
                }
                self.report = Some(*report);
            }
        }
    }

    fn step(&mut self, by: isize) {
        let rows = self.rows();
        let Some(last) = rows.len().checked_sub(1) else {
            return;
        };
        let now = self.selected_row().unwrap_or(0);
        let then = now.saturating_add_signed(by).min(last);
        self.selected = Some(rows[then].name.clone());
    }

    /// Opens the details of the selected VM.
    fn enter(&mut self) -> Asked {
        let row = self.selected_row();
        self.detail = row.map(|row| self.rows()[row].name.clone());
        self.map = None;
        self.swap = None;
        Asked::Fetch
    }

    /// Opens the details of the next or previous VM.
    fn step_detail(&mut self, by: isize) -> Asked {
        self.selected.clone_from(&self.detail);
        self.step(by);
        self.enter()
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Asked {
        if key.kind == KeyEventKind::Release {
            return Asked::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Asked::Quit,
                _ => Asked::Nothing,
            };
        }
        if self.shows_help {
            self.shows_help = false;
            return Asked::Nothing;
        }
        match key.code {
            KeyCode::Char('q') => return Asked::Quit,
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left if self.detail.is_some() => {
                self.selected = self.detail.take();
                self.map = None;
                // This ends the fetching of the map.
                return Asked::Fetch;
            }
            KeyCode::Char('?' | 'h') => self.shows_help = true,
            KeyCode::Char('p' | ' ') => {
                self.is_paused = !self.is_paused;
                return Asked::Fetch;
            }
            KeyCode::Up | KeyCode::Char('k') if self.detail.is_some() => {
                return self.step_detail(-1);
            }
            KeyCode::Down | KeyCode::Char('j') if self.detail.is_some() => {
                return self.step_detail(1);
            }
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-10),
            KeyCode::PageDown => self.step(10),
            KeyCode::Home | KeyCode::Char('g') => self.step(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.step(isize::MAX),
            KeyCode::Enter | KeyCode::Right if self.detail.is_none() => return self.enter(),
            KeyCode::Char('s' | '>') => self.sort = self.sort.step(1),
            KeyCode::Char('S' | '<') => self.sort = self.sort.step(COLUMNS.len() + 1),
            KeyCode::Char('r') => self.is_turned = !self.is_turned,
            KeyCode::Char('n') => self.sort = Sort::Name,
            _ => {}
        }
        Asked::Nothing
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn report(vms: &[(&str, u64)]) -> Report {
        let vms = vms.iter().map(|(name, mib)| VmAccount {
            name: (*name).to_owned(),
            domain: Some("lab".into()),
            ram_bytes: ByteSize::mib(512),
            pss_bytes: ByteSize::mib(*mib),
            private_bytes: ByteSize::mib(mib / 2),
            ..VmAccount::default()
        });
        Report {
            vms: vms.collect(),
            ..Report::default()
        }
    }

    pub(crate) fn press(view: &mut View, code: KeyCode) -> Asked {
        view.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    pub(crate) fn with(vms: &[(&str, u64)]) -> View {
        let mut view = View::new(Duration::from_secs(2));
        view.take(News::Report(Box::new(report(vms))));
        view
    }

    fn names(view: &View) -> Vec<&str> {
        view.rows().iter().map(|vm| vm.name.as_str()).collect()
    }

    #[test]
    fn when_rows_of_memfold_top_are_sorted_again_the_selection_follows_its_vm() {
        let mut view = with(&[("a", 10), ("b", 30), ("c", 20)]);
        assert_eq!(names(&view), ["b", "c", "a"]);
        press(&mut view, KeyCode::Down);
        assert_eq!(view.selected_row(), Some(1));
        view.take(News::Report(Box::new(report(&[
            ("a", 10),
            ("b", 30),
            ("c", 40),
        ]))));
        assert_eq!(names(&view), ["c", "b", "a"]);
        assert_eq!(view.selected_row(), Some(0), "it is still c");
        press(&mut view, KeyCode::Char('n'));
        assert_eq!(names(&view), ["a", "b", "c"]);
        press(&mut view, KeyCode::Char('r'));
        assert_eq!(names(&view), ["c", "b", "a"]);
        press(&mut view, KeyCode::End);
        assert_eq!(view.selected_row(), Some(2));
        press(&mut view, KeyCode::Home);
        assert_eq!(view.selected_row(), Some(0));
        // When the selected VM has ended, the first row is selected.
        view.take(News::Report(Box::new(report(&[("a", 1)]))));
        assert_eq!(view.selected_row(), Some(0));
        view.take(News::Report(Box::new(report(&[]))));
        assert_eq!(view.selected_row(), None);
        assert_eq!(press(&mut view, KeyCode::Down), Asked::Nothing);
    }

    #[test]
    fn in_memfold_top_pressing_the_sort_key_cycles_through_every_column() {
        let mut view = with(&[("a", 1)]);
        let first = view.sort;
        for _ in 0..COLUMNS.len() + 2 {
            press(&mut view, KeyCode::Char('s'));
        }
        assert_eq!(view.sort, first);
        press(&mut view, KeyCode::Char('S'));
        assert_ne!(view.sort, first);
        press(&mut view, KeyCode::Char('s'));
        assert_eq!(view.sort, first);
    }

    #[test]
    fn in_memfold_top_the_detail_view_of_a_vm_opens_and_closes() {
        let mut view = with(&[("a", 10), ("b", 30)]);
        assert_eq!(press(&mut view, KeyCode::Enter), Asked::Fetch);
        assert_eq!(view.detail_vm().unwrap().name, "b");
        let map = |vm: &str| MemoryMap {
            vm: vm.into(),
            ram_bytes: 0,
            cell_bytes: 0,
            states: Vec::new(),
            places: Vec::new(),
            cells: Vec::new(),
            segments: Vec::new(),
        };
        view.take(News::Map(Box::new(map("a"))));
        assert!(view.map.is_none(), "of another VM");
        view.take(News::Map(Box::new(map("b"))));
        assert!(view.map.is_some());
        assert_eq!(press(&mut view, KeyCode::Down), Asked::Fetch);
        assert_eq!(view.detail.as_deref(), Some("a"));
        assert!(view.map.is_none());
        press(&mut view, KeyCode::Char('p'));
        view.take(News::Map(Box::new(map("a"))));
        assert!(
            view.map.is_some(),
            "a pause keeps what is shown: nothing was"
        );
        press(&mut view, KeyCode::Char('p'));
        assert_eq!(press(&mut view, KeyCode::Esc), Asked::Fetch);
        assert!(view.detail.is_none());
        assert_eq!(view.selected_row(), Some(1), "a");
        assert_eq!(press(&mut view, KeyCode::Esc), Asked::Nothing);
        assert_eq!(press(&mut view, KeyCode::Char('q')), Asked::Quit);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(view.key(interrupt), Asked::Quit);
    }

    #[test]
    fn a_paused_memfold_top_shows_no_new_report_until_it_continues() {
        let mut view = with(&[("a", 10)]);
        press(&mut view, KeyCode::Char('p'));
        view.take(News::Report(Box::new(report(&[("a", 99)]))));
        assert_eq!(view.rows()[0].pss_bytes, ByteSize::mib(10));
        view.take(News::Failed("no daemon".into()));
        assert_eq!(view.error.as_deref(), Some("no daemon"));
        press(&mut view, KeyCode::Char('p'));
        view.take(News::Report(Box::new(report(&[("a", 99)]))));
        assert_eq!(view.error, None);
        assert_eq!(view.rows()[0].pss_bytes, ByteSize::mib(99));
        for _ in 0..2 * SAMPLES {
            view.take(News::Report(Box::new(report(&[("a", 7)]))));
        }
        assert_eq!(view.history["a"].len(), SAMPLES);
        press(&mut view, KeyCode::Char('?'));
        assert!(view.shows_help);
        assert_eq!(
            press(&mut view, KeyCode::Char('q')),
            Asked::Nothing,
            "closes the help"
        );
        assert!(!view.shows_help);
    }
}
