//! The part `study-disk` of the study `snapshots`: measures how long VMs take to save to a slow
//! disk (70 MB/s), like that of the published study. A child process makes the measurements, with
//! all its files on that disk.

use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use memfold_units::ByteSize;

use super::measure::Case;
use crate::loop_disk::LoopDisk;
use crate::record::Found;
use crate::study::Options;

/// Name of this part of the study `snapshots`, for the option `--arm`.
pub const ARM: &str = "study-disk";

/// Environment variable by which the child process knows that its files are on the slow disk.
const INSIDE: &str = "MEMFOLD_BENCH_STUDY_DISK";

/// Returns whether this process is the child process whose files are on the slow disk.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Measures saves of a VM to a slow disk, in a child process. Returns `results` and `samples`.
pub fn measure(case: &Case, options: &Options) -> anyhow::Result<Found> {
    let place = tempfile::Builder::new()
        .prefix("memfold-study-disk.")
        .tempdir_in("/var/tmp")?;
    // What fills the page cache, an image of QEMU's, snapshots.
    let size = ByteSize(case.memory.0 * 4 + (4 << 30));
    let mounted = place.path().join("mounted");
    let disk = LoopDisk::make(&place.path().join("disk"), size, &mounted)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["snapshots", "--json", "--arm", ARM]);
    command.args(options.quick.then_some("--quick"));
    command.args(["--memory", &format!("{}M", case.memory.0 >> 20)]);
    command.env("TMPDIR", disk.place()).env(INSIDE, "1");
    let output = command.stderr(Stdio::inherit()).output()?;
    let status = output.status;
    ensure!(status.success(), "the study on the slow disk: {status}");
    serde_json::from_slice(&output.stdout)
        .context("cannot read the results of the study's child process")
}
