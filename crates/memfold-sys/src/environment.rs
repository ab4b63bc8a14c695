//! Takes secrets out of this process's environment, so that child processes do not inherit them and
//! `/proc/PID/environ` does not show them.

use std::ffi::CString;
use std::io;

/// Removes the variables whose names `is_taken` selects, overwrites their values, and returns them.
/// Variables that are not UTF-8 stay.
///
/// # Errors
///
/// Fails if the process has several threads: another one could read the environment meanwhile.
pub fn take(is_taken: impl Fn(&str) -> bool) -> io::Result<Vec<(String, String)>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("other threads run already"));
    }
    let mut taken = Vec::new();
    for (name, value) in std::env::vars_os() {
        let (Ok(name), Ok(value)) = (name.into_string(), value.into_string()) else {
            continue;
        };
        if !is_taken(&name) {
            continue;
        }
        let c_name = CString::new(name.clone())?;
        // SAFETY: this is the only thread, so nobody changes the environment or reads the value
        // meanwhile. The pointer is null or points to a string that ends with a zero byte, in
        // memory of this process that may be written (getenv(3), environ(7)).
        unsafe {
            let at = libc::getenv(c_name.as_ptr());
            if !at.is_null() {
                std::ptr::write_bytes(at, 0, libc::strlen(at));
            }
            std::env::remove_var(&name);
        }
        taken.push((name, value));
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const HELPER: &str = "environment::tests::helper_process_takes_its_variables";

    #[test]
    fn with_other_threads_no_variable_is_taken() {
        let ready = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| ready.wait());
            take(|_| true).unwrap_err();
            ready.wait();
        });
    }

    #[test]
    fn taken_variables_are_in_neither_the_environment_nor_proc_nor_a_child() {
        // The test runner's process has other threads; this one is started for this test alone.
        let done = Command::new(std::env::current_exe().unwrap())
            .args([HELPER, "--exact", "--nocapture", "--test-threads", "1"])
            .env("MEMFOLD_TEST_SECRET", "hidden-value")
            .env("MEMFOLD_TEST_OTHER", "kept-value")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "{said}");
    }

    /// Does nothing unless the test above has started it.
    #[test]
    fn helper_process_takes_its_variables() {
        if std::env::var_os("MEMFOLD_TEST_SECRET").is_none() {
            return;
        }
        // The test's own thread is the second one, so that the main thread is forked away.
        // SAFETY: the child calls only what a test with one thread may call, and ends by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_right = std::panic::catch_unwind(helper).is_ok();
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = -1;
        // SAFETY: the pointer is valid during the call.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }

    fn helper() {
        let taken = take(|name| name == "MEMFOLD_TEST_SECRET").unwrap();
        let secret = ("MEMFOLD_TEST_SECRET".to_owned(), "hidden-value".to_owned());
        assert_eq!(taken, [secret]);
        assert!(std::env::var_os("MEMFOLD_TEST_SECRET").is_none());
        let own = std::fs::read("/proc/self/environ").unwrap();
        let shows = |bytes: &[u8], word: &str| {
            let words = bytes.windows(word.len());
            words.into_iter().any(|part| part == word.as_bytes())
        };
        assert!(!shows(&own, "hidden-value") && shows(&own, "kept-value"));
        let child = Command::new("/usr/bin/env").output().unwrap().stdout;
        assert!(!shows(&child, "hidden-value") && shows(&child, "kept-value"));
    }
}
