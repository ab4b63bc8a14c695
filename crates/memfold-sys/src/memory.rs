//! Reads and writes the memory of another process, such as QEMU (`process_vm_readv(2)`,
//! `process_vm_writev(2)`).

use std::io;

use memfold_units::{Hva, PAGE_BYTES};
use rustix::process::Pid;

/// Copies `buffer.len()` bytes at address `from` of process `pid` into `buffer`. Returns the number
/// of bytes copied, which is less if a later page is not mapped. The caller needs the right to
/// trace the process (root).
///
/// The kernel reads swapped pages back into memory. Holes in anonymous memory read as zeroes, and
/// the kernel maps the zero page there.
pub fn read(pid: Pid, from: Hva, buffer: &mut [u8]) -> io::Result<usize> {
    let length = buffer.len();
    read_many(pid, &[(from, length)], buffer)
}

/// Makes the kernel allocate the whole pages within a buffer at once, instead of one by one when
/// they are written first. Fails on kernels before Linux 5.14 (`MADV_POPULATE_WRITE` of
/// `madvise(2)`), and without enough memory.
pub fn populate(buffer: &mut [u8]) -> io::Result<()> {
    let skipped = buffer.as_ptr().align_offset(PAGE_BYTES);
    let Some(pages) = buffer.get_mut(skipped..) else {
        return Ok(());
    };
    let length = pages.len() / PAGE_BYTES * PAGE_BYTES;
    // SAFETY: the range is within `buffer`, and allocating its pages changes no byte of them.
    let done = unsafe {
        rustix::mm::madvise(
            pages.as_mut_ptr().cast(),
            length,
            rustix::mm::Advice::LinuxPopulateWrite,
        )
    };
    Ok(done?)
}

/// Copies up to 1,024 ranges (`IOV_MAX`) of process `pid` into `buffer`, one after another. Each
/// range is an address and a length in bytes; `buffer` must be long enough for all. Returns the
/// number of bytes copied. The copy stops in the first range that cannot be read completely.
pub fn read_many(pid: Pid, ranges: &[(Hva, usize)], buffer: &mut [u8]) -> io::Result<usize> {
    let local = entry(buffer.as_mut_ptr(), buffer.len());
    let remote = ranges.iter().map(|&(from, length)| remote(from, length));
    let remote = remote.collect::<io::Result<Vec<_>>>()?;
    // SAFETY: `local` is `buffer`, which is borrowed for writing.
    unsafe { transfer(libc::process_vm_readv, pid, &[local], &remote) }
}

/// Copies up to 1,024 ranges (`IOV_MAX`) of process `pid`, each to a buffer of its own, with one
/// system call. Returns the number of bytes copied. The copy stops in the first range that cannot
/// be read completely.
pub fn read_parts(pid: Pid, parts: &mut [(Hva, &mut [u8])]) -> io::Result<usize> {
    let remote = parts.iter().map(|(from, part)| remote(*from, part.len()));
    let remote = remote.collect::<io::Result<Vec<_>>>()?;
    let local = parts.iter_mut();
    let local: Vec<_> = local
        .map(|(_, part)| entry(part.as_mut_ptr(), part.len()))
        .collect();
    // SAFETY: each entry of `local` is one of `parts`, which are borrowed for writing.
    unsafe { transfer(libc::process_vm_readv, pid, &local, &remote) }
}

/// Writes `bytes` at address `to` of process `pid`. Returns the number of bytes written, which is
/// less if a later page is not mapped or not writable.
pub fn write(pid: Pid, to: Hva, bytes: &[u8]) -> io::Result<usize> {
    let local = entry(bytes.as_ptr().cast_mut(), bytes.len());
    let remote = remote(to, bytes.len())?;
    // SAFETY: the kernel only reads `local`, which is `bytes`.
    unsafe { transfer(libc::process_vm_writev, pid, &[local], &[remote]) }
}

fn entry(start: *mut u8, length: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: length,
    }
}

/// Returns a range of the other process, which is never dereferenced in this process.
fn remote(start: Hva, length: usize) -> io::Result<libc::iovec> {
    let start = usize::try_from(start.0).map_err(io::Error::other)?;
    Ok(entry(std::ptr::with_exposed_provenance_mut(start), length))
}

type Transfer = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

/// Calls `process_vm_readv(2)` or `process_vm_writev(2)`.
///
/// # Safety
/// Each entry of `local` is valid for its own length: for writes if `call` reads the other process.
unsafe fn transfer(
    call: Transfer,
    pid: Pid,
    local: &[libc::iovec],
    remote: &[libc::iovec],
) -> io::Result<usize> {
    let count = |entries: &[libc::iovec]| entries.len() as libc::c_ulong;
    let (pid, to, from) = (pid.as_raw_nonzero().get(), count(local), count(remote));
    // SAFETY: the caller's promise; both lists live through the call.
    let copied = unsafe { call(pid, local.as_ptr(), to, remote.as_ptr(), from, 0) };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_reads_its_own_memory() {
        let source: Vec<u8> = (0..=255).collect();
        let mut copy = [0; 256];
        let n = read(
            rustix::process::getpid(),
            Hva(source.as_ptr().expose_provenance() as u64),
            &mut copy,
        )
        .unwrap();
        assert_eq!((n, &copy[..]), (256, &source[..]));
    }

    #[test]
    fn several_memory_ranges_are_read_into_separate_buffers() {
        let source: Vec<u8> = (0..=255).collect();
        let at = |offset: u64| Hva(source.as_ptr().expose_provenance() as u64 + offset);
        let (mut first, mut second) = ([0; 3], [0; 2]);
        let parts = &mut [(at(200), &mut first[..]), (at(7), &mut second[..])];
        let read = read_parts(rustix::process::getpid(), parts).unwrap();
        assert_eq!((read, first, second), (5, [200, 201, 202], [7, 8]));
        // Reading ends before the range that is not mapped.
        let parts = &mut [(at(9), &mut first[..]), (Hva(4096), &mut second[..])];
        let read = read_parts(rustix::process::getpid(), parts).unwrap();
        assert_eq!((read, first, second), (3, [9, 10, 11], [7, 8]));
    }

    #[test]
    fn reading_an_unmapped_address_is_an_error() {
        assert!(read(rustix::process::getpid(), Hva(4096), &mut [0; 16]).is_err());
    }
}
