//! Real guests under attack: what folding must never do, whoever misbehaves.
//!
//! | test | holds |
//! |---|---|
//! | [`beside::integrity`] | every byte of files of `/usr` and of files that are rewritten, truncated and appended to, while memory is short, caches are dropped and the balloon moves |
//! | [`beside::domains`], [`beside::vm_killed`] | on the same VMs: no physical page crosses trust domains; a VM that dies is noticed by nobody |
//! | [`beside::daemon_killed`] | daemons die, VMs go on, the next daemon folds on |
//! | [`beside::attack`] | the interface is flooded: guests and folding do not notice |
//! | [`dashboard`] | Chromium walks the dashboard of real VMs |
//! | [`beside::liars`] | agents that lie about every field |
//! | [`beside::snapshots`], [`beside::hot_snapshots`] | a VM is saved, goes on, and comes back as it was, memory and disk; clones run beside it |
//! | [`beside::boot_snapshots`] | a VM goes back to right after its boot; what a snapshot would lack is refused |
//! | [`beside::disks`] | the same of disks that a VM writes in place, which stay its own |
//! | [`beside::cut_saves`], [`beside::attached`] | daemons and VMs die while they save; a QEMU that somebody typed is saved |
//! | [`beside::segments`] | VMs execute files of one image in place; what they write is theirs; who attacks it harms nobody else |
//! | [`beside::segments_killed`] | daemons die over segments, and disks are full |
//! | [`ksm`], [`ksm_explain`] | KSM for one trust domain, and its settings as before; every cause of `memfold ksm explain` |
//! | [`debt`] | clones rewrite all they share: braked in time, no byte and no VM lost |
//! | [`beside::lend`], [`beside::lend_short`] | a guest swaps on lent RAM, and lenders die, hang and fall short under it |
//! | [`beside::libvirt`] | domains of a real libvirtd fold with a VM of memfold's; save, restore, reboot and shutdown go on |
//! | [`soak`] | the second ring: the tutorial as it stands, churn, several hosts, LVM, iSCSI, migration, chaos, plans and estimates held against what is saved |
//!
//! Tests in [`beside`] may run two at a time; the others change what is the host's (KSM, swap, free
//! memory), or measure CPU time, and run alone. Guests are restored from one boot of their shape
//! ([`memfold_lab::Warm`]) where a test is not about booting. Without guest images or QEMU tests
//! say so and pass, unless `MEMFOLD_REAL=1`.

// A test here is one story of VMs that are dear to boot, and it speaks of states, stats and status.
#![allow(clippy::similar_names, clippy::too_many_lines)]

mod beside;
mod dashboard;
mod debt;
mod figures;
mod ksm;
mod ksm_explain;
mod served;
mod soak;
mod support;
