//! The description of a VM: its memory, CPUs, disks and options. The description is read from a
//! TOML file, built from command-line flags, or read back from the state directory.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::cloud_init::CloudInit;
use super::foreign::Foreign;
use super::forward::Forward;
use super::network::{MacAddress, Network};
use super::segment_spec::SegmentSpec;
use super::size_text;
use super::sizing_spec::SizingSpec;
use super::spec_error::{SpecError, require};

/// Which accelerator runs the guest's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccelChoice {
    /// KVM if a small test guest boots with it on this host, else TCG.
    #[default]
    Auto,
    /// KVM: hardware virtualization.
    Kvm,
    /// TCG: QEMU translates the guest's instructions.
    Tcg,
}

/// Format of a disk's image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// `raw`: the file contains the disk's bytes directly.
    Raw,
    /// `qcow2`: QEMU's own image format.
    Qcow2,
}

impl DiskFormat {
    /// Returns QEMU's name of the block driver for this format.
    #[must_use]
    pub const fn driver(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// How QEMU caches a disk's data (`man qemu-system-x86_64`, `-drive cache=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// I/O goes through the host's page cache. Only this allows folding pages again while the VM
    /// runs.
    #[default]
    Writeback,
    /// Direct I/O, which bypasses the host's page cache.
    None,
    /// I/O goes through the host's page cache, and QEMU flushes every write.
    Writethrough,
    /// Direct I/O, and QEMU flushes every write.
    Directsync,
    /// I/O goes through the host's page cache, and QEMU never flushes: for throw-away guests.
    Unsafe,
}

impl CacheMode {
    /// Returns whether I/O of the disk bypasses the host's page cache (`O_DIRECT`).
    #[must_use]
    pub const fn direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }
    /// Returns whether QEMU ignores the guest's flushes of the disk.
    #[must_use]
    pub const fn no_flush(self) -> bool {
        matches!(self, Self::Unsafe)
    }
    /// Returns whether the guest sees a volatile write cache on the disk.
    #[must_use]
    pub const fn write_cache(self) -> bool {
        matches!(self, Self::Writeback | Self::None | Self::Unsafe)
    }
}

/// How QEMU submits a disk's I/O to the host's kernel (`-drive aio=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// A pool of threads with blocking system calls.
    #[default]
    Threads,
    /// The kernel's `io_uring` interface.
    IoUring,
    /// Linux AIO (`io_submit(2)`); possible only with direct I/O.
    Native,
}

impl Aio {
    /// Returns QEMU's name of the I/O method.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::IoUring => "io_uring",
            Self::Native => "native",
        }
    }
}

/// A disk of a VM. The guest sees it as a virtio-blk disk: vda, vdb, ... in the order of the disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Path of the disk's image file or block device.
    pub path: PathBuf,
    /// Format of the disk's image. Unset: qcow2 if the file name ends in `.qcow2`, else raw.
    /// memfold refuses the VM if the image begins with the header of another format. The content
    /// alone never decides, because a guest could write a header into its raw disk. memfold checks
    /// this once, and then stores the format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<DiskFormat>,
    /// How QEMU caches the disk's data.
    #[serde(default)]
    pub cache: CacheMode,
    /// How QEMU submits the disk's I/O to the host's kernel.
    #[serde(default)]
    pub aio: Aio,
    /// Whether the disk is read-only for the guest.
    #[serde(default)]
    pub read_only: bool,
    /// Whether the guest's writes go to a temporary overlay, which is removed when the VM ends. The
    /// disk's image is then not changed.
    #[serde(default)]
    pub snapshot: bool,
    /// Files of the disk that are still being fetched from another host, below the disk's temporary
    /// overlay; unset in every description that comes from elsewhere.
    #[serde(skip)]
    pub streamed: Option<StreamedDisk>,
}

/// The files of a disk that are still being fetched. QEMU reads them by NBD, read-only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamedDisk {
    /// Unix socket of the NBD server.
    pub socket: PathBuf,
    /// Names of the NBD exports and their formats, from the top of the disk's chain.
    pub layers: Vec<(String, DiskFormat)>,
    /// Size of the disk in bytes.
    pub virtual_bytes: u64,
}

impl DiskSpec {
    /// Returns a disk with this image and with default settings.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            ..Self::default()
        }
    }

    /// Returns the format of the disk's image. If the format is unset, the file name decides.
    #[must_use]
    pub fn format(&self) -> DiskFormat {
        self.format.unwrap_or_else(|| {
            if self.path.extension().is_some_and(|e| e == "qcow2") {
                DiskFormat::Qcow2
            } else {
                DiskFormat::Raw
            }
        })
    }
}

/// What a VM boots. Default: QEMU's own firmware boots from the first disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootSpec {
    /// Path of a Linux kernel image that the VM boots; unset: the firmware boots from a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// Path of the initramfs for the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// Command line of the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
    /// Path of a firmware image that the VM uses instead of QEMU's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<PathBuf>,
}

/// Whether KSM may merge a VM's memory with that of other VMs. KSM merges only while it runs on the
/// host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MergeChoice {
    /// KSM may merge the VM's memory if the VM has a trust domain.
    #[default]
    Domain,
    /// KSM may not merge the VM's memory.
    Never,
}

/// The description of a VM. The default has neither name nor memory; see [`VmSpec::new`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(clippy::struct_excessive_bools)] // independent wishes
pub struct VmSpec {
    /// Name of the VM, unique on this host: 1 to 64 characters of a-z, 0-9 and `._-`.
    pub name: String,
    /// Size of the VM's RAM at its start; a whole number of MiB, at least 16 MiB.
    #[serde(with = "size_text")]
    pub memory: ByteSize,
    /// Largest size that the VM's RAM can reach while it runs; unset: no RAM can be added. The VM
    /// gets a virtio-mem device for what exceeds `memory`, a multiple of 128 MiB. Right-sizing
    /// plugs that memory when the guest needs it, and unplugs it when it is idle.
    #[serde(default, with = "size_text", skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<ByteSize>,
    /// Number of the VM's slots for DIMMs, 0 to 256, with `memory_max`. Unless it is 0, the VM has
    /// these slots instead of a virtio-mem device, and RAM is added to it by QEMU's monitor.
    #[serde(default)]
    pub memory_slots: u32,
    /// Number of the VM's virtual CPUs, 1 to 4096.
    #[serde(default = "one")]
    pub vcpus: u32,
    /// Trust domain of the VM: VMs of the same domain may share memory with each other. Unset: the
    /// VM shares with no other VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Which accelerator runs the guest's instructions.
    #[serde(default)]
    pub accel: AccelChoice,
    /// CPU model of the VM (QEMU's `-cpu`). Unset: all features of the host (`host`, under TCG
    /// `max`). A snapshot can then be restored only on a host with all these features. For several
    /// hosts, choose a named model that all of them support, such as `Skylake-Server-v5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Whether the VM has a balloon device with free page reporting, by which the guest returns
    /// freed memory to the host.
    #[serde(default = "yes")]
    pub balloon: bool,
    /// Whether the balloon gives memory back to the guest before the guest's kernel kills a process
    /// for lack of it. Each start of a new VM sets this; a user's description never does. Snapshots
    /// of VMs from before this field lack it, because a device must stay as the guest knows it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deflate_on_oom: bool,
    /// Which network the guest's network card is connected to: `none`, `user`, `bridge=NAME` or
    /// `macvtap=NAME`.
    #[serde(default)]
    pub network: Network,
    /// MAC address of the guest's network card. Unset: computed from the VM's name and the host; in
    /// a user-mode network, where each VM is alone, QEMU's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// Whether the VM's RAM is folded, for which memfold's library is preloaded into QEMU. A
    /// restored VM has the library in any case, because it fills the VM's RAM.
    #[serde(default = "yes")]
    pub fold: bool,
    /// Whether KSM may merge the VM's memory with that of other VMs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub merge: MergeChoice,
    /// User that QEMU switches to after it has opened all files (`-run-with user=`). Unset: a user
    /// of its own, which has no other rights, if the daemon is root. `root`: QEMU keeps the
    /// daemon's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether the daemon takes a snapshot `NAME-boot` as soon as the guest has booted, for
    /// `vm reboot --from-boot-snapshot`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub boot_snapshot: bool,
    /// Size of the VM's swap disk. memfold creates and removes the disk with the VM, and can move
    /// it to lent RAM. Unset: the VM has no swap disk.
    #[serde(default, with = "size_text", skip_serializing_if = "Option::is_none")]
    pub swap: Option<ByteSize>,
    /// Host ports that are forwarded into the guest through its user-mode network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<Forward>,
    /// Host resources of the saved VM that this VM, restored from a snapshot, lacks, each as text.
    /// Only a restore sets this; a user's description never does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Whether the VM continues by itself after QEMU stopped it because of a full disk, as soon as
    /// the disk's file system has 16 MiB free. Otherwise the VM waits for `vm resume`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resume_when_room: bool,
    /// Time to live of the VM in seconds: the VM is switched off when so much time has passed since
    /// its start, since it was last extended, or since a daemon adopted it. A program that starts
    /// VMs extends it again and again, so that they end with the program. Unset: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<NonZeroU32>,
    /// Additional arguments for QEMU, which memfold passes unchanged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub qemu_args: Vec<String>,
    /// Directory to which relative paths in `qemu_args` refer; `/` if it is unset or does not
    /// exist. `vm run` sets its own working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_directory: Option<PathBuf>,
    /// Files for which tokens in `qemu_args` stand; the VM gets its own copy of each. Only
    /// snapshots set this; a user's description never does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
    /// Number of the VM's device slots for segments, those attached while the VM runs included.
    /// Unset: as many as `segments` has. At most 16.
    #[serde(default, skip_serializing_if = "is_default")]
    pub segment_slots: u32,
    /// Segments that the VM maps at its start, in the order of their device slots.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<SegmentSpec>,
    /// What the VM boots: a kernel or firmware.
    #[serde(default)]
    pub boot: BootSpec,
    /// What cloud-init in the guest is told, on a disk after all other disks. Unset: the VM has no
    /// such disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// Limits of the VM's size, for right-sizing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sizing: SizingSpec,
    /// Disks of the VM, in the order in which the guest sees them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskSpec>,
    /// Arguments that create the VM's devices, for a snapshot of a VM that memfold did not start.
    /// Only snapshots set this; a user's description never does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign: Option<Foreign>,
}

const fn one() -> u32 {
    1
}
const fn yes() -> bool {
    true
}
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl VmSpec {
    /// Returns a VM description with default settings and no disk.
    #[must_use]
    pub fn new(name: impl Into<String>, memory: ByteSize) -> Self {
        Self {
            name: name.into(),
            memory,
            vcpus: one(),
            balloon: true,
            fold: true,
            ..Self::default()
        }
    }

    /// Returns the name of the block node that the device of disk number `disk` uses, until a
    /// snapshot puts an overlay above the node.
    #[must_use]
    pub fn disk_node(&self, disk: usize) -> String {
        match self.foreign.as_ref().and_then(|f| f.disks.get(disk)) {
            Some(foreign) => foreign.node.clone(),
            None => format!("disk{disk}"),
        }
    }

    /// Returns whether `place` is the path of disk number `disk` in QEMU's object tree (`qdev` in
    /// `query-block`).
    #[must_use]
    pub fn is_disk(&self, disk: usize, place: &str) -> bool {
        match &self.foreign {
            Some(foreign) => foreign.disks.get(disk).is_some_and(|d| d.device == place),
            None => place == format!("vd{disk}") || place.contains(&format!("/vd{disk}/")),
        }
    }

    /// Returns the number of the VM's network cards.
    #[must_use]
    pub fn cards(&self) -> usize {
        let own = usize::from(self.network != Network::None);
        self.foreign.as_ref().map_or(own, |foreign| foreign.cards)
    }

    /// Returns the number of the VM's device slots for segments, used or not.
    #[must_use]
    pub fn slots(&self) -> u32 {
        let used = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        self.segment_slots.max(used)
    }

    /// Returns the size of the VM's virtio-mem device; `None`: the VM has none.
    #[must_use]
    pub fn pluggable(&self) -> Option<ByteSize> {
        let max = self.memory_max.filter(|_| self.memory_slots == 0)?;
        Some(ByteSize(max.0.saturating_sub(self.memory.0)))
    }

    /// Returns the largest size that the VM can have: its RAM, and what virtio-mem can plug.
    #[must_use]
    pub fn largest_memory(&self) -> ByteSize {
        let more = self.pluggable().unwrap_or_default();
        ByteSize(self.memory.0.saturating_add(more.0))
    }

    /// Returns whether KSM may merge the VM's memory. Always false for a VM without a trust domain.
    #[must_use]
    pub fn merges(&self) -> bool {
        self.merge == MergeChoice::Domain && self.domain.is_some()
    }

    /// Reads a VM description from a TOML file. Relative paths of disks and boot files are relative
    /// to the file's directory. The result is not validated yet.
    pub fn from_toml_file(path: &Path) -> Result<Self, SpecError> {
        let text = std::fs::read_to_string(path).map_err(|source| SpecError::Read {
            path: path.into(),
            source,
        })?;
        let spec: Self = toml::from_str(&text).map_err(|source| SpecError::Parse {
            path: path.into(),
            source: Box::new(source),
        })?;
        spec.of_file(path)
    }

    /// Makes the relative paths of a description from the file `path` relative to the file's
    /// directory.
    pub(super) fn of_file(mut self, path: &Path) -> Result<Self, SpecError> {
        self.check_fields_of_users()?;
        let base = path.parent().unwrap_or(Path::new(""));
        for (_, file) in self.files_mut() {
            *file = base.join(&file);
        }
        Ok(self)
    }

    /// Refuses fields that only snapshots may set.
    pub(super) fn check_fields_of_users(&self) -> Result<(), SpecError> {
        let why = "belongs to snapshots only; give your own QEMU arguments as qemu_args";
        require(self.files.is_empty(), "files", why)?;
        require(self.foreign.is_none(), "foreign", why)?;
        let seed = self.cloud_init.as_ref().and_then(|of| of.seed.as_ref());
        let why = "belongs to snapshots only; name files as cloud_init.user_data";
        require(seed.is_none(), "cloud_init.seed", why)
    }

    /// Sets the paths of the VM's files to those of another description of the same VM.
    pub(super) fn keep_paths(&mut self, mut of: Self) {
        for ((_, path), (_, given)) in self.files_mut().zip(of.files_mut()) {
            path.clone_from(given);
        }
    }

    pub(super) fn files_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut PathBuf)> {
        let (user_data, keys) = match &mut self.cloud_init {
            Some(of) => (of.user_data.as_mut(), of.ssh_keys.as_mut_slice()),
            None => (None, [].as_mut_slice()),
        };
        let boot = &mut self.boot;
        let boot = [
            ("boot.kernel", boot.kernel.as_mut()),
            ("boot.initrd", boot.initrd.as_mut()),
            ("boot.firmware", boot.firmware.as_mut()),
        ];
        boot.into_iter()
            .filter_map(|(field, path)| Some((field, path?)))
            .chain(
                user_data
                    .into_iter()
                    .map(|path| ("cloud_init.user_data", path)),
            )
            .chain(keys.iter_mut().map(|path| ("cloud_init.ssh_keys", path)))
            .chain(self.disks.iter_mut().map(|d| ("disks.path", &mut d.path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<VmSpec, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn a_vm_description_round_trips_through_toml_and_json() {
        let spec = parse(
            "name = 'a'\nmemory = '512M'\nmemory_max = '2G'\ndomain = 'blue'\n\
             [boot]\nkernel = '/k'\ncmdline = 'quiet'\n[[disks]]\npath = '/d.qcow2'\ncache = 'none'\naio = 'io_uring'\n",
        )
        .unwrap();
        assert_eq!(spec.memory, ByteSize::mib(512));
        assert_eq!(spec.memory_max, Some(ByteSize(2 << 30)));
        assert_eq!(spec.disks[0].format(), DiskFormat::Qcow2);
        assert!(spec.fold && spec.balloon && spec.vcpus == 1);
        assert_eq!(parse(&toml::to_string(&spec).unwrap()).unwrap(), spec);
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<VmSpec>(&json).unwrap(), spec);
    }

    #[test]
    fn unknown_fields_and_malformed_sizes_in_a_vm_description_are_refused() {
        for (line, wrong) in [
            ("memory='512M'\nmemroy='1G'", "memroy"),
            ("memory='lots'", "'lots'"),
            ("memory=-1", "-1"),
        ] {
            let text = format!("name='a'\n{line}");
            let error = parse(&text).unwrap_err();
            assert_eq!(&text[error.span().unwrap()], wrong, "{error}");
        }
        parse("name='a'\nmemory='512M'").unwrap();
    }
}
