//! Settings that an operator can change while a VM runs. A change is recorded in the VM's
//! directory, so the next daemon knows it, and ends with the VM.

use std::num::NonZeroU32;

use memfold_vm::{Vm, VmDirectory};
use serde::{Deserialize, Serialize};

/// Settings of a running VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    /// Whether more of the VM's memory may be folded.
    pub fold: bool,
    /// Whether the VM resumes by itself when its full disk has free space.
    pub resume_when_room: bool,
    /// Time to live in seconds, after which the VM is switched off; `None`: no limit.
    #[serde(default)]
    pub ttl_s: Option<NonZeroU32>,
}

impl Settings {
    /// Returns the settings of a VM: those that were changed since its start, or those of its
    /// description.
    pub fn of(vm: &Vm) -> Self {
        let changed = vm.directory().map(VmDirectory::settings);
        let changed = changed.and_then(|path| VmDirectory::read_json(&path).ok());
        let spec = vm.spec();
        changed.unwrap_or(Self {
            fold: vm.has_library() && spec.is_none_or(|spec| spec.fold),
            resume_when_room: spec.is_some_and(|spec| spec.resume_when_room),
            ttl_s: spec.and_then(|spec| spec.ttl_s),
        })
    }
}
