//! What one-shot and streamed commands have in common: the shell's environment, its exit code, and
//! limits.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};

/// Most bytes of output in one message.
pub(super) const PIECE: usize = 16 << 10;
/// Number of reads after the shell has ended, enough for a full pipe (1 MiB if the command enlarged
/// it). Later output comes from children that the shell left running.
pub(super) const ROUNDS_AFTER_END: u32 = 64;

/// Sets the shell's script, working directory and environment.
pub(super) fn prepare(command: &mut Command, script: &str) {
    command.arg("-c").arg(script).current_dir("/");
    if std::env::var_os("PATH").is_none() {
        command.env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        );
    }
    if std::env::var_os("HOME").is_none() {
        command.env("HOME", "/root");
    }
    // With this variable, a script finds the agent's program wherever the guest keeps it.
    if let Ok(agent) = std::env::current_exe() {
        command.env("MEMFOLD_AGENT", agent);
    }
}

/// Waits for the end of a command. Returns its exit code, or 128 plus the signal.
pub(super) fn exit_code(child: &mut Child) -> i32 {
    let code = child.wait().ok().and_then(|status| {
        let signal = status.signal().map(|s| 128 + s);
        status.code().or(signal)
    });
    code.unwrap_or(127)
}
