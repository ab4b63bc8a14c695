//! The description of a VM, read from a TOML file, built from command-line flags, or read back from
//! the state directory.

use std::path::{Path, PathBuf};

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::foreign::Foreign;
use super::forward::Forward;
use super::segment_spec::SegmentSpec;
use super::spec_error::{SpecError, value};

/// What carries out the guest's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccelChoice {
    /// KVM where a probe guest really boots, else TCG.
    #[default]
    Auto,
    /// Hardware virtualization.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// Format of a disk image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// The disk's bytes as they are.
    Raw,
    /// QEMU's own.
    Qcow2,
}

impl DiskFormat {
    /// QEMU's name of the driver.
    #[must_use]
    pub const fn driver(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// QEMU's cache modes (`man qemu-system-x86_64`, `-drive cache=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Through the host's page cache. Lets folded pages be folded again while the VM runs.
    #[default]
    Writeback,
    /// Direct I/O.
    None,
    /// Through the page cache, every write flushed.
    Writethrough,
    /// Direct I/O, every write flushed.
    Directsync,
    /// Through the page cache, never flushed: for throw-away guests.
    Unsafe,
}

impl CacheMode {
    /// Whether the host's page cache is passed by (`O_DIRECT`).
    #[must_use]
    pub const fn direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }
    /// Whether the guest's flushes are ignored.
    #[must_use]
    pub const fn no_flush(self) -> bool {
        matches!(self, Self::Unsafe)
    }
    /// Whether the guest sees a volatile write cache.
    #[must_use]
    pub const fn write_cache(self) -> bool {
        matches!(self, Self::Writeback | Self::None | Self::Unsafe)
    }
}

/// How QEMU does a disk's I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// A pool of threads.
    #[default]
    Threads,
    /// `io_uring`.
    IoUring,
    /// Linux AIO; only with direct I/O.
    Native,
}

impl Aio {
    /// QEMU's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::IoUring => "io_uring",
            Self::Native => "native",
        }
    }
}

/// One virtio-blk disk; they appear in the guest as vda, vdb, ... in this order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// The image file or block device.
    pub path: PathBuf,
    /// Its format. Unset: qcow2 if the name ends in `.qcow2`, else raw, if what the file begins
    /// with doesn't say otherwise: then the VM is refused. Nothing is opened as what its bytes say
    /// alone: a guest could write a header into its raw disk. Checked once; what is set then stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<DiskFormat>,
    /// Cache mode.
    #[serde(default)]
    pub cache: CacheMode,
    /// I/O method.
    #[serde(default)]
    pub aio: Aio,
    /// The guest may not write.
    #[serde(default)]
    pub read_only: bool,
    /// Writes go to a temporary overlay, thrown away when the VM ends; the image stays as it is.
    #[serde(default)]
    pub snapshot: bool,
}

impl DiskSpec {
    /// A disk with default settings.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: None,
            cache: CacheMode::default(),
            aio: Aio::default(),
            read_only: false,
            snapshot: false,
        }
    }

    /// The format, by name if it isn't set.
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

/// How the VM boots. Nothing set: QEMU's own firmware, from the first disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootSpec {
    /// Linux kernel image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// Its initramfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// Its command line.
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

/// Whether KSM may merge a VM's memory with others'. Where it may, it does only while KSM runs on
/// the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MergeChoice {
    /// If the VM has a trust domain.
    #[default]
    Domain,
    /// It may not.
    Never,
}

impl MergeChoice {
    // Serde asks with a reference.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    const fn is_default(&self) -> bool {
        matches!(self, Self::Domain)
    }
}

/// A VM's description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(clippy::struct_excessive_bools)] // independent wishes
pub struct VmSpec {
    /// Unique on this host.
    pub name: String,
    /// RAM at start.
    #[serde(with = "size_text")]
    pub memory: ByteSize,
    /// RAM that hot-plugging may reach; unset means none can be added.
    #[serde(
        default,
        with = "optional_size_text",
        skip_serializing_if = "Option::is_none"
    )]
    pub memory_max: Option<ByteSize>,
    /// Hot-plug slots, with `memory_max`.
    #[serde(default = "four")]
    pub memory_slots: u32,
    /// Virtual CPUs.
    #[serde(default = "one")]
    pub vcpus: u32,
    /// Trust domain: the VMs that may share with each other. Unset: it shares with nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// What carries it out.
    #[serde(default)]
    pub accel: AccelChoice,
    /// QEMU's CPU model (`-cpu`). Unset: all that the host has (`host`, under TCG `max`), so that a
    /// snapshot needs a host with as much; a fleet's hosts have a named model in common, such as
    /// `Skylake-Server-v5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Balloon with free page reporting: the guest gives freed memory back.
    #[serde(default = "yes")]
    pub balloon: bool,
    /// Network.
    #[serde(default)]
    pub network: Network,
    /// Preload memfold's library into QEMU, so that the VM's RAM can be folded.
    #[serde(default = "yes")]
    pub fold: bool,
    /// Whether KSM may merge its memory.
    #[serde(default, skip_serializing_if = "MergeChoice::is_default")]
    pub merge: MergeChoice,
    /// User that QEMU runs as once it has opened everything (`-run-with user=`). Unset: the
    /// daemon's, root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Take a snapshot `NAME-boot` as soon as the guest is up, for
    /// `vm reboot --from-boot-snapshot`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub boot_snapshot: bool,
    /// Size of a swap disk, made with the VM and removed with it, which can be switched to lent
    /// RAM. Unset: it has none.
    #[serde(
        default,
        with = "optional_size_text",
        skip_serializing_if = "Option::is_none"
    )]
    pub swap: Option<ByteSize>,
    /// Ports of the host that lead into the guest, through its network in user mode.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<Forward>,
    /// What a VM of a snapshot lacks of the host that the saved one had. A snapshot's matter: no
    /// description of a person's has it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Let it go on by itself that stood still for a full disk, as soon as the disk's file system
    /// has 16 MiB free. Unset: somebody has to (`vm resume`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resume_when_room: bool,
    /// More QEMU arguments, as they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub qemu_args: Vec<String>,
    /// Directory where QEMU looks for relative paths of `qemu_args`; `/` if it is unset or not
    /// there. `vm run` says where it was typed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_directory: Option<PathBuf>,
    /// Files that tokens in `qemu_args` stand for, each VM with its own copy. A snapshot's matter:
    /// no description of a person's has it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
    /// Slots for segments: those below, and more that can be attached while it runs. Unset: as many
    /// as are below.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub segment_slots: u32,
    /// Segments that it maps, in the order of their slots.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<SegmentSpec>,
    /// Kernel or firmware.
    #[serde(default)]
    pub boot: BootSpec,
    /// Disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskSpec>,
    /// What makes its devices, if it comes from a VM that memfold didn't start. A snapshot's
    /// matter: no description of a person's has it.
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
#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
const fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl VmSpec {
    /// A VM with default settings and no disk.
    #[must_use]
    pub fn new(name: impl Into<String>, memory: ByteSize) -> Self {
        Self {
            name: name.into(),
            memory,
            memory_max: None,
            memory_slots: four(),
            vcpus: one(),
            domain: None,
            accel: AccelChoice::default(),
            cpu: None,
            balloon: true,
            network: Network::default(),
            fold: true,
            merge: MergeChoice::Domain,
            user: None,
            boot_snapshot: false,
            swap: None,
            forwards: Vec::new(),
            left_out: Vec::new(),
            resume_when_room: false,
            qemu_args: Vec::new(),
            qemu_directory: None,
            files: Vec::new(),
            segment_slots: 0,
            segments: Vec::new(),
            boot: BootSpec::default(),
            disks: Vec::new(),
            foreign: None,
        }
    }

    /// The node that a disk's device uses as long as no overlay was put over it.
    #[must_use]
    pub fn disk_node(&self, disk: usize) -> String {
        match self.foreign.as_ref().and_then(|f| f.disks.get(disk)) {
            Some(foreign) => foreign.node.clone(),
            None => format!("disk{disk}"),
        }
    }

    /// Whether a place in QEMU's tree of devices (`query-block`: `qdev`) is that of a disk.
    #[must_use]
    pub fn is_disk(&self, disk: usize, place: &str) -> bool {
        match &self.foreign {
            Some(foreign) => foreign.disks.get(disk).is_some_and(|d| d.device == place),
            None => place == format!("vd{disk}") || place.contains(&format!("/vd{disk}/")),
        }
    }

    /// Network cards.
    #[must_use]
    pub fn cards(&self) -> usize {
        let own = usize::from(self.network != Network::None);
        self.foreign.as_ref().map_or(own, |foreign| foreign.cards)
    }

    /// Slots for segments.
    #[must_use]
    pub fn slots(&self) -> u32 {
        let used = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        self.segment_slots.max(used)
    }

    /// Whether its memory is offered to KSM: one without a trust domain shares with nobody.
    #[must_use]
    pub fn merges(&self) -> bool {
        self.merge == MergeChoice::Domain && self.domain.is_some()
    }

    /// Reads a TOML description. Relative paths in it are taken from its own directory. Not
    /// validated yet.
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
            return Err(value(
                if spec.files.is_empty() {
                    "foreign"
                } else {
                    "files"
                },
                "belongs to snapshots only; give your own QEMU arguments as qemu_args".into(),
            ));
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

/// Sizes as people write them (`"512M"`), or plain bytes.
mod size_text {
    use super::ByteSize;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Size {
        Bytes(u64),
        Text(String),
    }

    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    pub fn serialize<S: Serializer>(size: &ByteSize, to: S) -> Result<S::Ok, S::Error> {
        match size.0 {
            n if n % (1 << 20) == 0 => to.serialize_str(&format!("{}M", n >> 20)),
            n => to.serialize_u64(n),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ByteSize, D::Error> {
        match Size::deserialize(from)? {
            Size::Bytes(n) => Ok(ByteSize(n)),
            Size::Text(text) => text.parse().map_err(D::Error::custom),
        }
    }
}

mod optional_size_text {
    use super::{ByteSize, size_text};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Size(#[serde(with = "size_text")] ByteSize);

    #[allow(clippy::ref_option)] // serde's signature
    pub fn serialize<S: Serializer>(size: &Option<ByteSize>, to: S) -> Result<S::Ok, S::Error> {
        size.map(Size).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ByteSize>, D::Error> {
        Ok(Option::<Size>::deserialize(from)?.map(|s| s.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<VmSpec, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn a_description_survives_toml_and_json() {
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
    fn unknown_fields_and_bad_sizes_are_refused() {
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
