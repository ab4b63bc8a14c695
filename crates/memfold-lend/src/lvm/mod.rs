//! Lent RAM under a swap volume of LVM's: the path of the study, for hosts whose swap is no disk of
//! a VM of ours (`borrow --lvm VG/LV`).
//!
//! ```text
//!   lender                          borrower's host
//!   tgtd, one a lease <-- iSCSI --> kernel's initiator (iscsi_tcp, iscsid) --> /dev/sdX, a physical volume of VG
//!                                                                                | image 1: reads
//!                                                             VG/LV (raid1) -----+
//!                                                                                | image 0: written only, while image 1 is there
//!                                                                              VG's own disks
//! ```
//! Durability `disk` makes the volume a mirror whose own image is marked write-mostly: what is read
//! comes from lent RAM, what is written goes to both, and what is on this host's disk is whole at
//! every moment. Durability `none` moves the volume (`pvmove`), as the study did.
//!
//! What LVM's metadata say is the truth: a lent disk is known by its physical volume's UUID
//! ([`new_uuid`]), which also who comes after a reboot finds. Everything here is the kernel's and
//! LVM's business once it stands: no process of ours is on the way of a page.
//!
//! Nobody compares what a lender serves with what was written, as the relay does for VMs.

mod error;
mod lent_disk;
mod loan;
mod run;
pub mod session;
pub mod tools;
mod volume;

pub use error::LvmError;
pub use lent_disk::{DATA_START, disk_bytes, is_lent, new_uuid};
pub use loan::{Loan, Phase};
pub use volume::{Volume, is_swap};
