//! A VM's virtio-mem device: memory beyond the RAM at the start, which is plugged into the running
//! guest, and unplugged again.
//!
//! ```text
//!   RAM at the start (block ram0)      [hole below 4 GiB]      virtio-mem (block ram1)
//!                                                              |- plugged -|----- unplugged -----|
//!   request --> QEMU --> the guest's driver plugs or unplugs blocks of 2 MiB until it has that much
//!   read    <-- QEMU     how much is plugged now
//! ```
//! The size is a request: the driver reaches it within a second, later, or not at all. A guest
//! without the driver never does, so [`has_driver`] tells the two apart. Unplugged memory costs the
//! host nothing: QEMU gives its pages back to the kernel.
//!
//! The device is there from the VM's start, with an address that depends on nothing else, so a
//! snapshot's device state fits the VM that is restored from it.

use memfold_units::ByteSize;
use serde_json::{Value, json};

use super::qemu_line::Line;
use super::qmp::{Qmp, QmpError};
use super::spec::VmSpec;

/// Name of the device in QEMU.
const DEVICE: &str = "vmem0";

/// Name of the device's memory backend, and so of its RAM block.
const BACKEND: &str = "ram1";

/// Smallest amount that can be plugged: the size of a huge page, so that unplugging splits none.
const BLOCK: ByteSize = ByteSize::mib(2);

/// The device's size is a multiple of this, which is the size of a memory block of Linux on x86
/// (`Documentation/admin-guide/mm/memory-hotplug.rst`). Linux would not use the rest.
pub(super) const GRANULE: ByteSize = ByteSize::mib(128);

/// Bit of a virtio device's status that the guest's driver sets when it is ready (`VIRTIO`, section
/// 2.1), in QEMU's words.
const DRIVER_OK: &str = "VIRTIO_CONFIG_S_DRIVER_OK";

/// What QEMU says about a VM's virtio-mem device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtioMem {
    /// Memory that is plugged now.
    pub plugged: ByteSize,
    /// Memory that the guest should plug in all.
    pub requested: ByteSize,
    /// Largest memory that can be plugged.
    pub max: ByteSize,
    /// Smallest amount that can be plugged or unplugged.
    pub block: ByteSize,
}

impl VirtioMem {
    fn parse(device: &Value) -> Option<Self> {
        let data = &device["data"];
        let bytes = |name: &str| data[name].as_u64().map(ByteSize);
        Some(Self {
            plugged: bytes("size")?,
            requested: bytes("requested-size")?,
            max: bytes("max-size")?,
            block: bytes("block-size").filter(|block| block.0 > 0)?,
        })
    }
}

/// Adds the device with its memory backend. Of all devices with memory, it must be the first one:
/// it then gets the lowest address.
pub(super) fn arguments(line: &mut Line, spec: &VmSpec) {
    let Some(size) = spec.pluggable() else { return };
    line.add(
        "-object",
        format!("memory-backend-ram,id={BACKEND},size={}", size.0),
    )
    .add(
        "-device",
        format!(
            "virtio-mem-pci,id={DEVICE},memdev={BACKEND},block-size={},requested-size=0",
            BLOCK.0
        ),
    );
}

fn unexpected(answer: &Value) -> QmpError {
    QmpError::Unexpected {
        command: "query-memory-devices".to_owned(),
        text: answer.to_string(),
    }
}

/// Returns the virtio-mem devices in an answer to `query-memory-devices`.
fn devices(answer: &Value) -> impl Iterator<Item = &Value> {
    let all = answer.as_array().into_iter().flatten();
    all.filter(|device| device["type"] == "virtio-mem")
}

/// Reads the state of the virtio-mem device that memfold gave the VM; `None`: there is none.
pub fn read(qmp: &mut Qmp) -> Result<Option<VirtioMem>, QmpError> {
    let answer = qmp.query("query-memory-devices")?;
    let own = devices(&answer).find(|device| device["data"]["id"] == DEVICE);
    own.map(|device| VirtioMem::parse(device).ok_or_else(|| unexpected(&answer)))
        .transpose()
}

/// Returns the memory that is plugged by all virtio-mem devices of the VM, whoever gave them to it.
pub fn plugged(qmp: &mut Qmp) -> Result<ByteSize, QmpError> {
    let answer = qmp.query("query-memory-devices")?;
    let mut sum = 0_u64;
    for device in devices(&answer) {
        let size = device["data"]["size"].as_u64();
        sum = sum.saturating_add(size.ok_or_else(|| unexpected(&answer))?);
    }
    Ok(ByteSize(sum))
}

/// Sets how much memory the guest should plug in all: a multiple of the device's block size, and at
/// most its maximum. The guest reaches it later.
pub fn request(qmp: &mut Qmp, bytes: ByteSize) -> Result<(), QmpError> {
    let path = format!("/machine/peripheral/{DEVICE}");
    qmp.execute(
        "qom-set",
        json!({ "path": path, "property": "requested-size", "value": bytes.0 }),
    )
    .map(drop)
}

/// Returns whether the guest has a driver for the device, which is ready. A QEMU that cannot say it
/// counts as one with a driver: the size then tells.
pub fn has_driver(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let path = format!("/machine/peripheral/{DEVICE}/virtio-backend");
    let answer = match qmp.execute("x-query-virtio-status", json!({ "path": path })) {
        Err(QmpError::Refused { .. }) => return Ok(true),
        other => other?,
    };
    let Some(statuses) = answer["status"]["statuses"].as_array() else {
        return Ok(true);
    };
    let is_ready = |status: &Value| status.as_str().is_some_and(|s| s.starts_with(DRIVER_OK));
    Ok(statuses.iter().any(is_ready))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_has_a_virtio_mem_device_if_it_may_grow_and_has_no_slots_for_dimms() {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        assert_eq!(spec.pluggable(), None);
        spec.memory_max = Some(ByteSize::mib(2048));
        assert_eq!(spec.pluggable(), Some(ByteSize::mib(1536)));
        spec.memory_slots = 4;
        assert_eq!(spec.pluggable(), None);
    }

    #[test]
    fn the_state_of_a_virtio_mem_device_is_read_from_qemus_list_of_memory_devices() {
        let of = |id: &str, size: u64| {
            json!({ "type": "virtio-mem", "data": {
                "id": id, "memaddr": 1_u64 << 32, "requested-size": 256_u64 << 20, "size": size,
                "max-size": 1_u64 << 30, "block-size": 2_u64 << 20, "node": 0, "memdev": "/objects/ram1",
            } })
        };
        let answer = json!([
            { "type": "dimm", "data": { "id": "dimm0", "size": 1 } },
            of("other", 5),
            of(DEVICE, 128 << 20),
        ]);
        let found: Vec<_> = devices(&answer).map(VirtioMem::parse).collect();
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[1],
            Some(VirtioMem {
                plugged: ByteSize::mib(128),
                requested: ByteSize::mib(256),
                max: ByteSize::mib(1024),
                block: BLOCK,
            })
        );
        let broken = json!({ "type": "virtio-mem", "data": { "id": DEVICE, "block-size": 0 } });
        assert_eq!(VirtioMem::parse(&broken), None);
    }
}
