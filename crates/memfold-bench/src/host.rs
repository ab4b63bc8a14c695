//! Checks that VMs can run on this host.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;
use memfold_api::DEFAULT_STATE;
use memfold_host::{HostFacts, examine, own_program};

use crate::output::Output;

/// Returns if VMs can run on this host. Otherwise, replaces this process by `memfold doctor`, which
/// prints the reason and exits with code 3.
pub fn check_host(output: &Output) -> anyhow::Result<()> {
    if examine(HostFacts::probe(DEFAULT_STATE.as_ref())).can_run {
        return Ok(());
    }
    let mut doctor = Command::new(own_program()?);
    doctor.args(["doctor", "--state", DEFAULT_STATE]);
    doctor.args(output.json.iter().map(|file| format!("--json={file}")));
    Err(doctor.exec()).context(
        "VMs cannot run on this host; cannot start 'memfold doctor', which would print the reason",
    )
}
