//! One page-store file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use memfold_units::{ByteSize, Hva, PAGE_BYTES, PAGE_SIZE, PageCount, StorePage};
use rustix::fs::{AtFlags, FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

/// Pages that may ever be in one store file: page numbers fit in 32 bits (16 TiB).
pub const MAX_PAGES: u64 = u32::MAX as u64 - 1;

/// Pages copied at once while filling (2 MiB).
const FILL_PAGES: usize = 512;

/// Which file a store is, as `/proc/PID/maps` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoreIdentity {
    /// Device number, `st_dev`.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
}

/// Why the store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The cap on bytes held is reached.
    #[error(
        "page store is full: {held} held, {cap} allowed; raise the cap or leave it: what is folded stays folded"
    )]
    Full {
        /// Bytes in the store now.
        held: ByteSize,
        /// The cap.
        cap: ByteSize,
    },
    /// No page numbers are left.
    #[error("page store has used all its {MAX_PAGES} page numbers")]
    Exhausted,
    /// Creating, growing, filling or punching failed.
    #[error("page store: {what}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

fn io_error(what: &'static str) -> impl Fn(io::Error) -> StoreError {
    move |source| StoreError::Io { what, source }
}

/// A page store of one trust domain. The daemon alone holds it writable.
#[derive(Debug)]
pub struct Store {
    file: File,
    read_only: OwnedFd,
    identity: StoreIdentity,
    frontier: StorePage,
    held_pages: u64,
    cap: ByteSize,
    buffer: Vec<u8>,
}

impl Store {
    /// A new, empty store for `domain` that will hold at most `cap` bytes.
    pub fn create(domain: &str, cap: ByteSize) -> Result<Self, StoreError> {
        let file = huge_file(domain).or_else(|error| {
            tracing::info!(
                domain,
                %error,
                "the page store gets ordinary pages: no tmpfs with huge pages can be mounted"
            );
            memfd(domain)
        })?;
        // Only root (and whoever we hand a descriptor to, read-only) may open it through /proc.
        rustix::fs::fchmod(&file, Mode::RUSR).map_err(|e| io_error("fchmod")(e.into()))?;
        Self::from_file(file, cap)
    }

    /// Takes over the store of `domain` that the QEMU process `pid` has open (a former daemon gave it the descriptor),
    /// or `None` if it has none.
    pub fn adopt(pid: Pid, domain: &str, cap: ByteSize) -> Result<Option<Self>, StoreError> {
        let directory = format!("/proc/{}/fd", pid.as_raw_nonzero());
        let name = file_name(domain);
        let wanted = [
            format!("/{name} (deleted)"),
            format!("/memfd:{name} (deleted)"),
        ];
        for entry in std::fs::read_dir(directory)
            .map_err(io_error("listing a VM's descriptors"))?
            .flatten()
        {
            let is_ours = std::fs::read_link(entry.path())
                .is_ok_and(|target| wanted.iter().any(|w| target.as_os_str() == w.as_str()));
            if is_ours {
                let file = File::options()
                    .read(true)
                    .write(true)
                    .open(entry.path())
                    .map_err(io_error("opening the store of a running VM"))?;
                return Self::from_file(file, cap).map(Some);
            }
        }
        Ok(None)
    }

    fn from_file(file: File, cap: ByteSize) -> Result<Self, StoreError> {
        let facts = file.metadata().map_err(io_error("fstat"))?;
        let read_only = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(io_error("opening read-only"))?
            .into();
        Ok(Self {
            identity: StoreIdentity {
                dev: facts.dev(),
                ino: facts.ino(),
            },
            frontier: StorePage(facts.size().div_ceil(PAGE_SIZE)),
            held_pages: facts.blocks() * 512 / PAGE_SIZE,
            read_only,
            file,
            cap,
            buffer: vec![0; FILL_PAGES * PAGE_BYTES],
        })
    }

    /// Which file it is.
    #[must_use]
    pub const fn identity(&self) -> StoreIdentity {
        self.identity
    }

    /// The descriptor for VMs: it can't be written through.
    #[must_use]
    pub fn read_only(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }

    /// The page that the next append will get.
    #[must_use]
    pub const fn frontier(&self) -> StorePage {
        self.frontier
    }

    /// Bytes the store holds in memory or swap, by the kernel's count: up to 2 MiB more than was appended, because the last
    /// huge page is there before its bytes are.
    pub fn held(&self) -> Result<ByteSize, StoreError> {
        let facts = self.file.metadata().map_err(io_error("fstat"))?;
        Ok(ByteSize(facts.blocks() * 512))
    }

    /// Changes the cap. What is held stays, even above it.
    pub const fn set_cap(&mut self, cap: ByteSize) {
        self.cap = cap;
    }

    /// The cap on bytes held.
    #[must_use]
    pub const fn cap(&self) -> ByteSize {
        self.cap
    }

    /// Appends a copy of `pages` pages at `from` in process `pid`. Returns the first new page and how many were copied, which
    /// is fewer if the process's memory ends there. The copy may catch a page between two of the guest's writes; the compare
    /// at folding decides.
    pub fn append(
        &mut self,
        pid: Pid,
        from: Hva,
        pages: u64,
    ) -> Result<(StorePage, PageCount), StoreError> {
        if self.held_pages.saturating_add(pages) > self.cap.pages().0 {
            let held = self.held()?;
            self.held_pages = held.pages().0;
            if self.held_pages.saturating_add(pages) > self.cap.pages().0 {
                return Err(StoreError::Full {
                    held,
                    cap: self.cap,
                });
            }
        }
        if self.frontier.0 + pages > MAX_PAGES {
            return Err(StoreError::Exhausted);
        }
        let first = self.frontier;
        let mut copied = 0;
        while copied < pages {
            let step = usize::try_from(pages - copied)
                .unwrap_or(FILL_PAGES)
                .min(FILL_PAGES);
            let buffer = &mut self.buffer[..step * PAGE_BYTES];
            let Ok(bytes) = memfold_sys::memory::read(pid, from.add_pages(copied), buffer) else {
                break;
            };
            let whole = bytes / PAGE_BYTES;
            let buffer = &buffer[..whole * PAGE_BYTES];
            self.file
                .write_all_at(buffer, self.frontier.offset())
                .map_err(io_error("writing"))?;
            self.frontier = self.frontier.add_pages(whole as u64);
            self.held_pages += whole as u64;
            copied += whole as u64;
            if whole < step {
                break;
            }
        }
        Ok((first, PageCount(copied)))
    }

    /// Punches pages out. Only for pages that no VM can need (see [`crate::fold`]'s reclaim).
    pub fn punch(&mut self, first: StorePage, pages: u64) -> Result<(), StoreError> {
        rustix::fs::fallocate(
            &self.file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            first.offset(),
            pages * PAGE_SIZE,
        )
        .map_err(|e| io_error("punching")(e.into()))?;
        self.held_pages = self.held_pages.saturating_sub(pages);
        Ok(())
    }

    /// Copies one page out, for samples and tests.
    pub fn read_page(&self, page: StorePage, buffer: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
        self.file.read_exact_at(buffer, page.offset())
    }
}

/// The name that `/proc/PID/fd` and `/proc/PID/maps` show, by which a new daemon finds the store.
fn file_name(domain: &str) -> String {
    format!("memfold:{domain}")
}

/// A file without a name in a tmpfs of its own, which allocates huge pages and is mounted nowhere: it ends with the last
/// descriptor and mapping of the file. Filling costs a quarter of a memfd's time and comparing half. Needs `CAP_SYS_ADMIN`.
/// tmpfs can't seal its files against shrinking (`memfd_file_seals_ptr` in `mm/memfd.c`); VMs can't anyhow with their descriptor.
fn huge_file(domain: &str) -> io::Result<File> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // `size`: without a limit, as a memfd; the cap is ours to hold.
    for (key, value) in [("huge", "always"), ("size", "0"), ("mode", "0700")] {
        fsconfig_set_string(context.as_fd(), key, value)?;
    }
    fsconfig_create(context.as_fd())?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags)?;
    let name = file_name(domain);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&root, &name, flags, Mode::RUSR)?;
    rustix::fs::unlinkat(&root, &name, AtFlags::empty())?;
    Ok(file.into())
}

/// Where no tmpfs can be mounted.
fn memfd(domain: &str) -> Result<File, StoreError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(file_name(domain), flags)
        .map_err(|e| io_error("memfd_create")(e.into()))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK)
        .map_err(|e| io_error("sealing against shrinking")(e.into()))?;
    Ok(fd.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> Pid {
        rustix::process::getpid()
    }

    fn address(bytes: &[u8]) -> Hva {
        Hva(bytes.as_ptr().expose_provenance() as u64)
    }

    fn pattern(pages: usize) -> Vec<u8> {
        let bytes = (1..=251).cycle().flat_map(|byte| [byte; 7]);
        bytes.take(pages * PAGE_BYTES).collect()
    }

    /// A store of each kind that this process can make, for domains `NAME0` and so on.
    fn stores(name: &str, cap: ByteSize) -> Vec<Store> {
        let mut files = Vec::new();
        match huge_file(&format!("{name}0")) {
            Ok(file) => files.push(file),
            Err(error) => println!("skipped: the store in a tmpfs: {error}"),
        }
        files.push(memfd(&format!("{name}{}", files.len())).unwrap());
        let stores = files.into_iter().map(|file| Store::from_file(file, cap));
        stores.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn appended_pages_read_back_and_offsets_are_never_reused() {
        for mut store in stores("t1", ByteSize::mib(64)) {
            let source = pattern(3);
            let (first, copied) = store.append(me(), address(&source), 3).unwrap();
            assert_eq!((first, copied), (StorePage(0), PageCount(3)));
            let mut page = [0; PAGE_BYTES];
            store.read_page(StorePage(2), &mut page).unwrap();
            assert_eq!(page[..], source[2 * PAGE_BYTES..]);

            store.punch(StorePage(0), 3).unwrap();
            assert_eq!(store.held().unwrap(), ByteSize(0));
            assert_eq!(
                store.append(me(), address(&source), 1).unwrap().0,
                StorePage(3)
            );
        }
    }

    #[test]
    fn punched_pages_are_given_back_and_their_neighbours_stay() {
        for mut store in stores("t6", ByteSize::mib(64)) {
            let source = pattern(1024);
            store.append(me(), address(&source), 1024).unwrap();
            assert_eq!(store.held().unwrap(), ByteSize::mib(4));
            // Mapped elsewhere, as VMs do: a huge page must be split under its users.
            let window = memfold_sys::region::Mapping::window(store.read_only(), 1024).unwrap();
            assert_eq!(window.area().zero_pages(), 0);
            for first in (0..1024).step_by(16) {
                store.punch(StorePage(first), 9).unwrap();
            }
            assert_eq!(store.held().unwrap(), ByteSize(64 * 7 * PAGE_SIZE));
            let mut page = [0; PAGE_BYTES];
            for at in (0..1024).filter(|at| at % 16 >= 9) {
                store.read_page(StorePage(at as u64), &mut page).unwrap();
                assert_eq!(page[..], source[at * PAGE_BYTES..][..PAGE_BYTES]);
            }
        }
    }

    #[test]
    fn the_cap_is_held() {
        for mut store in stores("t2", ByteSize(8 * PAGE_SIZE)) {
            let source = vec![1; PAGE_BYTES * 9];
            assert!(matches!(
                store.append(me(), address(&source), 9),
                Err(StoreError::Full { .. })
            ));
            store.append(me(), address(&source), 8).unwrap();
            assert!(matches!(
                store.append(me(), address(&source), 1),
                Err(StoreError::Full { .. })
            ));
            store.punch(StorePage(0), 1).unwrap();
            store.append(me(), address(&source), 1).unwrap();
        }
    }

    #[test]
    fn the_descriptor_for_vms_cannot_be_written() {
        for store in stores("t3", ByteSize::mib(1)) {
            assert_eq!(
                rustix::io::write(store.read_only(), b"x").unwrap_err(),
                rustix::io::Errno::BADF
            );
            assert_eq!(
                rustix::fs::ftruncate(store.read_only(), 0).unwrap_err(),
                rustix::io::Errno::INVAL
            );
        }
    }

    #[test]
    fn a_new_daemon_adopts_the_store_behind_its_frontier() {
        let source = vec![9; PAGE_BYTES];
        for (number, old) in stores("t4-", ByteSize::mib(1)).iter_mut().enumerate() {
            old.append(me(), address(&source), 1).unwrap();
            let domain = format!("t4-{number}");
            let adopted = Store::adopt(me(), &domain, ByteSize::mib(1)).unwrap();
            let adopted = adopted.unwrap();
            assert_eq!(
                (adopted.identity(), adopted.frontier()),
                (old.identity(), StorePage(1))
            );
        }
        assert!(
            Store::adopt(me(), "nobody", ByteSize::mib(1))
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_store_in_a_memfd_cannot_shrink() {
        let file = memfd("t5").unwrap();
        file.set_len(PAGE_SIZE).unwrap();
        assert!(file.set_len(0).is_err());
    }

    #[test]
    fn any_domain_gets_a_store() {
        for domain in ["", "a/b", "../x", &"n".repeat(200)] {
            let mut store = Store::create(domain, ByteSize::mib(1)).unwrap();
            let source = vec![9; PAGE_BYTES];
            store.append(me(), address(&source), 1).unwrap();
            let adopted = Store::adopt(me(), domain, ByteSize::mib(1)).unwrap();
            assert_eq!(adopted.unwrap().identity(), store.identity());
        }
    }
}
