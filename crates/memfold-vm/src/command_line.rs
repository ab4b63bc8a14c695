//! Builds QEMU's command line for a VM from the VM's description.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use memfold_wire::agent::PORT_NAME;

use super::directory::VmDirectory;
use super::foreign::Foreign;
use super::network::Network;
use super::qemu_line::{Line, escape, escape_text, monitor_argument, on_or_off};
use super::qemu_user::QemuUser;
use super::seed_disk;
use super::segments;
use super::spec::{DiskSpec, StreamedDisk, VmSpec};
use super::swap;
use super::virtio_mem;

/// Seconds for which QEMU waits for an NBD server that is gone: three years.
const WAIT_FOR_SERVER_S: u64 = 100_000_000;

/// ID of the backend of a VM's network card in QEMU.
pub(super) const NETWORK: &str = "net0";

/// Options of each VM's machine: the device state has no description of itself, and no core dump of
/// QEMU contains the guest's RAM.
const MACHINE_OPTIONS: &str = "suppress-vmdesc=on,dump-guest-core=off";

/// Returns QEMU's command line for a VM. `overlays` holds the overlay files of the disks with
/// `snapshot`, in the order of the disks; the file of the swap disk is the last, if the VM has one.
/// `user`: user that QEMU switches to.
#[must_use]
pub fn arguments(
    spec: &VmSpec,
    machine: &str,
    accel: &str,
    directory: &VmDirectory,
    overlays: &[PathBuf],
    user: Option<QemuUser>,
) -> Vec<OsString> {
    let mut line = Line::default();
    if let Some(foreign) = &spec.foreign {
        frame(&mut line, spec, user);
        foreign_arguments(&mut line, spec, foreign, directory, overlays);
        return line.0;
    }
    let merge = on_or_off(spec.merges());
    line.flag("-nodefaults").flag("-no-user-config");
    frame(&mut line, spec, user);
    line.add(
        "-machine",
        format!("{machine},memory-backend=ram0,mem-merge={merge},{MACHINE_OPTIONS}"),
    )
    .add(
        "-object",
        format!("memory-backend-ram,id=ram0,size={}", spec.memory.0),
    );
    let plugs = segments::max_memory(spec).map_or_else(String::new, |max| {
        // These slots are for DIMMs; virtio-mem needs none.
        let slots = spec.memory_max.map_or(0, |_| spec.memory_slots);
        format!(",slots={slots},maxmem={}b", max.0)
    });
    let memory = format!("size={}b{plugs}", spec.memory.0);
    line.add("-m", memory).add("-smp", spec.vcpus.to_string());
    let (accel, whole) = match accel {
        "kvm" => ("kvm", "host"),
        _ => ("tcg,thread=multi", "max"),
    };
    let cpu = spec.cpu.as_deref().unwrap_or(whole);
    line.add("-accel", accel).add("-cpu", cpu);
    monitors(&mut line, directory);
    agent_chardev(&mut line, "agent", directory)
        .add("-device", "virtio-serial-pci,id=serial0")
        .add(
            "-device",
            format!("virtserialport,bus=serial0.0,chardev=agent,id=agent0,name={PORT_NAME}"),
        );
    console_chardev(&mut line, "console", directory, false).add("-serial", "chardev:console");
    line.add("-device", "vmgenid,guid=auto");
    if spec.balloon {
        let balloon = "virtio-balloon-pci,id=balloon0,free-page-reporting=on";
        // A device that the guest has seen must stay as it was.
        let deflates = if spec.deflate_on_oom {
            ",deflate-on-oom=on"
        } else {
            ""
        };
        line.add("-device", format!("{balloon}{deflates}"));
    }
    network_arguments(&mut line, spec);
    disk_arguments(&mut line, spec, overlays);
    seed_disk::arguments(&mut line, spec, directory);
    virtio_mem::arguments(&mut line, spec);
    segments::arguments(&mut line, spec);
    boot_arguments(&mut line, spec);
    line.0.extend(spec.more_arguments(directory));
    line.0
}

fn network_arguments(line: &mut Line, spec: &VmSpec) {
    if spec.network == Network::None {
        return;
    }
    // A tap has a descriptor, so the code that starts QEMU adds its backend.
    if spec.network == Network::User {
        let forwards = spec.forwards.iter();
        let forwards = forwards.map(|forward| format!(",hostfwd={}", forward.rule()));
        let backend = format!("user,id={NETWORK}{}", forwards.collect::<String>());
        line.add("-netdev", backend);
    }
    // The network card gets no option ROM: nobody boots from the network, and the ROM is in another
    // Debian package.
    let mac = spec
        .mac
        .map_or_else(String::new, |mac| format!(",mac={mac}"));
    let card = format!("virtio-net-pci,netdev={NETWORK},romfile={mac}");
    line.add("-device", card);
}

/// Adds the block nodes of the disks. Of a VM that memfold started originally, also the disks'
/// devices and the swap disk.
fn disk_arguments(line: &mut Line, spec: &VmSpec, overlays: &[PathBuf]) {
    let mut overlays = overlays.iter();
    for (number, disk) in spec.disks.iter().enumerate() {
        let overlay = if disk.snapshot { overlays.next() } else { None };
        let node = spec.disk_node(number);
        let of_drive = spec
            .foreign
            .as_ref()
            .and_then(|f| f.disks.get(number)?.option.as_deref());
        node_arguments(line, number, &node, of_drive, disk, overlay);
        if spec.foreign.is_none() {
            let write_cache = on_or_off(disk.cache.write_cache());
            line.add(
                "-device",
                format!("virtio-blk-pci,id=vd{number},drive={node},write-cache={write_cache}"),
            );
        }
    }
    if let (None, Some(_), Some(file)) = (&spec.foreign, spec.swap, overlays.next()) {
        swap_arguments(line, file);
    }
}

/// Adds options that do not affect the guest: the process's name, sandbox and user.
fn frame(line: &mut Line, spec: &VmSpec, user: Option<QemuUser>) {
    line.add("-name", format!("guest={},debug-threads=on", spec.name))
        .add("-display", "none")
        .add("-msg", "timestamp=on,guest-name=on")
        .add("-sandbox", sandbox(user));
    if let Some(user) = user {
        line.add("-run-with", user.option(spec));
    }
}

/// Returns the command line of a VM that memfold did not start originally.
fn foreign_arguments(
    line: &mut Line,
    spec: &VmSpec,
    foreign: &Foreign,
    directory: &VmDirectory,
    overlays: &[PathBuf],
) {
    line.0
        .extend(foreign.line(&spec.forwards).iter().map(OsString::from));
    let merge = on_or_off(spec.merges());
    line.add("-machine", format!("mem-merge={merge},{MACHINE_OPTIONS}"))
        .add("-monitor", "none");
    monitors(line, directory);
    if let Some(id) = &foreign.agent {
        agent_chardev(line, id, directory);
    }
    if let Some(id) = &foreign.console {
        console_chardev(line, id, directory, foreign.console_shared);
    }
    disk_arguments(line, spec, overlays);
}

/// Returns the value of `-sandbox`. QEMU drops its privileges with system calls that the sandbox
/// would forbid (also under `children`), so these calls stay allowed. Without privileges and with
/// `spawn` denied, these calls gain nothing.
fn sandbox(user: Option<QemuUser>) -> String {
    let privileges = if user.is_some() { "allow" } else { "deny" };
    format!("on,obsolete=deny,elevateprivileges={privileges},spawn=deny,resourcecontrol=deny")
}

fn monitors(line: &mut Line, directory: &VmDirectory) {
    for socket in [directory.qmp(), directory.daemon_qmp()] {
        line.add("-qmp", monitor_argument(&socket));
    }
}

fn agent_chardev<'a>(line: &'a mut Line, id: &str, directory: &VmDirectory) -> &'a mut Line {
    let socket = format!("socket,id={},server=on,wait=off,path=", escape_text(id));
    line.with_path("-chardev", &socket, &directory.agent())
}

/// Adds the console's character device. `is_shared`: several devices use this character device.
fn console_chardev<'a>(
    line: &'a mut Line,
    id: &str,
    directory: &VmDirectory,
    is_shared: bool,
) -> &'a mut Line {
    let shared = if is_shared { ",mux=on" } else { "" };
    let mut console = OsString::from(format!(
        "socket,id={},server=on,wait=off,logappend=on{shared},path=",
        escape_text(id)
    ));
    console.push(escape(directory.console().as_os_str()));
    console.push(",logfile=");
    console.push(escape(directory.console_log().as_os_str()));
    line.add("-chardev", console)
}

/// One layer of a disk: a file, and the block node of its format.
struct Layer<'a> {
    node: &'a str,
    format: &'static str,
    file_node: String,
    path: &'a Path,
    read_only: bool,
    /// Text `,backing=NODE`, or nothing.
    backing: &'a str,
}

/// Adds a disk's block nodes: file and format, and above them the nodes of the disk's overlay, if
/// it has one. `top`: the node that the disk's device uses. `of_drive`: further options of
/// `-drive`, if `-drive` creates that node; `None` if `-blockdev` does.
fn node_arguments(
    line: &mut Line,
    number: usize,
    top: &str,
    of_drive: Option<&str>,
    disk: &DiskSpec,
    overlay: Option<&PathBuf>,
) {
    let (base, base_file) = layer_nodes(number, 0);
    let lower = Layer {
        node: if overlay.is_some() { &base } else { top },
        format: disk.format().driver(),
        file_node: base_file,
        path: &disk.path,
        read_only: disk.read_only || overlay.is_some(),
        backing: "",
    };
    if let Some(streamed) = &disk.streamed {
        streamed_arguments(line, number, disk, streamed);
    }
    let backing = format!(",backing={base}");
    let upper = overlay.map(|path| Layer {
        node: top,
        format: "qcow2",
        file_node: format!("overlay-file{number}"),
        path,
        read_only: false,
        backing: &backing,
    });
    let lower = disk.streamed.is_none().then_some(lower);
    for layer in [lower, upper].into_iter().flatten() {
        let of_drive = of_drive.filter(|_| layer.node == top);
        layer_arguments(line, &layer, disk, of_drive);
    }
}

/// Returns the names of the block nodes of layer `depth` below disk `number`'s overlay: of its
/// format, and of its file. Depth 0 is the top.
#[must_use]
pub fn layer_nodes(number: usize, depth: usize) -> (String, String) {
    let below = |node: &str| match depth {
        0 => format!("{node}{number}"),
        depth => format!("{node}{number}-{depth}"),
    };
    (below("base"), below("file"))
}

/// Adds the block nodes of a disk's files that are still being fetched. If the NBD server is gone,
/// requests wait for the next one.
fn streamed_arguments(line: &mut Line, number: usize, disk: &DiskSpec, streamed: &StreamedDisk) {
    let common = format!(
        "cache.direct={},cache.no-flush={},read-only=on,discard=unmap",
        on_or_off(disk.cache.direct()),
        on_or_off(disk.cache.no_flush())
    );
    for (depth, (export, format)) in streamed.layers.iter().enumerate().rev() {
        let (node, file_node) = layer_nodes(number, depth);
        let file = format!(
            "driver=nbd,node-name={file_node},export={export},reconnect-delay={WAIT_FOR_SERVER_S},{common},server.type=unix,server.path="
        );
        line.with_path("-blockdev", &file, &streamed.socket);
        let below = layer_nodes(number, depth + 1).0;
        let is_last = depth + 1 == streamed.layers.len();
        let backing = if is_last {
            String::new()
        } else {
            format!(",backing={below}")
        };
        let format = format.driver();
        line.add(
            "-blockdev",
            format!("driver={format},node-name={node},file={file_node}{backing},{common}"),
        );
    }
}

/// Adds the block nodes of one layer. `of_drive`: further options of `-drive`, if `-drive` creates
/// the node.
fn layer_arguments(line: &mut Line, layer: &Layer<'_>, disk: &DiskSpec, of_drive: Option<&str>) {
    let common = format!(
        "cache.direct={},cache.no-flush={},read-only={},discard=unmap",
        on_or_off(disk.cache.direct()),
        on_or_off(disk.cache.no_flush()),
        on_or_off(layer.read_only)
    );
    let is_device = is_block_device(layer.path);
    let driver = if is_device { "host_device" } else { "file" };
    let (node, file_node, backing) = (escape_text(layer.node), &layer.file_node, layer.backing);
    let aio = disk.aio.name();
    let file = format!("driver={driver},node-name={file_node},aio={aio},{common}");
    let format = format!("driver={},node-name={node}", layer.format);
    let Some(drive) = of_drive else {
        let format = format!("{format},file={file_node}{backing},{common}");
        line.with_path("-blockdev", &format!("{file},filename="), layer.path)
            .add("-blockdev", format);
        return;
    };
    // `-drive` takes the options of the file's node instead of the node itself.
    let file = file.replace(',', ",file.");
    let before = format!("{drive},{format}{backing},{common},file.{file},file.filename=");
    line.with_path("-drive", &before, layer.path);
}

fn is_block_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device())
}

/// Adds the swap disk. QEMU writes the disk's file through the page cache and never flushes it: a
/// crash of the host also ends the VM, and then the swapped data is worthless.
fn swap_arguments(line: &mut Line, file: &Path) {
    let cache = "cache.direct=off,cache.no-flush=on";
    let (node, file_node) = (swap::node(0), swap::file_node(0));
    let raw = format!("driver=raw,node-name={node},file={file_node},{cache}");
    let below = format!("driver=file,node-name={file_node},{cache},filename=");
    line.with_path("-blockdev", &below, file).add("-blockdev", raw)
    // Discarded blocks are not freed: they would have to be allocated again, here or at a lender,
    // perhaps when there is no room.
    .add(
        "-device",
        format!(
            "virtio-blk-pci,id={},drive={node},serial={},write-cache=on,discard=off,write-zeroes=off",
            swap::DEVICE,
            swap::SERIAL
        ),
    );
}

fn boot_arguments(line: &mut Line, spec: &VmSpec) {
    let boot = &spec.boot;
    let files = [&boot.kernel, &boot.initrd, &boot.firmware];
    for (option, path) in ["-kernel", "-initrd", "-bios"].into_iter().zip(files) {
        if let Some(path) = path {
            line.add(option, path);
        }
    }
    if let Some(cmdline) = segments::cmdline(spec) {
        line.add("-append", cmdline);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Aio, CacheMode, DiskFormat, MergeChoice};
    use memfold_units::ByteSize;

    fn text(spec: &VmSpec, overlays: &[PathBuf]) -> String {
        let directory = VmDirectory::of(Path::new("/run/x,y"), &spec.name);
        let line = arguments(spec, "pc-q35-10.0", "tcg", &directory, overlays, None);
        let words: Vec<_> = line
            .iter()
            .map(|w| w.to_string_lossy().into_owned())
            .collect();
        words.join("\n")
    }

    #[test]
    fn the_qemu_command_line_has_private_anonymous_ram_and_a_versioned_machine_type() {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        spec.memory_max = Some(ByteSize(1 << 30));
        let line = text(&spec, &[]);
        assert!(line.contains("-object\nmemory-backend-ram,id=ram0,size=536870912\n"));
        assert!(line.contains(
            "pc-q35-10.0,memory-backend=ram0,mem-merge=off,suppress-vmdesc=on,dump-guest-core=off\n"
        ));
        assert!(line.contains("-m\nsize=536870912b,slots=0,maxmem=1073741824b\n"));
        assert!(line.contains("free-page-reporting=on"));
        assert!(!line.contains("netdev"));
    }

    #[test]
    fn the_balloon_deflates_before_an_oom_kill_only_in_vms_that_were_started_with_that() {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        let before = text(&spec, &[]);
        let device = "virtio-balloon-pci,id=balloon0,free-page-reporting=on";
        assert!(before.lines().any(|line| line == device), "{before}");
        spec.deflate_on_oom = true;
        let after = text(&spec, &[]);
        assert_eq!(after.replace(",deflate-on-oom=on", ""), before);
        let device = format!("{device},deflate-on-oom=on");
        assert!(after.lines().any(|line| line == device), "{after}");
        spec.balloon = false;
        assert!(!text(&spec, &[]).contains("balloon"));
    }

    #[test]
    fn the_ram_of_a_vm_is_mergeable_by_ksm_only_if_the_vm_has_a_trust_domain() {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        assert!(text(&spec, &[]).contains(",mem-merge=off,"));
        spec.domain = Some("d".into());
        assert!(text(&spec, &[]).contains(",mem-merge=on,"));
        spec.merge = MergeChoice::Never;
        assert!(text(&spec, &[]).contains(",mem-merge=off,"));
    }

    #[test]
    fn commas_in_paths_are_escaped_on_the_qemu_command_line() {
        let line = text(&VmSpec::new("a", ByteSize::mib(512)), &[]);
        assert!(
            line.contains("unix:/run/x,,y/vms/a/qmp.sock,server=on"),
            "{line}"
        );
    }

    #[test]
    fn on_the_qemu_command_line_the_swap_disk_is_the_last_disk() {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        let mut disk = DiskSpec::new("/img/d.raw");
        disk.snapshot = true;
        spec.disks = vec![disk];
        spec.swap = Some(ByteSize::mib(64));
        let line = text(&spec, &["/var/tmp/o".into(), "/var/tmp/s".into()]);
        assert!(
            line.contains(
                "node-name=swap-file0,cache.direct=off,cache.no-flush=on,filename=/var/tmp/s"
            ),
            "{line}"
        );
        let swap = line
            .find("id=swap,drive=swap0,serial=memfold-swap")
            .unwrap();
        assert!(swap > line.find("id=vd0").unwrap());
    }

    #[test]
    fn a_copy_of_an_attached_vm_gets_its_drive_options_and_block_nodes_of_memfold() {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        let mut disk = DiskSpec::new("/img/d,1.raw");
        disk.snapshot = true;
        spec.disks = vec![disk];
        let option = Some("if=ide,id=ide0-hd0,bus=0,unit=0".to_owned());
        let of = crate::foreign::ForeignDisk {
            node: "memfold-drive0".into(),
            option,
            ..Default::default()
        };
        spec.foreign = Some(Foreign {
            disks: vec![of],
            ..Default::default()
        });
        let line = text(&spec, &["/var/tmp/o".into()]);
        for words in [
            "-blockdev\ndriver=raw,node-name=base0,file=file0,cache.direct=off",
            "-drive\nif=ide,id=ide0-hd0,bus=0,unit=0,driver=qcow2,node-name=memfold-drive0,backing=base0,cache.direct=off",
            "file.driver=file,file.node-name=overlay-file0,file.aio=threads,file.cache.direct=off",
            "file.filename=/var/tmp/o\n",
        ] {
            assert!(
                format!("{line}\n").contains(words),
                "no '{words}' in: {line}"
            );
        }
        spec.disks[0].snapshot = false;
        let line = text(&spec, &[]);
        assert!(
            line.contains(
                "-drive\nif=ide,id=ide0-hd0,bus=0,unit=0,driver=raw,node-name=memfold-drive0,cache"
            ),
            "{line}"
        );
        assert!(line.contains("file.filename=/img/d,,1.raw"), "{line}");
    }

    #[test]
    fn a_vm_with_a_disk_in_snapshot_mode_writes_only_to_the_overlay() {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        let mut disk = DiskSpec::new("/img/d.raw");
        disk.snapshot = true;
        disk.cache = CacheMode::None;
        disk.aio = Aio::IoUring;
        spec.disks = vec![disk, DiskSpec::new("/img/e.qcow2")];
        let line = text(&spec, &["/var/tmp/o".into()]);
        assert!(line.contains("driver=file,node-name=file0,aio=io_uring,cache.direct=on,cache.no-flush=off,read-only=on,discard=unmap,filename=/img/d.raw"));
        assert!(line.contains("driver=raw,node-name=base0,file=file0"));
        assert!(line.contains(
            "driver=qcow2,node-name=disk0,file=overlay-file0,backing=base0,cache.direct=on"
        ));
        assert!(line.contains("driver=qcow2,node-name=disk1,file=file1,cache.direct=off"));
        assert!(line.contains("virtio-blk-pci,id=vd1,drive=disk1,write-cache=on"));
    }

    #[test]
    fn a_disk_that_is_still_being_fetched_is_read_by_nbd_below_its_overlay() {
        let mut spec = VmSpec::new("a", ByteSize::mib(512));
        let mut disk = DiskSpec::new("/snapshots/s/disk0.qcow2");
        disk.snapshot = true;
        let layers = [
            ("disk0.qcow2", DiskFormat::Qcow2),
            ("base0", DiskFormat::Raw),
        ];
        disk.streamed = Some(StreamedDisk {
            socket: "/run/a,b".into(),
            layers: layers
                .map(|(name, format)| (name.to_owned(), format))
                .into(),
            virtual_bytes: 1 << 30,
        });
        spec.disks = vec![disk];
        let line = text(&spec, &["/var/tmp/o".into()]);
        let nodes: Vec<&str> = line
            .lines()
            .filter(|line| line.starts_with("driver="))
            .collect();
        let expected = [
            "driver=nbd,node-name=file0-1,export=base0,",
            "driver=raw,node-name=base0-1,file=file0-1,cache",
            "driver=nbd,node-name=file0,export=disk0.qcow2,",
            "driver=qcow2,node-name=base0,file=file0,backing=base0-1,",
            "driver=file,node-name=overlay-file0,",
            "driver=qcow2,node-name=disk0,file=overlay-file0,backing=base0,",
        ];
        assert_eq!(nodes.len(), expected.len(), "{nodes:?}");
        for (node, begins) in nodes.iter().zip(expected) {
            assert!(node.starts_with(begins), "{node}");
        }
        assert!(nodes[0].ends_with(",server.type=unix,server.path=/run/a,,b"));
        assert!(!line.contains("/snapshots/s"));
    }
}
