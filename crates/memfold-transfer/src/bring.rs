//! Brings VMs the pages of a snapshot that is being fetched: reads from the library in QEMU for
//! which pages the VM waits, and announces pages when their chunks are here.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use memfold_snapshot::restore::Piece;
use memfold_sys::descriptor;
use memfold_units::PAGE_SIZE;
use memfold_wire::library::{Arrived, Awaited, MAX_RUNS, MapRun};
use memfold_wire::{Decoder, encode};

use super::stream::{CHUNK_PAGES, Place, StreamedSnapshot};

/// A part of a VM's memory that lies in one chunk.
#[derive(Clone, Copy, Debug)]
struct Part {
    place: Place,
    run: MapRun,
}

impl StreamedSnapshot {
    /// Begins to announce the pieces of a VM's memory to the library at the other end of `socket`,
    /// as they arrive. Calls `complete` when the library has mapped all of them.
    pub fn bring(
        &self,
        pieces: Vec<Piece>,
        socket: UnixStream,
        complete: impl FnOnce() + Send + 'static,
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
        let (parts, of_wants) = (Arc::<[Part]>::from(parts), socket.try_clone()?);
        let (this, wanted) = (self.clone(), Arc::clone(&parts));
        let begin = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.into());
            thread.spawn(work).map(drop)
        };
        let read = move || {
            if this.read_wants(&of_wants, &wanted) {
                complete();
            }
        };
        begin("wants", Box::new(read))?;
        let this = self.clone();
        let announce = move || {
            // The VM may have ended.
            if let Err(error) = this.announce(&socket, &parts, &arrivals) {
                tracing::debug!(%error, "a VM is told no more which of its memory has arrived");
            }
        };
        begin("arrivals", Box::new(announce))
    }

    /// Reads which pages a VM waits for, until the connection ends. Returns whether all pages are
    /// mapped.
    fn read_wants(&self, mut socket: &UnixStream, parts: &[Part]) -> bool {
        let (mut decoder, mut buffer) = (Decoder::new(), [0; 4096]);
        while let Ok(read) = io::Read::read(&mut socket, &mut buffer) {
            if read == 0 {
                break;
            }
            decoder.push(&buffer[..read]);
            loop {
                match decoder.next::<Awaited>() {
                    Ok(Some(Awaited::Complete)) => return true,
                    Ok(Some(Awaited::Wanted { hva })) => {
                        let end = |part: &Part| part.run.hva + part.run.pages * PAGE_SIZE;
                        let at = parts.partition_point(|part| end(part) <= hva);
                        if let Some(part) = parts.get(at).filter(|part| part.run.hva <= hva) {
                            self.want(part.place);
                        }
                    }
                    Ok(None) => break,
                    Err(_) => return false,
                }
            }
        }
        false
    }

    /// Tells the library which parts of its VM's memory have arrived, until all have.
    fn announce(
        &self,
        socket: &UnixStream,
        parts: &[Part],
        arrivals: &Receiver<Place>,
    ) -> io::Result<()> {
        let mut left: BTreeMap<Place, Vec<MapRun>> = BTreeMap::new();
        for part in parts {
            left.entry(part.place).or_default().push(part.run);
        }
        // What arrives from now on is also in `arrivals`.
        let here = self.here(left.keys().copied());
        for file in here.chunk_by(|a, b| a.0 == b.0) {
            let runs = file.iter().filter_map(|place| left.remove(place));
            self.send(socket, file[0].0, &joined(runs.flatten().collect()))?;
        }
        while !left.is_empty() {
            let Ok(place) = arrivals.recv() else {
                return Ok(());
            };
            if let Some(runs) = left.remove(&place) {
                self.send(socket, place.0, &runs)?;
            }
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
