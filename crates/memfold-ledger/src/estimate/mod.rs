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
//! Nothing is written, no page is shared, no library or agent is needed. What a look costs the VMs: their pages count as used for
//! the host's reclaim (`process_vm_readv(2)` touches them), and other processes' CPU caches.
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

pub mod facts;
pub mod fingerprint;
pub mod look;
pub mod mechanisms;
pub mod pace;
pub mod place;
pub mod program;
pub mod report;
pub mod sample;
pub mod split;
pub mod statistics;
pub mod table;
pub mod targets;

use std::io;

pub use facts::{FileRun, KnownFile, KnownVm, VmFacts};
pub use pace::Pace;
pub use report::EstimateReport;
pub use targets::{Domains, Range, Target};

/// Pages of the sample at most: 40 bytes each.
pub const SAMPLE_PAGES: usize = 1 << 20;

/// Why nothing could be estimated.
#[derive(Debug, thiserror::Error)]
pub enum EstimateError {
    /// No QEMU runs here.
    #[error(
        "no QEMU process with memory of its own runs on this host; start VMs ('memfold vm run')"
    )]
    NoVms,
    /// No QEMU can be seen, and we aren't root.
    #[error("other users' processes and their memory can't be seen: run this as root")]
    NotRoot,
    /// A VM that was asked for is not there.
    #[error(
        "no QEMU has the name or number '{0}'; 'memfold ksm status' and 'memfold vm list' show those that run"
    )]
    NoSuchVm(String),
    /// Several have the name.
    #[error("several QEMUs are named '{name}': give one of their process numbers, {pids:?}")]
    Ambiguous {
        /// The name.
        name: String,
        /// Their numbers.
        pids: Vec<i32>,
    },
    /// The kernel has no `PAGEMAP_SCAN`.
    #[error(
        "this kernel can't tell which pages are in memory (PAGEMAP_SCAN): Linux 6.7 or newer is needed"
    )]
    NoScan,
    /// We may not look.
    #[error(
        "the memory of process {pid} may not be read (CAP_SYS_PTRACE, CAP_SYS_ADMIN): run this as root"
    )]
    NotAllowed {
        /// The process.
        pid: i32,
        /// Why.
        source: io::Error,
    },
    /// Who is a QEMU could not be found out.
    #[error(transparent)]
    Processes(#[from] memfold_ksm::KsmError),
    /// A file of `/proc` could not be read.
    #[error("cannot read the page map or mappings of process {pid}")]
    Read {
        /// The process.
        pid: i32,
        /// Why.
        source: io::Error,
    },
    /// Somebody pressed Ctrl-C.
    #[error("interrupted; nothing was changed")]
    Interrupted,
}

/// How to look.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Pages of the sample at most.
    pub sample_pages: usize,
    /// Chooses the sample. By chance, so that no guest can keep contents out of it.
    pub seed: u64,
    /// How KSM is set here: pages that one merged page stands for (`max_page_sharing`).
    pub max_page_sharing: u64,
    /// And whether zeroes become the kernel's own zero page (`use_zero_pages`).
    pub use_zero_pages: bool,
    /// Read pages of files too: what is folded, or of a snapshot's image, already.
    pub reads_files: bool,
}

impl Options {
    /// Everything, with KSM as it is set here, or at its defaults where there is none.
    #[must_use]
    pub fn here() -> Self {
        use std::hash::{BuildHasher, Hasher};
        let settings = memfold_ksm::Controls::default()
            .settings()
            .unwrap_or_default();
        Self {
            sample_pages: SAMPLE_PAGES,
            seed: std::collections::hash_map::RandomState::new()
                .build_hasher()
                .finish(),
            max_page_sharing: settings.max_page_sharing.unwrap_or(256).max(2),
            use_zero_pages: settings.use_zero_pages == Some(1),
            reads_files: false,
        }
    }
}

/// How far it is: what is being done, pages done, pages in all.
pub type Told<'a> = &'a mut dyn FnMut(&'static str, u64, u64);

/// Looks at the memory of `targets` and says what could be saved. `files`: those that their runs speak of.
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
