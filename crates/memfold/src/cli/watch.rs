//! Shows how far something long has come, on a terminal.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use memfold_host::progress::Step;
use memfold_units::ByteSize;

use super::context::Context;

/// How often the daemon is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Does something that may take long, of which the daemon tells the progress at `place`.
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
                // Nothing to show is no failure.
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
        // It only draws.
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
