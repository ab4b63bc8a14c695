//! Page stores that memfold's library in QEMU may map into the VM's RAM: their read-only
//! descriptors, and read-only mappings (windows) through which guest pages are compared with store
//! pages.

use std::os::fd::OwnedFd;

use memfold_sys::region::{Area, Mapping};
use memfold_units::PAGE_SIZE;
use memfold_wire::library::MAX_STORES;
use rustix::mm::Advice;

/// Maximum number of pages of one store: 16 TiB, an eighth of the address space.
const MAX_STORE_PAGES: u64 = 1 << 32;

/// One page store, with a read-only mapping (window) for comparing guest pages with its pages.
#[derive(Debug)]
pub struct Store {
    number: u32,
    /// Read-only descriptor of the store's file, for mapping its pages into RAM.
    pub(crate) file: OwnedFd,
    /// Device and inode number of the store's file.
    pub(crate) identity: (u64, u64),
    window: Mapping,
    /// Number of pages of the store's file at the last [`Stores::refresh`]. A page store never
    /// shrinks.
    pages: u64,
}

impl Store {
    /// Returns the mapped bytes of `pages` store pages from page `first` on; `None` if the store's
    /// file is shorter. (Touching a mapped page beyond the end of a file causes `SIGBUS`.)
    #[must_use]
    pub fn window(&self, first: u64, pages: u64) -> Option<Area> {
        let end = first.checked_add(pages)?;
        (end <= self.pages.min(self.window.area().pages()))
            .then(|| self.window.area().part(first, pages))
    }
}

/// All page stores that this process may map into RAM.
#[derive(Debug, Default)]
pub struct Stores(Vec<Store>);

impl Stores {
    /// Adds page store `number` of at most `max_pages` pages. If the store is known already, the
    /// new descriptor replaces the old one, and the window grows if it is too small. Fails if the
    /// number names another file.
    pub fn add(&mut self, number: u32, max_pages: u64, file: OwnedFd) -> Result<(), String> {
        if max_pages == 0 || max_pages > MAX_STORE_PAGES {
            return Err(format!(
                "a page store has 1 to {MAX_STORE_PAGES} pages, not {max_pages}"
            ));
        }
        let identity = identity(&file)?.0;
        let known = self.0.iter().position(|store| store.number == number);
        if let Some(store) = known.and_then(|n| self.0.get_mut(n)) {
            if store.identity != identity {
                return Err(format!(
                    "page store number {number} already names another file"
                ));
            }
            if max_pages <= store.window.area().pages() {
                store.file = file;
                return Ok(());
            }
        } else if self.0.len() >= MAX_STORES {
            return Err(format!("more than {MAX_STORES} page stores"));
        }
        let window = Mapping::window(&file, max_pages)
            .map_err(|errno| format!("cannot map page store {number}: {errno}"))?;
        // khugepaged looks at the mappings of processes. Without this advice, it would fill the
        // store's punched holes to make huge pages. A kernel without huge pages refuses the advice.
        let _ = window.area().advise(Advice::LinuxNoHugepage);
        let store = Store {
            number,
            file,
            identity,
            window,
            pages: 0,
        };
        match known {
            Some(n) => self.0[n] = store,
            None => self.0.push(store),
        }
        Ok(())
    }

    /// Closes page store `number`. Fails if there is none with this number.
    pub fn remove(&mut self, number: u32) -> Result<(), String> {
        let before = self.0.len();
        self.0.retain(|store| store.number != number);
        if self.0.len() == before {
            return Err(format!("no page store has the number {number}"));
        }
        Ok(())
    }

    /// Reads the size of page store `number` from the kernel, because the daemon may have appended
    /// pages.
    pub fn refresh(&mut self, number: u32) {
        if let Some(store) = self.0.iter_mut().find(|store| store.number == number) {
            store.pages = identity(&store.file).map_or(0, |(_, pages)| pages);
        }
    }

    /// Returns page store `number`; `None` if there is none with this number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&Store> {
        self.0.iter().find(|store| store.number == number)
    }
}

/// Returns a file's device and inode number, and its length in whole pages.
pub fn identity(descriptor: &OwnedFd) -> Result<((u64, u64), u64), String> {
    let stat = rustix::fs::fstat(descriptor).map_err(|errno| {
        format!("cannot read the size of the file that came with the order: {errno}")
    })?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    Ok(((stat.st_dev, stat.st_ino), size / PAGE_SIZE))
}
