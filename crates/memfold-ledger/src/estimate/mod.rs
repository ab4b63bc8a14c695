//! Estimates how much memory could be saved on this host before anything is changed (`memfold
//! estimate`).
//!
//! ```text
//!   targets     QEMUs of the host: their memory ranges, names, trust domains and files
//!     |
//!   look        first read: every private page is hashed; second read: did the sample's pages change?
//!     |         (pace limits the CPU time to a share of one core)
//!   sample      contents whose hash begins with `level` zero bits: all copies of a content, or none
//!     |
//!   split       classes: zero, within a VM, between VMs of a domain, between domains, volatile, merged, rest
//!     |
//!   mechanisms  what segments, clones, folding, KSM and free page reporting would save, and their CPU cost
//!   report, table
//! ```
//! The drawing shows the steps of an estimate, by module. An estimate writes nothing and shares no
//! page. It needs neither memfold's library in QEMU nor its agent in guests. Reading has two costs:
//! the host's reclaim regards the VMs' pages as recently used (`process_vm_readv(2)` accesses
//! them), and other processes lose CPU cache contents.
//!
//! | | |
//! |---|---|
//! | [`targets`], [`facts`] | QEMUs to read; a daemon's knowledge of them |
//! | [`look`], [`pace`] | the two reads, and their CPU budget |
//! | [`sample`], [`statistics`] | sampling by content, sums with error bars |
//! | [`split`], [`mechanisms`] | the classes of pages, and each mechanism's saving |
//! | [`report`], [`table`] | the result, and its table for people |
//! | [`fingerprint`], [`place`] | contents of VMs, comparable between hosts; which VMs to place together |
//! | [`program`] | the shareable part of one program (study A's Table 4) |

mod error;
pub mod facts;
pub mod fingerprint;
pub mod look;
pub mod mechanisms;
mod options;
pub mod pace;
pub mod place;
pub mod program;
pub mod report;
pub mod sample;
pub mod split;
pub mod statistics;
pub mod table;
pub mod targets;

pub use error::EstimateError;
pub use facts::{FileRun, KnownFile, KnownVm, VmFacts};
pub use options::{Options, SAMPLE_PAGES};
pub use pace::{Pace, Told};
pub use report::EstimateReport;
pub use targets::{Domains, Range, Target};

/// Reads the memory of the VMs `targets` and estimates how much of it could be saved.
/// [`FileRun::file`] in `targets` is an index into `files`. `told` is called with the progress.
pub fn estimate(
    targets: Vec<Target>,
    files: &[KnownFile],
    options: &Options,
    pace: &Pace<'_>,
    told: Told<'_>,
) -> Result<EstimateReport, EstimateError> {
    let looked = look::look(targets, options, pace, told)?;
    let split = split::split(&looked, files, options);
    Ok(report::report(&looked, &split, files, pace))
}
