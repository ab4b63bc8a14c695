//! Prints errors of `memfold`'s commands, and chooses exit codes: 0 success, 1 failure, 2 wrong
//! usage, 3 not possible on this host.

use std::process::ExitCode;

use memfold_api::ClientError;

/// Exit code of a command that is not possible on this host.
pub(super) const IMPOSSIBLE_HERE: u8 = 3;

/// Prints an error with its causes and a hint, and returns the exit code.
pub(super) fn fail(error: &anyhow::Error) -> ExitCode {
    memfold_host::say!("memfold: {error:#}");
    if let Some(ClientError::Refused(body)) = error.downcast_ref::<ClientError>() {
        if let Some(hint) = &body.hint {
            memfold_host::say!("hint: {hint}");
        }
        if body.impossible_here {
            return ExitCode::from(IMPOSSIBLE_HERE);
        }
    }
    ExitCode::FAILURE
}
