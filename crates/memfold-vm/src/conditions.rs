//! Finds out whether a VM's RAM can be folded and, if not, why. Pinned or locked memory and some
//! QEMU options prevent folding.
//!
//! QEMU does not report all options and hot-plugged devices. Therefore open descriptors and locked
//! memory are read from `/proc`.

use std::fs;

use rustix::fs::OFlags;
use rustix::process::Pid;
use serde::Serialize;
use serde_json::{Value, json};

use super::endpoints::command_line;
use super::layout::RamLayout;
use super::qmp::Qmp;
use super::ram::{self, RamError, RamFacts};

/// Why a VM cannot be folded, or what the VM costs the host, with a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// The setting or state of the VM that is the reason, as a text for the operator.
    pub condition: String,
    /// What the operator can change about the VM, as text.
    pub remedy: String,
    /// Whether the reason ends without a change by the operator (such as a migration), so that
    /// folding only pauses.
    pub passing: bool,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.condition, self.remedy)
    }
}

/// Whether a VM's RAM can be folded, as found at one moment, and the reasons if not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VmConditions {
    /// Reasons why the VM's RAM cannot be folded; empty if the RAM can be folded.
    pub fold: Vec<Reason>,
    /// Reasons why pages that the guest has written cannot be folded again while the VM runs, but
    /// only while it is paused; empty if they can.
    pub refold_live: Vec<Reason>,
    /// Settings of the VM that cost the host resources, but do not prevent folding.
    pub costs: Vec<Reason>,
    /// The host gets no memory back that the guest frees, or that its balloon takes: the RAM is
    /// pinned for a device or locked (QEMU's `ram_block_discard_disable`), or has huge pages of
    /// hugetlbfs.
    pub keeps_freed_ram: bool,
}

impl VmConditions {
    /// Returns whether the VM's RAM may be folded now.
    #[must_use]
    pub fn may_fold(&self) -> bool {
        self.fold.is_empty()
    }

    /// Returns whether pages that the guest has written may be folded again now, while the VM runs.
    #[must_use]
    pub fn may_refold_live(&self) -> bool {
        self.may_fold() && self.refold_live.is_empty()
    }
}

fn reason(condition: impl Into<String>, remedy: &str) -> Reason {
    Reason {
        condition: condition.into(),
        remedy: remedy.into(),
        passing: false,
    }
}

/// Reads from QEMU and the kernel the RAM layout of the VM of process `pid`, and whether the VM can
/// be folded. `library`: whether memfold's library is in this QEMU; an open userfaultfd is then the
/// library's own.
///
/// QEMU's monitor thread reads a command byte by byte (`monitor_can_read` of QEMU 10.0), with
/// several system calls for each, so nothing is asked twice.
pub fn read(qmp: &mut Qmp, pid: Pid, library: bool) -> Result<(RamLayout, VmConditions), RamError> {
    let mut found = VmConditions::default();
    let facts = ram::read_facts(qmp)?;
    memory(qmp, &facts, &mut found)?;
    migration(qmp, &mut found)?;
    plugged(qmp, &mut found)?;
    process(pid, library, &mut found);
    let words = command_line(pid).unwrap_or_default();
    // Under TCG, this option has no effect.
    if says_cpu_pm(words.iter().map(String::as_str)) && qmp.query("query-kvm")?["enabled"] == true {
        let remedy = "start the VM without cpu-pm=on to run more VMs than the host has cores";
        found.costs.push(reason(KEEPS_CPUS, remedy));
    }
    Ok((facts.layout, found))
}

/// Text for the operator about `-overcommit cpu-pm=on`: HLT, PAUSE and MWAIT of the guest do not
/// exit to the host (QEMU's `target/i386/kvm/kvm.c`, `KVM_CAP_X86_DISABLE_EXITS`).
pub const KEEPS_CPUS: &str = "the guest never yields a CPU, not even when idle (-overcommit cpu-pm=on): each vCPU takes a whole core of this host";

/// Returns whether `words`, a QEMU command line, contain `-overcommit cpu-pm=on`.
pub fn says_cpu_pm<'a>(words: impl Iterator<Item = &'a str>) -> bool {
    let (mut is_overcommit, mut is_on) = (false, false);
    for word in words {
        if is_overcommit {
            for part in word.split(',') {
                match part.split_once('=') {
                    Some(("cpu-pm", value)) => is_on = matches!(value, "on" | "yes" | "true" | "y"),
                    None if part == "cpu-pm" => is_on = true,
                    _ => {}
                }
            }
        }
        is_overcommit = matches!(word, "-overcommit" | "--overcommit");
    }
    is_on
}

/// Reads only the conditions that hot-plug can change at any time: devices and block nodes. The
/// result is complete only for folding again while the VM runs.
pub fn read_refold_live(qmp: &mut Qmp) -> Result<VmConditions, RamError> {
    let mut found = VmConditions::default();
    plugged(qmp, &mut found)?;
    Ok(found)
}

fn plugged(qmp: &mut Qmp, found: &mut VmConditions) -> Result<(), RamError> {
    devices(qmp, found)?;
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    block_nodes(&nodes, found);
    Ok(())
}

fn memory(qmp: &mut Qmp, facts: &RamFacts, found: &mut VmConditions) -> Result<(), RamError> {
    // SEV, SEV-SNP and TDX set this property to a link to their object; without them, the link is
    // empty (QEMU's hw/core/machine.c).
    let guest = json!({ "path": "/machine", "property": "confidential-guest-support" });
    let object = qmp.execute("qom-get", guest)?;
    if object.as_str().is_some_and(|object| !object.is_empty()) {
        found.fold.push(reason(
            "the VM's RAM is encrypted (confidential-guest-support)",
            "run the VM without SEV or TDX: equal pages differ once they are encrypted",
        ));
    }
    for block in &facts.layout.blocks {
        let id = ram::backend_id(&block.name);
        if facts.backends.iter().any(|b| b.id == id && b.share) {
            found.fold.push(reason(
                format!("RAM backend '{id}' is shared memory"),
                "use memory-backend-ram, or share=off",
            ));
        }
        let path = format!("/objects/{id}");
        let kind = qmp.execute("qom-get", json!({ "path": path, "property": "type" }))?;
        if kind != "memory-backend-ram" {
            found.fold.push(reason(
                format!(
                    "RAM backend '{id}' is {}, not anonymous memory",
                    kind.as_str().unwrap_or("of an unknown kind")
                ),
                "use memory-backend-ram",
            ));
        }
        let facts = facts.blocks.iter().find(|b| b.name == block.name);
        if let Some(facts) = facts.filter(|b| b.page_bytes != 4096) {
            found.keeps_freed_ram = true;
            let kib = facts.page_bytes >> 10;
            found.fold.push(reason(
                format!("RAM block '{id}' has pages of {kib} KiB (hugetlbfs)"),
                "use memory-backend-ram; transparent huge pages may stay on",
            ));
        }
    }
    Ok(())
}

fn migration(qmp: &mut Qmp, found: &mut VmConditions) -> Result<(), RamError> {
    let status = qmp.query("query-migrate")?;
    let status = status["status"].as_str().unwrap_or("none");
    if !matches!(status, "none" | "completed" | "failed" | "cancelled") {
        found.fold.push(Reason {
            passing: true,
            ..reason(
                format!("a migration is under way ('{status}')"),
                "folding continues when the migration ends",
            )
        });
    }
    let capabilities = qmp.query("query-migrate-capabilities")?;
    for name in ["postcopy-ram", "background-snapshot"] {
        let mut all = capabilities.as_array().into_iter().flatten();
        if all.any(|c| c["capability"] == name && c["state"] == true) {
            found.fold.push(reason(
                format!(
                    "migration capability '{name}' is on, which registers its own userfaultfd on RAM"
                ),
                "switch it off with migrate-set-capabilities",
            ));
        }
    }
    Ok(())
}

/// Finds devices that access guest memory without the kernel's page tables, or that pin guest
/// memory while they write to it.
fn devices(qmp: &mut Qmp, found: &mut VmConditions) -> Result<(), RamError> {
    for path in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let list = qmp.execute("qom-list", json!({ "path": path }))?;
        for device in list.as_array().into_iter().flatten() {
            if let Some(kind) = device["type"].as_str().and_then(child_type) {
                device_kind(kind, found);
            }
        }
    }
    let network = qmp.human("info network")?;
    for kind in ["vhost-user", "vhost-vdpa"] {
        if network.contains(&format!("type={kind}")) {
            device_kind(kind, found);
        }
    }
    Ok(())
}

/// Returns the device type in a property type: `virtio-net-pci` in `child<virtio-net-pci>`.
fn child_type(text: &str) -> Option<&str> {
    text.strip_prefix("child<")?.strip_suffix('>')
}

fn device_kind(kind: &str, found: &mut VmConditions) {
    if kind.starts_with("vfio") || kind.starts_with("vhost-vdpa") || kind == "x-vfio-user-server" {
        found.keeps_freed_ram = true;
        found.fold.push(reason(
            format!("device '{kind}' pins guest RAM for DMA"),
            "remove the device",
        ));
    } else if kind.starts_with("vhost-scsi") {
        found.fold.push(reason(
            format!("device '{kind}' lets the host's kernel write to guest RAM without pinning it"),
            "use virtio-scsi-pci with a block device of the host",
        ));
    } else if kind.starts_with("vhost-user") || kind.contains("vdpa-blk") {
        found.fold.push(reason(
            format!("device '{kind}' accesses guest RAM from another process"),
            "use QEMU's own virtio device",
        ));
    } else if matches!(kind, "scsi-block" | "scsi-generic") {
        found.refold_live.push(reason(
            format!("device '{kind}' passes commands to the host's disk with direct I/O"),
            "use scsi-hd with cache=writeback",
        ));
    }
}

fn block_nodes(nodes: &Value, found: &mut VmConditions) {
    for node in nodes.as_array().into_iter().flatten() {
        let name = node["node-name"].as_str().unwrap_or("?");
        let is_direct = node["cache"]["direct"] != false;
        match node["drv"].as_str().unwrap_or("?") {
            driver if driver == "nvme" || driver.starts_with("virtio-blk-v") => {
                found.keeps_freed_ram = true;
                found.fold.push(reason(
                    format!("block node '{name}' ({driver}) pins guest RAM for DMA"),
                    "use the kernel's block device",
                ));
            }
            _ if is_direct => found.refold_live.push(reason(
                format!("block node '{name}' uses direct I/O (cache.direct=on)"),
                "use cache=writeback; until then pages are folded again at pauses only",
            )),
            // These use the kernel's page cache, or copy by system calls, unless `cache.direct` is
            // on.
            "file" | "host_device" | "host_cdrom" | "raw" | "qcow2" | "qcow" | "qed" | "vmdk" | "vdi" | "vpc" | "vhdx" | "parallels" | "dmg" | "bochs" | "cloop" | "luks" | "throttle" | "copy-on-read" | "copy-before-write" | "snapshot-access" | "mirror_top" | "commit_top" | "blkdebug" | "quorum" | "null-co" | "null-aio" | "nbd" => {}
            driver => found.refold_live.push(reason(
                format!(
                    "block node '{name}' has driver '{driver}', whose way of I/O memfold does not know"
                ),
                "use a file or block device; until then pages are folded again at pauses only",
            )),
        }
    }
}

/// Returns whether the QEMU process `pid` holds something that forbids folding: locked memory, a
/// VFIO or vDPA device, direct I/O without pins, or a userfaultfd of its own. QEMU is not asked.
/// `library`: as for [`read`].
#[must_use]
pub fn process_forbids_folding(pid: Pid, library: bool) -> bool {
    let mut found = VmConditions::default();
    process(pid, library, &mut found);
    !found.may_fold()
}

fn process(pid: Pid, library: bool, found: &mut VmConditions) {
    let root = format!("/proc/{}", pid.as_raw_nonzero());
    let kib = locked_kib(&fs::read_to_string(format!("{root}/status")).unwrap_or_default());
    if kib > 0 {
        found.keeps_freed_ram = true;
        found.fold.push(reason(
            format!("QEMU has locked {kib} KiB of memory (mem-lock, or VFIO)"),
            "start QEMU without -overcommit mem-lock=on",
        ));
    }
    unpinned_direct_io(&root, found);
    let descriptors = fs::read_dir(format!("{root}/fd")).into_iter().flatten();
    let links = descriptors.filter_map(|e| fs::read_link(e.ok()?.path()).ok());
    let links: Vec<String> = links.map(|p| p.to_string_lossy().into_owned()).collect();
    if links.iter().any(|link| pins_ram(link)) {
        found.keeps_freed_ram = true;
        found.fold.push(reason(
            "QEMU holds a VFIO or vDPA device, which pins guest RAM for DMA",
            "remove the device",
        ));
    }
    if !library && links.iter().any(|l| l.contains("[userfaultfd]")) {
        found.fold.push(reason(
            "QEMU has a userfaultfd of its own",
            "end the postcopy or background snapshot",
        ));
    }
}

/// Returns whether the link of a QEMU's descriptor names a device that pins guest RAM.
fn pins_ram(link: &str) -> bool {
    link.starts_with("/dev/vfio/")
        || link.starts_with("/dev/vhost-vdpa-")
        || link.contains("[vfio-device]")
}

/// File systems whose direct I/O pins the pages that it reads into (`pin_user_pages(9)`), so that
/// the kernel refuses to move these pages (`folio_maybe_dma_pinned` in `mm/userfaultfd.c`). NFS and
/// Ceph only take references (`nfs_direct_read_schedule_iovec`, `__iter_get_bvecs`): a moved page
/// would miss what the server answers. Block devices are found below `/dev`.
const PINNING: [&str; 8] = [
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "devtmpfs",
];

/// Finds files that QEMU has open for direct I/O (`open(2)`, `O_DIRECT`) on file systems that are
/// not known to pin guest RAM meanwhile. `statfs(2)` is not asked, because it waits for servers
/// that do not answer.
fn unpinned_direct_io(root: &str, found: &mut VmConditions) {
    let mut mounts = None;
    for entry in fs::read_dir(format!("{root}/fd")).into_iter().flatten() {
        let Some((name, file)) = entry
            .ok()
            .and_then(|e| Some((e.file_name(), fs::read_link(e.path()).ok()?)))
        else {
            continue;
        };
        if !file.is_absolute() {
            continue;
        }
        let facts = format!("{root}/fdinfo/{}", name.to_string_lossy());
        let Some(mount) = direct_io_mount(&fs::read_to_string(facts).unwrap_or_default()) else {
            continue;
        };
        let mounts = mounts.get_or_insert_with(|| {
            fs::read_to_string(format!("{root}/mountinfo")).unwrap_or_default()
        });
        let kind = file_system(mounts, mount).unwrap_or("unknown");
        if !PINNING.contains(&kind) {
            found.fold.push(reason(
                format!(
                    "QEMU reads {} with direct I/O on file system '{kind}', which is not known to pin guest RAM",
                    file.display()
                ),
                "use cache=writeback, or put the disk on ext4, XFS, btrfs, F2FS or a block device",
            ));
        }
    }
}

/// Returns the number of the mount of a descriptor that is open for direct I/O, from
/// `/proc/PID/fdinfo/FD`; `None` if it is not.
fn direct_io_mount(fdinfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = fdinfo.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim)
    };
    let flags = u32::from_str_radix(field("flags:")?, 8).ok()?;
    let is_direct = flags & OFlags::DIRECT.bits() != 0;
    field("mnt_id:")?.parse().ok().filter(|_| is_direct)
}

/// Returns the file system of a mount, from `/proc/PID/mountinfo`.
fn file_system(mountinfo: &str, mount: u64) -> Option<&str> {
    let mut mounts = mountinfo.lines().filter_map(|line| {
        let (id, rest) = line.split_once(' ')?;
        let kind = rest.split_once(" - ")?.1.split(' ').next()?;
        Some((id.parse::<u64>().ok()?, kind))
    });
    mounts.find(|(id, _)| *id == mount).map(|(_, kind)| kind)
}

fn locked_kib(status: &str) -> u64 {
    let line = status.lines().find_map(|l| l.strip_prefix("VmLck:"));
    let kib = line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse().ok());
    kib.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_nodes(nodes: &Value) -> VmConditions {
        let mut found = VmConditions::default();
        block_nodes(nodes, &mut found);
        found
    }

    #[test]
    fn a_disk_with_direct_io_or_an_unknown_driver_forbids_folding_again_without_a_pause() {
        let node = |drv: &str, direct: bool| json!({"node-name": "n", "drv": drv, "cache": {"direct": direct, "no-flush": false, "writeback": true}});
        assert!(of_nodes(&json!([node("qcow2", false), node("file", false)])).may_refold_live());
        for bad in [
            node("file", true),
            node("strange", false),
            json!({"drv": "file"}),
        ] {
            let found = of_nodes(&json!([node("raw", false), bad]));
            assert!(found.may_fold() && !found.may_refold_live());
        }
        let nvme = of_nodes(&json!([node("nvme", true)]));
        assert!(!nvme.may_fold() && nvme.keeps_freed_ram);
    }

    #[test]
    fn a_vm_with_a_device_that_pins_memory_is_not_folded() {
        for (kind, fold, refold) in [
            ("virtio-blk-pci", true, true),
            ("vhost-vsock-pci", true, true),
            ("scsi-generic", true, false),
            ("virtio-scsi-pci", true, true),
            ("vhost-scsi-pci", false, false),
            ("vhost-scsi-pci-non-transitional", false, false),
            ("vfio-pci", false, false),
            ("vhost-user-fs-pci", false, false),
        ] {
            let mut found = VmConditions::default();
            device_kind(kind, &mut found);
            assert_eq!(
                (found.may_fold(), found.may_refold_live()),
                (fold, refold),
                "{kind}"
            );
            assert_eq!(found.keeps_freed_ram, kind == "vfio-pci", "{kind}");
        }
        assert_eq!(child_type("child<vfio-pci>"), Some("vfio-pci"));
        assert_eq!(child_type("string"), None);
    }

    #[test]
    fn a_vm_with_direct_io_on_a_file_system_that_may_not_pin_memory_is_not_folded() {
        let direct = "pos:\t0\nflags:\t02140002\nmnt_id:\t31\nino:\t7\n";
        assert_eq!(direct_io_mount(direct), Some(31));
        assert_eq!(
            direct_io_mount("pos:\t0\nflags:\t02100002\nmnt_id:\t31\n"),
            None
        );
        assert_eq!(direct_io_mount(""), None);
        let mounts = "30 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            31 30 0:44 / /srv/a\\040b rw - nfs4 server:/vms rw,vers=4.2\n\
            32 30 0:45 / /c rw master:2 - fuse.ceph-fuse x rw\n";
        assert_eq!(file_system(mounts, 30), Some("ext4"));
        assert_eq!(file_system(mounts, 31), Some("nfs4"));
        assert_eq!(file_system(mounts, 32), Some("fuse.ceph-fuse"));
        assert_eq!(file_system(mounts, 33), None);
        let place = tempfile::tempdir().unwrap();
        let root = place.path().to_str().unwrap();
        for part in ["fd", "fdinfo"] {
            fs::create_dir(place.path().join(part)).unwrap();
        }
        let open = |number: u32, file: &str, facts: &str| {
            std::os::unix::fs::symlink(file, place.path().join(format!("fd/{number}"))).unwrap();
            fs::write(place.path().join(format!("fdinfo/{number}")), facts).unwrap();
        };
        fs::write(place.path().join("mountinfo"), mounts).unwrap();
        open(3, "socket:[44]", direct);
        open(4, "/srv/a b/1.img", &direct.replace("02140002", "02100002"));
        open(5, "/disk.img", &direct.replace("31", "30"));
        let mut found = VmConditions::default();
        unpinned_direct_io(root, &mut found);
        assert_eq!(found, VmConditions::default());
        open(6, "/srv/a b/1.img", direct);
        unpinned_direct_io(root, &mut found);
        assert_eq!(found.fold.len(), 1);
        let told = found.fold[0].to_string();
        assert!(
            told.contains("/srv/a b/1.img") && told.contains("'nfs4'"),
            "{told}"
        );
    }

    #[test]
    fn the_option_cpu_pm_is_detected_on_the_qemu_command_line() {
        for (line, wanted) in [
            ("qemu -overcommit cpu-pm=on -m 64", true),
            ("qemu -m 64 --overcommit mem-lock=off,cpu-pm=on", true),
            ("qemu -overcommit cpu-pm=on -overcommit cpu-pm=off", false),
            ("qemu -overcommit mem-lock=on -name cpu-pm=on", false),
            ("qemu -overcommit", false),
        ] {
            assert_eq!(says_cpu_pm(line.split(' ')), wanted, "{line}");
        }
    }

    #[test]
    fn a_process_that_gets_a_vfio_device_forbids_folding_without_a_question_to_qemu() {
        let own = rustix::process::getpid();
        let place = tempfile::tempdir().unwrap();
        assert!(!process_forbids_folding(own, true));
        // The kernel's links to descriptors of VFIO devices contain this name.
        let device = fs::File::create(place.path().join("[vfio-device]")).unwrap();
        assert!(process_forbids_folding(own, true));
        drop(device);
        assert!(!process_forbids_folding(own, true));
        assert!(pins_ram("/dev/vfio/7") && pins_ram("/dev/vhost-vdpa-0"));
        assert!(!pins_ram("/dev/vhost-net") && !pins_ram("/dev/kvm"));
    }

    #[test]
    fn locked_memory_is_parsed_from_the_status_file_of_a_process() {
        assert_eq!(
            locked_kib("Name:\tqemu\nVmLck:\t    2048 kB\nVmPin:\t 0 kB\n"),
            2048
        );
        assert_eq!(locked_kib("Name:\tqemu\n"), 0);
    }
}
