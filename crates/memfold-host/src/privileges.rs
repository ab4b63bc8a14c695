//! Gives up what the daemon does not need of root's rights.
//!
//! 1. The whole process keeps the capabilities in [`KEPT`] and no others, in its bounding set too.
//!    Programs that it starts, such as QEMU, cannot have more.
//! 2. Threads that parse what network peers and guests sent have no capabilities at all, and a
//!    seccomp filter: they start no process, load no code, touch no other process and open no
//!    connection.
//!
//! Threads of one process share their memory. So a filter holds back a parser that was tricked into
//! an operation, or code that calls the kernel itself. It does not hold back code that changes the
//! memory of the process until another thread does what it wants ([decision
//! 58](../../../docs/decisions/0058-threads-give-up-rights.md)).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::process::{getpid, test_kill_process};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

/// Capabilities that the daemon keeps, and what it does with each.
pub const KEPT: [(CapabilitySet, &str); 17] = [
    (
        CapabilitySet::SYS_PTRACE,
        "reads memory, page maps and descriptors of QEMUs of other users (process_vm_readv, /proc/PID/pagemap, pidfd_getfd)",
    ),
    (
        CapabilitySet::SYS_ADMIN,
        "reads page frame numbers (/proc/PID/pagemap, /proc/kpageflags), makes the tmpfs of page stores (fsopen) and bubblewrap's namespaces",
    ),
    (
        CapabilitySet::DAC_OVERRIDE,
        "uses sockets, disks and directories of VMs that belong to other users",
    ),
    (
        CapabilitySet::FOWNER,
        "changes mode and times of files that belong to other users (segments, files of VMs)",
    ),
    (
        CapabilitySet::CHOWN,
        "gives files to the users of VMs, and builds segments with the owners of their files",
    ),
    (
        CapabilitySet::FSETID,
        "keeps the set-group-ID bit of files in segments",
    ),
    (
        CapabilitySet::SETFCAP,
        "copies file capabilities into segments",
    ),
    (CapabilitySet::MKNOD, "copies device files into segments"),
    (
        CapabilitySet::LINUX_IMMUTABLE,
        "protects images of segments against truncation (chattr +i)",
    ),
    (
        CapabilitySet::KILL,
        "ends QEMUs and helper programs of other users",
    ),
    (
        CapabilitySet::SETUID,
        "starts QEMU and helper programs as another user",
    ),
    (
        CapabilitySet::SETGID,
        "starts QEMU and helper programs with another user's groups",
    ),
    (
        CapabilitySet::NET_ADMIN,
        "makes tap and macvtap devices and connects them to bridges",
    ),
    (
        CapabilitySet::NET_BIND_SERVICE,
        "listens on ports below 1024 (--listen, --lend-ports, ports that QEMU forwards)",
    ),
    (
        CapabilitySet::IPC_LOCK,
        "locks lent memory, and the relays' own memory, in RAM",
    ),
    (
        CapabilitySet::SYS_RESOURCE,
        "lets a QEMU without root's rights lock memory (RLIMIT_MEMLOCK)",
    ),
    (
        CapabilitySet::LEASE,
        "finds out whether a VM's user still has a disk open for writing (F_SETLEASE)",
    ),
];

/// Returns the set of the capabilities that the daemon keeps.
#[must_use]
pub fn kept() -> CapabilitySet {
    KEPT.iter()
        .fold(CapabilitySet::empty(), |set, (one, _)| set | *one)
}

/// Drops all capabilities but those in [`KEPT`] from all sets of this thread, and forbids it to
/// gain any by starting a program (`PR_SET_NO_NEW_PRIVS`). Threads and programs that it starts
/// later inherit this, so the daemon calls this function before it starts a thread. Without root's
/// rights there are none to drop.
///
/// # Errors
///
/// The error of the kernel; some capabilities may have been dropped.
pub fn drop_unneeded() -> io::Result<()> {
    let now = capabilities(None)?;
    if now.permitted.is_empty() {
        return Ok(());
    }
    if now.effective.contains(CapabilitySet::SETPCAP) {
        // The kernel may know more capabilities than this program. It refuses numbers that it does
        // not know.
        for number in 0..u64::BITS {
            let one = CapabilitySet::from_bits_retain(1 << number);
            match capability_is_in_bounding_set(one) {
                Ok(true) if !kept().contains(one) => remove_capability_from_bounding_set(one)?,
                Ok(_) => {}
                Err(_) => break,
            }
        }
    }
    set_no_new_privs(true)?;
    let left = now.permitted & kept();
    let sets = CapabilitySets {
        effective: left,
        permitted: left,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

/// What a confined thread may do with files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// Opens, creates and replaces files with the rights of its user.
    Open,
    /// Uses only files and sockets that are open.
    None,
}

/// Why a thread could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// The kernel did not drop the capabilities.
    #[error("cannot drop the capabilities of the thread")]
    Capabilities(#[source] io::Error),
    /// The filter cannot be built for this processor.
    #[error("cannot build the thread's seccomp filter: {0}")]
    Build(String),
    /// The kernel did not take the filter.
    #[error("cannot install the thread's seccomp filter")]
    Install(#[source] seccompiler::Error),
}

/// Takes all capabilities from the calling thread, and installs a seccomp filter: what a parser of
/// foreign bytes never needs fails with `EPERM`. Threads that it starts inherit both.
///
/// # Errors
///
/// [`ConfineError`] if the kernel refuses. The thread may then be confined in part.
pub fn confine_thread(files: Files) -> Result<(), ConfineError> {
    static FILTERS: [OnceLock<Result<BpfProgram, String>>; 2] = [OnceLock::new(), OnceLock::new()];
    if is_confined(files) {
        return Ok(());
    }
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, none).map_err(|errno| ConfineError::Capabilities(errno.into()))?;
    let program = FILTERS[usize::from(files == Files::None)].get_or_init(|| build(files));
    let program = program
        .as_ref()
        .map_err(|why| ConfineError::Build(why.clone()))?;
    seccompiler::apply_filter(program).map_err(ConfineError::Install)
}

/// Returns whether this thread has inherited the filter. Each further filter would slow down system
/// calls, and the kernel limits their number.
fn is_confined(files: Files) -> bool {
    // Both calls succeed without a filter.
    let no_signals = test_kill_process(getpid()) == Err(Errno::PERM);
    let no_files = || File::open("/proc/self/status").is_err();
    no_signals && (files == Files::Open || no_files())
}

/// Like [`confine_thread`]; the first failure is logged, and the thread goes on.
pub fn confine_thread_or_warn(files: Files) {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    if let Err(error) = confine_thread(files) {
        if IS_TOLD.swap(true, Ordering::Relaxed) {
            return;
        }
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "cannot confine threads that parse foreign bytes; they keep the daemon's rights. Allow seccomp(2) and capset(2) where the daemon runs"
        );
    }
}

/// System calls that no confined thread may make.
const FORBIDDEN: &[i64] = &[
    // Starts programs and processes. Threads may be started (`clone` with CLONE_THREAD).
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    // Reads, changes and signals other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    // Changes users, namespaces and mounts.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    // Opens connections. Confined threads use sockets that others opened, or accept connections.
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    // Reaches large or rarely used parts of the kernel; io_uring evades this filter.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_bpf,
    libc::SYS_userfaultfd,
    libc::SYS_perf_event_open,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_quotactl,
    libc::SYS_acct,
    // Changes the kernel or the host.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_personality,
    libc::SYS_syslog,
    libc::SYS_vhangup,
];

/// System calls that name a file, which threads with [`Files::None`] may not make either.
const FILE_CALLS: &[i64] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_creat,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rmdir,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_truncate,
    libc::SYS_chmod,
    libc::SYS_fchmodat,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_utimensat,
    libc::SYS_chdir,
    libc::SYS_memfd_create,
];

/// First number of system calls of the x32 ABI (`__X32_SYSCALL_BIT`). They are the same calls under
/// other numbers.
const X32: u32 = 0x4000_0000;

/// Builds the filter of threads that may do `files`.
fn build(files: Files) -> Result<BpfProgram, String> {
    let told = |error: seccompiler::BackendError| error.to_string();
    let when = |argument: u8, mask: i32, value: i32| {
        let (mask, value) = (mask.unsigned_abs().into(), value.unsigned_abs().into());
        let masked = SeccompCmpOp::MaskedEq(mask);
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Qword, masked, value)
            .map_err(told)?;
        Ok::<_, String>(vec![SeccompRule::new(vec![condition]).map_err(told)?])
    };
    let more = match files {
        Files::Open => &[],
        Files::None => FILE_CALLS,
    };
    let all = FORBIDDEN.iter().chain(more).map(|&call| (call, Vec::new()));
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = all.collect();
    // New code cannot be put into memory.
    let executable = [
        (libc::SYS_mmap, 2),
        (libc::SYS_mprotect, 2),
        (libc::SYS_pkey_mprotect, 2),
    ];
    for (call, protection) in executable {
        rules.insert(call, when(protection, libc::PROT_EXEC, libc::PROT_EXEC)?);
    }
    rules.insert(libc::SYS_clone, when(0, libc::CLONE_THREAD, 0)?);
    let refused = errno(libc::EPERM);
    let architecture = std::env::consts::ARCH.try_into().map_err(told)?;
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(refused),
        architecture,
    );
    let rest: BpfProgram = filter.map_err(told)?.try_into().map_err(told)?;
    Ok(prologue().into_iter().chain(rest).collect())
}

/// Returns instructions that refuse the x32 ABI, and clone3(2), whose flags no filter can see. The
/// C library then calls clone(2).
fn prologue() -> [sock_filter; 5] {
    let [load, equal, at_least, end] = [
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    ]
    .map(|code| u16::try_from(code).unwrap_or_default());
    let line = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let clone3 = u32::try_from(libc::SYS_clone3).unwrap_or_default();
    let refuse = |number| u32::from(SeccompAction::Errno(errno(number)));
    [
        // The number of the system call is the first field of `struct seccomp_data`.
        line(load, 0, 0, 0),
        line(equal, 2, 0, clone3),
        line(at_least, 0, 2, X32),
        line(end, 0, 0, refuse(libc::EPERM)),
        line(end, 0, 0, refuse(libc::ENOSYS)),
    ]
}

const fn errno(number: i32) -> u32 {
    number.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// Returns a field of this thread's status, such as `CapEff`.
    fn status(field: &str) -> String {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = lines.find(|(name, _)| *name == field).unwrap();
        value.trim().to_owned()
    }

    /// Runs `work` in a confined thread.
    fn confined<T: Send + 'static>(files: Files, work: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = std::thread::spawn(move || {
            confine_thread(files).unwrap();
            work()
        });
        thread.join().unwrap()
    }

    #[track_caller]
    fn refused<T>(result: io::Result<T>) {
        let error = result.err().expect("the filter allowed the operation");
        assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
    }

    #[test]
    fn a_confined_thread_has_no_capability_and_a_seccomp_filter_and_others_keep_theirs() {
        let before = (status("CapEff"), status("Seccomp"));
        let fields = [
            "CapPrm",
            "CapEff",
            "CapInh",
            "CapAmb",
            "Seccomp",
            "NoNewPrivs",
        ];
        let found = confined(Files::Open, move || fields.map(status));
        assert_eq!(found[..4], ["0000000000000000"; 4]);
        assert_eq!(found[4..], ["2", "1"]);
        assert_eq!((status("CapEff"), status("Seccomp")), before);
    }

    #[test]
    fn a_process_that_gives_up_rights_keeps_the_listed_capabilities_and_programs_get_no_more() {
        if !rustix::process::geteuid().is_root() {
            memfold_testkit::skip!("needs root");
        }
        // The sets belong to a thread, so only this one loses its capabilities.
        let check = || {
            let mask = |field: &str| u64::from_str_radix(&status(field), 16).unwrap();
            let before = mask("CapPrm");
            drop_unneeded().unwrap();
            let left = before & kept().bits();
            assert_eq!([mask("CapPrm"), mask("CapEff"), mask("CapBnd")], [left; 3]);
            assert_eq!([mask("CapInh"), mask("CapAmb")], [0; 2]);
            assert_eq!(status("NoNewPrivs"), "1");
            let script = "grep ^CapEff /proc/self/status";
            let said = Command::new("sh").args(["-c", script]).output().unwrap();
            let said = String::from_utf8(said.stdout).unwrap();
            assert_eq!(said.trim(), format!("CapEff:\t{left:016x}"));
        };
        std::thread::spawn(check).join().unwrap();
    }

    #[test]
    fn a_confined_thread_starts_threads_but_no_program_or_process() {
        confined(Files::Open, || {
            // A thread that inherits the filter adds none.
            let again = || confine_thread(Files::Open).map(|()| status("Seccomp_filters"));
            let filters = status("Seccomp_filters");
            assert_eq!(std::thread::spawn(again).join().unwrap().unwrap(), filters);
            assert_eq!(
                std::thread::spawn(|| status("Seccomp")).join().unwrap(),
                "2"
            );
            refused(Command::new("/bin/true").spawn());
        });
    }

    #[test]
    fn a_confined_thread_reaches_neither_other_processes_nor_the_network() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        confined(Files::Open, move || {
            let own = rustix::process::getpid();
            refused(
                rustix::process::kill_process(own, rustix::process::Signal::CONT)
                    .map_err(Into::into),
            );
            refused(
                rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty())
                    .map_err(Into::into),
            );
            refused(TcpStream::connect(address));
            refused(UnixStream::connect("/run/none"));
            refused(TcpListener::bind("127.0.0.1:0"));
        });
    }

    #[test]
    fn a_confined_thread_serves_connections_at_a_socket_that_listens() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        confined(Files::None, move || {
            io::Write::write_all(&mut listener.accept().unwrap().0, b"x").unwrap();
        });
        let mut said = [0];
        io::Read::read_exact(&mut &client, &mut said).unwrap();
        assert_eq!(&said, b"x");
    }

    #[test]
    fn a_confined_thread_makes_no_memory_executable() {
        confined(Files::Open, || {
            let page = memmap2::MmapMut::map_anon(4096).unwrap();
            refused(page.make_exec());
        });
    }

    #[test]
    fn a_thread_that_may_not_name_files_uses_only_open_files() {
        let mut open = tempfile::tempfile().unwrap();
        confined(Files::Open, || {
            drop(File::open("/proc/self/status").unwrap());
        });
        confined(Files::None, move || {
            io::Write::write_all(&mut open, b"x").unwrap();
            refused(File::open("/proc/self/status"));
            refused(std::fs::remove_file("/nowhere"));
            refused(std::fs::create_dir(Path::new("/nowhere")));
        });
    }
}
