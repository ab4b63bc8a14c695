//! Carries out the daemon's orders, such as to fold pages, on the RAM of the process that contains
//! this code. This is QEMU, or a test.

use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use memfold_sys::cpu::thread_cpu_ns;
use memfold_sys::pagemap::Pagemap;
use memfold_sys::region::{self, Area};
use memfold_sys::userfaultfd::{Mode, Userfaultfd};
use memfold_units::PAGE_SIZE;
use memfold_wire::frame::Validate;
use memfold_wire::library::{
    FoldRun, Freeze, MONITOR_VARIABLE, MapRun, ORDER_TIME, Order, Outcome, Range, Reply, VERSION,
};
use rustix::io::Errno;
use rustix::mm::Advice;

use crate::arrival::Arrivals;
use crate::copy_before_write::Past;
use crate::freeze::Staging;
use crate::monitor::Monitor;
use crate::ram::{Kind, Mapped, Ram};
use crate::state::State;
use crate::zero::CHUNK_PAGES;

/// Reasons why the userfaultfds could not be opened.
#[derive(Debug, Default)]
struct Missing {
    uffd: Option<String>,
    tracker: Option<String>,
}

/// memfold's library in one process: executes the daemon's orders, and handles QEMU's discards of
/// RAM.
#[derive(Debug)]
pub struct Folder {
    uffd: OnceLock<Arc<Userfaultfd>>,
    /// Userfaultfd that write-protects RAM for [`Order::TrackWrites`].
    tracker: OnceLock<Userfaultfd>,
    /// Userfaultfd on which threads wait for pages that have yet to arrive.
    waiting: OnceLock<Arc<Userfaultfd>>,
    arrivals: Mutex<Option<Arrivals>>,
    /// Reasons why a userfaultfd or the staging area was missing at the start.
    missing: Missing,
    /// Page map of this process. It is opened at the start, because a QEMU that has dropped its
    /// privileges (`-run-with user=`) may not open it later.
    pagemap: Result<Arc<Pagemap>, String>,
    state: Arc<Mutex<State>>,
    /// QEMU's monitor, locked while an order stops the VM. A thread holds this lock together with
    /// the lock of `state` for one run at most, because QEMU's main loop may need the lock of
    /// `state` before it can stop.
    monitor: Mutex<Option<Monitor>>,
    can_stop: bool,
    /// Number of threads that wait for the lock of `state` to discard or unmap memory. The thread
    /// of an order lets them go first, because QEMU's main loop may be among them.
    discarding: AtomicUsize,
    /// Lowest address of RAM. `high` is the end of the highest block. `madvise` and `munmap` of
    /// memory outside these addresses need no lock.
    low: AtomicU64,
    high: AtomicU64,
}

impl Folder {
    /// Creates the folder and opens a userfaultfd, through `device` if that is given: an open
    /// `/dev/userfaultfd` that was passed to QEMU. Without a userfaultfd the folder still answers
    /// orders, and its reply to `Hello` names the reason. Orders that stop the VM use `monitor`.
    #[must_use]
    pub fn new(device: Option<RawFd>, monitor: Option<Monitor>) -> Self {
        let mut folder = Self {
            uffd: OnceLock::new(),
            tracker: OnceLock::new(),
            waiting: OnceLock::new(),
            arrivals: Mutex::default(),
            missing: Missing::default(),
            pagemap: Pagemap::open(rustix::process::getpid())
                .map(Arc::new)
                .map_err(|error| error.to_string()),
            state: Arc::default(),
            can_stop: monitor.is_some(),
            monitor: Mutex::new(monitor),
            discarding: AtomicUsize::new(0),
            low: AtomicU64::new(u64::MAX),
            high: AtomicU64::new(0),
        };
        folder.missing = folder.open(device);
        folder
    }

    /// Opens the userfaultfds that are not open yet. Returns why that failed.
    fn open(&self, device: Option<RawFd>) -> Missing {
        let open_uffd = || {
            let uffd = Userfaultfd::open(device).map_err(|error| {
                format!(
                    "no userfaultfd that catches faults from kernel mode ({error}): run QEMU as root, or give it \
                     or memfold's daemon access to /dev/userfaultfd, or set sysctl vm.unprivileged_userfaultfd=1"
                )
            })?;
            if uffd.can_move() {
                let staging = Staging::new(&uffd)
                    .map_err(|errno| format!("cannot create the staging area: {errno}"))?;
                self.lock().staging = Some(staging);
            }
            Ok(Arc::new(uffd))
        };
        let open_tracker = || {
            Userfaultfd::open_async(device).map_err(|error| {
                format!("cannot track writes on this host ({error}): Linux 6.7 or newer is needed")
            })
        };
        // If this fails, so does the opening of `uffd`, which is reported.
        let open_waiting = || {
            let uffd = Userfaultfd::open(device).map_err(|error| error.to_string())?;
            Ok(Arc::new(uffd))
        };
        let _ = open_once(&self.waiting, open_waiting);
        Missing {
            uffd: open_once(&self.uffd, open_uffd).err(),
            tracker: open_once(&self.tracker, open_tracker).err(),
        }
    }

    /// Takes the lock, even after a panic of its holder: guards have put every page back, and each
    /// change of the records is complete.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock after the threads that wait to discard memory. An order takes the lock anew
    /// for each run, so that a discard waits no longer than one run takes.
    fn lock_in_turn(&self) -> MutexGuard<'_, State> {
        for _ in 0..10_000 {
            if self.discarding.load(Ordering::Acquire) == 0 {
                break;
            }
            std::thread::yield_now();
        }
        self.lock()
    }

    /// Executes one order and returns the reply. `descriptor` is the file that came with the order.
    pub fn execute(&self, order: &Order, descriptor: Option<OwnedFd>) -> Reply {
        if let Err(error) = order.validate() {
            return refuse(error.to_string());
        }
        self.go_on_if_stuck();
        if changes_mappings(order) && self.lock().past.is_some() {
            return refuse("a copy-before-write of the VM's memory is under way".to_owned());
        }
        let is_change = changes_mappings(order) || matches!(order, Order::KeepPast { .. });
        if is_change && self.lock().ram.awaited_pages() > 0 {
            return refuse("the VM's memory is still arriving".to_owned());
        }
        self.reply(order, descriptor).unwrap_or_else(refuse)
    }

    fn reply(&self, order: &Order, descriptor: Option<OwnedFd>) -> Result<Reply, String> {
        match order {
            Order::Hello { version } => {
                // A QEMU without root's rights may not open the device; the daemon then sends an
                // open one.
                if let Some(device) = descriptor {
                    self.open(Some(device.as_raw_fd()));
                }
                return Ok(self.hello(*version));
            }
            Order::AddRam { hva, pages, advice } => {
                self.change_ram(|ram| ram.add(*hva, *pages, *advice))?;
            }
            Order::RemoveRam { hva } => self.change_ram(|ram| ram.remove(*hva))?,
            Order::AddStore { store, max_pages } => {
                let file = sent(descriptor, "page store")?;
                self.lock().stores.add(*store, *max_pages, file)?;
            }
            Order::RemoveStore { store } => self.lock().stores.remove(*store)?,
            &Order::Map {
                hva,
                pages,
                file_page,
            } => {
                let run = MapRun {
                    hva,
                    pages,
                    file_page,
                };
                self.map(&[run], &sent(descriptor, "file")?)?;
            }
            Order::MapRuns { runs } => self.map(runs, &sent(descriptor, "file")?)?,
            Order::Await { ranges } => self.await_pages(ranges, sent(descriptor, "socket")?)?,
            Order::Fold { freeze, runs } => return self.fold(*freeze, runs),
            Order::Release { freeze, ranges } => {
                return self.each(*freeze, ranges, |range| match freeze {
                    Freeze::Move => Outcome::Refused,
                    _ => self.lock_in_turn().release(self.uffd(), *freeze, range),
                });
            }
            Order::DropZero { ranges } => return self.drop_zero(ranges),
            Order::Stop => self.with_monitor(|monitor| match monitor.hold() {
                Ok(true) => Ok(()),
                Ok(false) => Err("the VM does not run".to_owned()),
                Err(error) => Err(not_stopped(&error)),
            })?,
            Order::Continue => self.with_monitor(|monitor| {
                let stopped = monitor.release().then_some(());
                stopped.ok_or_else(|| "this connection has not stopped the VM".to_owned())
            })?,
            Order::TrackWrites => self.track_writes()?,
            Order::UntrackWrites => self.untrack_writes(),
            Order::KeepPast { ranges } => self.keep_past(ranges, sent(descriptor, "file")?)?,
            Order::ForgetPast => self.forget_past(),
            Order::Stats => {
                let mut stats = self.lock().stats.clone();
                stats.thread_cpu_ns = thread_cpu_ns();
                return Ok(Reply::Stats(Box::new(stats)));
            }
        }
        Ok(Reply::Ok)
    }

    fn fold(&self, freeze: Freeze, runs: &[FoldRun]) -> Result<Reply, String> {
        let mut state = self.lock();
        for runs in runs.chunk_by(|a, b| a.store == b.store) {
            state.stores.refresh(runs[0].store);
        }
        drop(state);
        let reply = self.each(freeze, runs, |run| {
            self.lock_in_turn().fold(self.uffd(), freeze, run)
        });
        self.settle();
        reply
    }

    /// Calls `work` for each run or range. The VM is stopped meanwhile if `freeze` is `Stopped`.
    fn each<T>(
        &self,
        freeze: Freeze,
        items: &[T],
        work: impl Fn(&T) -> Outcome,
    ) -> Result<Reply, String> {
        let began = thread_cpu_ns();
        let (outcomes, stopped) = match freeze {
            Freeze::Move | Freeze::WriteProtect => {
                (in_time(ORDER_TIME, items, work), Duration::ZERO)
            }
            Freeze::Stopped { limit_us } => self.with_monitor(|monitor| {
                let Some(stopped) = monitor.stop().map_err(|error| not_stopped(&error))? else {
                    return Ok((vec![Outcome::Late; items.len()], Duration::ZERO));
                };
                let limit = Duration::from_micros(limit_us.into());
                let outcomes = in_time(limit.saturating_sub(stopped.since()), items, work);
                Ok((outcomes, stopped.go_on()))
            })?,
        };
        Ok(Reply::Outcomes {
            outcomes,
            cpu_ns: thread_cpu_ns() - began,
            stopped_ns: u64::try_from(stopped.as_nanos()).unwrap_or(u64::MAX),
        })
    }

    fn with_monitor<T>(
        &self,
        work: impl FnOnce(&mut Monitor) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        work(monitor.as_mut().ok_or_else(|| {
            format!(
                "the library has no QMP connection of its own: start QEMU with {MONITOR_VARIABLE}=PATH and \
                 -qmp unix:PATH,server=on,wait=off"
            )
        })?)
    }

    fn track_writes(&self) -> Result<(), String> {
        let tracker = self
            .tracker
            .get()
            .ok_or_else(|| self.missing.tracker.clone().unwrap_or_default())?;
        // The lock is held for all blocks, so that meanwhile no run is frozen on the other
        // userfaultfd and no mapping is replaced.
        let mut state = self.lock();
        if !state.tracked.is_empty() {
            return Err("writes are already tracked".to_owned());
        }
        let areas: Vec<Area> = state.ram.blocks.iter().map(|block| block.area).collect();
        let outcome = areas.into_iter().try_for_each(|area| {
            let registered = tracker.register(area, Mode::WriteProtect);
            // After ENOMEM, a part may be registered; after other errors, nothing.
            if registered.is_ok() || registered == Err(Errno::NOMEM) {
                state.tracked.push(area);
            }
            registered.and_then(|()| tracker.write_protect(area))
        });
        drop(state);
        outcome.map_err(|errno| {
            self.untrack_writes();
            format!("cannot track writes: {errno}")
        })
    }

    fn untrack_writes(&self) {
        let Some(tracker) = self.tracker.get() else {
            return;
        };
        let mut state = self.lock();
        // Only areas that this library has registered: QEMU may have a userfaultfd of its own.
        for area in std::mem::take(&mut state.tracked) {
            let _ = tracker.unregister(area);
        }
    }

    fn keep_past(&self, ranges: &[Range], file: OwnedFd) -> Result<(), String> {
        let uffd = self.need_uffd()?;
        let pagemap = self.need_pagemap()?;
        self.untrack_writes();
        let mut state = self.lock();
        if state.past.is_some() {
            return Err("a copy-before-write of the VM's memory is already under way".to_owned());
        }
        let mut areas = Vec::new();
        let mut blocks: Vec<Area> = Vec::new();
        for range in ranges {
            let found = state.ram.find(range.hva, range.pages);
            let (block, area) = found.ok_or_else(|| outside(range.hva, range.pages))?;
            areas.push(area);
            if !blocks.contains(&block.area) {
                blocks.push(block.area);
            }
        }
        state.past = Some(Past::start(
            uffd,
            &blocks,
            &areas,
            Arc::clone(pagemap),
            file,
        )?);
        Ok(())
    }

    fn forget_past(&self) {
        let past = self.lock().past.take();
        if let Some(past) = past {
            past.end();
        }
    }

    fn await_pages(&self, ranges: &[Range], socket: OwnedFd) -> Result<(), String> {
        let uffd = self.waiting.get();
        let uffd = uffd.ok_or_else(|| self.missing.uffd.clone().unwrap_or_default())?;
        let mut state = self.lock();
        state.waiting = Some(Arc::clone(uffd));
        for range in ranges {
            let found = state.ram.find(range.hva, range.pages);
            let (block, area) = found.ok_or_else(|| outside(range.hva, range.pages))?;
            if block.first_kind(area) != (Kind::Anonymous, area) {
                return Err(format!(
                    "a page of the {} pages at {:#x} is mapped already",
                    range.pages, range.hva
                ));
            }
            uffd.register(area, Mode::Missing)
                .map_err(|errno| format!("cannot wait for pages at {:#x}: {errno}", range.hva))?;
            block.await_pages(area);
            // QEMU may have touched pages before; whoever touches one now waits.
            area.advise(Advice::LinuxDontNeed)
                .map_err(|errno| format!("cannot discard pages at {:#x}: {errno}", range.hva))?;
        }
        drop(state);
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        if arrivals.is_none() {
            *arrivals = Some(Arrivals::start(Arc::clone(uffd), Arc::clone(&self.state))?);
        }
        let socket = UnixStream::from(socket);
        arrivals.as_ref().map_or(Ok(()), |a| a.connect(socket))
    }

    /// Handles the end of the daemon's connection: resumes the VM if an order has stopped it, ends
    /// write tracking, and ends a copy before write.
    pub fn disconnected(&self) {
        self.untrack_writes();
        self.forget_past();
        let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(monitor) = monitor.as_mut() {
            monitor.release();
            monitor.go_on_if_stuck();
        }
    }

    /// Returns whether the VM still has to be resumed, because QEMU has refused it so far.
    pub(crate) fn is_stuck(&self) -> bool {
        let monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        monitor.as_ref().is_some_and(Monitor::is_stuck)
    }

    /// Resumes the VM if an earlier order could not.
    pub(crate) fn go_on_if_stuck(&self) {
        let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(monitor) = monitor.as_mut() {
            monitor.go_on_if_stuck();
        }
    }

    /// Handles `madvise(MADV_DONTNEED or MADV_FREE)` on RAM: folded pages become fresh anonymous
    /// memory. Otherwise they would show the store's bytes again, although the guest has freed the
    /// pages (a guest with `init_on_free` relies on zeroes). Returns `None` if the range is outside
    /// RAM; then the caller makes the plain system call.
    pub fn discard(&self, address: usize, length: usize) -> Option<Result<(), Errno>> {
        let (start, end) = self.in_span(address, length)?;
        self.lock_before_orders().discard(start, end)
    }

    /// Handles `munmap` of RAM, which QEMU calls after a memory device was unplugged: unmaps the
    /// range and forgets the RAM blocks in it, under one lock, so that no order maps anything at
    /// addresses that QEMU may use for other things. Returns `None` if the range is outside RAM;
    /// then the caller makes the plain system call.
    pub fn unmap(&self, address: usize, length: usize) -> Option<Result<(), Errno>> {
        let (start, end) = self.in_span(address, length)?;
        let mut state = self.lock_before_orders();
        // SAFETY: QEMU owns the range and has requested this call.
        let unmapped = unsafe { region::munmap(address, length) };
        if unmapped.is_ok() {
            state.ram.forget(start, end);
            self.note_span(&state.ram);
        }
        Some(unmapped)
    }

    /// Returns the start and end of a range of whole pages that may have RAM.
    fn in_span(&self, address: usize, length: usize) -> Option<(u64, u64)> {
        let start = address as u64;
        let end = start.checked_add(length as u64)?;
        if end <= self.low.load(Ordering::Acquire) || start >= self.high.load(Ordering::Acquire) {
            return None;
        }
        if start % PAGE_SIZE != 0 {
            return None;
        }
        // The kernel rounds the length up, too.
        Some((start, end.checked_next_multiple_of(PAGE_SIZE)?))
    }

    /// Takes the lock before the thread of an order, which may have many runs.
    fn lock_before_orders(&self) -> MutexGuard<'_, State> {
        self.discarding.fetch_add(1, Ordering::AcqRel);
        let state = self.lock();
        self.discarding.fetch_sub(1, Ordering::AcqRel);
        state
    }

    fn uffd(&self) -> Option<&Userfaultfd> {
        self.uffd.get().map(Arc::as_ref)
    }

    fn need_uffd(&self) -> Result<&Arc<Userfaultfd>, String> {
        let why = || self.missing.uffd.clone().unwrap_or_default();
        self.uffd.get().ok_or_else(why)
    }

    fn need_pagemap(&self) -> Result<&Arc<Pagemap>, String> {
        let why = |error| format!("cannot open /proc/self/pagemap: {error}");
        self.pagemap.as_ref().map_err(why)
    }

    fn hello(&self, version: u16) -> Reply {
        let problem = match self.uffd() {
            _ if version != VERSION => Some(format!(
                "the daemon speaks version {version} of the protocol and this library {VERSION}: \
                 restart the VM with the library of the installed memfold"
            )),
            None => Some(self.missing.uffd.clone().unwrap_or_default()),
            Some(uffd) if !uffd.can_move() => Some(
                "the host's kernel has no UFFDIO_MOVE: folding a running VM needs Linux 6.8 or newer"
                    .to_owned(),
            ),
            Some(_) => None,
        };
        Reply::Hello {
            version: VERSION,
            library: env!("CARGO_PKG_VERSION").to_owned(),
            can_move: self.uffd().is_some_and(Userfaultfd::can_move),
            can_write_protect: self.uffd().is_some_and(Userfaultfd::protection_lasts),
            can_stop: self.can_stop,
            problem,
        }
    }

    fn change_ram(
        &self,
        change: impl FnOnce(&mut Ram) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut state = self.lock();
        change(&mut state.ram)?;
        self.note_span(&state.ram);
        Ok(())
    }

    fn note_span(&self, ram: &Ram) {
        let (low, high) = ram.span();
        self.low.store(low, Ordering::Release);
        self.high.store(high, Ordering::Release);
    }

    fn map(&self, runs: &[MapRun], file: &OwnedFd) -> Result<(), String> {
        let file = &Mapped::open(file)?;
        for run in runs {
            file.check(run)?;
            let mut state = self.lock();
            let found = state.ram.find(run.hva, run.pages);
            let (block, area) = found.ok_or_else(|| outside(run.hva, run.pages))?;
            file.map(block, area, run.file_page)?;
        }
        Ok(())
    }

    fn drop_zero(&self, ranges: &[Range]) -> Result<Reply, String> {
        let uffd = self.need_uffd()?;
        if !uffd.can_move() {
            return Err("dropping zero pages needs UFFDIO_MOVE, Linux 6.8 or newer".to_owned());
        }
        let pagemap = self.need_pagemap()?;
        let (began, began_ns) = (Instant::now(), thread_cpu_ns());
        let (mut scanned, mut dropped) = (0, 0);
        for range in ranges {
            let mut done = 0;
            while done < range.pages && began.elapsed() < ORDER_TIME {
                let offset = done.checked_mul(PAGE_SIZE);
                let hva = offset.and_then(|offset| range.hva.checked_add(offset));
                let hva = hva.ok_or_else(|| {
                    format!("the range at {:#x} is not a valid address", range.hva)
                })?;
                let chunk = Range {
                    hva,
                    pages: CHUNK_PAGES.min(range.pages - done),
                };
                let looked = self.lock_in_turn().drop_zero(uffd, pagemap, &chunk);
                let (looked, gone) = looked.ok_or_else(|| outside(hva, chunk.pages))?;
                scanned += looked;
                dropped += gone;
                done += chunk.pages;
            }
        }
        self.settle();
        Ok(Reply::Zero {
            scanned,
            dropped,
            cpu_ns: thread_cpu_ns() - began_ns,
        })
    }

    /// Frees the staging area and repeats advice. Both are cheaper once for many runs.
    fn settle(&self) {
        let mut state = self.lock();
        if let Some(staging) = state.staging.as_mut() {
            staging.free();
        }
        for block in &mut state.ram.blocks {
            block.advise_now();
        }
    }
}

fn open_once<T>(
    cell: &OnceLock<T>,
    open: impl FnOnce() -> Result<T, String>,
) -> Result<(), String> {
    if cell.get().is_none() {
        // Only one thread opens userfaultfds, because the library serves one daemon at a time.
        let _ = cell.set(open()?);
    }
    Ok(())
}

fn sent(descriptor: Option<OwnedFd>, of: &str) -> Result<OwnedFd, String> {
    descriptor.ok_or_else(|| format!("the {of}'s descriptor did not come with the order"))
}

fn not_stopped(error: &std::io::Error) -> String {
    format!("QEMU did not stop the VM: {error}")
}

fn outside(hva: u64, pages: u64) -> String {
    format!("{pages} pages at {hva:#x} are not inside one RAM block")
}

/// Calls `work` for each item. Items that are not started within `limit` get the outcome `Late`.
fn in_time<T>(limit: Duration, items: &[T], work: impl Fn(&T) -> Outcome) -> Vec<Outcome> {
    let began = Instant::now();
    let in_time = |item| {
        if began.elapsed() < limit {
            work(item)
        } else {
            Outcome::Late
        }
    };
    items.iter().map(in_time).collect()
}

/// Returns whether an order may replace mappings of guest memory.
const fn changes_mappings(order: &Order) -> bool {
    matches!(
        order,
        Order::Fold { .. }
            | Order::Release { .. }
            | Order::DropZero { .. }
            | Order::Map { .. }
            | Order::MapRuns { .. }
            | Order::TrackWrites
    )
}

fn refuse(mut reason: String) -> Reply {
    let mut end = reason.len().min(4096);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason.truncate(end);
    Reply::Error { reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_are_not_processed_before_the_time_limit_are_reported_as_late() {
        let slow = |_: &u32| {
            std::thread::sleep(Duration::from_millis(600));
            Outcome::Done
        };
        let outcomes = in_time(Duration::from_millis(500), &[1, 2, 3], slow);
        assert_eq!(outcomes, [Outcome::Done, Outcome::Late, Outcome::Late]);
        let never = |_: &u32| Outcome::Done;
        assert_eq!(in_time(Duration::ZERO, &[1], never), [Outcome::Late]);
    }
}
