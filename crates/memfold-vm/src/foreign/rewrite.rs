//! Rewrites the command line of a QEMU for a second QEMU, which runs snapshots of the first one's
//! VM: the same devices, without the host resources of the first QEMU.
//!
//! | option | in the copy |
//! |---|---|
//! | machine, CPUs, memory's size, devices, firmware tables, kernel | unchanged |
//! | RAM backends | plain memory of the same name and size |
//! | disks and other media (`-blockdev`) | left out: the VM gets its own |
//! | drives (`-drive`, `-hda` ...) | the same interface, bus, unit and name, with a medium of its own |
//! | firmware (pflash) | without a file: its contents are in the saved RAM |
//! | network: user mode | unchanged, but without ports of the host |
//! | network: taps, bridges, vhost-user | a new tap with as many queues, connected to nothing |
//! | network: others | user mode, restricted |
//! | character devices | null devices, except the console and the agent's port |
//! | sound | discarded |
//! | monitors, displays, sandbox, QEMU's own files | left out |
//!
//! memfold refuses an option that [`options`] does not list, because a device that differs cannot
//! load the saved device state. The operator is told which ports, sockets and displays are left
//! out.

use std::collections::{BTreeMap, BTreeSet};

use memfold_wire::agent::PORT_NAME;

use super::drives::{self, Drive};
use super::options::{self, Fate, Named};
use super::spec::Foreign;
use super::value::{Value, parse};
use super::view::View;
use super::{files, host_ends, network};
use crate::qemu_line::{escape_text, on_or_off};

/// Facts about the running VM, from QEMU's monitor and `/proc`.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// Machine type, with its version.
    pub(super) machine: String,
    /// Accelerator: `kvm` or `tcg`.
    pub(super) accel: String,
    /// Devices that have a medium.
    pub(super) media: Vec<Medium>,
    /// Length of each block node, in bytes.
    pub(super) sizes: BTreeMap<String, u64>,
    /// Working directory and mount namespace in which QEMU opens files.
    pub(super) view: View,
}

/// A device with a medium.
#[derive(Clone, Debug, Default)]
pub(super) struct Medium {
    /// Name of the drive, if `-drive` created the device.
    pub(super) backend: String,
    /// Path of the device in QEMU's object tree.
    pub(super) device: String,
    /// Block node that the device uses now.
    pub(super) node: String,
}

/// The block node of a medium in the copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    /// Further options of `-drive`, if `-drive` creates the node.
    pub(super) option: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Copy {
    /// The copied command line, without disks and files.
    pub(super) foreign: Foreign,
    /// Block node for each of [`Facts::media`], by the device's path in QEMU's object tree.
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) balloon: bool,
}

/// Kinds of devices that need a resource of the host or another process, and are refused.
const HOSTS: &[&str] = &[
    "vfio-",
    "vhost-",
    "usb-host",
    "usb-mtp",
    "ivshmem",
    "loader",
    "guest-loader",
    "tpm-",
    "ccid-card-emulated",
    "u2f-",
    "nvdimm",
    "virtio-pmem",
    "scsi-block",
    "scsi-generic",
    "virtio-9p",
    "xen-",
];
/// Kinds of devices that draw with the host's OpenGL and are refused: QEMU cannot save their state
/// (`virgl is not yet migratable`).
const DRAWN_BY_HOST: [&str; 4] = [
    "virtio-gpu-gl",
    "virtio-vga-gl",
    "virtio-gpu-rutabaga",
    "virtio-vga-rutabaga",
];
/// Kinds of objects that are left out: secrets and authorization of displays, monitors and disks,
/// and network filters.
const OWN_OBJECTS: &[&str] = &[
    "secret",
    "tls-",
    "authz",
    "thread-context",
    "filter-",
    "colo-compare",
    "pr-manager",
];
/// Name of the console's character device, which replaces the original one.
const CONSOLE: &str = "memfold-console";

/// Makes the copy of a command line.
pub(super) fn copy(options: &[Named], facts: &Facts) -> Result<Copy, String> {
    let mut copy = Copy::default();
    look_at_devices(options, &mut copy)?;
    look_at_chardevs(options, &mut copy)?;
    let media = Media::of(options, facts)?;
    let mut drives = media.drives.iter();
    let (mut has_machine, mut has_accel, mut has_audio) = (false, false, false);
    for (name, value) in options {
        let words = |value: String| vec![format!("-{name}"), value];
        let text = value.as_deref().unwrap_or_default();
        let Some((_, fate)) = options::known(name) else {
            return Err(format!("memfold does not know QEMU's option '-{name}'"));
        };
        copy.foreign.left_out.extend(host_ends::told(name, text)?);
        copy.foreign.left_out.extend(host_ends::of_ram(name, text)?);
        let made = match (fate, name.as_str()) {
            (Fate::Refused(why), _) => return Err(format!("-{name} {text}: {why}")),
            (Fate::Dropped, _) | (_, "L" | "readconfig" | "set") => Vec::new(),
            (Fate::Kept, _) => {
                has_accel |= ["accel", "enable-kvm"].contains(&name.as_str());
                let value = value.as_ref();
                let value = value.map(|text| found(options, name, text, &facts.view));
                std::iter::once(format!("-{name}")).chain(value).collect()
            }
            (_, "machine" | "M") => {
                has_machine = true;
                let machine = machine(text, facts)?;
                has_accel |= machine.get("accel").is_some();
                let machine = files::name_whole("machine", &machine.render(), &facts.view);
                vec!["-machine".into(), machine]
            }
            (_, "object") => object(text)?.map_or_else(Vec::new, words),
            (_, "chardev") => chardev(text, &copy)?.map_or_else(Vec::new, words),
            (_, "netdev" | "nic" | "net") => words(network::copy(name, text)?.0),
            (_, "audio") => {
                has_audio = true;
                words(audio(text)?)
            }
            (_, "audiodev") => {
                let id = parse("driver", text)?.text("id");
                words(format!("none,id={}", escape_text(&id)))
            }
            (_, "blockdev") => media.blockdev(text, facts)?.map_or_else(Vec::new, words),
            (_, name) if drives::is_drive(name) => {
                let drive = drives.next().ok_or("cannot tell the VM's drives apart")?;
                let option = Media::drive(drive, facts)?;
                option.map_or_else(Vec::new, |option| vec!["-drive".into(), option])
            }
            (_, "device") => words(files::name_whole("device", &device(text)?, &facts.view)),
            (_, "serial") => words(serial(text, &copy)),
            (_, "parallel") => words(if text == "none" { "none" } else { "null" }.into()),
            (_, "debugcon") if !text.starts_with("chardev:") => words("null".into()),
            (_, "debugcon" | "icount" | "usbdevice") => words(of_no_other(name, text)?),
            // The guest sees this setting (MONITOR and MWAIT).
            (_, "overcommit") if parse("", text)?.is_on("cpu-pm") => words("cpu-pm=on".into()),
            // With `-nographic`, the first serial port is the terminal where QEMU was started.
            (_, "nographic")
                if copy.foreign.console.as_deref() == Some(CONSOLE) && has_own_serial(options)? =>
            {
                vec!["-serial".into(), format!("chardev:{CONSOLE}")]
            }
            (_, "nographic" | "overcommit") => Vec::new(),
            (Fate::Made, other) => return Err(format!("memfold does not support '-{other}'")),
        };
        copy.foreign.words.extend(made);
    }
    if !has_machine {
        copy.foreign
            .words
            .extend(["-machine".into(), escape_text(&facts.machine)]);
    }
    if !has_accel {
        copy.foreign
            .words
            .extend(["-accel".into(), facts.accel.clone()]);
    }
    if !has_audio {
        // Otherwise sound cards would open the host's sound devices.
        copy.foreign.words.extend(["-audio".into(), "none".into()]);
    }
    copy.nodes = media.nodes;
    check_media(&copy, &media.drives)?;
    Ok(copy)
}

/// Returns the value of `-machine`, with the version of the running machine type.
fn machine(value: &str, facts: &Facts) -> Result<Value, String> {
    let mut machine = parse("type", value)?;
    for key in ["confidential-guest-support", "memory-encryption"] {
        if machine.get(key).is_some() {
            return Err(format!("the VM's RAM is encrypted (-machine {key})"));
        }
    }
    machine.set("type", &facts.machine);
    Ok(machine)
}

/// Returns an option's value unchanged, or an error if the value is valid only on this host or for
/// this run.
fn of_no_other(name: &str, value: &str) -> Result<String, String> {
    match name {
        "usbdevice" if value == "braille" => {
            Err(format!("'-usbdevice {value}' is a device of this host"))
        }
        "icount" if value.contains("rr=") => {
            Err(format!("'-icount {value}' records or replays a run"))
        }
        _ => Ok(value.to_owned()),
    }
}

/// Returns the option for the same sound card, without output.
fn audio(value: &str) -> Result<String, String> {
    let mut audio = parse("driver", value)?;
    audio.drop_keys(|key| key != "model");
    audio.set("driver", "none");
    Ok(audio.render())
}

/// Returns the value of a copied option, with absolute file paths.
fn found(options: &[Named], name: &str, value: &str, view: &View) -> String {
    let named = files::name_whole(name, value, view);
    if named != value || !["bios", "option-rom"].contains(&name) || value.contains('/') {
        return named;
    }
    // Directories in which QEMU looks for its own data files.
    let places = options.iter().filter(|(name, _)| name == "L");
    let mut places = places.filter_map(|(_, place)| Some(view.whole(place.as_ref()?).join(value)));
    let there = places.find(|path| view.is_file(path));
    there.map_or(named, |path| path.to_string_lossy().into_owned())
}

/// Returns whether QEMU creates a default serial port (`default_serial` in `system/vl.c`).
fn has_own_serial(options: &[Named]) -> Result<bool, String> {
    let has_none = values(options, &["nodefaults", "serial"]).next().is_some();
    let mut devices = devices(options)?.into_iter();
    Ok(!has_none && !devices.any(|device| device.kind() == "isa-serial"))
}

/// Checks that every medium has its device in the copy, and every device its medium. Otherwise QEMU
/// would not start.
fn check_media(copy: &Copy, drives: &[Drive]) -> Result<(), String> {
    let mut wanted = BTreeSet::new();
    let mut there: BTreeSet<String> = BTreeSet::new();
    for pair in copy.foreign.words.windows(2) {
        match pair[0].as_str() {
            "-device" => wanted.extend(drives::of_device(&pair[1])?),
            "-drive" => there.extend(parse("file", &pair[1])?.get("id").map(str::to_owned)),
            _ => {}
        }
    }
    for (device, node) in &copy.nodes {
        let name = match &node.option {
            None => node.name.clone(),
            Some(option) => parse("file", option)?.text("id"),
        };
        let of_no_interface = |drive: &Drive| drive.backend == name && drive.interface == "none";
        let needs_device = node.option.is_none() || drives.iter().any(of_no_interface);
        if needs_device && !wanted.contains(&name) {
            return Err(format!(
                "device {device} of disk '{name}' is not on QEMU's command line; give that device an id (-device ...,id=NAME)"
            ));
        }
        there.insert(name);
    }
    let missing = wanted.difference(&there).next();
    missing.map_or(Ok(()), |name| Err(gone(name)))
}

fn gone(name: &str) -> String {
    format!(
        "the medium '{name}' that the VM was started with is gone; insert a medium to save the VM"
    )
}

/// Returns the values of the options named in `wanted`.
fn values<'a>(options: &'a [Named], wanted: &'a [&str]) -> impl Iterator<Item = &'a str> {
    let named = options
        .iter()
        .filter(|(name, _)| wanted.contains(&name.as_str()));
    named.map(|(_, value)| value.as_deref().unwrap_or_default())
}

fn devices(options: &[Named]) -> Result<Vec<Value>, String> {
    let values = values(options, &["device"]);
    values.map(|value| parse("driver", value)).collect()
}

/// Collects facts about devices that other options depend on, and refuses devices that cannot be
/// started twice.
fn look_at_devices(options: &[Named], copy: &mut Copy) -> Result<(), String> {
    for device in devices(options)? {
        let (kind, chardev) = (device.kind(), device.get("chardev").map(str::to_owned));
        if kind.starts_with("vhost-vsock") {
            return Err(format!(
                "device '{kind}' has the vsock address guest-cid={} of this host, which only one VM can have, and its connections are in this host's kernel; start the VM without that device (libvirt: remove <vsock>) to save it",
                device.text("guest-cid")
            ));
        }
        if let Some(hosts) = HOSTS.iter().find(|start| kind.starts_with(**start)) {
            return Err(format!(
                "device '{kind}' ('{hosts}...') belongs to this host or to another process, and a second QEMU cannot have it"
            ));
        }
        if DRAWN_BY_HOST.iter().any(|start| kind.starts_with(start)) {
            return Err(format!(
                "device '{kind}' draws with this host's OpenGL, whose state QEMU cannot save; use a device without OpenGL (virtio-vga)"
            ));
        }
        if kind == "virtserialport" && device.get("name") == Some(PORT_NAME) {
            copy.foreign.agent = chardev;
        } else if kind == "isa-serial" && copy.foreign.console.is_none() {
            copy.foreign.console = chardev;
        }
        copy.balloon |= kind.starts_with("virtio-balloon");
        copy.foreign.cards += usize::from(device.get("netdev").is_some());
    }
    let nics = values(options, &["nic"]).filter(|nic| *nic != "none");
    copy.foreign.cards += nics.count();
    let nets = values(options, &["net"]).filter(|net| net.starts_with("nic"));
    copy.foreign.cards += nets.count();
    let networks = ["netdev", "nic", "net", "nodefaults"];
    // Without any network option, QEMU creates a card by default.
    copy.foreign.cards += usize::from(values(options, &networks).next().is_none());
    Ok(())
}

/// Finds the console, which is the first connected serial port. This runs first, because options
/// that depend on the console may come before it.
fn look_at_chardevs(options: &[Named], copy: &mut Copy) -> Result<(), String> {
    let mut ports = values(options, &["serial"]).filter(|port| !["none", "null"].contains(port));
    if let Some(port) = ports.next().filter(|_| copy.foreign.console.is_none()) {
        let id = port.strip_prefix("chardev:").unwrap_or(CONSOLE);
        copy.foreign.console = Some(id.to_owned());
    } else if copy.foreign.console.is_none()
        && values(options, &["nographic"]).next().is_some()
        && has_own_serial(options)?
    {
        copy.foreign.console = Some(CONSOLE.to_owned());
    }
    let of_devices = devices(options)?;
    let of_devices = of_devices.iter().filter_map(|device| device.get("chardev"));
    let of_ports = values(options, &["serial", "debugcon"]);
    let of_ports = of_ports.filter_map(|port| port.strip_prefix("chardev:"));
    let users = of_devices.chain(of_ports);
    let users = users.filter(|id| copy.foreign.console.as_deref() == Some(*id));
    copy.foreign.console_shared = users.count() > 1;
    Ok(())
}

/// Returns a null character device in place of `value`; `None` if the copy creates this device
/// separately.
fn chardev(value: &str, copy: &Copy) -> Result<Option<String>, String> {
    let chardev = parse("backend", value)?;
    let id = chardev.text("id");
    if [&copy.foreign.agent, &copy.foreign.console].contains(&&Some(id.clone())) {
        return Ok(None);
    }
    Ok(Some(host_ends::null_chardev(&chardev)))
}

fn device(value: &str) -> Result<String, String> {
    let mut device = parse("driver", value)?;
    // The copy is another VM, so it gets another generation ID.
    if device.kind() != "vmgenid" {
        return Ok(value.to_owned());
    }
    device.set("guid", "auto");
    Ok(device.render())
}

fn object(value: &str) -> Result<Option<String>, String> {
    let object = parse("qom-type", value)?;
    let (kind, id) = (object.kind(), object.get("id").unwrap_or_default());
    if kind.starts_with("memory-backend-") {
        if object.get("mem-path").is_some() || object.is_on("hugetlb") {
            return Err(format!(
                "RAM backend '{id}' is a file or in huge pages (mem-path, hugetlb); use memory-backend-ram"
            ));
        }
        if kind == "memory-backend-epc" {
            return Err(format!(
                "memory '{id}' is encrypted (SGX) and cannot be read"
            ));
        }
        let size = object.text("size");
        // The name of the RAM block depends on this setting.
        let naming = "x-use-canonical-path-for-ramblock-id";
        let naming = match object.text(naming) {
            text if text.is_empty() => text,
            _ => format!(",{naming}={}", on_or_off(object.is_on(naming))),
        };
        return Ok(Some(format!(
            "memory-backend-ram,id={},size={}{naming}",
            escape_text(id),
            escape_text(&size)
        )));
    }
    match kind {
        "iothread"
        | "rng-random"
        | "rng-builtin"
        | "rng-egd"
        | "throttle-group"
        | "main-loop"
        | "cryptodev-backend"
        | "cryptodev-backend-builtin"
        | "acpi-generic-initiator"
        | "acpi-generic-port" => Ok(Some(value.to_owned())),
        kind if OWN_OBJECTS.iter().any(|own| kind.starts_with(own)) => Ok(None),
        _ => Err(format!(
            "cannot start another QEMU with an object '{kind}' (id '{id}')"
        )),
    }
}

fn serial(value: &str, copy: &Copy) -> String {
    if ["none", "null"].contains(&value) || value.starts_with("chardev:") {
        return value.to_owned();
    }
    let console = format!("chardev:{CONSOLE}");
    let is_first =
        copy.foreign.console.as_deref() == Some(CONSOLE) && !copy.foreign.words.contains(&console);
    if is_first { console } else { "null".to_owned() }
}

/// Disks and other media of a command line, with their block nodes and drives.
struct Media {
    /// Block nodes of firmware (pflash).
    flash: BTreeSet<String>,
    /// All drives of the command line, in their order.
    drives: Vec<Drive>,
    /// Block node for each medium; see [`Copy::nodes`].
    nodes: BTreeMap<String, Node>,
}

impl Media {
    fn of(options: &[Named], facts: &Facts) -> Result<Self, String> {
        let devices = devices(options)?;
        let drives = drives::drives(options, &facts.machine)?;
        let mut flash = BTreeSet::new();
        for machine in values(options, &["machine", "M"]) {
            let machine = parse("type", machine)?;
            let nodes = ["pflash0", "pflash1"].map(|key| machine.get(key).map(str::to_owned));
            flash.extend(nodes.into_iter().flatten());
        }
        let mut nodes = BTreeMap::new();
        // A medium that no device uses is not visible to the guest.
        for medium in facts
            .media
            .iter()
            .filter(|medium| !medium.device.is_empty())
        {
            let is_its =
                |drive: &&Drive| !medium.backend.is_empty() && drive.backend == medium.backend;
            let node = match drives.iter().find(is_its) {
                Some(drive) if drive.interface == "pflash" => continue,
                Some(drive) => Node {
                    name: format!("memfold-drive{}", nodes.len()),
                    option: Some(drive.option()),
                },
                None => Node {
                    name: medium.called(&devices),
                    option: None,
                },
            };
            if !flash.contains(&node.name) && !medium.device.contains("/system.flash") {
                nodes.insert(medium.device.clone(), node);
            }
        }
        Ok(Self {
            flash,
            drives,
            nodes,
        })
    }

    fn blockdev(&self, value: &str, facts: &Facts) -> Result<Option<String>, String> {
        let node = parse("driver", value)?;
        let name = node.get("node-name").unwrap_or_default();
        let Some(size) = facts.sizes.get(name).filter(|_| self.flash.contains(name)) else {
            return Ok(None);
        };
        let read_only = on_or_off(node.is_on("read-only"));
        Ok(Some(format!(
            "driver=null-co,node-name={},size={size},read-zeroes=on,read-only={read_only}",
            escape_text(name)
        )))
    }

    /// Returns the replacement of a drive's option; `None` if the drive's medium is added when the
    /// copy is started, or if no device uses the drive.
    fn drive(drive: &Drive, facts: &Facts) -> Result<Option<String>, String> {
        let name = &drive.backend;
        let medium = facts.media.iter().find(|medium| medium.backend == *name);
        if drive.interface == "pflash" {
            let size = medium.and_then(|medium| facts.sizes.get(&medium.node));
            let size = size.ok_or_else(|| format!("QEMU does not report its firmware '{name}'"))?;
            let read_only = on_or_off(drive.is_read_only());
            return Ok(Some(format!(
                "if=pflash,unit={},id={},format=raw,readonly={read_only},file.driver=null-co,file.size={size},file.read-zeroes=on",
                drive.unit,
                escape_text(name)
            )));
        }
        match medium {
            Some(medium) if !medium.device.is_empty() => Ok(None),
            // The drive has a medium, and no device uses it.
            Some(_) if drive.interface != "none" => Ok(None),
            _ => Ok(Some(drive.empty_option().ok_or_else(|| gone(name))?)),
        }
    }
}

impl Medium {
    /// Returns the name that the medium's block node has on the command line. The running VM may
    /// use other nodes above this node.
    fn called(&self, devices: &[Value]) -> String {
        let id = self.device.strip_prefix("/machine/peripheral/");
        let id = id.map(|rest| rest.split('/').next().unwrap_or_default());
        let id = Some(id.unwrap_or(&self.device));
        let named = devices.iter().find(|device| device.get("id") == id);
        let drive = named.and_then(|device| device.get("drive"));
        let own = Some(&self.backend).filter(|name| !name.is_empty());
        drive.unwrap_or(own.unwrap_or(&self.node)).to_owned()
    }
}

#[cfg(test)]
#[path = "rewrite_tests.rs"]
mod tests;
