//! Reads and writes another process's memory with `process_vm_readv(2)` and `process_vm_writev(2)`.

use std::io;

use memfold_units::Hva;
use rustix::process::Pid;

/// Copies `buffer.len()` bytes at address `from` of process `pid` into `buffer`. Returns the number
/// of bytes copied, which is less if a later page is not mapped. Needs the right to trace the
/// process (root).
///
/// Swapped pages are read back into memory. Holes in anonymous memory read as zeroes and are mapped
/// to the zero page.
pub fn read(pid: Pid, from: Hva, buffer: &mut [u8]) -> io::Result<usize> {
    let length = buffer.len();
    read_many(pid, &[(from, length)], buffer)
}

/// Copies ranges of a process's memory, each given by address and length in bytes, one after
/// another into `buffer`, which must be long enough for all. Returns the number of bytes copied.
/// The copy stops in the first range that cannot be read completely. At most 1,024 ranges
/// (`IOV_MAX`).
pub fn read_many(pid: Pid, ranges: &[(Hva, usize)], buffer: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let remote = ranges.iter().map(|&(from, length)| {
        Ok(libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(
                usize::try_from(from.0).map_err(io::Error::other)?,
            ),
            iov_len: length,
        })
    });
    let remote = remote.collect::<io::Result<Vec<libc::iovec>>>()?;
    let count = libc::c_ulong::try_from(remote.len()).map_err(io::Error::other)?;
    // SAFETY: `local` is `buffer`, valid for writes of its own length; `remote` is never
    // dereferenced in this process.
    let copied = unsafe {
        libc::process_vm_readv(
            pid.as_raw_nonzero().get(),
            &raw const local,
            1,
            remote.as_ptr(),
            count,
            0,
        )
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// Copies several ranges of a process's memory, each to a buffer of its own, with one system call.
/// Returns the number of bytes copied. The copy stops in the first range that cannot be read
/// completely. At most 1,024 ranges (`IOV_MAX`).
pub fn read_parts(pid: Pid, parts: &mut [(Hva, &mut [u8])]) -> io::Result<usize> {
    let mut local = Vec::with_capacity(parts.len());
    let mut remote = Vec::with_capacity(parts.len());
    for (from, part) in parts {
        let from = usize::try_from(from.0).map_err(io::Error::other)?;
        local.push(libc::iovec {
            iov_base: part.as_mut_ptr().cast(),
            iov_len: part.len(),
        });
        remote.push(libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(from),
            iov_len: part.len(),
        });
    }
    let count = libc::c_ulong::try_from(local.len()).map_err(io::Error::other)?;
    // SAFETY: each entry of `local` is one of `parts`, which are borrowed for writing and valid for
    // their own lengths; `remote` is never dereferenced in this process.
    let copied = unsafe {
        libc::process_vm_readv(
            pid.as_raw_nonzero().get(),
            local.as_ptr(),
            count,
            remote.as_ptr(),
            count,
            0,
        )
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// Writes `bytes` at address `to` of process `pid`. Returns the number of bytes written, which is
/// less if a later page is not mapped or not writable.
pub fn write(pid: Pid, to: Hva, bytes: &[u8]) -> io::Result<usize> {
    let local = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let remote = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(
            usize::try_from(to.0).map_err(io::Error::other)?,
        ),
        iov_len: bytes.len(),
    };
    // SAFETY: the kernel only reads `local`, which is `bytes`; `remote` is never dereferenced in
    // this process.
    let written = unsafe {
        libc::process_vm_writev(
            pid.as_raw_nonzero().get(),
            &raw const local,
            1,
            &raw const remote,
            1,
            0,
        )
    };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
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
