//! Looks up the groups of the process at the other end of a Unix socket, and converts between
//! numbers and names of users and groups. The daemon's access control uses this.

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

/// Most groups that the kernel gives a process (`NGROUPS_MAX`, limits.h).
const MOST_GROUPS: usize = 65_536;

/// Largest entry of the user and group databases that is read, in bytes.
const MOST_BYTES: usize = 1 << 20;

/// Returns the supplementary groups that the peer process of a Unix stream socket had when it
/// connected (`SO_PEERGROUPS`, Linux >= 4.13). Groups from `/proc/PID/status` could belong to a
/// later process with the same process ID; these cannot.
pub fn groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let fd = socket.as_fd().as_raw_fd();
    let mut groups = vec![0u32; 64];
    loop {
        let mut bytes = socklen(groups.len() * size_of::<u32>())?;
        // SAFETY: the buffer has `bytes` bytes, and any bytes are valid u32s.
        let result = unsafe {
            libc::getsockopt(
                fd,
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let wanted = bytes as usize / size_of::<u32>();
        if result == 0 {
            groups.truncate(wanted);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // After ERANGE, `bytes` holds the needed size.
        if error.raw_os_error() != Some(libc::ERANGE)
            || wanted <= groups.len()
            || wanted > MOST_GROUPS
        {
            return Err(error);
        }
        groups.resize(wanted, 0);
    }
}

fn socklen(bytes: usize) -> io::Result<libc::socklen_t> {
    libc::socklen_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Returns the number of the group `name`, from the host's group databases (`getgrnam_r(3)`);
/// `None` if there is no such group.
pub fn group_id(name: &str) -> io::Result<Option<u32>> {
    let name = CString::new(name)?;
    // SAFETY: name is a C string.
    unsafe { look_up(libc::getgrnam_r, name.as_ptr(), |group| group.gr_gid) }
}

/// Returns the numbers of the user `name` and of its primary group, from the host's databases
/// (`getpwnam_r(3)`); `None` if there is no such user.
pub fn user_ids(name: &str) -> io::Result<Option<(u32, u32)>> {
    let name = CString::new(name)?;
    let ids = |user: &libc::passwd| (user.pw_uid, user.pw_gid);
    // SAFETY: name is a C string.
    unsafe { look_up(libc::getpwnam_r, name.as_ptr(), ids) }
}

/// Returns the name of the user with this number (`getpwuid_r(3)`); `None` if there is no such
/// user.
pub fn user_name(uid: u32) -> io::Result<Option<String>> {
    // SAFETY: the name of a user that was found is a C string.
    let name = |user: &libc::passwd| unsafe { CStr::from_ptr(user.pw_name) };
    let name = |user: &libc::passwd| name(user).to_string_lossy().into_owned();
    // SAFETY: the key is a number.
    unsafe { look_up(libc::getpwuid_r, uid, name) }
}

/// A function of the C library that finds an entry of a database by its key.
type Call<K, E> =
    unsafe extern "C" fn(K, *mut E, *mut libc::c_char, libc::size_t, *mut *mut E) -> libc::c_int;

/// Repeats `call` with a larger buffer until the answer fits, and passes the entry to `read`.
///
/// # Safety
/// `call` is `getgrnam_r(3)` or one of its kind, and `key` is valid for it.
unsafe fn look_up<K: Copy, E, T>(
    call: Call<K, E>,
    key: K,
    read: impl Fn(&E) -> T,
) -> io::Result<Option<T>> {
    let mut buffer = vec![0u8; 4096];
    loop {
        let (mut entry, mut found) = (MaybeUninit::<E>::uninit(), ptr::null_mut::<E>());
        let (start, length) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: the caller's promise; entry and buffer live until `read` is over, and buffer's
        // length is its own.
        match unsafe { call(key, entry.as_mut_ptr(), start, length, &raw mut found) } {
            // SAFETY: null, or it points to `entry`, which the call has filled.
            0 => return Ok(unsafe { found.as_ref() }.map(read)),
            libc::ERANGE if length < MOST_BYTES => buffer.resize(length * 4, 0),
            // Some databases report a missing entry by these errors (getgrnam_r(3)).
            libc::ENOENT | libc::ESRCH => return Ok(None),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_groups_of_a_socket_peer_equal_the_groups_of_its_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("Groups:"));
        let mut wanted: Vec<u32> = line
            .unwrap()
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        let mut found = groups(&ours).unwrap();
        wanted.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, wanted);
    }

    #[test]
    fn users_and_groups_are_found_by_name_and_unknown_names_are_not_found() {
        assert_eq!(group_id("root").unwrap(), Some(0));
        assert_eq!(group_id("no-such-group-here").unwrap(), None);
        assert!(group_id("a\0b").is_err());
        assert_eq!(user_ids("root").unwrap(), Some((0, 0)));
        assert_eq!(user_ids("no-such-user-here").unwrap(), None);
        assert_eq!(user_name(0).unwrap().as_deref(), Some("root"));
        assert_eq!(user_name(3_999_999_999).unwrap(), None);
    }
}
