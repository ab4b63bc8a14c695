//! What could be saved on this host, before anything is changed: `memfold estimate`.
//!
//! ```text
//!   targets     QEMUs of the host, where their memory lies, their names, trust domains and files
//!     |
//!   look        first look: every private page is read and hashed     second look: the sample's pages, has the guest written since?
//!     |              |                                                     |
//!   pace         within a share of one core                                |
//!   sample       pages of contents whose hash begins with `level` zero bits: all copies of a content, or none
//!     |                                                                    |
//!   split        zero / within a VM / between VMs of a domain / between domains / volatile / merged already / the rest  <--'
//!     |
//!   mechanisms   what of that segments, clones, folding, KSM and free page reporting would bring, at what CPU
//!   report, table
//! ```
//! Nothing is written, no page is shared, no library or agent is needed. What a look costs the VMs:
//! their pages count as used for the host's reclaim (`process_vm_readv(2)` touches them), and other
//! processes' CPU caches.
//!
//! | | |
//! |---|---|
//! | [`targets`], [`facts`] | whose memory; what a daemon knows of it |
//! | [`look`], [`pace`] | the two looks, and their CPU budget |
//! | [`sample`], [`statistics`] | sampling by content, sums with error bars |
//! | [`split`], [`mechanisms`] | the classes, and who would bring what |
//! | [`report`], [`table`] | the result, and how people read it |
//! | [`fingerprint`], [`place`] | what VMs hold, comparable between hosts; which to place together |
//! | [`program`] | the shareable share of one program (study A's Table 4) |

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

/// Looks at the memory of `targets` and says what could be saved. `files`: those that their runs
/// speak of.
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
