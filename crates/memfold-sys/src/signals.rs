//! Blocks signals in a thread (`pthread_sigmask(3)`), so that another thread receives them.

use std::mem::MaybeUninit;

/// Runs `body` with every signal blocked in this thread, and then restores the old signal mask. In
/// a thread that `body` starts, every signal stays blocked, so that this thread never runs a signal
/// handler of the host program.
pub fn with_all_blocked<T>(body: impl FnOnce() -> T) -> T {
    struct Restore(libc::sigset_t);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: the mask was filled by the kernel; a null pointer asks for no old mask.
            unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
            };
        }
    }
    let mut all = MaybeUninit::uninit();
    let mut old = MaybeUninit::uninit();
    // SAFETY: sigfillset fills `all` before it is used, pthread_sigmask fills `old` before it is
    // read.
    let _restore = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), old.as_mut_ptr());
        Restore(old.assume_init())
    };
    body()
}
