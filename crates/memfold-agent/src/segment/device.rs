//! Images of segments in the guest: virtio-pmem devices that contain an EROFS file system with a
//! manifest. This module finds, checks, mounts and unmounts them.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags, StatxAttributes};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use super::error::{During, Error, Result};
use super::manifest::{self, MAX_BYTES, Manifest};
use super::mount_table::MountTable;
use super::state::Places;
use super::tree;

/// `EROFS_SUPER_MAGIC_V1` at `EROFS_SUPER_OFFSET` (`fs/erofs/erofs_fs.h`), little-endian.
const MAGIC: u32 = 0xe0f5_e1e2;
const MAGIC_AT: u64 = 1024;
/// `VIRTIO_ID_PMEM` (`include/uapi/linux/virtio_ids.h`) as sysfs writes it.
const VIRTIO_PMEM: &str = "0x001b";
/// Longest wait for the device file of a device that was plugged in.
const PATIENCE: Duration = Duration::from_secs(2);
/// Number of regular files that are checked for DAX.
const DAX_SAMPLES: u32 = 64;

/// A segment's image that is mounted, but attached to no directory yet.
pub struct Image {
    /// Root directory of the image's file system. Closing this descriptor ends the mount, unless
    /// the mount was attached.
    pub root: OwnedFd,
    /// Reason why the kernel did not mount the image with DAX; `None` if the kernel named none.
    pub no_dax: Option<String>,
}

/// A segment that is mounted at its path in `/run/memfold/segments`.
#[derive(Debug)]
pub struct Segment {
    /// Manifest of the segment's image.
    pub manifest: Manifest,
    /// Path of the directory on which the segment's image is mounted.
    pub mounted: PathBuf,
    /// Path of the segment's device, as in the mount table.
    pub device: PathBuf,
    /// Whether the segment's files are mapped with DAX; `None` if the image has no file to check.
    pub dax: Option<bool>,
    /// Reason why the segment's files are not mapped with DAX, from the kernel's messages.
    pub dax_reason: Option<String>,
    /// Whether this run of the agent has mounted the segment; false if the segment was mounted
    /// before.
    pub is_new: bool,
}

/// Returns the number of the machine's virtio-pmem devices.
fn pmem_devices() -> usize {
    let Ok(entries) = fs::read_dir("/sys/bus/virtio/devices") else {
        return 0;
    };
    entries
        .flatten()
        .filter(|e| {
            fs::read_to_string(e.path().join("device")).is_ok_and(|t| t.trim() == VIRTIO_PMEM)
        })
        .count()
}

/// Runs a command without input and output. A failure of the command is ignored.
pub fn run_quietly(command: &mut Command) {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null());
    let _ = command.stderr(Stdio::null()).status();
}

/// Loads the kernel modules for segments if the machine has a virtio-pmem device, and waits up to 2
/// s for the device file. Errors are ignored, because the drivers may be built in; if a driver is
/// missing, the use of the device fails.
pub fn load_modules(places: &Places) {
    if pmem_devices() == 0 {
        return;
    }
    // Modules are loaded one by one: without -a, modprobe takes further words for options, and with
    // -a it may stop at an unknown module.
    for module in ["virtio_pmem", "nd_pmem", "erofs", "overlay"] {
        let mut modprobe = Command::new("modprobe");
        modprobe.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        run_quietly(modprobe.args(["-q", module]));
    }
    let start = Instant::now();
    while devices(places).len() < pmem_devices() && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the paths of all device files `/dev/pmemN`, sorted by N.
pub fn devices(places: &Places) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(&places.dev) else {
        return Vec::new();
    };
    let number = |path: &PathBuf| {
        let name = path.file_name()?.to_str()?;
        let digits = name.strip_prefix("pmem")?;
        digits
            .bytes()
            .all(|b| b.is_ascii_digit())
            .then(|| digits.parse::<u32>().ok())?
    };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|e| e.path())
        .filter(|p| number(p).is_some())
        .collect();
    found.sort_by_key(number);
    found
}

/// Makes a device with a segment's image read-only for the whole guest. The host maps the image
/// read-only, so a guest's writes would be lost silently. If this fails, the file system is still
/// mounted read-only. Returns false if the device holds no image.
pub fn protect(device: &Path) -> io::Result<bool> {
    let mut magic = [0; 4];
    let file = File::open(device)?;
    file.read_exact_at(&mut magic, MAGIC_AT)?;
    let is_image = u32::from_le_bytes(magic) == MAGIC;
    if is_image {
        let _ = memfold_sys::guest::set_read_only(&file);
    }
    Ok(is_image)
}

/// Mounts the image on a device without attaching it to a directory, and reads the image's
/// manifest.
pub fn open(device: &Path) -> Result<(Image, Manifest)> {
    if !protect(device).during(|| format!("reading {}", device.display()))? {
        return Err(Error::refused(
            format!("{} contains no EROFS file system", device.display()),
            "segments are made by memfold segment build",
        ));
    }
    let image = match mount_image(device, true) {
        Ok(image) => image,
        Err(reason) => Image {
            no_dax: Some(reason.to_string()),
            ..mount_image(device, false).during(|| format!("mounting {}", device.display()))?
        },
    };
    let manifest = read_manifest(&image.root)?;
    Ok((image, manifest))
}

/// Mounts an image without attaching the mount to a directory. So the manifest can be read before
/// the mount point is chosen, and an unwanted mount disappears when it is closed. The mount is not
/// `nosuid`, because the segment's files replace the guest's own, setuid programs included.
fn mount_image(device: &Path, dax: bool) -> io::Result<Image> {
    let context = fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let done = (|| {
        fsconfig_set_string(&context, "source", device)?;
        fsconfig_set_flag(&context, "ro")?;
        if dax {
            fsconfig_set_string(&context, "dax", "always")?;
        }
        fsconfig_create(&context)?;
        fsmount(
            &context,
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::MOUNT_ATTR_RDONLY,
        )
    })();
    let said = said_by_kernel(&context);
    match done {
        Ok(root) => Ok(Image {
            root,
            no_dax: said.filter(|_| dax),
        }),
        Err(e) => {
            let e = io::Error::from(e);
            Err(match said {
                Some(said) => io::Error::new(e.kind(), format!("{e} ({said})")),
                None => e,
            })
        }
    }
}

/// Reads the kernel's messages from a file system context. Each read returns one message, "e text"
/// or "w text".
fn said_by_kernel(context: &OwnedFd) -> Option<String> {
    let mut said: Vec<String> = Vec::new();
    let mut buffer = [0_u8; 512];
    while let Ok(n @ 1..) = rustix::io::read(context, &mut buffer[..]) {
        let text = String::from_utf8_lossy(&buffer[..n]);
        said.push(text.trim().chars().skip(2).collect());
        if said.len() == 8 {
            break;
        }
    }
    (!said.is_empty()).then(|| said.join("; "))
}

fn read_manifest(root: &OwnedFd) -> Result<Manifest> {
    let what = || "reading /.memfold-segment of the image".to_string();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    let file = match tree::open_below(root, manifest::FILE.as_bytes(), flags) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(Error::refused(
                "the image has no /.memfold-segment",
                "segments are made by memfold segment build",
            ));
        }
        other => other.during(what)?,
    };
    let stat = tree::stat_of(&file).during(what)?;
    let mut text = Vec::new();
    if tree::kind(&stat) == FileType::RegularFile {
        let most = u64::try_from(MAX_BYTES).unwrap_or(u64::MAX) + 1;
        File::from(file)
            .take(most)
            .read_to_end(&mut text)
            .during(what)?;
    }
    Manifest::parse(&text)
}

impl Segment {
    /// Returns the segment `name@generation`. Mounts the segment's image if it is not mounted.
    pub fn mount(places: &Places, name: &str, generation: u64) -> Result<Self> {
        let mounted = places.mounted(name, generation);
        if let Some(mount) = MountTable::read()?.at(&mounted) {
            let device = PathBuf::from(OsStr::from_bytes(&mount.source));
            let root = tree::open(&mounted).during(|| format!("opening {}", mounted.display()))?;
            let manifest = read_manifest(&root)?;
            if (manifest.name.as_str(), manifest.generation) != (name, generation) {
                return Err(Error::refused(
                    format!(
                        "{} holds {}@{}",
                        mounted.display(),
                        manifest.name,
                        manifest.generation
                    ),
                    "unmount it",
                ));
            }
            return Ok(Self::new(&root, manifest, mounted, device, None));
        }
        let mut problems = Vec::new();
        for device in devices(places) {
            match open(&device) {
                Ok((image, manifest))
                    if manifest.name == name && manifest.generation == generation =>
                {
                    return Self::attach(places, image, manifest, mounted, &device);
                }
                Ok((_, other)) => problems.push(format!(
                    "{} is {}@{}",
                    device.display(),
                    other.name,
                    other.generation
                )),
                Err(e) => problems.push(format!("{}: {e}", device.display())),
            }
        }
        let found = if problems.is_empty() {
            "no /dev/pmem device exists".into()
        } else {
            problems.join("; ")
        };
        Err(Error::refused(
            format!("no device holds the segment {name}@{generation}: {found}"),
            "attach it on the host: memfold segment attach",
        ))
    }

    fn attach(
        places: &Places,
        image: Image,
        manifest: Manifest,
        mounted: PathBuf,
        device: &Path,
    ) -> Result<Self> {
        let what = || format!("mounting {} on {}", device.display(), mounted.display());
        places.steps.step().during(what)?;
        match fs::create_dir(&mounted) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e).during(what),
            _ => {}
        }
        move_mount(
            &image.root,
            c"",
            rustix::fs::CWD,
            &mounted,
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
        )
        .during(what)?;
        let (root, device) = (&image.root, device.to_path_buf());
        let segment = Self::new(root, manifest, mounted, device, image.no_dax);
        Ok(Self {
            is_new: true,
            ..segment
        })
    }

    fn new(
        root: &OwnedFd,
        manifest: Manifest,
        mounted: PathBuf,
        device: PathBuf,
        no_dax: Option<String>,
    ) -> Self {
        let dax = dax(root);
        Self {
            manifest,
            mounted,
            device,
            dax,
            dax_reason: no_dax.filter(|_| dax != Some(true)),
            is_new: false,
        }
    }

    /// Unmounts the segment's image. Returns true if programs still use the image.
    pub fn unmount(&self) -> Result<bool> {
        unmount_at(&self.mounted)
    }
}

/// Unmounts the image at the path `mounted`, and removes the directory. Returns true if running
/// programs or an overlay still use the image; the mount is then only detached, and the device must
/// stay.
pub fn unmount_at(mounted: &Path) -> Result<bool> {
    let what = || format!("unmounting {}", mounted.display());
    let table = MountTable::read()?;
    let device = table
        .at(mounted)
        .map(|m| PathBuf::from(OsStr::from_bytes(&m.source)));
    let busy = match unmount(mounted, UnmountFlags::NOFOLLOW) {
        Ok(()) => false,
        Err(rustix::io::Errno::BUSY) => {
            unmount(mounted, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).during(what)?;
            true
        }
        Err(e) => return Err(e).during(what),
    };
    fs::remove_dir(mounted).during(what)?;
    Ok(busy || device.is_some_and(|d| is_claimed(&d)))
}

/// Returns whether a mounted file system uses the device. The kernel then refuses an exclusive open
/// (`open(2)`, `O_EXCL` without `O_CREAT`).
fn is_claimed(device: &Path) -> bool {
    let flags = i32::try_from((OFlags::EXCL | OFlags::NONBLOCK).bits()).unwrap_or(0);
    let opened = fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(device);
    device.as_os_str().as_bytes().starts_with(b"/dev/pmem")
        && opened.is_err_and(|e| e.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()))
}

/// Returns whether files are mapped with DAX, by checking some non-empty regular files. One file
/// with DAX is enough, because a file with an inlined tail never has DAX.
fn dax(root: &OwnedFd) -> Option<bool> {
    let mut looked = 0;
    let mut pending = vec![Vec::new()];
    while let Some(path) = pending.pop() {
        let Ok(directory) = tree::directory_below(root, &path) else {
            continue;
        };
        for name in tree::names(&directory).unwrap_or_default() {
            let Ok(stat) = tree::stat(&directory, &name) else {
                continue;
            };
            match tree::kind(&stat) {
                FileType::Directory => pending.push(super::compare::join(&path, &name)),
                FileType::RegularFile if stat.stx_size > 0 => {
                    if stat.stx_attributes.contains(StatxAttributes::DAX) {
                        return Some(true);
                    }
                    looked += 1;
                }
                _ => {}
            }
            if looked >= DAX_SAMPLES {
                return Some(false);
            }
        }
    }
    (looked > 0).then_some(false)
}
