//! Makes memory read-only for a moment, where userfaultfd cannot write-protect it: private mappings
//! of files outside tmpfs. A thread that writes to the memory meanwhile gets SIGSEGV, and waits in
//! the handler of this module until the memory is writable again. A system call that writes to the
//! memory fails with `EFAULT` instead.
//!
//! Functions: `mprotect(2)`, `sigaction(2)`, `madvise(2)` with `MADV_POPULATE_WRITE` (Linux 5.14).

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memfold_units::PAGE_BYTES;
use rustix::io::Errno;
use rustix::mm::{Advice, MprotectFlags};

use crate::region::Area;

/// Locked while memory is read-only: there is one such area at a time.
static ONE: Mutex<()> = Mutex::new(());
/// First address and end of the memory that is read-only now; an end of 0 means that there is none.
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
/// Number of areas that were made read-only so far.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The action of SIGSEGV before this module's, for all faults that are not its own. Never freed.
static EARLIER: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Guard of memory that is read-only: threads that write to it wait until the guard is dropped.
#[derive(Debug)]
pub struct ReadOnly {
    area: Area,
    /// Number of pages from the start that have a new, writable mapping.
    replaced: u64,
    _one: MutexGuard<'static, ()>,
}

impl ReadOnly {
    /// Makes `area` read-only, all of which is writable. The calling thread must not write to it.
    ///
    /// # Errors
    ///
    /// Fails with `EBUSY` if the process has set another handler of SIGSEGV since the first call,
    /// and with `ENOMEM` if it cannot have more mappings. Then the area is writable.
    pub fn new(area: Area) -> Result<Self, Errno> {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        handle_faults()?;
        let guard = Self {
            area,
            replaced: 0,
            _one: one,
        };
        START.store(area.pointer().expose_provenance(), SeqCst);
        END.store(area.pointer().expose_provenance() + area.length(), SeqCst);
        // Whoever sees the next count sees the area as well (`becomes_writable`).
        COUNT.fetch_add(1, SeqCst);
        protect(area, MprotectFlags::READ)?;
        Ok(guard)
    }

    /// Makes the memory writable again, of which new mappings have replaced the first `replaced`
    /// pages.
    pub fn finish(mut self, replaced: u64) {
        self.replaced = replaced;
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let rest = self.area.after(self.replaced);
        // The area was made read-only as a whole, so no mapping must be split, and ENOMEM can only
        // be temporary.
        while protect(rest, MprotectFlags::READ | MprotectFlags::WRITE) == Err(Errno::NOMEM) {
            std::thread::yield_now();
        }
        END.store(0, SeqCst);
    }
}

fn protect(area: Area, flags: MprotectFlags) -> Result<(), Errno> {
    if area.is_empty() {
        return Ok(());
    }
    // SAFETY: the maker of the area agreed to its mappings being replaced. It was writable, and is
    // writable again before its owner gets on; a thread that writes to it meanwhile waits.
    unsafe { rustix::mm::mprotect(area.pointer(), area.length(), flags) }
}

/// Makes [`on_fault`] the handler of SIGSEGV, at the first call.
fn handle_faults() -> Result<(), Errno> {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null pointer asks for no change; the kernel fills `now`, of which all bytes of zero
    // are a valid value anyway.
    let now = unsafe {
        libc::sigaction(libc::SIGSEGV, ptr::null(), now.as_mut_ptr());
        now.assume_init()
    };
    let ours = on_fault as *const () as usize;
    if now.sa_sigaction == ours {
        return Ok(());
    }
    if !EARLIER.load(SeqCst).is_null() {
        return Err(Errno::BUSY);
    }
    EARLIER.store(Box::into_raw(Box::new(now)), SeqCst);
    let action = libc::sigaction {
        sa_sigaction: ours,
        sa_flags: libc::SA_SIGINFO | libc::SA_ONSTACK,
        ..now
    };
    // SAFETY: `action` is complete, and the handler calls only functions that are safe in handlers
    // (signal-safety(7)).
    match unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

/// Handles SIGSEGV: waits while the address is read-only, so that the thread then repeats its
/// write. Any other fault goes to the handler of before.
extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    /// Code of a fault that the protection of a mapping has caused.
    const SEGV_ACCERR: i32 = 2;
    // SAFETY: the kernel calls the handler with a valid `info` of a fault.
    let (code, at) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if code == SEGV_ACCERR && is_write(context) && becomes_writable(at) {
        return;
    }
    // SAFETY: `EARLIER` was set before this handler was, and is never freed. When this handler
    // returns, the thread repeats its access, and its fault gets the handler of before.
    unsafe { libc::sigaction(signal, EARLIER.load(SeqCst), ptr::null_mut()) };
    if code <= 0 {
        // Another process or thread has sent the signal.
        // SAFETY: this system call changes no memory.
        unsafe { libc::raise(signal) };
    }
}

/// Returns whether a fault was a write, and no jump to memory without code.
#[cfg(target_arch = "x86_64")]
fn is_write(context: *const libc::c_void) -> bool {
    /// Bit of the page fault's error code for a write (Intel SDM volume 3, "Page-Fault
    /// Exceptions").
    const WRITE: i64 = 2;
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel calls the handler with a valid context, whose array has this register.
    let error = unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] };
    error & WRITE != 0
}

/// Other processors do not tell in the same way.
#[cfg(not(target_arch = "x86_64"))]
fn is_write(_: *const libc::c_void) -> bool {
    true
}

/// Waits until an address that was read-only is writable. Returns `false` if it was not made
/// read-only by this module.
fn becomes_writable(at: usize) -> bool {
    loop {
        let count = COUNT.load(SeqCst);
        let is_read_only = START.load(SeqCst) <= at && at < END.load(SeqCst);
        // The order of the questions matters. An area counts after it was recorded and before it
        // becomes read-only. So if the count stays the same, the answer of `is_writable` is not
        // about an area that the first question did not see.
        if !is_read_only {
            if is_writable(at) {
                return true;
            }
            if COUNT.load(SeqCst) == count {
                return false;
            }
        }
        std::thread::yield_now();
    }
}

/// Returns whether the page of an address can be written, and makes it present if so.
fn is_writable(at: usize) -> bool {
    let page = ptr::with_exposed_provenance_mut(at - at % PAGE_BYTES);
    // SAFETY: this advice changes no bytes.
    let outcome = unsafe { rustix::mm::madvise(page, PAGE_BYTES, Advice::LinuxPopulateWrite) };
    // EINVAL tells that the mapping is not writable. After other errors, the write itself fails.
    outcome != Err(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::region::Mapping;

    #[test]
    fn a_thread_that_writes_to_memory_that_is_read_only_waits_until_it_is_writable() {
        let memory = Mapping::anonymous(4, true).unwrap();
        let area = memory.area();
        let stop = &AtomicBool::new(false);
        let writes = std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                let values = (1..).take_while(|_| !stop.load(SeqCst));
                values.inspect(|&v| area.part(v % 4, 1).write(&[v])).count()
            });
            for _ in 0..500 {
                let guard = ReadOnly::new(area).unwrap();
                let before = Mapping::anonymous(4, true).unwrap();
                area.copy_nonzero(before.area());
                std::thread::yield_now();
                let equal = area.equal_pages(before.area());
                guard.finish(0);
                assert_eq!(equal, 4, "a thread wrote to read-only memory");
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
            stop.store(true, SeqCst);
            writer.join().unwrap()
        });
        assert!(writes > 100, "{writes}");
    }

    #[test]
    fn another_fault_still_ends_the_process() {
        const CHILD: &str = "MEMFOLD_TEST_FAULT";
        let memory = Mapping::anonymous(1, true).unwrap();
        let area = memory.area();
        if std::env::var_os(CHILD).is_some() {
            ReadOnly::new(area).unwrap().finish(0);
            area.write(&[1]);
            protect(area, MprotectFlags::READ).unwrap();
            area.write(&[2]);
            unreachable!("the write succeeded");
        }
        let test = "read_only::tests::another_fault_still_ends_the_process";
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(libc::SIGSEGV), "{child:?}");
    }
}
