//! A VM's balloon (`virtio-balloon-pci`): the guest's memory figures by its driver, and the size
//! that the host leaves to the guest.
//!
//! ```text
//!   set_target --> QEMU --> the guest's driver allocates pages and gives them up, or takes them back
//!   actual     <-- QEMU <-- the driver says how many it has given up (BALLOON_CHANGE)
//! ```
//! The target is a request: the driver reaches it slowly, or not at all. A guest without the driver
//! never does, so [`set_target`] refuses it. With `deflate-on-oom=on`, the driver takes pages back
//! before the guest's kernel would kill a process, and gives them up again later.

use std::thread::sleep;
use std::time::{Duration, Instant};

use memfold_units::ByteSize;
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Smallest target: less is not enough for a Linux guest's kernel.
pub const SMALLEST: ByteSize = ByteSize::mib(64);

/// Time between two looks at a size that changes.
const LOOK: Duration = Duration::from_millis(100);

/// Directories of QEMU's object tree that hold devices with and without a name.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// Why a balloon cannot be moved.
#[derive(Debug, thiserror::Error)]
pub enum BalloonError {
    /// The VM has no balloon.
    #[error("the VM has no balloon device; start it with balloon = true")]
    NoDevice,
    /// The guest's driver has never answered.
    #[error(
        "the guest has no balloon driver; load the module virtio_balloon in the guest, or wait until the guest has booted"
    )]
    NoDriver,
    /// The target is below [`SMALLEST`], or above the VM's RAM.
    #[error("a balloon target must be from {SMALLEST} to {ram}, the VM's RAM; {target} is not")]
    Target {
        /// Size that the guest should have been given, which is not possible.
        target: ByteSize,
        /// RAM of the VM, with DIMMs.
        ram: ByteSize,
    },
    /// The monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

impl BalloonError {
    /// Returns whether QEMU may have taken the order, or may still take it, although its answer is
    /// missing.
    #[must_use]
    pub const fn may_have_moved(&self) -> bool {
        matches!(self, Self::Qmp(error) if !matches!(error, QmpError::Refused { .. }))
    }
}

/// Memory figures that a guest's balloon driver reports (`guest-stats`; QEMU's
/// `docs/interop/virtio-balloon-stats.rst`), in bytes unless the name says otherwise. `None`: the
/// guest's kernel or QEMU does not know the figure. Untrusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestStats {
    /// Time at which QEMU got the figures, in seconds since 1970.
    pub updated_s: u64,
    /// Memory of the guest, as its kernel counts it.
    pub total: u64,
    /// Memory that is free.
    pub free: Option<u64>,
    /// Memory that programs could get without swapping (`MemAvailable`).
    pub available: u64,
    /// Page cache that can be reclaimed.
    pub disk_caches: Option<u64>,
    /// Number of page faults for which the guest read from a disk.
    pub major_faults: Option<u64>,
    /// Bytes read from swap since the guest's boot.
    pub swap_in: Option<u64>,
    /// Bytes written to swap since the guest's boot.
    pub swap_out: Option<u64>,
    /// Number of processes that the guest's kernel killed for lack of memory (Linux 6.12).
    pub oom_kills: Option<u64>,
    /// Number of allocations that had to reclaim memory themselves (Linux 6.12).
    pub alloc_stalls: Option<u64>,
    /// Number of pages scanned for reclaim (Linux 6.12).
    pub scanned_pages: Option<u64>,
    /// Number of pages reclaimed (Linux 6.12).
    pub reclaimed_pages: Option<u64>,
}

impl GuestStats {
    /// Reads QEMU's answer; `None` if the guest has reported nothing yet, or if its kernel lacks
    /// the most important figures.
    #[must_use]
    pub fn parse(answer: &Value) -> Option<Self> {
        let stats = &answer["stats"];
        // QEMU reports an unknown value as the largest number.
        let number = |name: &str| stats[name].as_u64().filter(|value| *value != u64::MAX);
        let sum = |names: [&str; 2]| {
            let [a, b] = names.map(number);
            Some(a?.saturating_add(b?))
        };
        Some(Self {
            updated_s: answer["last-update"].as_u64().unwrap_or(0),
            total: number("stat-total-memory").filter(|total| *total > 0)?,
            free: number("stat-free-memory"),
            available: number("stat-available-memory")?,
            disk_caches: number("stat-disk-caches"),
            major_faults: number("stat-major-faults"),
            swap_in: number("stat-swap-in"),
            swap_out: number("stat-swap-out"),
            oom_kills: number("stat-oom-kills"),
            alloc_stalls: number("stat-alloc-stalls"),
            scanned_pages: sum(["stat-async-scans", "stat-direct-scans"]),
            reclaimed_pages: sum(["stat-async-reclaims", "stat-direct-reclaims"]),
        })
    }
}

/// Finds the VM's balloon, and returns its path in QEMU's object tree.
pub fn find(qmp: &mut Qmp) -> Result<String, BalloonError> {
    for directory in DEVICES {
        let children = qmp.execute("qom-list", json!({ "path": directory }))?;
        let mut children = children.as_array().into_iter().flatten();
        let is_balloon = |child: &&Value| {
            let kind = child["type"].as_str().unwrap_or_default();
            kind.starts_with("child<virtio-balloon")
        };
        if let Some(name) = children.find(is_balloon).and_then(|c| c["name"].as_str()) {
            return Ok(format!("{directory}/{name}"));
        }
    }
    Err(BalloonError::NoDevice)
}

/// Returns the guest's figures, as its driver last reported them; `None` if there are none yet.
/// `device`: path of the balloon ([`find`]).
pub fn guest_stats(qmp: &mut Qmp, device: &str) -> Result<Option<GuestStats>, QmpError> {
    let answer = qmp.execute(
        "qom-get",
        json!({ "path": device, "property": "guest-stats" }),
    )?;
    Ok(GuestStats::parse(&answer))
}

/// Sets how often QEMU asks the guest for figures, in seconds; 0 stops the queries.
pub fn poll_guest_stats(qmp: &mut Qmp, device: &str, seconds: u64) -> Result<(), QmpError> {
    let property = "guest-stats-polling-interval";
    qmp.execute(
        "qom-set",
        json!({ "path": device, "property": property, "value": seconds }),
    )
    .map(drop)
}

/// Returns whether the guest's driver takes pages back from the balloon before its kernel would
/// kill a process. `device`: path of the balloon ([`find`]).
pub fn deflates_on_oom(qmp: &mut Qmp, device: &str) -> Result<bool, QmpError> {
    let property = "deflate-on-oom";
    let answer = qmp.execute("qom-get", json!({ "path": device, "property": property }))?;
    Ok(answer.as_bool().unwrap_or(false))
}

/// Returns whether QEMU gives pages that are free in the guest back to the host: the VM has a
/// balloon with free page reporting, whoever gave it to the VM.
pub fn reports_free_pages(qmp: &mut Qmp) -> Result<bool, BalloonError> {
    let device = match find(qmp) {
        Err(BalloonError::NoDevice) => return Ok(false),
        other => other?,
    };
    let property = "free-page-reporting";
    let answer = qmp.execute("qom-get", json!({ "path": device, "property": property }));
    Ok(is_on(answer)?)
}

/// Returns whether a property of a device is on. A QEMU that refuses the question is older than the
/// property (QEMU 5.1 brought free page reporting).
fn is_on(answer: Result<Value, QmpError>) -> Result<bool, QmpError> {
    match answer {
        Err(QmpError::Refused { .. }) => Ok(false),
        other => Ok(other?.as_bool().unwrap_or(false)),
    }
}

/// Returns the VM's RAM with DIMMs: its size when the balloon is empty. Memory of other devices is
/// not part of it, because QEMU does not count that for the balloon (`hw/virtio/virtio-balloon.c`,
/// `get_current_ram_size`; `hw/mem/pc-dimm.c`, `pc_dimm_plug`): what virtio-mem has plugged,
/// segments (virtio-pmem), NVDIMMs.
pub fn full_size(qmp: &mut Qmp) -> Result<ByteSize, QmpError> {
    let answer = qmp.query("query-memory-size-summary")?;
    let bytes = |name: &str| answer[name].as_u64();
    let Some(base) = bytes("base-memory") else {
        return Err(unexpected("query-memory-size-summary", &answer));
    };
    // All devices with memory (`hw/mem/memory-device.c`, `get_plugged_memory_size`).
    let has_devices = bytes("plugged-memory").unwrap_or(0) > 0;
    if !has_devices {
        return Ok(ByteSize(base));
    }
    let devices = qmp.query("query-memory-devices")?;
    let dimms = dimms(&devices).ok_or_else(|| unexpected("query-memory-devices", &devices))?;
    Ok(ByteSize(base.saturating_add(dimms)))
}

/// Returns the size of all DIMMs in an answer to `query-memory-devices`, in bytes; `None` if one
/// has no size.
fn dimms(answer: &Value) -> Option<u64> {
    let devices = answer.as_array().into_iter().flatten();
    let mut dimms = devices.filter(|device| device["type"] == "dimm");
    dimms.try_fold(0_u64, |sum, dimm| {
        Some(sum.saturating_add(dimm["data"]["size"].as_u64()?))
    })
}

/// Returns the size that the guest really has: its RAM without the pages in the balloon, and
/// without memory that virtio-mem has plugged.
pub fn actual(qmp: &mut Qmp) -> Result<ByteSize, BalloonError> {
    let answer = match qmp.query("query-balloon") {
        Err(QmpError::Refused { class, .. }) if class == "DeviceNotActive" => {
            return Err(BalloonError::NoDevice);
        }
        other => other?,
    };
    let actual = answer["actual"].as_u64();
    let actual = actual.ok_or_else(|| unexpected("query-balloon", &answer))?;
    Ok(ByteSize(actual))
}

/// Returns the VM's RAM with DIMMs ([`full_size`]), and the size that the guest really has
/// ([`actual`]).
///
/// QEMU has no question for both. If a DIMM is plugged or removed between two questions, its size
/// would count as memory that the balloon takes or gives. So QEMU is asked for the RAM before and
/// after, and for the size again if the RAM has changed.
pub fn sizes(qmp: &mut Qmp) -> Result<(ByteSize, ByteSize), BalloonError> {
    let before = full_size(qmp)?;
    let size = actual(qmp)?;
    let ram = full_size(qmp)?;
    if ram == before {
        return Ok((ram, size));
    }
    Ok((ram, actual(qmp)?))
}

fn unexpected(command: &str, answer: &Value) -> QmpError {
    QmpError::Unexpected {
        command: command.to_owned(),
        text: answer.to_string(),
    }
}

/// Sets the size that the guest should have, without memory that virtio-mem has plugged. The guest
/// reaches it later; [`wait_for`] waits for that.
///
/// # Errors
///
/// [`BalloonError::Target`] if the target is not possible, [`BalloonError::NoDevice`] and
/// [`BalloonError::NoDriver`] if nothing would happen.
pub fn set_target(qmp: &mut Qmp, target: ByteSize) -> Result<(), BalloonError> {
    let ram = full_size(qmp)?;
    if target > ram || target < SMALLEST.min(ram) {
        return Err(BalloonError::Target { target, ram });
    }
    let device = find(qmp)?;
    check_driver(qmp, &device)?;
    qmp.execute("balloon", json!({ "value": target.0 }))?;
    Ok(())
}

/// Gives the guest its memory back up to `size`, or all of it. This needs no driver, so it succeeds
/// whatever the guest does: a driver that is loaded later begins with an empty balloon.
pub fn restore(qmp: &mut Qmp, size: Option<ByteSize>) -> Result<(), BalloonError> {
    actual(qmp)?;
    let ram = full_size(qmp)?;
    let size = size.map_or(ram, |size| size.min(ram));
    qmp.execute("balloon", json!({ "value": size.0 }))?;
    Ok(())
}

/// Waits until the guest has at most `target`, or `limit` is over. Returns the real size then.
pub fn wait_for(
    qmp: &mut Qmp,
    target: ByteSize,
    limit: Duration,
) -> Result<ByteSize, BalloonError> {
    let until = Instant::now() + limit;
    let before = actual(qmp)?;
    loop {
        let now = actual(qmp)?;
        let is_there = if target < before {
            now <= target
        } else {
            now >= target
        };
        if is_there || Instant::now() >= until {
            return Ok(now);
        }
        sleep(LOOK);
    }
}

/// Checks that the guest's driver has spoken since QEMU began. Each driver hands QEMU a first page
/// of figures when it starts, and again after the VM was restored.
fn check_driver(qmp: &mut Qmp, device: &str) -> Result<(), BalloonError> {
    let answer = qmp.execute(
        "qom-get",
        json!({ "path": device, "property": "guest-stats" }),
    )?;
    match answer["last-update"].as_u64() {
        None | Some(0) => Err(BalloonError::NoDriver),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::tests::server;

    #[test]
    fn unknown_figures_of_a_balloon_driver_are_none_and_a_silent_driver_has_no_figures() {
        let answer = json!({ "last-update": 1, "stats": {
            "stat-total-memory": 512_u64 << 20, "stat-free-memory": 100, "stat-available-memory": 200,
            "stat-swap-in": u64::MAX, "stat-swap-out": 7, "stat-htlb-pgfail": u64::MAX,
            "stat-async-scans": 5, "stat-direct-scans": 6, "stat-async-reclaims": u64::MAX,
            "stat-direct-reclaims": 1,
        } });
        let expected = GuestStats {
            updated_s: 1,
            total: 512 << 20,
            free: Some(100),
            available: 200,
            swap_out: Some(7),
            scanned_pages: Some(11),
            ..GuestStats::default()
        };
        assert_eq!(GuestStats::parse(&answer), Some(expected));
        let silent = json!({ "stats": {}, "last-update": 0 });
        assert_eq!(GuestStats::parse(&silent), None);
        let zero = json!({ "stats": { "stat-total-memory": 0, "stat-available-memory": 0 } });
        assert_eq!(GuestStats::parse(&zero), None);
    }

    #[test]
    fn of_all_devices_with_memory_only_dimms_count_for_the_balloon() {
        let of = |kind: &str, size: u64| json!({ "type": kind, "data": { "size": size } });
        let kinds = ["dimm", "nvdimm", "virtio-mem", "virtio-pmem"];
        let mut devices: Vec<Value> = kinds.iter().map(|kind| of(kind, 1 << 30)).collect();
        devices.push(of("dimm", 1 << 28));
        assert_eq!(dimms(&json!(devices)), Some((1 << 30) + (1 << 28)));
        assert_eq!(dimms(&json!([of("virtio-pmem", 1)])), Some(0));
        assert_eq!(dimms(&json!([{ "type": "dimm", "data": {} }])), None);
    }

    #[test]
    fn a_dimm_that_is_plugged_between_two_questions_counts_for_ram_and_size_or_for_none() {
        let ram = r#"{"return": {"base-memory": 1024, "plugged-memory": 0}, "id": ID}"#;
        let more = r#"{"return": {"base-memory": 1024, "plugged-memory": 256}, "id": ID}"#;
        let dimm = r#"{"return": [{"type": "dimm", "data": {"size": 256}}], "id": ID}"#;
        let (small, large) = (
            r#"{"return": {"actual": 924}, "id": ID}"#,
            r#"{"return": {"actual": 1180}, "id": ID}"#,
        );
        for (answers, expected) in [
            (vec![ram, small, ram], (1024, 924)),
            // The DIMM is plugged after the first question, and after the second one.
            (vec![ram, large, more, dimm, large], (1280, 1180)),
            (vec![ram, small, more, dimm, large], (1280, 1180)),
        ] {
            let (_dir, path) = server(vec![answers]);
            let mut qmp = Qmp::connect(&path, Duration::from_secs(5)).unwrap();
            let (ram, size) = sizes(&mut qmp).unwrap();
            assert_eq!((ram.0, size.0), expected);
        }
    }

    #[test]
    fn a_balloon_whose_qemu_does_not_know_free_page_reporting_has_none() {
        let command = || "qom-get".to_owned();
        let unknown = QmpError::Refused {
            command: command(),
            class: "GenericError".into(),
            description: "Property 'virtio-balloon-pci.free-page-reporting' not found".into(),
        };
        assert!(matches!(is_on(Err(unknown)), Ok(false)));
        assert!(matches!(is_on(Ok(json!(true))), Ok(true)));
        assert!(matches!(is_on(Ok(json!(false))), Ok(false)));
        // QEMU is asked again.
        let late = QmpError::Timeout {
            command: command(),
            seconds: 1.0,
        };
        assert!(is_on(Err(late)).is_err());
    }

    #[test]
    fn an_order_without_an_answer_may_have_moved_the_balloon_and_a_refused_one_has_not() {
        let command = || "balloon".to_owned();
        let late = QmpError::Timeout {
            command: command(),
            seconds: 1.0,
        };
        assert!(BalloonError::from(late).may_have_moved());
        let refused = QmpError::Refused {
            command: command(),
            class: "GenericError".into(),
            description: "no".into(),
        };
        assert!(!BalloonError::from(refused).may_have_moved());
        assert!(!BalloonError::NoDriver.may_have_moved());
    }
}
