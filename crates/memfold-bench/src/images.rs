//! Finds the guest images of the demo and the self-test. If an image is missing, it is built with
//! the program `guest/build`, which the package `memfold-bench` installs. That takes some minutes,
//! once.

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context as _;
use memfold_host::files::{CACHE_VARIABLE, image_builder};
use memfold_host::{guest_images, image_directory};

/// Exit code of the builder if this host lacks something, for example a program.
const IMPOSSIBLE_HERE: i32 = 3;

/// Why the guest images that are missing cannot be built on this host.
#[derive(Debug, thiserror::Error)]
pub enum NoImages {
    /// The program that builds guest images is not installed.
    #[error(
        "no guest image '{name}' in {directory}, and no program that builds it beside memfold-bench; \
         install the package memfold-bench, or run 'make setup' in a checkout"
    )]
    NoBuilder {
        /// Name of the first guest image that is missing.
        name: String,
        /// Directory in which guest images are looked for.
        directory: String,
    },
    /// The program that builds guest images needs something that this host lacks, and has printed
    /// what.
    #[error("the guest images cannot be built on this host; {builder} has printed the reason")]
    Impossible {
        /// Path of the program that builds guest images.
        builder: String,
    },
}

/// Builds those of the guest images `names` that do not exist yet. The builder's output goes to
/// standard error, because standard output may have to be JSON.
///
/// # Errors
/// [`NoImages`] if the images cannot be built on this host; another error if the build failed.
pub fn build_missing(names: &[&str]) -> anyhow::Result<()> {
    let Some(name) = first_missing(names) else {
        return Ok(());
    };
    let directory = image_directory()?;
    let Some(builder) = image_builder() else {
        let directory = directory.display().to_string();
        return Err(NoImages::NoBuilder { name, directory }.into());
    };
    // Two VMs may boot one image.
    let mut names = names.to_vec();
    names.sort_unstable();
    names.dedup();
    memfold_host::say!(
        "no guest image '{name}' in {}: building the images, which takes some minutes, once",
        directory.display()
    );
    run_builder(&builder, &names, &directory)
}

fn run_builder(builder: &Path, names: &[&str], directory: &Path) -> anyhow::Result<()> {
    let status = Command::new(builder)
        .args(names)
        .env(CACHE_VARIABLE, directory)
        // The builder gives files to the user who ran sudo; this directory is the one of this
        // process's user.
        .env_remove("SUDO_USER")
        .env_remove("SUDO_UID")
        .stdin(Stdio::null())
        .stdout(io::stderr().as_fd().try_clone_to_owned()?)
        .status()
        .with_context(|| format!("cannot start {}", builder.display()))?;
    let builder = builder.display().to_string();
    if status.code() == Some(IMPOSSIBLE_HERE) {
        return Err(NoImages::Impossible { builder }.into());
    }
    anyhow::ensure!(
        status.success(),
        "{builder} failed ({status}); the lines above say why"
    );
    match first_missing(names) {
        None => Ok(()),
        Some(name) => anyhow::bail!(
            "{builder} succeeded, but there is no guest image '{name}' in {}",
            directory.display()
        ),
    }
}

/// Returns the first of these images that does not exist.
fn first_missing(names: &[&str]) -> Option<String> {
    let images = guest_images().unwrap_or_default();
    let missing = names.iter().find(|name| !images.contains_key(**name));
    missing.map(|name| (*name).to_owned())
}
