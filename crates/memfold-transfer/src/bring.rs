//! Brings VMs the pages of a snapshot that is being fetched: reads from the library in QEMU for
//! which pages the VM waits, and announces pages when their chunks are here.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use memfold_snapshot::restore::Piece;
use memfold_sys::descriptor;
use memfold_units::PAGE_SIZE;
use memfold_wire::library::{Arrived, Awaited, MAX_RUNS, MapRun};
use memfold_wire::{Decoder, encode};

use super::first_pages::CHUNK_PAGES;
use super::stream::StreamedSnapshot;
use super::stream_state::{Arrival, FilePages, Place};

/// The library takes a file for that of the message with whose first bytes it comes. A longer
/// message could come in two pieces (32 KiB each), and its file with those of the next one. A run
/// has at most 30 bytes.
const _: () = assert!(MAX_RUNS * 30 + 16 < 32 << 10);

/// How often the thread that waits for arrivals looks whether its VM's connection is over.
const LOOK: Duration = Duration::from_secs(1);

/// A part of a VM's memory that lies in one chunk.
#[derive(Clone, Copy, Debug)]
struct Part {
    place: Place,
    run: MapRun,
}

impl StreamedSnapshot {
    /// Begins to announce the pieces of a VM's memory to the library at the other end of `socket`,
    /// as they arrive. Calls `ended` when the connection ends: with `true` after the library has
    /// mapped all pieces. With `false`, the VM has ended, or needs another connection.
    pub fn bring(
        &self,
        pieces: Vec<Piece>,
        socket: UnixStream,
        ended: impl FnOnce(bool) + Send + 'static,
    ) -> io::Result<()> {
        let mut parts = Vec::new();
        for piece in pieces {
            let file = self.file_of(piece.file);
            let file = file.ok_or(io::ErrorKind::InvalidData)?;
            let mut done = 0;
            while done < piece.pages {
                let file_page = piece.file_page + done;
                let pages = (CHUNK_PAGES - file_page % CHUNK_PAGES).min(piece.pages - done);
                let run = MapRun {
                    hva: piece.hva + done * PAGE_SIZE,
                    pages,
                    file_page,
                };
                parts.push(Part {
                    place: (file, file_page / CHUNK_PAGES),
                    run,
                });
                done += pages;
            }
        }
        parts.sort_unstable_by_key(|part| part.run.hva);
        let arrivals = self.arrivals();
        let (parts, socket) = (Arc::<[Part]>::from(parts), Arc::new(socket));
        let begin = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.into());
            thread.spawn(work).map(drop)
        };
        // A connection that one thread cannot use any more ends for the other one, too.
        let end = |socket: &UnixStream| drop(socket.shutdown(Shutdown::Both));
        let (this, of_wants, wanted) = (self.clone(), Arc::clone(&socket), Arc::clone(&parts));
        let is_over = Arc::<AtomicBool>::default();
        let of_read = Arc::clone(&is_over);
        let read = move || {
            let is_complete = this.read_wants(&of_wants, &wanted);
            of_read.store(true, Ordering::Relaxed);
            if !is_complete {
                end(&of_wants);
            }
            ended(is_complete);
        };
        begin("wants", Box::new(read))?;
        let (this, of_arrivals) = (self.clone(), Arc::clone(&socket));
        let announce = move || {
            // The VM may have ended.
            if let Err(error) = this.announce(&of_arrivals, &parts, (&arrivals, &is_over)) {
                tracing::debug!(%error, "a VM is told no more which of its memory has arrived");
                end(&of_arrivals);
            }
        };
        begin("arrivals", Box::new(announce)).inspect_err(|_| end(&socket))
    }

    /// Reads which pages a VM waits for, until the connection ends. Returns whether all pages are
    /// mapped.
    fn read_wants(&self, mut socket: &UnixStream, parts: &[Part]) -> bool {
        let (mut decoder, mut buffer) = (Decoder::new(), [0; 4096]);
        loop {
            match io::Read::read(&mut socket, &mut buffer) {
                Ok(0) => return false,
                Ok(read) => decoder.push(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return false,
            }
            loop {
                match decoder.next::<Awaited>() {
                    Ok(Some(Awaited::Complete)) => return true,
                    Ok(Some(Awaited::Wanted { hva })) => {
                        let end = |part: &Part| part.run.hva + part.run.pages * PAGE_SIZE;
                        let at = parts.partition_point(|part| end(part) <= hva);
                        if let Some(part) = parts.get(at).filter(|part| part.run.hva <= hva) {
                            let pages = (hva - part.run.hva) / PAGE_SIZE;
                            self.want(part.place.0, part.run.file_page + pages);
                        }
                    }
                    Ok(None) => break,
                    Err(_) => return false,
                }
            }
        }
    }

    /// Tells the library which parts of its VM's memory have arrived, until all have or the
    /// connection is over.
    fn announce(
        &self,
        socket: &UnixStream,
        parts: &[Part],
        (arrivals, is_over): (&Receiver<Arrival>, &AtomicBool),
    ) -> io::Result<()> {
        let mut left: BTreeMap<Place, Vec<MapRun>> = BTreeMap::new();
        for part in parts {
            left.entry(part.place).or_default().push(part.run);
        }
        // What arrives from now on is also in `arrivals`.
        let (here, first) = self.here(left.keys().copied());
        // The VM touches these first.
        self.announce_first(socket, &left, &first)?;
        for file in here.chunk_by(|a, b| a.0 == b.0) {
            let runs = file.iter().filter_map(|place| left.remove(place));
            self.send(socket, file[0].0, &joined(runs.flatten().collect()))?;
        }
        while !left.is_empty() {
            match arrivals.recv_timeout(LOOK) {
                Ok(Arrival::Chunk(place)) => {
                    if let Some(runs) = left.remove(&place) {
                        self.send(socket, place.0, &runs)?;
                    }
                }
                Ok(Arrival::Pages(pages)) => self.announce_first(socket, &left, &pages)?,
                Err(RecvTimeoutError::Timeout) if !is_over.load(Ordering::Relaxed) => {}
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// Tells the library which pages have arrived before their chunks. The chunks' other pages are
    /// announced later; pages that are announced twice are mapped once.
    fn announce_first(
        &self,
        socket: &UnixStream,
        left: &BTreeMap<Place, Vec<MapRun>>,
        pages: &[FilePages],
    ) -> io::Result<()> {
        for of_file in pages.chunk_by(|a, b| a.0 == b.0) {
            let file = of_file[0].0;
            let runs = of_file.iter().flat_map(|(_, pages)| {
                let place = (file, pages.start / CHUNK_PAGES);
                let of_chunk = left.get(&place).into_iter().flatten();
                of_chunk.filter_map(|run| common(run, pages))
            });
            self.send(socket, file, &joined(runs.collect()))?;
        }
        Ok(())
    }

    fn send(&self, socket: &UnixStream, file: usize, runs: &[MapRun]) -> io::Result<()> {
        let file = self.file(file).as_fd();
        for runs in runs.chunks(MAX_RUNS) {
            let frame = encode(&Arrived {
                runs: runs.to_vec(),
            });
            let frame = frame.map_err(io::Error::other)?;
            descriptor::send(socket, &frame, Some(file))?;
        }
        Ok(())
    }
}

/// Returns the part of a run that maps these pages of its file.
fn common(run: &MapRun, pages: &Range<u64>) -> Option<MapRun> {
    let first = run.file_page.max(pages.start);
    let end = (run.file_page + run.pages).min(pages.end);
    (first < end).then(|| MapRun {
        hva: run.hva + (first - run.file_page) * PAGE_SIZE,
        pages: end - first,
        file_page: first,
    })
}

/// Joins runs that lie next to each other, in memory and in the file.
fn joined(mut runs: Vec<MapRun>) -> Vec<MapRun> {
    runs.sort_unstable_by_key(|run| run.hva);
    let mut joined: Vec<MapRun> = Vec::new();
    for run in runs {
        match joined.last_mut() {
            Some(last)
                if last.hva + last.pages * PAGE_SIZE == run.hva
                    && last.file_page + last.pages == run.file_page =>
            {
                last.pages += run.pages;
            }
            _ => joined.push(run),
        }
    }
    joined
}
