//! Types of the daemon's API for right-sizing: how much memory each VM should have, what the daemon
//! does about it, and what the operator allows.

use memfold_units::ByteSize;
use memfold_vm::SizingSpec;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether the daemon changes the memory of VMs.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum RightsizeMode {
    /// The daemon neither looks nor acts.
    Off,
    /// The daemon says what it would do, and does nothing.
    #[default]
    Watch,
    /// The daemon trims page caches of guests, moves their balloons, and plugs memory.
    On,
}

/// Request body of `PUT /v1/rightsize`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RightsizeRequest {
    /// New mode, until the daemon ends.
    pub mode: RightsizeMode,
}

/// Limits of one VM's size, which the operator sets. Request body of `PUT /v1/vms/{name}/sizing`,
/// where absent fields keep their values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Sizing {
    /// Smallest size, in bytes; by default a quarter of the VM's RAM, but at least 256 MiB, and at
    /// most the largest size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bytes: Option<u64>,
    /// Largest size, in bytes; by default the size that the VM had before right-sizing changed it:
    /// all of its RAM, unless another program, such as libvirt, has moved its balloon. A VM with
    /// `memory_max` can grow to that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// Memory that the VM has beyond its working set, in percent of the working set: 0 to 1,000, by
    /// default 20.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffer_percent: Option<u16>,
    /// Weight of what the VM loses, compared with other VMs: of two VMs, the one with half the
    /// weight is asked first. 1 to 10,000, by default 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u16>,
    /// Whether the VM's size never changes; by default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<bool>,
}

/// What right-sizing knows about the host and its VMs, and what it does.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct RightsizeReport {
    /// Whether the daemon changes the memory of VMs.
    pub mode: RightsizeMode,
    /// How short the host is, from the least: `ample`, `trim`, `balloon`, `lent`, `brake`. Null
    /// before the first look.
    pub rung: Option<String>,
    /// Why the host is on this rung, as a sentence.
    pub why: String,
    /// Memory of the host that is available now (`MemAvailable`), in bytes.
    pub available_bytes: u64,
    /// Memory of the host that must stay available, in bytes (the brake's reserve).
    pub reserve_bytes: u64,
    /// VMs, by name.
    pub vms: Vec<VmRightsize>,
    /// Last orders that were carried out, oldest first: as many as the request asked for.
    pub events: Vec<RightsizeEvent>,
    /// Last changes of the rung, oldest first, at most 64.
    #[serde(default)]
    pub rungs: Vec<RungChange>,
    /// Number of orders since the daemon's start, by what was ordered and why.
    #[serde(default)]
    pub orders: Vec<OrderCount>,
}

/// Query parameters of `GET /v1/rightsize`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct RightsizeQuery {
    /// Number of orders in `events`, 0 to 1,000; by default 100.
    pub events: Option<u32>,
}

/// A change of the host's rung.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RungChange {
    /// Time of the change, in seconds since 1970.
    pub at_unix_s: f64,
    /// New rung: `ample`, `trim`, `balloon`, `lent` or `brake`.
    pub rung: String,
    /// Why, as a sentence.
    pub why: String,
}

/// Number of orders of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OrderCount {
    /// What was ordered: `trim`, `balloon`, `plug` or `unplug`.
    pub kind: String,
    /// Why, in a word, such as `cache_not_missed` or `host_short`.
    pub reason: String,
    /// Number of orders that were given.
    pub count: u64,
    /// Number of them that could not be carried out.
    pub failed: u64,
}

/// What right-sizing knows about one VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct VmRightsize {
    /// Name of the VM.
    pub vm: String,
    /// Memory that the guest may use now, in bytes. For a VM that does not run, or whose QEMU does
    /// not answer: as QEMU last said.
    pub size_bytes: u64,
    /// Part of `size_bytes` that virtio-mem has plugged, in bytes; null if the VM has no virtio-mem
    /// device.
    #[serde(default)]
    pub plugged_bytes: Option<u64>,
    /// Memory that the guest would miss, in bytes.
    pub working_set_bytes: u64,
    /// What the working set is based on: `probed`, `upper bound` or `unknown`.
    pub basis: String,
    /// Size that the VM should have, in bytes: working set and buffer, within its limits.
    pub target_bytes: u64,
    /// Share of time in which a task of the guest waited for memory, 0 to 1; null if the guest does
    /// not report it.
    pub pressure: Option<f64>,
    /// Order of the last look, as text; in the mode `watch`, what would be ordered. Null if there
    /// was none.
    pub order: Option<String>,
    /// Why the VM got this order, or none, as a sentence.
    pub reason: String,
    /// Limits that the operator set.
    pub sizing: Sizing,
}

/// An order of right-sizing.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct RightsizeEvent {
    /// Time of the order, in seconds since 1970.
    pub at_unix_s: f64,
    /// Name of the VM.
    pub vm: String,
    /// The order, as text.
    pub order: String,
    /// Why, as a sentence.
    pub reason: String,
    /// What became of it, as text: the memory that the guest gave, or why it failed; null while the
    /// order is carried out.
    pub result: Option<String>,
}

/// Rungs of the ladder, from the lowest to the highest.
pub const RUNGS: [&str; 5] = ["ample", "trim", "balloon", "lent", "brake"];

impl RightsizeReport {
    /// Returns the rung as a number, from 0 (`ample`) to 4 (`brake`); `None` before the first look.
    #[must_use]
    pub fn rung_number(&self) -> Option<u8> {
        let rung = self.rung.as_deref()?;
        let index = RUNGS.iter().position(|name| *name == rung)?;
        u8::try_from(index).ok()
    }
}

impl Sizing {
    /// Returns these limits with the fields of `changes` that are set.
    #[must_use]
    pub fn with(self, changes: Self) -> Self {
        Self {
            min_bytes: changes.min_bytes.or(self.min_bytes),
            max_bytes: changes.max_bytes.or(self.max_bytes),
            buffer_percent: changes.buffer_percent.or(self.buffer_percent),
            priority: changes.priority.or(self.priority),
            pinned: changes.pinned.or(self.pinned),
        }
    }

    /// Checks the limits of a VM that can have this much memory. The error says which limit is
    /// wrong, and why.
    pub fn check(&self, largest: ByteSize) -> Result<(), String> {
        SizingSpec::from(*self).check(largest)
    }
}

impl From<SizingSpec> for Sizing {
    fn from(of: SizingSpec) -> Self {
        Self {
            min_bytes: of.min.map(|size| size.0),
            max_bytes: of.max.map(|size| size.0),
            buffer_percent: of.buffer,
            priority: of.priority,
            pinned: of.pinned.then_some(true),
        }
    }
}

impl From<Sizing> for SizingSpec {
    fn from(of: Sizing) -> Self {
        Self {
            min: of.min_bytes.map(ByteSize),
            max: of.max_bytes.map(ByteSize),
            buffer: of.buffer_percent,
            priority: of.priority,
            pinned: of.pinned.unwrap_or(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_vms_size_that_contradict_each_other_or_its_ram_are_refused_with_the_reason() {
        let ram = ByteSize::mib(1024);
        let sizing = |min: u64, max: u64| Sizing {
            min_bytes: Some(min << 20),
            max_bytes: Some(max << 20),
            ..Sizing::default()
        };
        assert_eq!(sizing(256, 1024).check(ram), Ok(()));
        for (wrong, words) in [
            (sizing(2048, 4096), "min is 2.00 GiB"),
            (sizing(256, 2048), "max is 2.00 GiB"),
            (sizing(512, 256), "above max"),
            (
                Sizing {
                    priority: Some(0),
                    ..Sizing::default()
                },
                "priority",
            ),
            (
                Sizing {
                    buffer_percent: Some(1001),
                    ..Sizing::default()
                },
                "buffer",
            ),
        ] {
            let error = wrong.check(ram).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn absent_limits_of_a_request_keep_the_values_of_the_vm() {
        let now = Sizing {
            min_bytes: Some(1),
            pinned: Some(true),
            ..Sizing::default()
        };
        let changes = Sizing {
            pinned: Some(false),
            priority: Some(7),
            ..Sizing::default()
        };
        let new = now.with(changes);
        assert_eq!(
            (new.min_bytes, new.pinned, new.priority),
            (Some(1), Some(false), Some(7))
        );
        assert_eq!(new.max_bytes, None);
    }
}
