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

/// Reports that the running test, or a part of it, does not run on this machine. Prefer the macro
/// [`skip!`](crate::skip), which also ends the test.
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

/// Calls [`report_skip`] and returns `None`. For functions that find something or skip:
/// `let Some(x) = find() else { return reports_skip("no x") }`.
#[must_use]
pub fn reports_skip<T>(reason: &str) -> Option<T> {
    report_skip(reason);
    None
}

/// Ends a test that cannot run on this machine. The arguments are the reason, as for `format!`.
///
/// `scripts/test` counts the test as skipped, and fails unless `scripts/skips.txt` lists the test.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => {{
        $crate::report_skip(&::std::format!($($reason)*));
        return;
    }};
}
