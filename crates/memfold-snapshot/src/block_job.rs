//! Waits until a block job of QEMU (a disk copy or a merge of overlays) ends, by polling
//! `query-jobs`, and ends the job.

use std::ops::DerefMut;
use std::time::{Duration, Instant};

use memfold_host::progress::Progress;
use memfold_vm::Qmp;
use serde_json::{Value, json};

/// First interval between two polls. Later intervals are longer, because each poll occupies QEMU's
/// monitor.
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Number of consecutive polls that may fail, because QEMU's main loop may be busy for long.
const PATIENCE: u32 = 3;

/// Access to a VM's QMP monitor. Other tasks may use the monitor between two calls of `qmp`.
pub trait Monitor {
    /// Locks the monitor until the returned guard is dropped.
    fn qmp(&self) -> impl DerefMut<Target = Qmp>;
}

impl<F: Fn() -> M, M: DerefMut<Target = Qmp>> Monitor for F {
    fn qmp(&self) -> impl DerefMut<Target = Qmp> {
        self()
    }
}

/// Returns QEMU's record of the job with this name, if it exists.
pub(super) fn find(monitor: &impl Monitor, id: &str) -> Result<Option<Value>, String> {
    let jobs = monitor.qmp().execute("query-jobs", json!({}));
    let jobs = jobs.map_err(|error| error.to_string())?;
    let mut jobs = jobs.as_array().into_iter().flatten();
    Ok(jobs.find(|job| job["id"] == id).cloned())
}

/// Waits until a job that was started without `auto-dismiss` has ended, and returns its result. A
/// job that becomes ready is completed. `mind` is called between polls; its error ends the wait.
pub(super) fn finish(
    monitor: &impl Monitor,
    id: &str,
    timeout: Duration,
    progress: &Progress,
    mind: impl Fn() -> Result<(), String>,
) -> Result<(), String> {
    let end = Instant::now() + timeout;
    let (mut done, mut failed, mut look) = (0, 0, FIRST_LOOK);
    loop {
        mind()?;
        let found = find(monitor, id);
        if found.is_err() && failed < PATIENCE {
            failed += 1;
            std::thread::sleep(LOOK_EVERY);
            continue;
        }
        failed = 0;
        let job = found?.ok_or("its block job is gone")?;
        let now = job["current-progress"].as_u64().unwrap_or(done).max(done);
        progress.add(now - done);
        done = now;
        if job["status"] == "concluded" {
            dismiss(monitor, id)?;
            return job["error"].as_str().map_or(Ok(()), |why| Err(why.into()));
        }
        if Instant::now() > end {
            return Err(format!(
                "the block job is not done after {} s and continues; try again later",
                timeout.as_secs()
            ));
        }
        if job["status"] == "ready" {
            // QEMU refuses the command if the job has ended meanwhile; the next poll shows the
            // result.
            let _ = monitor.qmp().execute("job-complete", json!({ "id": id }));
        }
        std::thread::sleep(look);
        look = (look * 2).min(LOOK_EVERY);
    }
}

/// Dismisses a job that has ended.
pub(super) fn dismiss(monitor: &impl Monitor, id: &str) -> Result<(), String> {
    let done = monitor.qmp().execute("job-dismiss", json!({ "id": id }));
    done.map(drop).map_err(|error| error.to_string())
}
