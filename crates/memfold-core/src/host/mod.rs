//! What this host can do: probed once, asked by everything.

pub mod doctor;
pub mod facts;
pub mod files;
pub mod groups;
pub mod helper;
pub mod kvm;
pub mod qemu;
pub mod socket;

pub use doctor::{Check, Report, Status, examine};
pub use facts::HostFacts;
pub use files::{GuestImage, guest_images, image_directory, library, own_program};
pub use groups::{Group, Room};
pub use kvm::KvmVerdict;
pub use qemu::{QemuError, QemuFacts};
