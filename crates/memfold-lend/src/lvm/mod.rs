//! Puts an LVM swap volume of a host on RAM that another host lends (`borrow --lvm VG/LV`). This is
//! for hosts that swap themselves, without VMs of memfold. A published study used this setup.
//!
//! ```text
//!   lender                          borrower's host
//!   tgtd, one a lease <-- iSCSI --> kernel's initiator (iscsi_tcp, iscsid) --> /dev/sdX, a physical volume of VG
//!                                                                                | image 1: reads
//!                                                             VG/LV (raid1) -----+
//!                                                                                | image 0: written only, while image 1 is there
//!                                                                              VG's own disks
//! ```
//! With durability `disk`, the volume becomes a RAID 1 mirror, whose image on this host's disk is
//! marked write-mostly. Reads come from lent RAM, writes go to both images, and the image on this
//! host's disk is complete at every moment. With durability `none`, the volume is moved to lent RAM
//! (`pvmove`), as in the study.
//!
//! LVM's own metadata decide what is on lent RAM. memfold recognizes a lent disk by the UUID of its
//! physical volume ([`new_uuid`]), also after a reboot. Once the volume is set up, only the kernel
//! and LVM handle its pages, without a memfold process.
//!
//! Bytes from a lender are not compared with the bytes that were written; only the relay of a VM's
//! swap disk does that.

mod error;
mod loan;
mod run;
pub mod session;
pub mod tools;
mod volume;

pub use error::LvmError;
pub use loan::{DATA_START, Loan, Phase, disk_bytes, is_lent, new_uuid};
pub use volume::{Volume, is_swap};
