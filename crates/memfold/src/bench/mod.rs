//! The studies: one file each, JSON out, figures out. They share the laboratory ([`lab`]): VMs of their own in a daemon of
//! their own.

pub mod clones;
pub mod desktops;
pub mod figure;
pub mod fold;
pub mod hints;
pub mod ksm;
mod pipeline;
mod qemu_way;
pub mod record;
pub mod remote;
pub mod segments;
pub mod selftest;
pub mod snapshots;
mod warmth;
