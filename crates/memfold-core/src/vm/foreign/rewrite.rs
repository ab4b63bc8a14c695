//! The words of another's command line that make the same devices, without those of its host.
//!
//! | words | in the copy |
//! |---|---|
//! | machine, CPUs, memory's size, devices, firmware tables, kernel | as they are |
//! | RAM backends | plain memory of the same name and size |
//! | disks and other media | left out: the VM gets its own |
//! | firmware (pflash) | of no file: what it holds is RAM |
//! | network: user mode | as it is, without ports of the host |
//! | network: taps, bridges | a tap of its own, connected to nothing |
//! | network: others | user mode, restricted |
//! | character devices | lead nowhere, but for the console and the agent's port |
//! | monitors, displays, sandbox, files of its own | left out |
//!
//! A word that is in no table here is refused: a device that isn't as it was would not take its state.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use memfold_wire::agent::PORT_NAME;

use super::value::Value;

/// What QEMU says of the running VM.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// Machine type, with its version.
    pub(super) machine: String,
    /// `kvm` or `tcg`.
    pub(super) accel: String,
    /// Devices that have a medium.
    pub(super) drives: Vec<Drive>,
    /// Bytes that each node has.
    pub(super) sizes: BTreeMap<String, u64>,
    /// QEMU's working directory.
    pub(super) place: PathBuf,
}

/// A device with a medium.
#[derive(Clone, Debug, Default)]
pub(super) struct Drive {
    /// What `-drive` calls it, if that made it.
    pub(super) backend: String,
    /// Where the device is in QEMU's tree.
    pub(super) device: String,
    /// The node that it uses now.
    pub(super) node: String,
}

/// The copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) words: Vec<String>,
    /// What each of [`Facts::drives`] is called in `words`, by where it is in QEMU's tree.
    pub(super) drives: BTreeMap<String, String>,
    /// Character device of the agent's port, and of the console.
    pub(super) agent: Option<String>,
    pub(super) console: Option<String>,
    pub(super) cards: usize,
    pub(super) balloon: bool,
}

/// Options that have a value and stay.
const KEPT: &[&str] = &[
    "accel", "action", "append", "bios", "boot", "compat", "cpu", "dtb", "fw_cfg", "global",
    "initrd", "kernel", "m", "numa", "rtc", "smbios", "smp", "uuid", "vga",
];
/// Options without one that stay.
pub(super) const KEPT_FLAGS: &[&str] = &[
    "enable-kvm",
    "no-fd-bootchk",
    "no-reboot",
    "no-user-config",
    "nodefaults",
    "usb",
];
/// Options that have a value and are left out; `id` is Proxmox VE's, a number for `ps`.
const DROPPED: &[&str] = &[
    "D",
    "add-fd",
    "chroot",
    "d",
    "display",
    "gdb",
    "id",
    "incoming",
    "iscsi",
    "mon",
    "monitor",
    "msg",
    "name",
    "overcommit",
    "pidfile",
    "qmp",
    "qmp-pretty",
    "run-with",
    "runas",
    "sandbox",
    "spice",
    "trace",
    "vnc",
];
/// Options without one that are left out.
const DROPPED_FLAGS: &[&str] = &[
    "S",
    "daemonize",
    "full-screen",
    "no-shutdown",
    "nographic",
    "only-migratable",
    "s",
    "snapshot",
];
/// Options whose value is a file as a whole. It may be named from QEMU's working directory.
pub(super) const FILES: &[&str] = &["bios", "dtb", "initrd", "kernel"];
/// Kinds of devices that are something of the host's, or of another process's.
const HOSTS: &[&str] = &[
    "vfio-",
    "vhost-",
    "usb-host",
    "usb-redir",
    "ivshmem",
    "loader",
    "guest-loader",
    "tpm-",
    "ccid-card",
    "u2f-",
    "nvdimm",
    "virtio-pmem",
    "scsi-block",
    "scsi-generic",
    "virtio-9p",
];
/// Objects that stay.
const OBJECTS: &[&str] = &[
    "iothread",
    "rng-random",
    "rng-builtin",
    "rng-egd",
    "throttle-group",
    "main-loop",
];
/// Objects that are left out: secrets of displays, monitors and disks, and what they are checked by.
const OWN_OBJECTS: &[&str] = &["secret", "tls-creds", "authz", "thread-context"];

/// Makes the copy, or says what keeps it from being one.
pub(super) fn copy(line: &[String], facts: &Facts) -> Result<Copy, String> {
    let options = options(line)?;
    let mut copy = Copy::default();
    look_at_devices(&options, &mut copy)?;
    let mut nodes = Nodes::of(&options, facts)?;
    let mut late = Vec::new();
    let (mut has_machine, mut has_accel) = (false, false);
    for (name, value) in &options {
        let words = |value: String| vec![format!("-{name}"), value];
        let made = match (name.as_str(), value) {
            ("machine" | "M", Some(value)) => {
                has_machine = true;
                let mut machine = parse("type", value)?;
                has_accel |= machine.get("accel").is_some();
                machine.set("type", &facts.machine);
                vec!["-machine".into(), machine.render()]
            }
            ("object", Some(value)) => object(value)?.map_or_else(Vec::new, words),
            ("chardev", Some(value)) => {
                let id = parse("backend", value)?
                    .get("id")
                    .unwrap_or_default()
                    .to_owned();
                let is_used = [&copy.agent, &copy.console]
                    .iter()
                    .any(|own| own.as_ref() == Some(&id));
                if is_used {
                    Vec::new()
                } else {
                    words(format!("null,id={id}"))
                }
            }
            ("netdev" | "nic", Some(value)) => words(network(value)?),
            ("net", Some(value)) if value == "none" => words(value.clone()),
            ("audiodev", Some(value)) => {
                let id = parse("driver", value)?
                    .get("id")
                    .unwrap_or_default()
                    .to_owned();
                words(format!("none,id={id}"))
            }
            ("blockdev", Some(value)) => nodes.blockdev(value, facts)?.map_or_else(Vec::new, words),
            ("drive", Some(value)) => {
                let (here, last) = nodes.drive(value, facts)?;
                late.extend(
                    last.into_iter()
                        .flat_map(|device| ["-device".into(), device]),
                );
                here.map_or_else(Vec::new, words)
            }
            ("device", Some(value)) => words(device(value)?),
            ("serial", Some(value)) => words(serial(value, &mut copy)),
            ("parallel", Some(value)) => {
                words(if value == "none" { "none" } else { "null" }.into())
            }
            (_, Some(value)) if KEPT.contains(&name.as_str()) => {
                has_accel |= name == "accel";
                words(found_from(&facts.place, name, value))
            }
            (_, None) if KEPT_FLAGS.contains(&name.as_str()) => {
                has_accel |= name == "enable-kvm";
                vec![format!("-{name}")]
            }
            ("nographic", None) => {
                // Its first serial port is where it was started from.
                if options.iter().any(|(name, _)| name == "serial") {
                    Vec::new()
                } else {
                    let word = serial("stdio", &mut copy);
                    vec!["-serial".into(), word]
                }
            }
            (_, Some(_)) if DROPPED.contains(&name.as_str()) => Vec::new(),
            (_, None) if DROPPED_FLAGS.contains(&name.as_str()) => Vec::new(),
            _ => {
                let value = value.as_deref().unwrap_or_default();
                return Err(format!(
                    "memfold doesn't know what '-{name} {value}' would be in another QEMU; start it without that to have it saved"
                ));
            }
        };
        copy.words.extend(made);
    }
    copy.words.extend(late);
    if !has_machine {
        copy.words
            .extend(["-machine".into(), facts.machine.clone()]);
    }
    if !has_accel {
        copy.words.extend(["-accel".into(), facts.accel.clone()]);
    }
    copy.drives = nodes.called;
    check_drives(&copy)?;
    Ok(copy)
}

/// Whether every medium has its device in the copy, and every device its medium: QEMU would not start otherwise.
fn check_drives(copy: &Copy) -> Result<(), String> {
    let mut wanted = BTreeSet::new();
    let mut empty = BTreeSet::new();
    for pair in copy.words.windows(2) {
        match pair[0].as_str() {
            "-device" => wanted.extend(parse("driver", &pair[1])?.get("drive").map(str::to_owned)),
            "-drive" => empty.extend(parse("file", &pair[1])?.get("id").map(str::to_owned)),
            _ => {}
        }
    }
    let lacking = copy.drives.iter().find(|(_, name)| !wanted.contains(*name));
    if let Some((device, name)) = lacking {
        return Err(format!(
            "nothing on its command line is the device {device} of disk '{name}'; give that device an id (-device ...,id=NAME)"
        ));
    }
    let media: BTreeSet<&String> = copy.drives.values().chain(&empty).collect();
    match wanted.iter().find(|name| !media.contains(name)) {
        Some(name) => Err(format!(
            "the medium '{name}' that it was started with is gone; insert one to have it saved"
        )),
        None => Ok(()),
    }
}

/// An option's name and value.
type Named = (String, Option<String>);

/// Names of options, and their values.
fn options(line: &[String]) -> Result<Vec<Named>, String> {
    let mut options = Vec::new();
    let mut words = line.iter().skip(1);
    while let Some(word) = words.next() {
        let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
        let name = name.filter(|name| !name.is_empty()).ok_or_else(|| {
            format!("'{word}' on its command line is no option; name the disk by -blockdev and a -device")
        })?;
        let is_flag = KEPT_FLAGS.contains(&name) || DROPPED_FLAGS.contains(&name);
        let value = if is_flag { None } else { words.next().cloned() };
        options.push((name.to_owned(), value));
    }
    Ok(options)
}

fn parse(implied: &'static str, text: &str) -> Result<Value, String> {
    Value::parse(implied, text).ok_or_else(|| format!("'{text}' on its command line can't be read"))
}

/// Finds what other options need to know of devices, and refuses those that can't be started twice.
fn look_at_devices(options: &[Named], copy: &mut Copy) -> Result<(), String> {
    for (_, value) in options.iter().filter(|(name, _)| name == "device") {
        let device = parse("driver", value.as_deref().unwrap_or_default())?;
        let (kind, chardev) = (device.kind(), device.get("chardev").map(str::to_owned));
        if let Some(hosts) = HOSTS.iter().find(|start| kind.starts_with(**start)) {
            return Err(format!(
                "its device '{kind}' ('{hosts}...') is something of this host's or of another process's, which a second QEMU can't have"
            ));
        }
        if kind == "virtserialport" && device.get("name") == Some(PORT_NAME) {
            copy.agent = chardev;
        } else if kind == "isa-serial" && copy.console.is_none() {
            copy.console = chardev;
        }
        copy.balloon |= kind.starts_with("virtio-balloon");
        copy.cards += usize::from(device.get("netdev").is_some());
    }
    let nics = options
        .iter()
        .filter(|(name, value)| name == "nic" && value.as_deref() != Some("none"));
    copy.cards += nics.count();
    Ok(())
}

fn device(value: &str) -> Result<String, String> {
    let mut device = parse("driver", value)?;
    // Another VM, another generation.
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
                "its RAM backend '{id}' is a file, or huge pages (mem-path, hugetlb); use memory-backend-ram"
            ));
        }
        let size = object.text("size");
        return Ok(Some(format!("memory-backend-ram,id={id},size={size}")));
    }
    if OBJECTS.contains(&kind) {
        return Ok(Some(value.to_owned()));
    }
    if OWN_OBJECTS.iter().any(|own| kind.starts_with(own)) {
        return Ok(None);
    }
    Err(format!(
        "memfold can't start another QEMU with an object '{kind}' (id '{id}')"
    ))
}

/// The same for the guest's card: taps add headers to packets, and the card's state says whether they did.
fn network(value: &str) -> Result<String, String> {
    const OF_THE_HOST: [&str; 6] = [
        "hostfwd",
        "guestfwd",
        "smb",
        "smbserver",
        "tftp",
        "bootfile",
    ];
    let mut net = parse("type", value)?;
    let kind = net.kind().to_owned();
    match kind.as_str() {
        "none" => {}
        "user" => net.drop_keys(|key| OF_THE_HOST.contains(&key)),
        _ => {
            net.drop_keys(|key| !["id", "model", "mac"].contains(&key));
            let (kind, options): (_, &[_]) = match kind.as_str() {
                "tap" | "bridge" => ("tap", &[("script", "no"), ("downscript", "no")]),
                _ => ("user", &[("restrict", "on")]),
            };
            net.set("type", kind);
            for (key, value) in options {
                net.set(key, value);
            }
        }
    }
    Ok(net.render())
}

/// The first port that leads anywhere is the console.
fn serial(value: &str, copy: &mut Copy) -> String {
    if value == "none" || value == "null" {
        return value.to_owned();
    }
    if let Some(id) = value.strip_prefix("chardev:") {
        copy.console.get_or_insert_with(|| id.to_owned());
        return value.to_owned();
    }
    if copy.console.is_some() {
        return "null".to_owned();
    }
    copy.console = Some("memfold-console".to_owned());
    "chardev:memfold-console".to_owned()
}

/// A file that is named from QEMU's working directory, by its whole path.
fn found_from(place: &Path, option: &str, value: &str) -> String {
    let path = place.join(value);
    if FILES.contains(&option) && path.is_file() {
        path.to_string_lossy().into_owned()
    } else {
        value.to_owned()
    }
}

/// Nodes of disks and of firmware.
struct Nodes {
    /// Firmware's.
    flash: BTreeSet<String>,
    /// See [`Copy::drives`].
    called: BTreeMap<String, String>,
    /// Drives so far that are virtio disks of their own.
    virtio: usize,
}

impl Nodes {
    fn of(options: &[Named], facts: &Facts) -> Result<Self, String> {
        let named = |wanted: &'static [&str]| {
            options
                .iter()
                .filter(|(name, _)| wanted.contains(&name.as_str()))
        };
        let devices = named(&["device"])
            .map(|(_, value)| parse("driver", value.as_deref().unwrap_or_default()));
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        let mut flash = BTreeSet::new();
        for (_, value) in named(&["machine", "M"]) {
            let machine = parse("type", value.as_deref().unwrap_or_default())?;
            let nodes = ["pflash0", "pflash1"]
                .into_iter()
                .filter_map(|key| machine.get(key));
            flash.extend(nodes.map(str::to_owned));
        }
        let mut called = BTreeMap::new();
        // What no device uses is nothing of the guest's.
        for drive in facts.drives.iter().filter(|drive| !drive.device.is_empty()) {
            let name = drive.called(&devices);
            if !flash.contains(&name) && !drive.backend.starts_with("pflash") {
                called.insert(drive.device.clone(), name);
            }
        }
        Ok(Self {
            flash,
            called,
            virtio: 0,
        })
    }

    fn blockdev(&self, value: &str, facts: &Facts) -> Result<Option<String>, String> {
        let node = parse("driver", value)?;
        let name = node.get("node-name").unwrap_or_default();
        let Some(size) = facts.sizes.get(name).filter(|_| self.flash.contains(name)) else {
            return Ok(None);
        };
        let read_only = if node.is_on("read-only") { "on" } else { "off" };
        Ok(Some(format!(
            "driver=null-co,node-name={name},size={size},read-zeroes=on,read-only={read_only}"
        )))
    }

    /// What is put in the place of a drive, and after all devices.
    fn drive(
        &mut self,
        value: &str,
        facts: &Facts,
    ) -> Result<(Option<String>, Option<String>), String> {
        let drive = parse("file", value)?;
        let id = drive.get("id").map(str::to_owned);
        match (drive.get("if").unwrap_or("of the machine's own kind"), id) {
            ("none", Some(id)) if self.called.values().any(|name| *name == id) => Ok((None, None)),
            // Without a medium, whatever it had.
            ("none", Some(id)) => Ok((Some(format!("if=none,id={id},media=cdrom")), None)),
            // What '-drive' does itself, once all other devices are made.
            ("virtio", id) => {
                let name = id.unwrap_or_else(|| format!("virtio{}", self.virtio));
                self.virtio += 1;
                Ok((None, Some(format!("virtio-blk,drive={name}"))))
            }
            ("pflash", id) => {
                let unit = drive.text("unit").parse().unwrap_or(0);
                let name = id.unwrap_or_else(|| format!("pflash{unit}"));
                let node = facts.drives.iter().find(|drive| drive.backend == name);
                let size = node.and_then(|drive| facts.sizes.get(&drive.node));
                let size =
                    size.ok_or_else(|| format!("QEMU doesn't tell of its firmware '{name}'"))?;
                let read_only = if drive.is_on("readonly") { "on" } else { "off" };
                Ok((
                    Some(format!(
                        "if=pflash,unit={unit},format=raw,readonly={read_only},file.driver=null-co,file.size={size},file.read-zeroes=on"
                    )),
                    None,
                ))
            }
            (interface, _) => Err(format!(
                "its drive is {interface} (-drive {value}), which a second QEMU can't be given apart from its file; use if=none,id=NAME and a -device, if=virtio, or -blockdev"
            )),
        }
    }
}

impl Drive {
    /// What the command line calls it. A node may have got others over it since.
    fn called(&self, devices: &[Value]) -> String {
        let id = self.device.strip_prefix("/machine/peripheral/");
        let id = id.map_or(self.device.as_str(), |rest| {
            rest.split('/').next().unwrap_or_default()
        });
        let named = devices.iter().find(|device| device.get("id") == Some(id));
        let drive = named.and_then(|device| device.get("drive"));
        drive.map_or_else(
            || {
                if self.backend.is_empty() {
                    self.node.clone()
                } else {
                    self.backend.clone()
                }
            },
            str::to_owned,
        )
    }
}

#[cfg(test)]
#[path = "rewrite_tests.rs"]
mod tests;
