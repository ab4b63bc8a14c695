//! The description of a VM, read from a TOML file, built from command-line flags, or read back from
//! the state directory.

use std::path::{Path, PathBuf};

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::foreign::Foreign;
use super::forward::Forward;
use super::segment_spec::SegmentSpec;
use super::spec_error::{SpecError, value};

/// The accelerator that runs the guest's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccelChoice {
    /// KVM if a probe guest boots with it, else TCG.
    #[default]
    Auto,
    /// Hardware virtualization (KVM).
    Kvm,
    /// QEMU's own translator (TCG).
    Tcg,
}

/// Format of a disk image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// `raw`: the file contains the disk's bytes directly.
    Raw,
    /// `qcow2`: QEMU's own image format.
    Qcow2,
}

impl DiskFormat {
    /// Returns QEMU's name of the block driver.
    #[must_use]
    pub const fn driver(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// QEMU's cache modes of a disk (`man qemu-system-x86_64`, `-drive cache=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Through the host's page cache. Allows folding pages again while the VM runs.
    #[default]
    Writeback,
    /// Direct I/O, without the host's page cache.
    None,
    /// Through the host's page cache, every write flushed.
    Writethrough,
    /// Direct I/O, every write flushed.
    Directsync,
    /// Through the host's page cache, never flushed: for throw-away guests.
    Unsafe,
}

impl CacheMode {
    /// Returns whether I/O bypasses the host's page cache (`O_DIRECT`).
    #[must_use]
    pub const fn direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }
    /// Returns whether the guest's flushes are ignored.
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

/// Method of a disk's I/O in QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// A pool of threads.
    #[default]
    Threads,
    /// The kernel's `io_uring`.
    IoUring,
    /// Linux AIO; only with direct I/O.
    Native,
}

impl Aio {
    /// Returns QEMU's name of the method.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::IoUring => "io_uring",
            Self::Native => "native",
        }
    }
}

/// One virtio-blk disk. Disks appear in the guest as vda, vdb, ... in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Path of the image file or block device.
    pub path: PathBuf,
    /// Format of the image. Unset: qcow2 if the name ends in `.qcow2`, else raw; a VM whose image
    /// begins with the header of another format is refused. The content alone never decides,
    /// because a guest could write a header into its raw disk. memfold checks this once, and then
    /// stores the format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<DiskFormat>,
    /// Cache mode of the disk.
    #[serde(default)]
    pub cache: CacheMode,
    /// I/O method of the disk.
    #[serde(default)]
    pub aio: Aio,
    /// Whether the disk is read-only for the guest.
    #[serde(default)]
    pub read_only: bool,
    /// Whether writes go to a temporary overlay, which is removed when the VM ends. The image is
    /// then not changed.
    #[serde(default)]
    pub snapshot: bool,
}

impl DiskSpec {
    /// Returns a disk with default settings.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            ..Self::default()
        }
    }

    /// Returns the format of the image; if it is unset, according to the file's name.
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

/// How the VM boots. Default: QEMU's own firmware boots from the first disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootSpec {
    /// Linux kernel image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// Initramfs of the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// Command line of the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
    /// Firmware image instead of QEMU's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<PathBuf>,
}

/// The guest's network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// No network card.
    #[default]
    None,
    /// QEMU's user-mode network.
    User,
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
    /// Name of the VM, unique on this host.
    pub name: String,
    /// RAM of the VM at its start.
    #[serde(with = "size_text")]
    pub memory: ByteSize,
    /// Largest RAM that the VM can reach by hot-plug; unset: no RAM can be added.
    #[serde(default, with = "size_text", skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<ByteSize>,
    /// Number of memory slots for hot-plug, if `memory_max` is set.
    #[serde(default = "four")]
    pub memory_slots: u32,
    /// Number of virtual CPUs.
    #[serde(default = "one")]
    pub vcpus: u32,
    /// Trust domain of the VM: VMs of the same domain may share memory with each other. Unset: the
    /// VM shares with no other VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Accelerator that runs the guest's instructions.
    #[serde(default)]
    pub accel: AccelChoice,
    /// QEMU's CPU model (`-cpu`). Unset: all features of the host (`host`, under TCG `max`). A
    /// snapshot can then be restored only on a host with all these features. For several hosts,
    /// choose a named model that all of them support, such as `Skylake-Server-v5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Whether the VM has a balloon device with free page reporting, by which the guest returns
    /// freed memory to the host.
    #[serde(default = "yes")]
    pub balloon: bool,
    /// Kind of the guest's network.
    #[serde(default)]
    pub network: Network,
    /// Whether memfold's library is preloaded into QEMU, so that the VM's RAM can be folded.
    #[serde(default = "yes")]
    pub fold: bool,
    /// Whether KSM may merge the VM's memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub merge: MergeChoice,
    /// User that QEMU switches to after it has opened all files (`-run-with user=`). Unset: the
    /// daemon's user, root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether a snapshot `NAME-boot` is taken as soon as the guest has booted, for
    /// `vm reboot --from-boot-snapshot`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub boot_snapshot: bool,
    /// Size of a swap disk, which is created and removed with the VM and can be switched to lent
    /// RAM. Unset: the VM has no swap disk.
    #[serde(default, with = "size_text", skip_serializing_if = "Option::is_none")]
    pub swap: Option<ByteSize>,
    /// Host ports that are forwarded into the guest through its user-mode network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<Forward>,
    /// Host resources of the saved VM that a VM restored from a snapshot lacks, as text. Set by
    /// snapshots only, never in a user's description.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Whether a VM that QEMU stopped because of a full disk resumes by itself as soon as the
    /// disk's file system has 16 MiB free. Otherwise the VM waits for `vm resume`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resume_when_room: bool,
    /// Additional QEMU arguments, passed unchanged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub qemu_args: Vec<String>,
    /// Directory to which relative paths in `qemu_args` refer; `/` if it is unset or does not
    /// exist. `vm run` sets its own working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_directory: Option<PathBuf>,
    /// Files that tokens in `qemu_args` stand for; each VM gets its own copy. Set by snapshots
    /// only, never in a user's description.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
    /// Number of slots for segments: those in `segments`, and those attached while the VM runs.
    /// Unset: as many as `segments` has.
    #[serde(default, skip_serializing_if = "is_default")]
    pub segment_slots: u32,
    /// Segments that the VM maps, in the order of their slots.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<SegmentSpec>,
    /// Kernel or firmware that the VM boots.
    #[serde(default)]
    pub boot: BootSpec,
    /// Disks of the VM, in the order in which the guest sees them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskSpec>,
    /// The part of the command line that creates the devices, for a snapshot of a VM that memfold
    /// did not start. Set by snapshots only, never in a user's description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign: Option<Foreign>,
}

const fn one() -> u32 {
    1
}
const fn four() -> u32 {
    4
}
const fn yes() -> bool {
    true
}
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl VmSpec {
    /// Returns a VM with default settings and no disk.
    #[must_use]
    pub fn new(name: impl Into<String>, memory: ByteSize) -> Self {
        Self {
            name: name.into(),
            memory,
            memory_slots: four(),
            vcpus: one(),
            balloon: true,
            fold: true,
            ..Self::default()
        }
    }

    /// Returns the name of the block node that a disk's device uses as long as no overlay was put
    /// over the node.
    #[must_use]
    pub fn disk_node(&self, disk: usize) -> String {
        match self.foreign.as_ref().and_then(|f| f.disks.get(disk)) {
            Some(foreign) => foreign.node.clone(),
            None => format!("disk{disk}"),
        }
    }

    /// Returns whether `place`, a path in QEMU's object tree (`query-block`: `qdev`), is the path
    /// of disk `disk`.
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

    /// Returns the number of slots for segments.
    #[must_use]
    pub fn slots(&self) -> u32 {
        let used = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        self.segment_slots.max(used)
    }

    /// Returns whether the VM's memory is offered to KSM. The memory of a VM without a trust domain
    /// is not.
    #[must_use]
    pub fn merges(&self) -> bool {
        self.merge == MergeChoice::Domain && self.domain.is_some()
    }

    /// Reads a description in TOML. Relative paths in it are relative to the file's directory. The
    /// result is not validated yet.
    pub fn from_toml_file(path: &Path) -> Result<Self, SpecError> {
        let text = std::fs::read_to_string(path).map_err(|source| SpecError::Read {
            path: path.into(),
            source,
        })?;
        let mut spec: Self = toml::from_str(&text).map_err(|source| SpecError::Parse {
            path: path.into(),
            source: Box::new(source),
        })?;
        if spec.foreign.is_some() || !spec.files.is_empty() {
            let field = if spec.files.is_empty() {
                "foreign"
            } else {
                "files"
            };
            let why = "belongs to snapshots only; give your own QEMU arguments as qemu_args";
            return Err(value(field, why));
        }
        let base = path.parent().unwrap_or(Path::new(""));
        for (_, file) in spec.files_mut() {
            *file = base.join(&file);
        }
        Ok(spec)
    }

    pub(super) fn files_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut PathBuf)> {
        let boot = &mut self.boot;
        let boot = [
            ("boot.kernel", boot.kernel.as_mut()),
            ("boot.initrd", boot.initrd.as_mut()),
            ("boot.firmware", boot.firmware.as_mut()),
        ];
        boot.into_iter()
            .filter_map(|(field, path)| Some((field, path?)))
            .chain(self.disks.iter_mut().map(|d| ("disks.path", &mut d.path)))
    }
}

/// Serializes a size, which may be unset, as text such as `"512M"`. Also accepts a number of bytes.
mod size_text {
    use super::ByteSize;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Size {
        Bytes(u64),
        Text(String),
    }

    pub fn serialize<S: Serializer, T>(size: &T, to: S) -> Result<S::Ok, S::Error>
    where
        T: Copy + Into<Option<ByteSize>>,
    {
        match (*size).into() {
            None => to.serialize_none(),
            Some(ByteSize(n)) if n % (1 << 20) == 0 => to.serialize_str(&format!("{}M", n >> 20)),
            Some(ByteSize(n)) => to.serialize_u64(n),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>, T>(from: D) -> Result<T, D::Error>
    where
        T: Default + From<ByteSize>,
    {
        match Option::deserialize(from)? {
            None => Ok(T::default()),
            Some(Size::Bytes(n)) => Ok(ByteSize(n).into()),
            Some(Size::Text(text)) => text.parse().map(ByteSize::into).map_err(D::Error::custom),
        }
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
