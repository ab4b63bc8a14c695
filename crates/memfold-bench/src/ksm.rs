//! Study B: the memory that KSM, the kernel's own merging, saves, and its cost.
//!
//! | part | |
//! |---|---|
//! | `foci` | RAM of 1 and more VMs, unmerged and merged; the VMs are idle, compute, hold random data, or hold the same data. Also page faults and times of reading and writing, before and after merging |
//! | `speed` | time and CPU until 90 % of the mergeable memory is merged: with the kernel's defaults, `memfold ksm start`, and the kernel's advisor |
//! | `slowdown` | slowdown of a program that computes and of one that writes to memory, by ksmd's speed (study C's figure 1) |
//!
//! Before each measurement, KSM is stopped and all pages are unmerged. The host must not use KSM
//! for anything else.

mod foci;
mod guest;
mod scale;
mod slowdown;
mod speed;

use anyhow::ensure;
use serde_json::{Value, json};

use memfold_ksm::{Controls, NOTES};

use crate::figure::Figure;
use crate::study::Options;
use scale::Scale;

/// Runs the study. Returns `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let scale = Scale::of(options);
    let controls = Controls::default();
    // If an earlier run was killed, its settings of KSM are restored first.
    memfold_ksm::restore_leftover(NOTES.as_ref())?;
    ensure!(
        controls.number::<u64>("run")? != Some(1),
        "KSM runs on this host, and what it merges would be counted; stop it first (echo 0 > /sys/kernel/mm/ksm/run)"
    );
    let (mut results, mut samples) = speed::measure(&scale)?;
    for part in [slowdown::measure, foci::measure] {
        let (more, of) = part(&scale)?;
        results.extend(more);
        samples.extend(of);
    }
    let vm = json!({ "image": "trixie-a", "memory_mib": scale.memory.0 >> 20, "data_mib": scale.data_mib });
    Ok(json!({ "vms": [vm], "samples": samples, "results": results }))
}

/// Draws the study's figures.
#[must_use]
pub fn figures(study: &Value) -> Vec<Figure> {
    let empty = Vec::new();
    let samples = study["samples"].as_array().unwrap_or(&empty);
    let mut figures = foci::figures(samples);
    figures.extend(speed::figure(samples));
    figures.extend(slowdown::figure(samples));
    figures
}
