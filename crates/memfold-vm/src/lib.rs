//! Starts, finds and stops virtual machines, and connects to each: QMP, RAM layout, memfold's agent
//! in the guest, and memfold's library in QEMU.
//!
//! ```text
//!   VmSpec --start--> Vm <--discover-- STATE/vms/NAME/   <--attach-- a QMP socket
//!                     |-- Qmp          RAM layout, conditions, stop
//!                     |-- AgentLink    hints and commands, untrusted
//!                     |-- LibraryLink  fold orders
//!                     `-- Process      pid + start time, pidfd
//! ```
//! All functions of this crate block; callers run them on threads.

mod agent_budget;
mod agent_facts;
mod agent_held;
pub mod agent_link;
mod agent_stream;
mod agent_task;
mod agent_trim;
mod agent_windows;
pub mod balloon;
pub mod block_device;
mod cloud_init;
pub mod command_line;
pub mod conditions;
pub mod connection;
mod definition;
pub mod directory;
mod disk_header;
pub mod endpoints;
pub mod foreign;
pub mod forward;
mod image_format;
pub mod kernel_copy;
pub mod launch;
pub mod layout;
pub mod library_link;
pub mod machine;
mod name;
mod network;
mod orphans;
pub mod overlay;
pub mod own_files;
pub mod process;
pub mod qcow2;
mod qemu_line;
pub mod qemu_user;
pub mod qmp;
mod quiet;
pub mod ram;
pub mod seed_disk;
mod segment_spec;
pub mod segments;
mod shared_qmp;
mod size_text;
mod sizing_spec;
pub mod spec;
mod spec_error;
mod stop;
pub mod swap;
pub mod trial;
mod validate;
pub mod virtio_mem;

pub use agent_facts::{AgentEvent, AgentFacts, AgentOptions, AgentStats};
pub use agent_link::AgentLink;
pub use agent_stream::{StreamRequest, StreamedCommand};
pub use agent_task::{AgentError, CommandResult, GuestTask, StreamEvent};
pub use agent_trim::Trim;
pub use cloud_init::{CloudInit, Seed};
pub use conditions::{Reason, VmConditions};
pub use connection::ConnectionError;
pub use definition::Definition;
pub use directory::{DEFAULT_STATE, Record, VmDirectory, missing_is_fine};
pub use forward::Forward;
pub use launch::{
    Cancel, Incoming, LaunchError, file_end, last_words, log_tail, start, start_unless,
};
pub use layout::{RamBlock, RamLayout, RamSlot};
pub use library_link::{LibraryError, LibraryFacts, LibraryLink};
pub use machine::{MachineError, Vm};
pub use memfold_wire::agent::{INPUT_WINDOW, OutputStream, Terminal, TerminalSize};
pub use memfold_wire::order::GuestOrder;
pub use memfold_wire::permission::Permission;
pub use name::{MAX_NAME, check_name, host_name};
pub use network::{MacAddress, Network};
pub use orphans::{Orphans, remove_orphans, vm_of};
pub use process::{Identity, Process, boot_id, start_ticks};
pub use qemu_user::{QemuUser, UserError};
pub use qmp::{Qmp, QmpError};
pub use ram::RamError;
pub use segment_spec::SegmentSpec;
pub use shared_qmp::{QmpGuard, SharedQmp};
pub use sizing_spec::SizingSpec;
pub use spec::{
    AccelChoice, Aio, BootSpec, CacheMode, DiskFormat, DiskSpec, MergeChoice, StreamedDisk, VmSpec,
};
pub use spec_error::SpecError;
pub use stop::{Ask, StopKind, Stopped};
