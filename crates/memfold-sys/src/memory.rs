//! Reading another process's memory with `process_vm_readv(2)`.

use std::io;

use memfold_units::Hva;
use rustix::process::Pid;

/// Copies `buffer.len()` bytes at `from` in process `pid` into `buffer`; the number of bytes copied, which is less when a
/// later page is not mapped. Needs the right to trace the process (root).
///
/// Pages that were swapped out are read back in. Holes in anonymous memory read as zeroes and become backed by the zero page.
pub fn read(pid: Pid, from: Hva, buffer: &mut [u8]) -> io::Result<usize> {
    let length = buffer.len();
    read_many(pid, &[(from, length)], buffer)
}

/// Copies ranges of a process's memory, each given by address and length in bytes, one after the other into `buffer`, which is at
/// least as long as all of them; the number of bytes copied. It ends within the first range that can't be read whole. At most
/// 1,024 ranges (`IOV_MAX`).
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
    // SAFETY: `local` is `buffer`, valid for writes of its own length; `remote` is never dereferenced in this process.
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

/// Writes `bytes` at `to` in process `pid`; the number of bytes written, which is less when a later page is not mapped or not
/// writable.
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
    // SAFETY: the kernel only reads `local`, which is `bytes`; `remote` is never dereferenced in this process.
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
    fn reads_its_own_memory() {
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
    fn an_unmapped_address_is_an_error() {
        assert!(read(rustix::process::getpid(), Hva(4096), &mut [0; 16]).is_err());
    }
}
