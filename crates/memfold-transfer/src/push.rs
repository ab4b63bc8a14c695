//! Copies a snapshot into an object store.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::{StreamExt, TryStreamExt, stream};
use memfold_host::progress::Progress;
use memfold_snapshot::{Manifest, Shelf, SnapshotError, portable};
use object_store::path::Path;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use utoipa::ToSchema;

use super::chunk::{self, CHUNK_BYTES, ChunkName};
use super::description::{Description, FORMAT, FileEntry, check_disks};
use super::error::TransferError;
use super::first_pages::PartEntry;
use super::gather;
use super::remote::{AT_ONCE, Remote, UNUSED};
use super::signature;

/// Time after which a push looks for all of its chunks again: 8 hours. A chunk that it has found is
/// less than 20 hours old then. So it stays for 4 hours at least: enough for the last steps of the
/// push, and for clocks that differ.
const LONG: Duration = Duration::from_secs(UNUSED.as_secs() / 3);

/// Input of a push, which copies a snapshot from this host into an object store.
#[derive(Clone, Debug, Default)]
pub struct PushRequest {
    /// Name of the snapshot on this host.
    pub name: String,
    /// Name that the snapshot gets in the object store.
    pub to: String,
    /// Private key in PEM form with which the snapshot's description is signed; `None`: no
    /// signature.
    pub key: Option<String>,
}

/// Result of a push, which copied a snapshot from this host into an object store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PushReport {
    /// Name of the snapshot in the object store.
    pub name: String,
    /// URL of the object store.
    pub url: String,
    /// Bytes of the snapshot's files before compression, without chunks that hold only zeroes.
    pub stored_bytes: u64,
    /// Part of `stored_bytes` that the store did not have before.
    pub new_bytes: u64,
    /// Compressed bytes that were sent: for `new_bytes`, and for the pages that VMs touch at once,
    /// which are sent a second time, together.
    pub sent_bytes: u64,
    /// Whether the snapshot's description was signed.
    pub signed: bool,
    /// Duration of the push in seconds.
    pub took_s: f64,
}

/// Chunk of a file that is being pushed.
#[derive(Clone)]
struct Piece {
    file: Arc<File>,
    bytes: u64,
    number: u64,
}

impl Piece {
    fn length(&self) -> u64 {
        chunk::length(self.bytes, self.number) as u64
    }
}

/// A chunk after its push.
#[allow(clippy::struct_field_names)] // bytes that were sent
struct Sent {
    name: ChunkName,
    stored_bytes: u64,
    new_bytes: u64,
    sent_bytes: u64,
    piece: Piece,
    /// Whether the chunk was sent although the store had it: it was so old there that another host
    /// may be removing it.
    was_old: bool,
}

/// Copies a snapshot from `shelf`, this host's snapshot directory, into an object store. Chunks
/// that the store already has are not sent. The description is written last, so the store never
/// shows an incomplete snapshot.
pub fn push(
    shelf: &Shelf,
    remote: &Remote,
    request: &PushRequest,
    progress: &Progress,
) -> Result<PushReport, TransferError> {
    let began = Instant::now();
    memfold_vm::check_name("snapshot", &request.to)
        .map_err(|error| SnapshotError::Name(error.to_string()))?;
    let manifest = shelf.manifest(&request.name)?;
    check_disks(&manifest).map_err(|why| {
        let why = format!("snapshot '{}' cannot be pushed: {why}", request.name);
        SnapshotError::Impossible(why)
    })?;
    let members = portable::members(shelf, &manifest)?;
    let taken = || TransferError::Taken {
        name: request.to.clone(),
        url: remote.url().to_owned(),
    };
    let place = remote.description(&request.to);
    let there = remote.wait(remote.look(&place))?;
    if there.is_some() {
        return Err(taken());
    }
    // Damage would spread to every host that pulls the snapshot.
    memfold_snapshot::restore::check_all(shelf, &manifest, progress)?;
    let total = members.iter().map(|member| member.bytes).sum();
    progress.begin("pushed", total);
    remote.wait(async {
        let (mut files, mut pieces, mut opened) = (Vec::new(), Vec::new(), Vec::new());
        for member in members {
            let file = Arc::new(member.file);
            opened.push(file.clone());
            pieces.extend((0..chunk::count(member.bytes)).map(|number| Piece {
                file: file.clone(),
                bytes: member.bytes,
                number,
            }));
            files.push(FileEntry {
                name: member.name,
                bytes: member.bytes,
                origin: member.origin,
            });
        }
        let known = Known::default();
        let looked = SystemTime::now();
        let sent: Vec<Sent> = stream::iter(pieces)
            .map(|piece| send(remote, &known, piece, progress))
            .buffered(AT_ONCE)
            .try_collect()
            .await?;
        send_again(remote, &sent, looked, progress).await?;
        let names: Vec<ChunkName> = sent.iter().map(|sent| sent.name).collect();
        let (first_pages, of_first, mut again) =
            send_first(remote, (shelf, &manifest), (&opened, &files), &names).await?;
        let index = chunk::encode(&names);
        let index_name = blake3::hash(&index);
        let packed = chunk::pack(&index).map_err(TransferError::Local)?;
        remote
            .put(&remote.index(&index_name), packed.clone())
            .await?;
        again.push((remote.index(&index_name), packed));
        for (path, packed) in again {
            if remote.look(&path).await?.is_none() {
                remote.put(&path, packed).await?;
            }
        }
        // No file was changed while it was read.
        memfold_snapshot::restore::spec(shelf, &manifest, &manifest.vm)?;
        let description = Description {
            format: FORMAT,
            name: request.to.clone(),
            chunk_bytes: CHUNK_BYTES,
            stored_bytes: sent.iter().map(|sent| sent.stored_bytes).sum(),
            index: index_name.to_hex().to_string(),
            files,
            first_pages,
            manifest,
        };
        let text = serde_json::to_vec_pretty(&description)
            .map_err(|error| TransferError::Local(io::Error::other(error)))?;
        let signed = match &request.key {
            Some(key) => {
                let made = signature::sign(&text, key)?;
                remote.put(&remote.signature(&text), made).await?;
                true
            }
            None => false,
        };
        // The snapshot is there when all that it needs stays there.
        remote.sync().await?;
        if !remote.create(&place, text).await? {
            return Err(taken());
        }
        remote.sync().await?;
        Ok(PushReport {
            name: request.to.clone(),
            url: remote.url().to_owned(),
            stored_bytes: description.stored_bytes,
            new_bytes: sent.iter().map(|sent| sent.new_bytes).sum(),
            sent_bytes: sent.iter().map(|sent| sent.sent_bytes).sum::<u64>() + of_first,
            signed,
            took_s: began.elapsed().as_secs_f64(),
        })
    })
}

/// Makes sure, before the description is written, that the store keeps all chunks until it is:
///
/// 1. Chunks that the store had, but that were old there, were sent again. Another host that
///    removes a snapshot may have found them old just before, and have removed them just after.
/// 2. If the push has looked for its first chunk long ago (`looked`), chunks have got old since
///    then. It looks for all again, and sends those that are old or gone.
///
/// A removal takes no chunk that was younger than 24 hours when the removal began, and none that a
/// description named then. So chunks are safe also from a removal that began before the description
/// was there.
async fn send_again(
    remote: &Remote,
    sent: &[Sent],
    mut looked: SystemTime,
    progress: &Progress,
) -> Result<(), TransferError> {
    let mut were_old = pieces(sent.iter().filter(|chunk| chunk.was_old));
    loop {
        renew(remote, were_old, &[Found::Missing], progress).await?;
        if looked.elapsed().is_ok_and(|time| time < LONG) {
            return Ok(());
        }
        looked = SystemTime::now();
        let all = pieces(sent.iter());
        were_old = renew(remote, all, &[Found::Missing, Found::Old], progress).await?;
    }
}

/// Returns the names of chunks, each once, and where their bytes are. Chunks of zeroes have none.
fn pieces<'a>(sent: impl Iterator<Item = &'a Sent>) -> HashMap<blake3::Hash, Piece> {
    sent.filter_map(|chunk| Some((chunk.name?, chunk.piece.clone())))
        .collect()
}

/// Looks for chunks in the store, and sends those again that it finds as in `send_if`. Returns the
/// chunks that were sent.
async fn renew(
    remote: &Remote,
    chunks: HashMap<blake3::Hash, Piece>,
    send_if: &[Found],
    progress: &Progress,
) -> Result<HashMap<blake3::Hash, Piece>, TransferError> {
    if chunks.is_empty() {
        return Ok(chunks);
    }
    let bytes = chunks.values().map(Piece::length).sum();
    progress.begin("looked for again", bytes);
    let renewed: Vec<_> = stream::iter(chunks)
        .map(|(name, piece)| async move {
            let path = remote.chunk(&name);
            let is_sent = send_if.contains(&look(remote, &path).await?);
            if is_sent {
                let of = piece.clone();
                let packed = blocking(move || {
                    let data = chunk::read(&of.file, of.bytes, of.number)?;
                    chunk::pack(&data.unwrap_or_default())
                });
                remote.put(&path, packed.await?).await?;
            }
            progress.add(piece.length());
            Ok::<_, TransferError>(is_sent.then_some((name, piece)))
        })
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await?;
    Ok(renewed.into_iter().flatten().collect())
}

/// Chunks that this push has seen. The lock of a chunk is held while it is sent, so that an equal
/// chunk waits instead of being sent twice.
#[derive(Default)]
struct Known(Mutex<HashMap<blake3::Hash, Arc<Mutex<bool>>>>);

impl Known {
    async fn of(&self, name: blake3::Hash) -> Arc<Mutex<bool>> {
        self.0.lock().await.entry(name).or_default().clone()
    }
}

/// Sends a chunk, unless the store has it.
async fn send(
    remote: &Remote,
    known: &Known,
    piece: Piece,
    progress: &Progress,
) -> Result<Sent, TransferError> {
    let length = piece.length();
    let Piece {
        file,
        bytes,
        number,
    } = piece.clone();
    let read = blocking(move || {
        let data = chunk::read(&file, bytes, number)?;
        Ok(data.map(|data| (blake3::hash(&data), data)))
    })
    .await?;
    let mut sent = Sent {
        name: None,
        stored_bytes: 0,
        new_bytes: 0,
        sent_bytes: 0,
        piece,
        was_old: false,
    };
    if let Some((name, data)) = read {
        (sent.name, sent.stored_bytes) = (Some(name), length);
        let lock = known.of(name).await;
        let mut is_there = lock.lock().await;
        if !*is_there {
            let found = look(remote, &remote.chunk(&name)).await?;
            if found == Found::Stays {
                remote.note_used(&remote.chunk(&name))?;
            } else {
                let packed = blocking(move || chunk::pack(&data)).await?;
                (sent.new_bytes, sent.sent_bytes) = (length, packed.len() as u64);
                remote.put(&remote.chunk(&name), packed).await?;
                sent.was_old = found == Found::Old;
            }
        }
        *is_there = true;
    }
    progress.add(length);
    Ok(sent)
}

/// Sends the pages that VMs touch at once, together. Returns the names of their parts, the number
/// of bytes that were sent, and the objects that were sent although the store had them.
async fn send_first(
    remote: &Remote,
    (shelf, manifest): (&Shelf, &Manifest),
    (opened, files): (&[Arc<File>], &[FileEntry]),
    names: &[ChunkName],
) -> Result<(Vec<PartEntry>, u64, Vec<(Path, Vec<u8>)>), TransferError> {
    let (mut chunks, mut rest) = (Vec::new(), names);
    for file in files {
        let count = usize::try_from(chunk::count(file.bytes)).unwrap_or(usize::MAX);
        let (here, after) = rest.split_at(count.min(rest.len()));
        chunks.push(here.to_vec());
        rest = after;
    }
    let runs = gather::runs(shelf, manifest, (files, &chunks))?;
    let parts = stream::iter(gather::split(&runs))
        .map(|runs| async {
            let opened = opened.to_vec();
            let part = blocking(move || Ok(gather::read(runs, &opened)?.encode())).await?;
            let (name, bytes) = (blake3::hash(&part), part.len() as u64);
            let path = remote.first(&name);
            let (mut sent, mut again) = (0, None);
            let found = look(remote, &path).await?;
            if found == Found::Stays {
                remote.note_used(&path)?;
            } else {
                let packed = blocking(move || gather::pack(&part)).await?;
                sent = packed.len() as u64;
                again = (found == Found::Old).then(|| (path.clone(), packed.clone()));
                remote.put(&path, packed).await?;
            }
            let object = name.to_hex().to_string();
            Ok::<_, TransferError>((PartEntry { object, bytes }, sent, again))
        })
        .buffered(AT_ONCE);
    let parts: Vec<(PartEntry, u64, _)> = parts.try_collect().await?;
    let sent = parts.iter().map(|(_, sent, _)| sent).sum();
    let (entries, again): (Vec<_>, Vec<_>) = parts
        .into_iter()
        .map(|(entry, _, again)| (entry, again))
        .unzip();
    Ok((entries, sent, again.into_iter().flatten().collect()))
}

/// Whether a store has an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The store has it, and will have it for 12 hours more.
    Stays,
    /// The store has it, but it is so old that a removal may remove it.
    Old,
    /// The store does not have it, or not whole.
    Missing,
}

async fn look(remote: &Remote, path: &Path) -> Result<Found, TransferError> {
    // A host that lost its power may have left an empty file.
    let found = remote.look(path).await?.filter(|found| found.size > 0);
    let Some(found) = found else {
        return Ok(Found::Missing);
    };
    let age = SystemTime::now().duration_since(found.last_modified.into());
    let stays = age.map_or(true, |age| age < UNUSED / 2);
    Ok(if stays { Found::Stays } else { Found::Old })
}

/// Does work on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, TransferError> {
    let done = spawn_blocking(work).await;
    done.map_err(io::Error::other)
        .and_then(std::convert::identity)
        .map_err(TransferError::Local)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_push_sends_chunks_again_that_are_old_or_removed_when_it_ends() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("ram");
        std::fs::write(&path, "memory").unwrap();
        let remote = Remote::open(&format!("file://{}", place.path().display())).unwrap();
        let piece = Piece {
            file: Arc::new(File::open(&path).unwrap()),
            bytes: 6,
            number: 0,
        };
        let known = Known::default();
        let progress = Progress::default();
        progress.begin("pushed", 6);
        let step = |name: &str| {
            let now = progress.now();
            assert_eq!((now.step.as_str(), now.done_bytes), (name, 6));
            assert_eq!(now.total_bytes, 6);
        };
        remote.wait(async {
            let sent = send(&remote, &known, piece, &progress).await.unwrap();
            let chunk = remote.chunk(&sent.name.unwrap());
            remote.delete(&chunk).await.unwrap();
            let (mut sent, now) = ([sent], SystemTime::now());
            for (looked, found) in [(now, Found::Missing), (now - LONG, Found::Stays)] {
                let told = send_again(&remote, &sent, looked, &progress).await;
                told.unwrap();
                assert_eq!(look(&remote, &chunk).await.unwrap(), found);
                // Nothing is looked for at first. Progress counts bytes, not chunks.
                let is_first = found == Found::Missing;
                step(if is_first {
                    "pushed"
                } else {
                    "looked for again"
                });
            }
            // Nobody has removed this one yet.
            let file = crate::local::LocalStore::file(&chunk).unwrap();
            let file = File::options().write(true).open(file).unwrap();
            file.set_modified(now - UNUSED / 2 - LONG).unwrap();
            for (looked, found) in [(now, Found::Old), (now - LONG, Found::Stays)] {
                let told = send_again(&remote, &sent, looked, &progress).await;
                told.unwrap();
                assert_eq!(look(&remote, &chunk).await.unwrap(), found);
            }
            // Another host has found this one old, and has removed it when it was sent again.
            sent[0].was_old = true;
            remote.delete(&chunk).await.unwrap();
            let told = send_again(&remote, &sent, now, &progress).await;
            told.unwrap();
            assert_eq!(look(&remote, &chunk).await.unwrap(), Found::Stays);
        });
    }
}
