//! Shows a progress bar on a terminal while the daemon carries out a long operation, such as a
//! save.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use memfold_host::progress::Step;
use memfold_units::ByteSize;

use super::context::Context;

/// Time between two requests for the progress of an operation.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Runs the long operation `work`. Meanwhile, shows the progress that the daemon reports at the API
/// path `place`.
pub(super) fn watched<T>(
    context: &Context,
    place: String,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template("{spinner} {msg}")?);
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let watcher = context.client()?;
    let shown = bar.clone();
    let thread = (!bar.is_hidden()).then(|| {
        std::thread::spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK_EVERY) {
                // A missing progress report is not an error.
                if let Ok(Some(step)) = watcher.get::<Option<Step>>(&place) {
                    shown.set_message(describe(&step));
                    shown.tick();
                }
            }
        })
    });
    let result = work();
    drop(end);
    if let Some(thread) = thread {
        // The thread only draws the progress bar, so its result does not matter.
        let _ = thread.join();
    }
    bar.finish_and_clear();
    result
}

fn describe(step: &Step) -> String {
    if step.total_bytes == 0 {
        return step.step.clone();
    }
    format!(
        "{}: {} of {}",
        step.step,
        ByteSize(step.done_bytes),
        ByteSize(step.total_bytes)
    )
}
