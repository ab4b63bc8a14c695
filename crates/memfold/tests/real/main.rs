//! Real guests under attack: what folding must never do, whoever misbehaves.
//!
//! | test | holds |
//! |---|---|
//! | [`integrity`] | every byte of `/usr` and of files that are rewritten, truncated and appended to, while memory is short, caches are dropped and the balloon moves |
//! | [`domains`], [`vm_killed`] | on the same VMs: no physical page crosses trust domains; a VM that dies is noticed by nobody |
//! | [`daemon_killed`] | twenty daemons die, VMs go on, the next daemon folds on |
//! | [`dashboard`] | Chromium walks the dashboard of real VMs |
//! | [`liars`] | agents that lie about every field |
//! | [`snapshots`] | a VM is saved, goes on, and comes back as it was, memory and disk; clones run beside it |
//! | [`disks`] | the same of disks that a VM writes in place, which stay its own |
//! | [`snapshots_killed`] | daemons and VMs die while they save |
//! | [`segments`] | VMs execute files of one image in place; what they write is theirs; who attacks it harms nobody else |
//! | [`segments_killed`] | daemons die over segments, and disks are full |
//! | [`ksm`], [`ksm_explain`] | KSM for one trust domain, and its settings as before; every cause of `memfold ksm explain` |
//! | [`debt`] | clones rewrite all they share: braked in time, no byte and no VM lost |
//! | [`estimate`] | what `memfold estimate` promises is what KSM and folding then save |
//! | [`lend`] | a guest swaps on lent RAM, and lenders die and hang under it |
//! | [`plan`] | as many VMs as a plan speaks of take what it says |
//! | [`churn`] | files of three times the memory: what is folded at any moment, and that nothing grows |
//!
//! Each boots its VMs once; they take turns. Without guest images or QEMU they say so and pass, unless `MEMFOLD_REAL=1`.

// A test here is one story of VMs that are dear to boot, and it speaks of states, stats and status.
#![allow(clippy::similar_names, clippy::too_many_lines)]

mod churn;
mod daemon_killed;
mod dashboard;
mod debt;
mod disks;
mod domains;
mod estimate;
mod integrity;
mod ksm;
mod ksm_explain;
mod lend;
mod liars;
mod plan;
mod segments;
mod segments_killed;
mod served;
mod snapshots;
mod snapshots_killed;
mod support;
mod vm_killed;
