//! Prints errors of `memfold`'s commands, and chooses exit codes: 0 success, 1 failure, 2 wrong
//! usage, 3 not possible on this host.

use std::process::ExitCode;

use memfold_api::ClientError;
use serde::Serialize;

use super::context::Context;

/// Exit code of a command that is not possible on this host.
pub(super) const IMPOSSIBLE_HERE: u8 = 3;

/// Prints an error with its causes and a hint, and returns the exit code.
pub(super) fn fail(error: &anyhow::Error) -> ExitCode {
    memfold_host::say!("memfold: {error:#}");
    if let Some(ClientError::Refused { body, .. }) = error.downcast_ref::<ClientError>() {
        if let Some(hint) = &body.hint {
            memfold_host::say!("hint: {hint}");
        }
        if body.impossible_here {
            return ExitCode::from(IMPOSSIBLE_HERE);
        }
    }
    ExitCode::FAILURE
}

/// Separates the successes and the failures of a command that does the same for several names, so
/// that a failure neither stops the command nor hides what it has done.
pub(super) fn separate<T>(
    results: impl IntoIterator<Item = anyhow::Result<T>>,
) -> (Vec<T>, Vec<anyhow::Error>) {
    let (mut done, mut errors) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(one) => done.push(one),
            Err(error) => errors.push(error),
        }
    }
    (done, errors)
}

/// Prints the errors, and returns the exit code of the first one; `success` if there is none.
pub(super) fn fail_each(errors: &[anyhow::Error], success: ExitCode) -> ExitCode {
    let codes: Vec<ExitCode> = errors.iter().map(fail).collect();
    codes.first().copied().unwrap_or(success)
}

/// Prints what a command has done for the names that it succeeded for, unless that is nothing,
/// and the errors of the others. Returns the exit code.
pub(super) fn print_done<T: Serialize>(
    context: &Context,
    (done, is_nothing): (&T, bool),
    errors: &[anyhow::Error],
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<ExitCode> {
    let code = if is_nothing && !errors.is_empty() {
        ExitCode::FAILURE
    } else {
        context.print(done, text)?
    };
    Ok(fail_each(errors, code))
}
