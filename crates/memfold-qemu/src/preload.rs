//! Entry points of the preloaded library: the constructor, which starts its thread, and the
//! interposed `madvise`, which sees QEMU's discards.

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

/// Environment variable with the number of an open `/dev/userfaultfd`, for a QEMU that may not open
/// it itself.
pub const DEVICE_VARIABLE: &str = "MEMFOLD_UFFD";

/// Settings that the constructor found in the environment.
struct Start {
    socket: OsString,
    monitor: Option<OsString>,
    device: Option<RawFd>,
}

static START: OnceLock<Start> = OnceLock::new();

/// Folder that `madvise` calls; null until it exists. It is never freed.
static FOLDER: AtomicPtr<Folder> = AtomicPtr::new(std::ptr::null_mut());

/// Process in which the thread runs. A process made by `fork(2)` has no such thread.
static PROCESS: AtomicU32 = AtomicU32::new(0);

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    // Nothing may leave this function: QEMU would not start.
    let _ = std::panic::catch_unwind(|| {
        let Some(socket) = env::var_os(SOCKET_VARIABLE) else {
            return;
        };
        // A shell script that starts QEMU has the library too, and must hand the variable on.
        if !is_qemu() {
            return;
        }
        let device = env::var(DEVICE_VARIABLE).ok().and_then(|n| n.parse().ok());
        let monitor = env::var_os(MONITOR_VARIABLE);
        for name in [SOCKET_VARIABLE, MONITOR_VARIABLE, DEVICE_VARIABLE] {
            if let Ok(name) = CString::new(name) {
                // SAFETY: constructors run before `main`, in a process of one thread. The strings
                // that /proc/PID/environ shows stay where they are, so the daemon can read the path
                // there.
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

/// Returns whether this program is QEMU's system emulator: by its name, or by a function that QEMU
/// exports to its modules.
fn is_qemu() -> bool {
    let named = env::current_exe().is_ok_and(|path| {
        let name = path
            .file_name()
            .map(|n| n.as_bytes().to_vec())
            .unwrap_or_default();
        name.starts_with(b"qemu-system") || name == b"qemu-kvm" || name == b"kvm"
    });
    // SAFETY: looks a name up, nothing more.
    named || unsafe { !libc::dlsym(libc::RTLD_DEFAULT, c"qemu_ram_mmap".as_ptr()).is_null() }
}

/// Returns the monitor that the variable names: by the number of a connected socket, or by a path.
fn monitor(value: &OsStr) -> Option<Monitor> {
    let Some(number) = value.to_str().and_then(|text| text.parse::<RawFd>().ok()) else {
        return Some(Monitor::new(value.into()));
    };
    // SAFETY: it is ours by the variable, and is never closed.
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
    // After `fork(2)` (QEMU's -daemonize) the old userfaultfd is the parent's, and so is the
    // folder.
    let folder: &'static Folder = Box::leak(Box::new(Folder::new(
        start.device,
        start.monitor.as_deref().and_then(monitor),
    )));
    install(folder);
    // Before the thread, and so before QEMU's own sockets: whoever has reached those expects this
    // one.
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

/// Sets the folder that `madvise` calls. Tests do this in their own process.
pub fn install(folder: &'static Folder) {
    FOLDER.store(std::ptr::from_ref(folder).cast_mut(), Ordering::Release);
}

/// Interposes `madvise(2)`. The folder handles discards of folded pages; everything else goes
/// straight to the kernel. Safe at any time, even before the constructor.
///
/// # Safety
/// As for `madvise(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    let at = address.expose_provenance();
    let result = match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => discard(at, length),
        _ => {
            // The first thing that a QEMU gone to the background (-daemonize) does with its RAM.
            if advice == libc::MADV_DONTFORK {
                restart_after_fork();
            }
            None
        }
    };
    // SAFETY: the caller's promise.
    let result = result.unwrap_or_else(|| unsafe { region::madvise(at, length, advice) });
    match result {
        Ok(()) => 0,
        Err(errno) => {
            // SAFETY: glibc's errno of this thread.
            unsafe { *libc::__errno_location() = errno.raw_os_error() };
            -1
        }
    }
}

fn discard(address: usize, length: usize) -> Option<Result<(), Errno>> {
    // SAFETY: null, or a folder that is never freed.
    let folder = unsafe { FOLDER.load(Ordering::Acquire).as_ref() }?;
    std::panic::catch_unwind(|| folder.discard(address, length)).unwrap_or(None)
}

fn restart_after_fork() {
    if START.get().is_some() && PROCESS.load(Ordering::Acquire) != std::process::id() {
        let _ = std::panic::catch_unwind(start_thread);
    }
}
