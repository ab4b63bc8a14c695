//! Tests on real guests, with attacks and failures: the guarantees of folding hold whichever part
//! misbehaves.
//!
//! | test | checks |
//! |---|---|
//! | [`beside::integrity`] | every byte of files of `/usr`, and of files that are rewritten, truncated and appended to, while memory is short, caches are dropped and the balloon moves |
//! | [`beside::domains`], [`beside::vm_killed`] | on the same VMs: no physical page crosses trust domains; the death of a VM does not affect the others |
//! | [`beside::daemon_killed`] | daemons die, VMs keep running, and the next daemon continues folding |
//! | [`beside::defined`] | VMs with autostart run again after a boot of the host |
//! | [`beside::attack`] | the API is flooded; guests and folding are not disturbed |
//! | [`dashboard`] | the dashboard of real VMs in Chromium |
//! | [`beside::guest_memory`] | the daemon knows the guest's memory figures; a trim takes only clean page cache; the balloon moves |
//! | [`beside::liars`] | agents that report false values in every field |
//! | [`beside::snapshots`], [`beside::hot_snapshots`] | a VM is saved, keeps running, and is restored with the same memory and disk; clones run beside it |
//! | [`beside::object_store`] | a snapshot travels through an S3 server to another daemon, although both daemons are killed on the way |
//! | [`beside::boot_snapshots`] | a VM is restored to the state after its boot; unsuitable VMs are refused |
//! | [`beside::disks`] | snapshots with disks that a VM writes in place and keeps |
//! | [`beside::cut_saves`], [`beside::attached`] | daemons and VMs die during a save; a QEMU that was started by hand is saved |
//! | [`beside::segments`] | VMs execute files of one image in place; writes stay private; an attack on the image harms no other VM |
//! | [`beside::segments_killed`] | daemons die during operations on segments, and disks are full |
//! | [`ksm`], [`ksm_explain`] | KSM for one trust domain, and restored settings; every cause of `memfold ksm explain` |
//! | [`debt`] | clones rewrite all shared memory: the brake acts in time, and no byte and no VM is lost |
//! | [`beside::lend`], [`beside::lend_short`] | a guest swaps on lent RAM while lenders die, hang and run short of memory |
//! | [`beside::libvirt`] | domains of a real libvirtd are folded with a VM of memfold; save, restore, reboot and shutdown work as usual |
//! | [`beside::pve`] | VMs that a fake node of Proxmox VE starts are attached in their trust domains |
//! | [`soak`] | long tests: the tutorial, changing page caches, several hosts, a lender whose own VM grows, right-sized VMs in trouble, LVM, iSCSI, migration, chaos, and plans and estimates compared with the real savings |
//!
//! Tests in [`beside`], [`debt`] and the long test of [`dashboard`] may run two at a time. The
//! others change settings of the host (KSM, swap, free memory) or measure CPU time, and run alone.
//! Guests are restored from one boot of their kind ([`memfold_lab::Warm`]) unless a test is about
//! booting. Without guest images or QEMU, tests report that and pass, unless `MEMFOLD_REAL=1`.

// Each test here is a long sequence on VMs that take long to boot, with names such as states, stats
// and status.
#![allow(clippy::similar_names, clippy::too_many_lines)]

mod beside;
mod dashboard;
mod debt;
mod figures;
mod ksm;
mod ksm_explain;
mod served;
mod sizing;
mod soak;
mod support;
