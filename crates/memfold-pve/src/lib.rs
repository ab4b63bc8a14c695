//! VMs of Proxmox VE: enables memfold for them, and finds their QEMU processes when they run.
//!
//! The package `memfold-proxmox` puts a script in the place of `/usr/bin/kvm`. A file
//! `/etc/memfold/pve/VMID`, the *mark*, makes the script start that VM with memfold's library and a
//! QMP socket. The VM's configuration in `/etc/pve` does not change.
//!
//! ```text
//!   memfold pve enable  --->  /etc/memfold/pve/VMID: trust domain, UUID of the VM
//!   qm start --> qemu-server --> kvm (the script) --> QEMU with the library and VMID.qmp
//!   daemon:  each mark --> VMID.qmp --> the QEMU process, if its UUID is that of the mark
//! ```

mod enable;
mod mark;
mod node;

pub use enable::{Change, PveError};
pub use mark::{Mark, MarkError};
pub use node::{Config, Node, ROOT_VARIABLE};
