//! The study `memfold bench ksm`, which repeats a published study (study B): measures how much
//! memory KSM (the kernel's same-page merging) saves, and what that costs.
//!
//! | part | |
//! |---|---|
//! | `foci` | RAM of 1 and more VMs, unmerged and merged; the VMs are idle, compute, hold random data, or hold the same data. Also page faults and times of reading and writing, before and after merging |
//! | `speed` | time and CPU until 90 % of the mergeable memory is merged: with the kernel's defaults, `memfold ksm start`, and the kernel's advisor |
//! | `slowdown` | slowdown of a program that computes and of one that writes to memory, by ksmd's speed (study C's figure 1) |
//!
//! Before each measurement, KSM is stopped and all pages are unmerged. So the host must not use KSM
//! for anything else.

mod foci;
mod guest;
mod scale;
mod slowdown;
mod speed;

use memfold_ksm::NOTES;
use serde_json::{Value, json};

use crate::figure::{self, Figure};
use crate::host::check_ksm_is_off;
use crate::record::Found;
use crate::study::Options;
use scale::Scale;

/// Runs the study `ksm`. Returns its JSON record, with the parts `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let scale = Scale::of(options);
    // If an earlier run was killed, its settings of KSM are restored first.
    memfold_ksm::restore_leftover(NOTES.as_ref())?;
    check_ksm_is_off()?;
    let vm = json!({ "image": "trixie-a", "memory_mib": scale.memory.0 >> 20, "data_mib": scale.data_mib });
    let mut found = Found {
        vms: vec![vm],
        ..Found::default()
    };
    for part in [speed::measure, slowdown::measure, foci::measure] {
        found.add(part(&scale)?);
    }
    Ok(json!(found))
}

/// Draws the figures of the study `ksm` from its record `study`.
pub fn figures(study: &Value) -> Vec<Figure> {
    let samples = figure::samples(study);
    let mut figures = foci::figures(samples);
    figures.extend(speed::figure(samples));
    figures.extend(slowdown::figure(samples));
    figures
}
