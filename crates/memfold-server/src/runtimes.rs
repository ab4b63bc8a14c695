//! The threads of the daemon's API, in two groups with different rights.
//!
//! ```text
//!   TCP, TLS, Unix socket --> threads "http": TLS, HTTP, JSON, roles     no capabilities, seccomp filter
//!                                  | on_worker: a closure
//!                                  v
//!                             threads "request": carry requests out      the daemon's rights
//! ```
//! A thread inherits the rights of the thread that starts it. So a request's thread is started by
//! the runtime of the other requests, never by a thread that serves HTTP.

use std::io;
use std::panic::resume_unwind;
use std::sync::OnceLock;

use memfold_host::privileges::{Files, confine_thread_or_warn};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::{JoinHandle, spawn_blocking};

/// Name of the threads that serve HTTP.
pub const HTTP_THREAD: &str = "http";
/// Name of the threads that carry out requests.
pub const REQUEST_THREAD: &str = "request";

/// Where the process's requests are carried out. A test without [`Runtimes`] has one runtime for
/// everything.
static WORKERS: OnceLock<Handle> = OnceLock::new();

/// Both groups of threads.
#[derive(Debug)]
pub struct Runtimes {
    /// Serves connections. Its threads have no capabilities and a seccomp filter.
    pub http: Runtime,
    /// Carries out requests, with the rights of the process.
    pub workers: Runtime,
}

impl Runtimes {
    /// Starts the threads. Requests of this process are carried out there from now on.
    ///
    /// # Errors
    ///
    /// An error of the system call that makes a thread or an event queue.
    pub fn start() -> io::Result<Self> {
        let workers = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(REQUEST_THREAD)
            .enable_all()
            .build()?;
        let http = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name(HTTP_THREAD)
            .on_thread_start(|| confine_thread_or_warn(Files::Open))
            .enable_all()
            .build()?;
        // A process has one daemon, so a second call has no effect.
        let _ = WORKERS.set(workers.handle().clone());
        Ok(Self { http, workers })
    }
}

/// Starts blocking work in a thread with the daemon's rights. The work is done even if the result
/// is dropped.
pub(crate) fn on_worker<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let Some(workers) = WORKERS.get() else {
        return spawn_blocking(work);
    };
    workers.spawn(async {
        match spawn_blocking(work).await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                // The runtime ends, and this task with it.
                Err(_) => std::future::pending().await,
            },
        }
    })
}
