//! Entry points of the library that QEMU preloads: the constructor, which starts the library's
//! thread, and replacements of `madvise` and `munmap`, which notice QEMU's discards of pages and
//! the end of RAM blocks.

use std::env;
use std::ffi::{CString, OsStr, OsString, c_int, c_void};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use memfold_sys::{region, signals};
use memfold_wire::library::{MONITOR_VARIABLE, SOCKET_VARIABLE};
use rustix::io::Errno;

use memfold_folder::{Folder, Monitor, say, serve};

/// Environment variable of QEMU with the descriptor number of an open `/dev/userfaultfd`, for a
/// QEMU that may not open the device itself.
pub const DEVICE_VARIABLE: &str = "MEMFOLD_UFFD";

/// Values of the library's environment variables, which the constructor has read.
struct Start {
    socket: OsString,
    monitor: Option<OsString>,
    device: Option<RawFd>,
}

static START: OnceLock<Start> = OnceLock::new();

/// The [`Folder`] that `madvise` and `munmap` call; null until [`install`]. A folder is never
/// freed.
static FOLDER: AtomicPtr<Folder> = AtomicPtr::new(std::ptr::null_mut());

/// ID of the process in which the library's thread runs. A process made by `fork(2)` has no such
/// thread.
static PROCESS: AtomicU32 = AtomicU32::new(0);

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    // A panic must not leave this function, because QEMU would not start then.
    let _ = std::panic::catch_unwind(|| {
        let Some(socket) = env::var_os(SOCKET_VARIABLE) else {
            return;
        };
        // A shell script that starts QEMU loads the library too, and must leave the variables to
        // QEMU.
        if !is_qemu() {
            return;
        }
        let device = env::var(DEVICE_VARIABLE).ok().and_then(|n| n.parse().ok());
        let monitor = env::var_os(MONITOR_VARIABLE);
        for name in [SOCKET_VARIABLE, MONITOR_VARIABLE, DEVICE_VARIABLE] {
            if let Ok(name) = CString::new(name) {
                // SAFETY: constructors run before `main`, in a process of one thread. `unsetenv`
                // leaves the strings that /proc/PID/environ shows in place, so the daemon can still
                // read the path there.
                unsafe { libc::unsetenv(name.as_ptr()) };
            }
        }
        let _ = START.set(Start {
            socket,
            monitor,
            device,
        });
        start_thread();
    });
}

/// Returns whether this program is QEMU's system emulator. The program's name tells, or a function
/// that QEMU exports to its modules.
fn is_qemu() -> bool {
    let named = env::current_exe().is_ok_and(|path| {
        let name = path
            .file_name()
            .map(|n| n.as_bytes().to_vec())
            .unwrap_or_default();
        name.starts_with(b"qemu-system") || name == b"qemu-kvm" || name == b"kvm"
    });
    // SAFETY: `dlsym` only looks up a name.
    named || unsafe { !libc::dlsym(libc::RTLD_DEFAULT, c"qemu_ram_mmap".as_ptr()).is_null() }
}

/// Returns the monitor that `value` names: the number of a connected socket, or a path.
fn monitor(value: &OsStr) -> Option<Monitor> {
    let Some(number) = value.to_str().and_then(|text| text.parse::<RawFd>().ok()) else {
        return Some(Monitor::new(value.into()));
    };
    // SAFETY: the variable gives the descriptor to this library, which never closes it.
    let socket = unsafe { BorrowedFd::borrow_raw(number) };
    let connected = rustix::io::fcntl_dupfd_cloexec(socket, 0)
        .map_err(io::Error::from)
        .and_then(|socket| Monitor::connected(UnixStream::from(socket)));
    connected
        .inspect_err(|error| say!("memfold: no monitor at descriptor {number}: {error}"))
        .ok()
}

fn start_thread() {
    let Some(start) = START.get() else { return };
    let process = std::process::id();
    if PROCESS.swap(process, Ordering::AcqRel) == process {
        return;
    }
    // In a child of `fork(2)` (QEMU's -daemonize), the old folder and its userfaultfd belong to the
    // parent, so the child needs new ones.
    let folder: &'static Folder = Box::leak(Box::new(Folder::new(
        start.device,
        start.monitor.as_deref().and_then(monitor),
    )));
    install(folder);
    // Listen before the thread starts, and so before QEMU opens its own sockets: a client that
    // reaches QEMU's sockets can then reach this socket too.
    let listener = match serve::listen(Path::new(&start.socket)) {
        Ok(listener) => listener,
        Err(error) => {
            say!(
                "memfold: cannot listen at {}: {error}; this VM can't be folded",
                Path::new(&start.socket).display()
            );
            return;
        }
    };
    let spawned = signals::with_all_blocked(|| {
        std::thread::Builder::new()
            .name("memfold".to_owned())
            .spawn(move || serve::serve(&listener, folder))
    });
    if let Err(error) = spawned {
        say!("memfold: cannot start a thread: {error}; this VM can't be folded");
    }
}

/// Sets the [`Folder`] that the replacements of `madvise` and `munmap` call from now on. Tests call
/// this function in their own process.
pub fn install(folder: &'static Folder) {
    FOLDER.store(std::ptr::from_ref(folder).cast_mut(), Ordering::Release);
}

/// Replaces the C library's `madvise(2)`. The [`Folder`] handles discards of folded pages; all
/// other calls go to the kernel unchanged. Calls are safe at any time, even before the constructor.
///
/// # Safety
/// The conditions of `madvise(2)` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    let at = address.expose_provenance();
    let result = match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => discard(at, length),
        _ => {
            // A QEMU that has gone to the background (-daemonize) gives its RAM this advice first.
            if advice == libc::MADV_DONTFORK {
                restart_after_fork();
            }
            None
        }
    };
    // SAFETY: the caller of this function promises what `madvise` needs.
    answer(result.unwrap_or_else(|| unsafe { region::madvise(at, length, advice) }))
}

/// Replaces the C library's `munmap(2)`. The [`Folder`] handles RAM, which QEMU unmaps when a
/// memory device was unplugged; all other calls go to the kernel unchanged. Calls are safe at any
/// time.
///
/// # Safety
/// The conditions of `munmap(2)` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, length: usize) -> c_int {
    let at = address.expose_provenance();
    let result = folder()
        .and_then(|folder| std::panic::catch_unwind(|| folder.unmap(at, length)).unwrap_or(None));
    // SAFETY: the caller of this function promises what `munmap` needs.
    answer(result.unwrap_or_else(|| unsafe { region::munmap(at, length) }))
}

/// Returns what a function of the C library returns, and sets errno.
fn answer(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            // SAFETY: glibc's pointer to errno is valid in this thread.
            unsafe { *libc::__errno_location() = errno.raw_os_error() };
            -1
        }
    }
}

fn discard(address: usize, length: usize) -> Option<Result<(), Errno>> {
    let folder = folder()?;
    std::panic::catch_unwind(|| folder.discard(address, length)).unwrap_or(None)
}

fn folder() -> Option<&'static Folder> {
    // SAFETY: the pointer is null, or points to a folder that is never freed.
    unsafe { FOLDER.load(Ordering::Acquire).as_ref() }
}

fn restart_after_fork() {
    if START.get().is_some() && PROCESS.load(Ordering::Acquire) != std::process::id() {
        let _ = std::panic::catch_unwind(start_thread);
    }
}
