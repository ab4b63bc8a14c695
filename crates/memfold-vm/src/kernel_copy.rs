//! Shares one copy of the kernel image (`-kernel`) among all QEMU processes of a trust domain.
//!
//! QEMU reads a Linux image into its memory (`hw/i386/x86-common.c`, `x86_load_linux`) and passes
//! it to the guest's boot code at each boot. So every QEMU process holds about 11 MiB that nobody
//! writes. Right after a VM's start, memfold replaces this memory by a private mapping of one
//! sealed copy. All VMs of a trust domain with the same image map that copy.
//!
//! ```text
//!   image file   | boot sector and setup | the kernel proper ................................. |
//!   in QEMU               | 16 bytes of malloc   | the kernel proper ......................... |   starts a page
//!   the copy                                   .....| whole pages of it                    |....
//! ```
//! If anything differs from what memfold expects (another malloc, another image format, other
//! bytes), QEMU keeps its own memory.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use memfold_sys::memory;
use memfold_units::{Hva, PAGE_SIZE};
use memfold_wire::library::{Advice, Order};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::Pid;

use super::Vm;

/// Bytes that glibc's malloc puts before a chunk that it maps (`malloc/malloc.c`,
/// `sysmalloc_mmap`).
const AHEAD: u64 = 16;

/// Largest kernel image that is shared, in bytes.
const MAX_IMAGE: u64 = 256 << 20;

/// Most bytes by which a mapping in QEMU may be larger than the copy. The kernel may have merged
/// neighbouring mappings; the limit excludes guest RAM from the search.
const MAX_OTHER: u64 = 16 << 20;

/// Number of copies kept for later clones. A copy that VMs have mapped exists in any case.
const KEPT: usize = 4;

/// Number of bytes by which the copy is located in memory, before all bytes are compared.
const BEGINNING: usize = 256;

/// Identity of a copy: trust domain; device, inode and length of the image file; time of its last
/// change.
type Key = (String, (u64, u64, u64), (i64, i64));

/// One copy of the kernel, without boot sector and setup.
#[derive(Debug)]
struct Copy {
    /// The first [`BEGINNING`] bytes of the kernel.
    beginning: Vec<u8>,
    /// Length of the kernel in bytes.
    bytes: u64,
    /// A sealed file with the whole pages of the kernel, aligned as in QEMU's memory.
    pages: File,
}

/// Sealed copies of kernel images, one for each trust domain and image, which VMs map.
#[derive(Debug, Default)]
pub struct KernelCopies(Mutex<VecDeque<(Key, Arc<Copy>)>>);

impl KernelCopies {
    /// Replaces the kernel image in the memory of the VM's QEMU by a mapping of the copy that the
    /// VM's trust domain shares. Returns the number of bytes that QEMU no longer holds itself; 0 if
    /// there is nothing to replace.
    ///
    /// # Errors
    ///
    /// An I/O error if the memory was not replaced; QEMU then keeps its own.
    pub fn share(&self, vm: &Vm) -> io::Result<u64> {
        let spec = vm.spec().filter(|spec| spec.foreign.is_none());
        let wanted = spec.and_then(|spec| spec.boot.kernel.as_ref().zip(spec.domain.as_ref()));
        let Some((image, domain)) = wanted else {
            return Ok(0);
        };
        let copy = self.copy(image, domain)?;
        let Some(start) = find(vm.pid(), &copy)? else {
            return Ok(0);
        };
        let hva = start.0 - AHEAD + PAGE_SIZE;
        let pages = copy.pages.metadata()?.len() / PAGE_SIZE;
        let link = vm.library_link().ok_or(io::ErrorKind::Unsupported)?;
        let mut link = link.map_err(io::Error::other)?;
        let mut ask =
            |order: &Order, file| link.order(order, file).map(drop).map_err(io::Error::other);
        let advice = Advice::default();
        ask(&Order::AddRam { hva, pages, advice }, None)?;
        let file_page = 0;
        let map = Order::Map {
            hva,
            pages,
            file_page,
        };
        let mapped = ask(&map, Some(copy.pages.as_fd()));
        // This range is not RAM of the guest.
        ask(&Order::RemoveRam { hva }, None)?;
        mapped.map(|()| pages * PAGE_SIZE)
    }

    fn copy(&self, image: &Path, domain: &str) -> io::Result<Arc<Copy>> {
        let file = File::open(image)?;
        let facts = file.metadata()?;
        let is = (facts.dev(), facts.ino(), facts.len());
        let key: Key = (domain.to_owned(), is, (facts.mtime(), facts.mtime_nsec()));
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, copy)) = kept.iter().find(|(other, _)| *other == key) {
            return Ok(copy.clone());
        }
        let copy = Arc::new(Copy::of(&file)?);
        kept.push_front((key, copy.clone()));
        kept.truncate(KEPT);
        Ok(copy)
    }
}

impl Copy {
    fn of(image: &File) -> io::Result<Self> {
        let length = image.metadata()?.len();
        let why = "the file is not a Linux kernel image";
        let nonsense = || io::Error::new(io::ErrorKind::InvalidData, why);
        // The kernel's Documentation/arch/x86/boot.rst: setup_sects at 0x1f1, 0 stands for 4;
        // "HdrS" at 0x202.
        let mut head = [0; 0x206];
        image.read_exact_at(&mut head, 0)?;
        if length > MAX_IMAGE || head[0x202..] != *b"HdrS" {
            return Err(nonsense());
        }
        let setup = match head[0x1f1] {
            0 => 4,
            sectors => u64::from(sectors),
        };
        let from = (setup + 1) * 512;
        let bytes = length.checked_sub(from).ok_or_else(nonsense)?;
        let first = PAGE_SIZE - AHEAD;
        let pages = bytes.saturating_sub(first) / PAGE_SIZE;
        if pages == 0 {
            return Err(nonsense());
        }
        let mut beginning = vec![0; BEGINNING];
        image.read_exact_at(&mut beginning, from)?;
        let mut whole = vec![0; usize::try_from(pages * PAGE_SIZE).map_err(io::Error::other)?];
        image.read_exact_at(&mut whole, from + first)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let pages = File::from(memfd_create("memfold-kernel", flags)?);
        pages.write_all_at(&whole, 0)?;
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&pages, seals)?;
        Ok(Self {
            beginning,
            bytes,
            pages,
        })
    }

    /// Returns whether the whole copy is at address `start` of a process.
    fn is_at(&self, pid: Pid, start: Hva) -> io::Result<bool> {
        let mut at = start.0 - AHEAD + PAGE_SIZE;
        // These buffers are so small that a core's cache holds both.
        let (mut theirs, mut ours) = (vec![0; 128 << 10], vec![0; 128 << 10]);
        let mut done = 0;
        loop {
            let count = self.pages.read_at(&mut ours, done)?;
            if count == 0 {
                return Ok(true);
            }
            let theirs = &mut theirs[..count];
            if memory::read(pid, Hva(at), theirs)? < count || *theirs != ours[..count] {
                return Ok(false);
            }
            done += count as u64;
            at += count as u64;
        }
    }
}

/// Finds the copy in a process's anonymous memory.
fn find(pid: Pid, copy: &Copy) -> io::Result<Option<Hva>> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()))?;
    let mut beginning = vec![0; copy.beginning.len()];
    for (from, to) in maps.lines().filter_map(anonymous) {
        if to - from < copy.bytes || to - from > copy.bytes + MAX_OTHER {
            continue;
        }
        let pages = (0..=(to - from - copy.bytes) / PAGE_SIZE).map(|page| from + page * PAGE_SIZE);
        for page in pages {
            let start = Hva(page + AHEAD);
            let count = memory::read(pid, start, &mut beginning)?;
            if count == beginning.len() && beginning == copy.beginning && copy.is_at(pid, start)? {
                return Ok(Some(start));
            }
        }
    }
    Ok(None)
}

/// Parses a line of `/proc/PID/maps` (proc(5)). Returns the range if it is private, writable memory
/// without a file.
fn anonymous(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let is_private = fields.next()? == "rw-p";
    let has_no_file = fields.nth(2)? == "0" && fields.next().is_none();
    let at = |text| u64::from_str_radix(text, 16).ok();
    (is_private && has_no_file).then_some((at(from)?, at(to)?))
}

#[cfg(test)]
mod tests {
    use memfold_sys::region::Mapping;
    use rustix::process::getpid;

    use super::*;

    const SETUP: usize = 15 * 512;

    /// Makes an image with a kernel proper of `bytes` bytes. Returns its file and all of its bytes,
    /// in one piece: if the kernel were alone in memory, malloc would place it as in QEMU, and the
    /// search would find it here.
    fn image(bytes: usize, seed: u64) -> (File, Vec<u8>) {
        let mut all = vec![0_u8; SETUP + bytes];
        all[0x1f1] = 14;
        all[0x202..0x206].copy_from_slice(b"HdrS");
        let body = all[SETUP..].chunks_mut(8).enumerate();
        for (number, word) in body {
            let number = (number as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            word.copy_from_slice(&number.to_le_bytes()[..word.len()]);
        }
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&all, 0).unwrap();
        (file, all)
    }

    #[test]
    fn qemus_copy_of_the_guest_kernel_file_is_found_in_its_memory_only_if_complete() {
        let (file, all) = image(3_000_003, 1);
        let body = &all[SETUP..];
        let copy = Copy::of(&file).unwrap();
        assert_eq!(copy.bytes, 3_000_003);
        let whole = (3_000_003 - 4080) / 4096 * 4096;
        assert_eq!(copy.pages.metadata().unwrap().len(), whole);
        // malloc places a piece of this size in a mapping of its own; this mapping imitates that.
        let held = Mapping::anonymous(1000, false).unwrap();
        let own = Hva(held.area().start().0 + 17 * PAGE_SIZE + AHEAD);
        let put = |at: usize, bytes: &[u8]| {
            let there = Hva(own.0 + at as u64);
            assert_eq!(memory::write(getpid(), there, bytes).unwrap(), bytes.len());
        };
        put(0, body);
        assert_eq!(find(getpid(), &copy).unwrap(), Some(own));
        put(1_500_000, &[body[1_500_000] ^ 1]);
        assert_eq!(find(getpid(), &copy).unwrap(), None);
        put(1_500_000, &body[1_500_000..=1_500_000]);
        assert_eq!(find(getpid(), &copy).unwrap(), Some(own));
        let (other, _) = image(3_000_003, 2);
        assert_eq!(find(getpid(), &Copy::of(&other).unwrap()).unwrap(), None);
        // The sealed file cannot be changed.
        copy.pages.write_all_at(b"x", 0).unwrap_err();
        copy.pages.set_len(0).unwrap_err();
    }

    #[test]
    fn a_file_that_is_not_a_linux_kernel_image_is_refused() {
        for bytes in [&b""[..], &[0; 0x206], &[0xff; 8192]] {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(bytes, 0).unwrap();
            Copy::of(&file).unwrap_err();
        }
        let (file, _) = image(100, 1);
        Copy::of(&file).unwrap_err();
    }

    #[test]
    fn each_trust_domain_and_each_version_of_a_kernel_file_has_a_separate_shared_copy() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinuz");
        let put = |seed| {
            let (file, _) = image(100_000, seed);
            let mut bytes = vec![0; SETUP + 100_000];
            file.read_exact_at(&mut bytes, 0).unwrap();
            std::fs::write(&path, bytes).unwrap();
        };
        put(1);
        let copies = KernelCopies::default();
        let of = |domain| copies.copy(&path, domain).unwrap();
        let first = of("a");
        assert!(Arc::ptr_eq(&first, &of("a")));
        assert!(!Arc::ptr_eq(&first, &of("b")));
        std::thread::sleep(std::time::Duration::from_millis(20));
        put(2);
        assert_ne!(of("a").beginning, first.beginning);
        for domain in ["c", "d", "e", "f", "g"] {
            of(domain);
        }
        assert_eq!(copies.0.lock().unwrap().len(), KEPT);
    }

    #[test]
    fn only_private_anonymous_memory_of_qemu_is_searched_for_a_copy_of_the_kernel_file() {
        let line = "7f0000000000-7f0000b34000 rw-p 00000000 00:00 0 ";
        assert_eq!(anonymous(line), Some((0x7f00_0000_0000, 0x7f00_00b3_4000)));
        for other in [
            "7f0000000000-7f0000b34000 r--p 00000000 00:00 0 ",
            "7f0000000000-7f0000b34000 rw-s 00000000 00:01 12 /memfd:x (deleted)",
            "55d000000000-55d000b34000 rw-p 00000000 00:00 0 [heap]",
            "nonsense",
        ] {
            assert_eq!(anonymous(other), None, "{other}");
        }
    }
}
