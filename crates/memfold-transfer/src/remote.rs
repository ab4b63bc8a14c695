//! Opens an object store at a URL, and reads and lists the snapshots in it.

use std::future::Future;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use futures_util::{Stream, TryStreamExt};
use memfold_snapshot::portable;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, PutMode, PutOptions, PutPayload};
use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};
use url::Url;
use utoipa::ToSchema;

use super::description::{Description, MOST_BYTES};
use super::error::{TransferError, failed};
use super::local::LocalStore;
use super::{chunk, signature};

/// Number of chunks that are on their way at the same time.
pub(crate) const AT_ONCE: usize = 8;

/// Most snapshots of a store. A store that lists more would take gigabytes of memory.
const MOST_NAMES: usize = 1 << 20;

/// Threads for hashing and compressing, and for waiting for the store.
const THREADS: usize = 2;

/// Time that a chunk which no snapshot names stays, so that a push that is under way finds it. A
/// push sends a chunk again that is half as old.
pub(crate) const UNUSED: Duration = Duration::from_secs(24 * 3600);

/// Name of the directory with the parts of snapshots' first pages.
pub(crate) const FIRST_PAGES: &str = "first-pages";

/// First letters of the variables with settings of object stores, in lower case.
const PREFIXES: [&str; 3] = ["aws_", "azure_", "google_"];

/// Credentials and settings that [`take_credentials`] has taken out of the environment.
static TAKEN: OnceLock<Vec<(String, String)>> = OnceLock::new();

fn is_setting(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Takes the credentials of object stores out of this process's environment, for
/// [`Remote::open`]: so no child process inherits them. Must be called before any thread starts.
///
/// # Errors
///
/// Fails if other threads run.
pub fn take_credentials() -> io::Result<()> {
    let taken = memfold_sys::environment::take(is_setting)?;
    // Only the first call finds any.
    let _ = TAKEN.set(taken);
    Ok(())
}

/// An object store that contains snapshots.
#[derive(Debug)]
pub struct Remote {
    pub(crate) store: Arc<dyn ObjectStore>,
    root: Path,
    url: String,
    runtime: Runtime,
    /// Writes the objects of a `file://` URL.
    local: Option<Arc<LocalStore>>,
}

/// A snapshot in an object store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteSnapshot {
    /// Name of the snapshot in the object store.
    pub name: String,
    /// Name of the VM that was saved; empty if the snapshot's description is damaged.
    pub vm: String,
    /// Time at which the save ended, in seconds since 1970.
    pub created_s: u64,
    /// Size of the saved VM's RAM, in bytes.
    pub memory_bytes: u64,
    /// Bytes of the snapshot's files before compression, without chunks that hold only zeroes.
    /// Other snapshots may share chunks with this one.
    pub stored_bytes: u64,
    /// Whether the store has a signature of the snapshot's description. The signature itself is not
    /// checked.
    pub signed: bool,
    /// Reason why the snapshot cannot be pulled; unset if it can be.
    pub problem: Option<String>,
}

impl Remote {
    /// Opens the object store at a URL: `file://`, `s3://`, `gs://`, `az://`, `http://` or
    /// `https://`. Credentials come from the environment of this process, or from what
    /// [`take_credentials`] has taken out of it (`AWS_ACCESS_KEY_ID`,
    /// `AWS_ENDPOINT`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`, ...: the names of
    /// crate `object_store`).
    ///
    /// # Errors
    ///
    /// [`TransferError::Address`] if the URL is of another kind, the directory of a `file://` URL
    /// does not exist, or the settings are not valid, for example because credentials are missing.
    pub fn open(url: &str) -> Result<Self, TransferError> {
        check_directory(url)?;
        Self::reopen(url)
    }

    /// Opens an object store from which a snapshot is being fetched, as [`Remote::open`] does. The
    /// directory of a `file://` URL may be missing for now.
    ///
    /// # Errors
    ///
    /// [`TransferError::Address`] if the URL is of another kind, or the settings are not valid.
    pub fn reopen(url: &str) -> Result<Self, TransferError> {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        let taken = TAKEN.get().into_iter().flatten().cloned();
        let settings = taken.chain(variables).filter(|(name, _)| is_setting(name));
        Self::open_any(
            url,
            settings.map(|(name, value)| (name.to_ascii_lowercase(), value)),
        )
    }

    /// Opens the object store at a URL with `settings` instead of environment variables. A setting
    /// has the name of such a variable in lower case, such as `aws_endpoint`.
    ///
    /// # Errors
    ///
    /// The same as of [`Remote::open`].
    pub fn open_with(
        url: &str,
        settings: impl Iterator<Item = (String, String)>,
    ) -> Result<Self, TransferError> {
        check_directory(url)?;
        Self::open_any(url, settings)
    }

    fn open_any(
        url: &str,
        settings: impl Iterator<Item = (String, String)>,
    ) -> Result<Self, TransferError> {
        let bad = |why: String| TransferError::Address {
            url: url.to_owned(),
            why,
        };
        let parsed = Url::parse(url).map_err(|error| bad(error.to_string()))?;
        if parsed.password().is_some() {
            return Err(bad("a password does not belong into a URL".into()));
        }
        // Whoever names a URL without TLS wants none.
        let is_plain = parsed.scheme() == "http";
        let allow = is_plain.then(|| ("allow_http".to_owned(), "true".to_owned()));
        let (store, root) = object_store::parse_url_opts(&parsed, settings.chain(allow))
            .map_err(|error| bad(error.to_string()))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("transfer")
            .enable_all()
            .build()
            .map_err(|error| bad(error.to_string()))?;
        let local = match parsed.scheme() {
            "file" => Some(Arc::new(LocalStore::new(&root)?)),
            _ => None,
        };
        Ok(Self {
            store: store.into(),
            root,
            url: url.trim_end_matches('/').to_owned(),
            runtime,
            local,
        })
    }

    /// Makes a directory's objects as little durable as its file system makes them.
    pub(crate) fn without_sync(mut self) -> Self {
        self.local = None;
        self
    }

    /// Returns the URL of the store, without a slash at its end.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    fn path(&self, name: &str) -> Path {
        let parts = name.split('/');
        parts.fold(self.root.clone(), |path, part| path.child(part))
    }

    pub(crate) fn chunks(&self) -> Path {
        self.path("chunks")
    }

    pub(crate) fn indexes(&self) -> Path {
        self.path("indexes")
    }

    pub(crate) fn chunk(&self, name: &blake3::Hash) -> Path {
        let hex = name.to_hex();
        self.chunks().child(&hex[..2]).child(hex.as_str())
    }

    pub(crate) fn index(&self, name: &blake3::Hash) -> Path {
        self.indexes().child(name.to_hex().as_str())
    }

    pub(crate) fn firsts(&self) -> Path {
        self.path(FIRST_PAGES)
    }

    /// Returns the place of a part of a snapshot's first pages.
    pub(crate) fn first(&self, name: &blake3::Hash) -> Path {
        self.firsts().child(name.to_hex().as_str())
    }

    pub(crate) fn description(&self, name: &str) -> Path {
        self.path("snapshots").child(format!("{name}.json"))
    }

    /// Returns the place of the signature of a description. It is named by the description's bytes,
    /// so that it never belongs to another one.
    pub(crate) fn signature(&self, description: &[u8]) -> Path {
        let name = blake3::hash(description);
        self.path("signatures").child(name.to_hex().as_str())
    }

    /// Returns facts about an object; `None` if there is none.
    pub(crate) async fn look(&self, path: &Path) -> Result<Option<ObjectMeta>, TransferError> {
        match self.store.head(path).await {
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            found => found.map(Some).map_err(failed(path)),
        }
    }

    /// Reads an object of at most `most` bytes; `None` if there is none.
    pub(crate) async fn get(
        &self,
        path: &Path,
        most: u64,
    ) -> Result<Option<Vec<u8>>, TransferError> {
        let found = match self.store.get(path).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            found => found.map_err(failed(path))?,
        };
        let damaged = |bytes: u64| TransferError::Damaged {
            object: path.to_string(),
            why: format!("it has {bytes} bytes, and at most {most} are expected"),
        };
        if found.meta.size > most {
            return Err(damaged(found.meta.size));
        }
        // The length that a server states may be wrong, too.
        let mut bytes = Vec::new();
        let mut pieces = found.into_stream();
        while let Some(piece) = pieces.try_next().await.map_err(failed(path))? {
            bytes.extend_from_slice(&piece);
            if bytes.len() as u64 > most {
                return Err(damaged(bytes.len() as u64));
            }
        }
        Ok(Some(bytes))
    }

    pub(crate) async fn put(&self, path: &Path, bytes: Vec<u8>) -> Result<(), TransferError> {
        if let Some(local) = &self.local {
            return write(local, path, bytes, true).await.map(drop);
        }
        let put = self.store.put(path, PutPayload::from(bytes)).await;
        put.map(drop).map_err(failed(path))
    }

    /// Notes that a new snapshot needs an object that was there before. Its name may not be on the
    /// store's disk yet.
    pub(crate) fn note_used(&self, path: &Path) -> Result<(), TransferError> {
        if let Some(local) = &self.local {
            local.touched(&LocalStore::file(path)?);
        }
        Ok(())
    }

    /// Waits until what was written, removed and noted as used survives a power failure.
    pub(crate) async fn sync(&self) -> Result<(), TransferError> {
        let Some(local) = self.local.clone() else {
            return Ok(());
        };
        on_blocking_thread(move || local.sync()).await
    }

    /// Deletes an object, if it is there: not every server takes the deletion of one that is not.
    pub(crate) async fn delete(&self, path: &Path) -> Result<(), TransferError> {
        if self.look(path).await?.is_none() {
            return Ok(());
        }
        self.delete_found(path).await
    }

    /// Deletes an object that was there just now.
    pub(crate) async fn delete_found(&self, path: &Path) -> Result<(), TransferError> {
        match self.store.delete(path).await {
            Err(object_store::Error::NotFound { .. }) => {}
            done => done.map_err(failed(path))?,
        }
        if let Some(local) = &self.local {
            local.touched(&LocalStore::file(path)?);
        }
        Ok(())
    }

    /// Removes parts of objects that killed pushes have left in a directory, and that were last
    /// changed before `before`. Returns their number and bytes. Other stores have no such parts.
    pub(crate) async fn remove_parts(
        &self,
        before: SystemTime,
    ) -> Result<(u64, u64), TransferError> {
        let Some(local) = self.local.clone() else {
            return Ok((0, 0));
        };
        let of_chunks = (0..=u8::MAX).map(|first| self.chunks().child(format!("{first:02x}")));
        let named = ["signatures", "snapshots"].map(|place| self.path(place));
        let others = [self.indexes(), self.firsts()].into_iter().chain(named);
        let directories = of_chunks
            .chain(others)
            .map(|place| LocalStore::file(&place));
        let directories: Vec<_> = directories.collect::<Result<_, _>>()?;
        on_blocking_thread(move || local.remove_parts(&directories, before)).await
    }

    /// Writes an object that must not exist. Returns false if it does. A store that cannot tell
    /// writes it all the same.
    pub(crate) async fn create(&self, path: &Path, bytes: Vec<u8>) -> Result<bool, TransferError> {
        if let Some(local) = &self.local {
            return write(local, path, bytes, false).await;
        }
        let payload = PutPayload::from(bytes);
        let options = PutOptions::from(PutMode::Create);
        match self.store.put_opts(path, payload.clone(), options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(object_store::Error::NotImplemented | object_store::Error::NotSupported { .. }) => {
                let put = self.store.put(path, payload).await;
                put.map(|_| true).map_err(failed(path))
            }
            Err(error) => Err(failed(path)(error)),
        }
    }

    /// Reads the description of a snapshot, and its bytes, over which the signature is.
    pub(crate) async fn describe(
        &self,
        name: &str,
    ) -> Result<(Description, Vec<u8>), TransferError> {
        let path = self.description(name);
        let bytes = self.get(&path, MOST_BYTES).await?;
        let bytes = bytes.ok_or_else(|| self.unknown(name))?;
        let described = Description::parse(&bytes, name);
        let described = described.map_err(|why| damaged(&path, why))?;
        Ok((described, bytes))
    }

    pub(crate) async fn read_index(
        &self,
        description: &Description,
    ) -> Result<Vec<chunk::ChunkName>, TransferError> {
        let name = description
            .index_hash()
            .map_err(|why| damaged(&self.description(&description.name), why))?;
        let path = self.index(&name);
        let length = description.chunks() * chunk::NAME_BYTES as u64;
        let packed = self.get(&path, most_packed(length)).await?;
        let packed = packed.ok_or_else(|| damaged(&path, MISSING.into()))?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let index = chunk::unpack(&packed, length, &name);
        Ok(chunk::decode(&index.map_err(|why| damaged(&path, why))?))
    }

    pub(crate) fn unknown(&self, name: &str) -> TransferError {
        TransferError::Unknown {
            name: name.to_owned(),
            url: self.url.clone(),
        }
    }

    /// Lists the objects under a path.
    pub(crate) fn list_under(
        &self,
        path: &Path,
    ) -> impl Stream<Item = Result<ObjectMeta, TransferError>> + Unpin {
        let path = path.clone();
        let listed = self.store.list(Some(&path));
        listed.map_err(move |error| failed(&path)(error))
    }

    /// Returns the names of all snapshots, sorted.
    pub(crate) async fn names(&self) -> Result<Vec<String>, TransferError> {
        let place = self.path("snapshots");
        let mut objects = self.list_under(&place);
        let mut names = Vec::new();
        while let Some(object) = objects.try_next().await? {
            let file = object.location.filename();
            let name = file.and_then(|file| file.strip_suffix(".json"));
            // Others are not ours, or shall confuse a terminal.
            let name = name.filter(|name| memfold_vm::check_name("snapshot", name).is_ok());
            names.extend(name.map(str::to_owned));
            if names.len() > MOST_NAMES {
                let why = format!("there are more than {MOST_NAMES} snapshots");
                return Err(damaged(&place, why));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Lists all snapshots in the store, sorted by name. A snapshot whose description is damaged is
    /// listed with its problem.
    pub fn list(&self) -> Result<Vec<RemoteSnapshot>, TransferError> {
        self.wait(async {
            let mut found = Vec::new();
            for name in self.names().await? {
                found.push(match self.describe(&name).await {
                    Ok((description, bytes)) => RemoteSnapshot {
                        name,
                        vm: description.manifest.vm.escape_debug().to_string(),
                        created_s: description.manifest.created_s,
                        memory_bytes: description.manifest.memory().0,
                        stored_bytes: description.stored_bytes,
                        signed: self.look(&self.signature(&bytes)).await?.is_some(),
                        problem: None,
                    },
                    // Another host may have removed it just now.
                    Err(TransferError::Unknown { .. }) => continue,
                    Err(TransferError::Damaged { why, .. }) => RemoteSnapshot {
                        name,
                        vm: String::new(),
                        created_s: 0,
                        memory_bytes: 0,
                        stored_bytes: 0,
                        signed: false,
                        problem: Some(why.escape_debug().to_string()),
                    },
                    Err(error) => return Err(error),
                });
            }
            Ok(found)
        })
    }

    /// Checks the signature of a description, and returns it, if `trust` (a public key in PEM form)
    /// is given.
    pub(crate) async fn check(
        &self,
        name: &str,
        bytes: &[u8],
        trust: Option<&str>,
    ) -> Result<Option<Vec<u8>>, TransferError> {
        let Some(key) = trust else { return Ok(None) };
        let found = self.get(&self.signature(bytes), signature::BYTES).await?;
        let Some(found) = found else {
            return Err(TransferError::Unsigned {
                name: name.to_owned(),
                url: self.url.clone(),
            });
        };
        if signature::is_right(bytes, &found, key)? {
            Ok(Some(found))
        } else {
            Err(TransferError::Signature {
                name: name.to_owned(),
            })
        }
    }
}

async fn write(
    local: &Arc<LocalStore>,
    path: &Path,
    bytes: Vec<u8>,
    replace: bool,
) -> Result<bool, TransferError> {
    let (local, file) = (local.clone(), LocalStore::file(path)?);
    on_blocking_thread(move || local.write(&file, &bytes, replace)).await
}

async fn on_blocking_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, TransferError> + Send + 'static,
) -> Result<T, TransferError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| TransferError::Local(std::io::Error::other(error)))?
}

/// Checks that the directory of a `file://` URL exists. It may be a file system that is not
/// mounted.
fn check_directory(url: &str) -> Result<(), TransferError> {
    let of_files = Url::parse(url).ok().filter(|url| url.scheme() == "file");
    let is_there = |url: Url| url.to_file_path().is_ok_and(|place| place.is_dir());
    if of_files.is_none_or(is_there) {
        return Ok(());
    }
    Err(TransferError::Address {
        url: url.to_owned(),
        why: "there is no such directory".into(),
    })
}

/// Reason why an object that a description names cannot be read.
pub(crate) const MISSING: &str = "it is missing; the snapshot was perhaps removed meanwhile";

/// Returns the most bytes that Zstandard needs for `length` bytes (`ZSTD_compressBound`).
pub(crate) const fn most_packed(length: u64) -> u64 {
    length + length / 256 + 1024
}

pub(crate) fn damaged(path: &Path, why: String) -> TransferError {
    TransferError::Damaged {
        object: path.to_string(),
        why,
    }
}

/// Returns whether a file came from outside the snapshot.
pub(crate) fn is_base(name: &str, number: usize) -> bool {
    name == portable::base_name(number)
}
