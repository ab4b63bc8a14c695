//! Reads the kernel's events about the guest's page cache and about writeback. The agent uses a
//! tracing instance of its own (tracefs `instances/`).
//!
//! | event | meaning |
//! |---|---|
//! | `filemap:mm_filemap_add_to_page_cache` | a folio is added to a file's page cache (its bytes are not read yet) |
//! | `filemap:mm_filemap_delete_from_page_cache` | a folio is removed from a file's page cache |
//! | `writeback:writeback_dirty_folio` | a clean folio became dirty (once, until it is cleaned) |
//! | `writeback:writeback_single_inode` | the flusher wrote an inode's dirty pages |
//!
//! Sources: `include/trace/events/filemap.h` and `writeback.h`, `Documentation/trace/events.rst`.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::format::{EventFormat, Field, PageFormat};
use crate::ring::RingPage;

/// Mount point of tracefs.
const TRACEFS: &str = "/sys/kernel/tracing";
/// Size of each CPU's ring buffer in KiB, enough for some 23,000 page-cache events.
const BUFFER_KIB: u32 = 1024;
/// Number of ring-buffer pages that are read in one round. It limits the agent's memory (about 90
/// events a page, 48 bytes each).
const PAGES_A_ROUND: usize = 128;

const ADD: &str = "filemap/mm_filemap_add_to_page_cache";
const DELETE: &str = "filemap/mm_filemap_delete_from_page_cache";
const DIRTY: &str = "writeback/writeback_dirty_folio";
const WRITTEN: &str = "writeback/writeback_single_inode";

/// Device number that stands for every backing device that is no block device, such as the one that
/// btrfs has for itself.
pub const UNNAMED_DISK: u32 = u32::MAX;

/// Kind of a trace event about cached pages. Names of fields are those of [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The 2^`order` page frames from `pfn` on now cache the file's pages from `page` on. `device`
    /// is the number of the file system's device.
    Add,
    /// The 2^`order` page frames from `pfn` on no longer cache the file's pages from `page` on.
    /// `device` is the number of the file system's device.
    Delete,
    /// A program wrote to the folio that begins at the file's page `page`. `device` is the number
    /// of the disk (not of the partition), or [`UNNAMED_DISK`].
    Dirty,
    /// All dirty pages of the inode were written back to disk. `device` is the number of the disk
    /// (not of the partition), or [`UNNAMED_DISK`].
    Written,
}

/// One decoded trace event about cached pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time of the event by the trace clock, in nanoseconds.
    pub time: u64,
    /// Inode number of the file whose pages the event concerns.
    pub inode: u64,
    /// Position in the file of the event's first page, in pages; 0 for [`What::Written`].
    pub page: u64,
    /// Number of the event's first page frame; 0 for [`What::Dirty`] and [`What::Written`].
    pub pfn: u64,
    /// Device number, `major << 20 | minor`, of the file system or of the disk; the kind of the
    /// event says which.
    pub device: u32,
    /// Number of the event's pages, as log2, 0 to 18; 0 for [`What::Dirty`] and [`What::Written`].
    pub order: u8,
    /// Kind of the event, which decides what the other fields mean.
    pub what: What,
}

/// Field that names a device: the number of a file system's device, or the name of a disk.
#[derive(Clone, Copy, Debug)]
enum Device {
    Number(Field),
    Name(Field),
}

/// Positions of an event's fields. A field that the event does not have stands for 0.
#[derive(Clone, Copy, Debug)]
struct Layout {
    id: u16,
    what: What,
    inode: Field,
    index: Option<Field>,
    pfn: Option<Field>,
    order: Option<Field>,
    device: Device,
    /// Number of pages that the flusher was allowed to write, and number of those it wrote.
    written: Option<(Field, Field)>,
}

impl Layout {
    /// Reads the layout of an event; `None` if a necessary field is missing.
    fn new(what: What, f: &EventFormat) -> Option<Self> {
        let is_cache = matches!(what, What::Add | What::Delete);
        let has_page = what != What::Written;
        // A field that the event must have, if it is an event that `has` it.
        let need = |has: bool, name| {
            if has {
                f.field(name).map(Some)
            } else {
                Some(None)
            }
        };
        let (limit, wrote) = (need(!has_page, "nr_to_write")?, need(!has_page, "wrote")?);
        Some(Self {
            id: f.id,
            what,
            inode: f.field(if is_cache { "i_ino" } else { "ino" })?,
            index: need(has_page, "index")?,
            pfn: need(is_cache, "pfn")?,
            order: f.field("order").filter(|_| is_cache),
            device: if is_cache {
                Device::Number(f.field("s_dev")?)
            } else {
                Device::Name(f.field("name")?)
            },
            written: limit.zip(wrote),
        })
    }
}

/// Decodes ring-buffer records into events, by the event formats of the running kernel.
#[derive(Clone, Debug)]
pub struct EventDecoder(Vec<Layout>);

impl EventDecoder {
    /// Creates a decoder. `format` returns the text of an event's format file; its argument names
    /// the event as `system/event`. The result is `None` if the kernel has no page-cache events;
    /// the writeback events may be missing.
    pub fn new(format: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let layout = |what, name| Layout::new(what, &EventFormat::parse(&format(name)?)?);
        let mut layouts = vec![layout(What::Add, ADD)?, layout(What::Delete, DELETE)?];
        layouts.extend(layout(What::Dirty, DIRTY));
        layouts.extend(layout(What::Written, WRITTEN));
        Some(Self(layouts))
    }

    /// Decodes a record of a ring-buffer page. Returns `None` if the record is malformed or is of
    /// an event of no interest.
    pub fn decode(&self, time: u64, record: &[u8]) -> Option<Event> {
        let id = u16::from_ne_bytes(*record.first_chunk()?);
        let f = self.0.iter().find(|f| f.id == id)?;
        let number = |field: Option<Field>| field.map_or(Some(0), |field| field.number(record));
        if let Some((limit, wrote)) = f.written {
            // If the flusher wrote fewer pages than it was allowed to, no dirty page is left. (The
            // flag in `state` has another value since 6.12.)
            if wrote.number(record)? >= limit.number(record)? {
                return None;
            }
        }
        // Order 18 is 1 GiB: the largest folio, and the longest run in a message.
        let order = number(f.order)?;
        Some(Event {
            time,
            inode: f.inode.number(record)?,
            page: number(f.index)?,
            pfn: number(f.pfn)?,
            device: match f.device {
                Device::Number(number) => u32::try_from(number.number(record)?).ok()?,
                Device::Name(name) => disk(name.text(record)?),
            },
            order: u8::try_from(order).ok().filter(|order| *order <= 18)?,
            what: f.what,
        })
    }
}

/// Parses the name of a backing device, such as `254:0`, into a device number.
fn disk(name: &[u8]) -> u32 {
    let parse = || {
        let (major, minor) = std::str::from_utf8(name).ok()?.split_once(':')?;
        let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
        (major < 1 << 12 && minor < 1 << 20).then_some(major << 20 | minor)
    };
    parse().unwrap_or(UNNAMED_DISK)
}

/// Trace events that were read from all ring buffers in one round.
#[derive(Debug, Default)]
pub struct Round {
    /// Decoded events of all CPUs, in the order of time.
    pub events: Vec<Event>,
    /// Number of ring-buffer records that were read, of any kind of event.
    pub records: u64,
    /// Number of trace events that the kernel overwrote before they were read; 1 if their number is
    /// unknown.
    pub lost: u64,
    /// Whether more events may be waiting in the ring buffers.
    pub more: bool,
}

/// The tracing instance `memfold` in tracefs, from which the agent reads events.
#[derive(Debug)]
pub struct Tracer {
    instance: PathBuf,
    pipes: Vec<File>,
    decoder: EventDecoder,
    page: PageFormat,
    buffer: Vec<u8>,
}

impl Tracer {
    /// Creates the tracing instance `memfold` (and mounts tracefs if needed), or takes over the
    /// instance of an earlier agent. No event is enabled yet.
    pub fn new() -> io::Result<Self> {
        let tracefs = Path::new(TRACEFS);
        if !tracefs.join("events").exists() {
            rustix::mount::mount(
                "tracefs",
                tracefs,
                "tracefs",
                rustix::mount::MountFlags::NOSUID
                    | rustix::mount::MountFlags::NODEV
                    | rustix::mount::MountFlags::NOEXEC,
                None,
            )?;
        }
        let events = tracefs.join("events");
        let decoder =
            EventDecoder::new(|name| fs::read_to_string(events.join(name).join("format")).ok())
                .ok_or_else(|| io::Error::other("the kernel has no filemap trace events"))?;
        let page = fs::read_to_string(events.join("header_page"))
            .ok()
            .and_then(|t| PageFormat::parse(&t))
            .unwrap_or_default();
        let instance = tracefs.join("instances/memfold");
        match fs::create_dir(&instance) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let mut tracer = Self {
            instance,
            pipes: Vec::new(),
            decoder,
            page,
            buffer: vec![0; 64 << 10],
        };
        tracer.stop();
        tracer.set("buffer_size_kb", &BUFFER_KIB.to_string())?;
        // With 0, the first event wakes a poll (Linux >= 4.20); without it, half a buffer of events
        // does.
        tracer.set("buffer_percent", "0")?;
        Ok(tracer)
    }

    fn set(&self, file: &str, value: &str) -> io::Result<()> {
        fs::write(self.instance.join(file), value)
    }

    fn enable(&self, event: &str, on: bool) -> io::Result<()> {
        let file = self.instance.join("events").join(event).join("enable");
        fs::write(file, if on { "1" } else { "0" })
    }

    /// Empties the ring buffers and enables the trace events. If the kernel has no writeback
    /// events, returns a message about it.
    pub fn start(&mut self) -> io::Result<Option<String>> {
        self.stop();
        self.set("trace", "\n")?;
        let mut cpus: Vec<PathBuf> = fs::read_dir(self.instance.join("per_cpu"))?
            .filter_map(|e| Some(e.ok()?.path().join("trace_pipe_raw")))
            .collect();
        cpus.sort();
        for pipe in cpus {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = rustix::fs::open(pipe, flags, Mode::empty())?;
            self.pipes.push(file.into());
        }
        self.set("tracing_on", "1")?;
        let mut problem = None;
        for event in [DIRTY, WRITTEN] {
            if let Err(e) = self.enable(event, true) {
                problem = Some(format!("trace event {event}: {e}"));
            }
        }
        self.enable(DELETE, true)?;
        self.enable(ADD, true)?;
        Ok(problem)
    }

    /// Disables the trace events, so that tracing costs the guest nothing while no daemon is
    /// connected.
    pub fn stop(&mut self) {
        for event in [ADD, DELETE, DIRTY, WRITTEN] {
            // `start` reports missing events; other failures cannot be repaired here.
            let _ = self.enable(event, false);
        }
        self.pipes.clear();
    }

    /// Removes the tracing instance, which returns its memory to the guest.
    pub fn remove(mut self) {
        self.stop();
        let _ = fs::remove_dir(&self.instance);
    }

    /// Returns the descriptors of all ring buffers. They are readable when events wait.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.pipes.iter().map(AsFd::as_fd)
    }

    /// Reads waiting events into `round`, at most about 128 ring-buffer pages of them. Earlier
    /// contents of `round` are replaced.
    pub fn read(&mut self, round: &mut Round) -> io::Result<()> {
        self.read_pages(round, |_| {})
    }

    /// Reads like [`Self::read`], and passes the bytes of each ring-buffer page to `page` (for
    /// fixtures and tests).
    pub fn read_pages(&mut self, round: &mut Round, mut page: impl FnMut(&[u8])) -> io::Result<()> {
        round.events.clear();
        (round.records, round.lost, round.more) = (0, 0, false);
        let each = (PAGES_A_ROUND / self.pipes.len().max(1)).max(4);
        for pipe in &mut self.pipes {
            let mut left = each;
            loop {
                let n = match pipe.read(&mut self.buffer) {
                    Ok(0) => break,
                    Ok(n) => n,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(e) => return Err(e),
                };
                page(&self.buffer[..n]);
                decode_page(&self.buffer[..n], &self.page, &self.decoder, round);
                left -= 1;
                if left == 0 {
                    round.more = true;
                    break;
                }
            }
        }
        if self.pipes.len() > 1 {
            round.events.sort_by_key(|e| e.time);
        }
        Ok(())
    }
}

/// Decodes `bytes`, one page of a ring buffer, and adds the page's events to `round`.
pub fn decode_page(bytes: &[u8], format: &PageFormat, decoder: &EventDecoder, round: &mut Round) {
    let Some(page) = RingPage::parse(bytes, format) else {
        return;
    };
    if let Some(lost) = page.lost {
        // A damaged page may contain any number.
        round.lost = round.lost.saturating_add(lost.max(1));
    }
    for (time, record) in page.records() {
        round.records += 1;
        round.events.extend(decoder.decode(time, record));
    }
}
