//! Skips tests that cannot run on this machine, and counts the skips.

use std::fs::File;
use std::io::Write;

/// File to which each skip is appended, as `TEST<TAB>REASON` and a newline.
const SKIPS: &str = "MEMFOLD_TEST_SKIPS";

/// The test that runs: as nextest calls it (`PROGRAM::TEST` without the program), else the thread's
/// name, which libtest sets.
fn test_name() -> String {
    std::env::var("NEXTEST_TEST_NAME").unwrap_or_else(|_| {
        let thread = std::thread::current();
        thread.name().unwrap_or("unknown").to_owned()
    })
}

/// Reports that the test, or a part of it, does not run here. Prefer [`skip!`](crate::skip), which
/// also returns.
///
/// # Panics
///
/// If the file that `MEMFOLD_TEST_SKIPS` names cannot be written: an uncounted skip would look like
/// a pass.
pub fn report_skip(reason: &str) {
    let reason = reason.trim().replace('\n', "; ");
    println!("skipped: {reason}");
    if let Some(path) = std::env::var_os(SKIPS) {
        let file = File::options().append(true).create(true).open(path);
        // One write, so that lines of parallel tests do not mix.
        let line = format!("{}\t{reason}\n", test_name());
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.expect("the list of skips can be written");
    }
}

/// [`report_skip`] with the value that says so:
/// `let Some(x) = find() else { return reports_skip("no x") }`.
#[must_use]
pub fn reports_skip<T>(reason: &str) -> Option<T> {
    report_skip(reason);
    None
}

/// Ends a test that cannot run here, with the reason, which is formatted as by `format!`.
///
/// Under `scripts/test` the test is counted as skipped, and the run fails unless
/// `scripts/skips.txt` lists it.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => {{
        $crate::report_skip(&::std::format!($($reason)*));
        return;
    }};
}
