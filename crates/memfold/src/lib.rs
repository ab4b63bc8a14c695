//! memfold: one Linux host, more QEMU/KVM virtual machines in the same RAM.
//!
//! Floors, from the ground; no arrow runs up:
//!
//! | floor | rooms |
//! |---|---|
//! | top | [`cli`], [`bench`], [`api`] |
//! | | [`daemon`]: the running whole |
//! | | [`ledger`]: what is where, in bytes; [`estimate`]: what could be saved |
//! | mechanisms | [`fold`], [`ksm`], [`snapshot`], [`segment`], [`lend`] |
//! | | [`vm`]: QEMU processes and the links to them |
//! | | [`libvirt`]: its domains, enabled and found |
//! | ground | [`store`], [`host`], [`progress`] |

pub mod api;
pub mod bench;
pub mod cli;
pub mod daemon;
pub mod estimate;
pub mod fold;
pub mod history;
pub mod host;
pub mod ksm;
pub mod ledger;
pub mod lend;
pub mod libvirt;
pub mod progress;
pub mod segment;
pub mod snapshot;
pub mod store;
pub mod vm;
