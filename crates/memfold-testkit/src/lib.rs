//! Helpers for memfold's tests: skipping tests and counting the skips, waiting with deadlines that
//! adapt to the machine's speed, doses of repeated work, helper processes, and an S3 server.
//!
//! ```no_run
//! use std::time::Duration;
//! memfold_testkit::wait_until("the socket exists", Duration::from_secs(10), || {
//!     std::path::Path::new("/run/example").exists()
//! });
//! ```
//!
//! Environment variables:
//!
//! | variable | meaning |
//! |---|---|
//! | `MEMFOLD_TEST_SLOW` | how slow this machine is, 1 or more: deadlines and bounds grow with it; measured if it is not set |
//! | `MEMFOLD_TEST_SKIPS` | file to which each skip is appended; `scripts/test` reads it |
//! | `MEMFOLD_REAL` | set: tests of the real ring fail where they would otherwise skip |

mod dose;
mod helper;
mod s3;
mod skip;
mod wait;

pub use dose::{dose, seconds};
pub use helper::start_helper;
pub use s3::S3Server;
pub use skip::{report_skip, reports_skip};
pub use wait::{bound, patience, slowness, wait_for, wait_until};
