//! Virtual machines: launch, QMP, RAM layout, links to agent and library.

pub mod layout;

pub use layout::{RamBlock, RamLayout, RamSlot};
