//! Tests whether KVM works by booting a probe guest. Opening `/dev/kvm` is not enough: a nested
//! host may have the device but be unable to run an ordinary kernel.
//!
//! The probe guest boots the kernel of a guest image, or a kernel file of the host if there is no
//! image. The result is kept in files `kvm.json`. A failure is kept for a day only, because its
//! cause may pass, for example a lack of memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use memfold_sys::descriptor::wait_readable;
use serde::{Deserialize, Serialize};

use super::files::GuestImage;
use super::qemu::QemuFacts;

/// Time limit for the first output of the probe guest's kernel. On hardware, this output appears
/// within a second.
const PATIENCE: Duration = Duration::from_secs(8);

/// Beginning of the first output of a Linux kernel.
const FIRST_WORDS: &[u8] = b"Linux version";

/// Time in seconds for which a failed test is kept.
const KEEP_FAILURE_S: u64 = 24 * 3600;

/// Beginning of the reason in [`KvmVerdict::Unusable`] if the probe guest was started and failed.
/// Only such failures are kept in `kvm.json`.
pub(crate) const BOOT_FAILED: &str = "/dev/kvm opens, but";

/// Whether KVM works on this host, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "lowercase")]
pub enum KvmVerdict {
    /// KVM works: a probe guest's kernel ran.
    Works,
    /// KVM cannot be used.
    Unusable {
        /// Step of the test that failed, with its error or QEMU's last message.
        why: String,
    },
    /// `/dev/kvm` can be opened, but no probe guest could be booted.
    Untried {
        /// What is missing for a probe guest: QEMU, or a kernel to boot.
        why: String,
    },
}

impl KvmVerdict {
    /// Returns whether KVM works, so that VMs with `accel = "auto"` use it.
    #[must_use]
    pub const fn is_usable(&self) -> bool {
        matches!(self, Self::Works)
    }
}

/// Content of a file `kvm.json`.
#[derive(Serialize, Deserialize)]
struct Cached {
    key: String,
    verdict: KvmVerdict,
    /// Time of the test in seconds since 1970; `None` in files of older versions.
    #[serde(default)]
    tried_at_unix_s: Option<u64>,
}

impl Cached {
    /// Returns whether the result still counts. A time in the future is wrong, so it does not.
    fn is_valid(&self, now_unix_s: u64) -> bool {
        let age = self
            .tried_at_unix_s
            .and_then(|at| now_unix_s.checked_sub(at));
        self.verdict.is_usable() || age.is_some_and(|age| age < KEEP_FAILURE_S)
    }
}

/// The kernel that the probe guest boots, and where the result is kept.
struct ProbeGuest {
    kernel: PathBuf,
    /// What the result depends on: host kernel, QEMU, and the probe guest's kernel.
    key: String,
    /// Paths of the cache files for the result.
    places: Vec<PathBuf>,
}

impl ProbeGuest {
    /// Chooses the kernel of the guest image. If there is no image, chooses a kernel file of the
    /// host in the root directory `root`. Returns `None` if there is no kernel file either.
    fn choose(
        qemu: &QemuFacts,
        image: Option<&GuestImage>,
        state: &Path,
        root: &Path,
    ) -> Option<Self> {
        let host = rustix::system::uname();
        let release = host.release().to_string_lossy();
        let (kernel, version) = if let Some(image) = image {
            (image.kernel.clone(), image.kernel_version.clone())
        } else {
            let kernel = host_kernel(root, &release)?;
            let version = kernel.display().to_string();
            (kernel, version)
        };
        Some(Self {
            kernel,
            key: format!("{}{version}", host_key(qemu)),
            places: places(image, state),
        })
    }

    /// Returns the kept result, or boots the probe guest and keeps its result. A result is not kept
    /// if the probe guest cannot be started. `now_unix_s`: the present time in seconds since 1970.
    fn verdict(&self, qemu: &QemuFacts, now_unix_s: u64) -> KvmVerdict {
        let mut places = self.places.iter();
        let is_same = |key: &str| key == self.key;
        if let Some(verdict) = places.find_map(|place| kept_at(place, is_same, now_unix_s)) {
            return verdict;
        }
        let verdict = match boots(qemu, &self.kernel) {
            Ok(verdict) => verdict,
            Err(e) => return unusable(format!("cannot start the probe guest: {e}")),
        };
        let cached = Cached {
            key: self.key.clone(),
            verdict,
            tried_at_unix_s: Some(now_unix_s),
        };
        for place in &self.places {
            if let Err(error) = remember(place, &cached) {
                tracing::debug!(path = %place.display(), %error, "cannot save the result of the KVM check for later starts");
            }
        }
        cached.verdict
    }
}

/// Tests whether KVM works by booting the kernel of the guest image, or without an image a kernel
/// of this host. If the test was done before with the same host kernel, QEMU and guest kernel, the
/// cached result is returned; a failure counts for a day. A process that can read no kernel uses
/// the cached result of another process, whatever the guest kernel was. The cache files `kvm.json`
/// are in the directory `state` and beside the image, where other daemons of this host find them.
pub fn probe(qemu: &QemuFacts, image: Option<&GuestImage>, state: &Path) -> KvmVerdict {
    if let Err(e) = File::options().read(true).write(true).open("/dev/kvm") {
        return unusable(format!("/dev/kvm: {e}"));
    }
    if !qemu.accelerators.iter().any(|a| a == "kvm") {
        return unusable(format!("{} was built without KVM", qemu.program.display()));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_unix_s = now.map_or(0, |now| now.as_secs());
    if let Some(guest) = ProbeGuest::choose(qemu, image, state, Path::new("/")) {
        return guest.verdict(qemu, now_unix_s);
    }
    kept_of_host(qemu, state, now_unix_s).unwrap_or_else(|| KvmVerdict::Untried {
        why: "no guest image, and no readable kernel file of this host in /boot, \
              /lib/modules or /run/current-system"
            .into(),
    })
}

/// Returns the beginning of the keys of results with this host's kernel and QEMU. The guest kernel
/// follows.
fn host_key(qemu: &QemuFacts) -> String {
    let host = rustix::system::uname();
    format!("{} {:?} ", host.release().to_string_lossy(), qemu.version)
}

/// Returns the result that another process has kept for this host's kernel and QEMU. The daemon's
/// unit hides `/lib/modules` (`ProtectKernelModules=`), where `memfold doctor` may find a kernel.
fn kept_of_host(qemu: &QemuFacts, state: &Path, now_unix_s: u64) -> Option<KvmVerdict> {
    let host = host_key(qemu);
    let is_of_host = |key: &str| key.starts_with(&host);
    kept_at(&state.join("kvm.json"), is_of_host, now_unix_s)
}

fn unusable(why: String) -> KvmVerdict {
    KvmVerdict::Unusable { why }
}

/// Returns the path of a kernel file of the host that this process can read: that of the running
/// kernel `release`, else the newest in `/boot`. NixOS has its kernel in `/run/current-system`.
fn host_kernel(root: &Path, release: &str) -> Option<PathBuf> {
    let running = [
        format!("boot/vmlinuz-{release}"),
        format!("lib/modules/{release}/vmlinuz"),
        "run/current-system/kernel".to_owned(),
    ];
    let mut running = running.iter().map(|path| root.join(path));
    running
        .find(|path| changed_at(path).is_some())
        .or_else(|| newest_kernel(&root.join("boot")))
}

/// Returns the file `vmlinuz-*` of a directory that was changed last, of those that this process
/// can read.
fn newest_kernel(boot: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(boot).ok()?.flatten();
    let kernels = entries.filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.strip_prefix("vmlinuz-")?;
        let path = entry.path();
        Some((changed_at(&path)?, path))
    });
    kernels.max().map(|(_, path)| path)
}

/// Returns when a file was changed last; `None` if this process cannot read it.
fn changed_at(path: &Path) -> Option<SystemTime> {
    let facts = File::open(path).ok()?.metadata().ok()?;
    facts.is_file().then(|| facts.modified().ok()).flatten()
}

/// Returns the paths of the cache files for the result.
fn places(image: Option<&GuestImage>, state: &Path) -> Vec<PathBuf> {
    let beside = image.and_then(|image| image.kernel.parent());
    let places = [Some(state), beside].into_iter().flatten();
    places.map(|place| place.join("kvm.json")).collect()
}

/// Returns the result in a cache file, if its key is a right one and the result still counts.
fn kept_at(place: &Path, is_right: impl Fn(&str) -> bool, now_unix_s: u64) -> Option<KvmVerdict> {
    let bytes = std::fs::read(place).ok()?;
    let cached: Cached = serde_json::from_slice(&bytes).ok()?;
    (is_right(&cached.key) && cached.is_valid(now_unix_s)).then_some(cached.verdict)
}

fn remember(place: &Path, cached: &Cached) -> io::Result<()> {
    if let Some(parent) = place.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let part = place.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&part, serde_json::to_vec(cached)?)?;
    std::fs::rename(part, place)
}

/// Output of the probe guest.
enum Output {
    /// The first output of a kernel.
    Kernel,
    /// No such output in time.
    Nothing,
    /// The end of QEMU.
    End,
}

/// Boots a kernel without a disk, and waits for the kernel's first output on the serial console.
fn boots(qemu: &QemuFacts, kernel: &Path) -> io::Result<KvmVerdict> {
    let mut child = Command::new(&qemu.program)
        .args(["-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-display", "none", "-machine", &qemu.machine])
        .args(["-accel", "kvm", "-cpu", "host", "-m", "256"])
        .args(["-serial", "stdio"])
        .args(["-append", "console=ttyS0 panic=-1 earlyprintk=serial"])
        .arg("-kernel")
        .arg(kernel)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let heard = child.stdout.take().map_or(Ok(Output::Nothing), listen);
    // The probe guest ends here in any case. Killing an ended process is no error.
    child.kill()?;
    let output = child.wait_with_output()?;
    Ok(match heard? {
        Output::Kernel => KvmVerdict::Works,
        Output::Nothing => unusable(format!(
            "{BOOT_FAILED} the kernel {} under KVM printed nothing in {} s",
            kernel.display(),
            PATIENCE.as_secs()
        )),
        Output::End => {
            let words = String::from_utf8_lossy(&output.stderr);
            let first = words.lines().next().unwrap_or("without a word").chars();
            unusable(format!(
                "{BOOT_FAILED} QEMU with the kernel {} under KVM ended: {}",
                kernel.display(),
                first.take(200).collect::<String>()
            ))
        }
    })
}

fn listen(mut console: std::process::ChildStdout) -> io::Result<Output> {
    let deadline = Instant::now() + PATIENCE;
    let mut heard = Vec::new();
    let mut chunk = [0; 4096];
    // Output without these words is not that of a Linux kernel.
    while heard.len() < 1 << 20 {
        let left = deadline.saturating_duration_since(Instant::now());
        if !wait_readable(&console, left)? {
            return Ok(Output::Nothing);
        }
        let n = console.read(&mut chunk)?;
        if n == 0 {
            return Ok(Output::End);
        }
        heard.extend_from_slice(&chunk[..n]);
        if heard.windows(FIRST_WORDS.len()).any(|w| w == FIRST_WORDS) {
            return Ok(Output::Kernel);
        }
    }
    Ok(Output::Nothing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    fn qemu_at(program: PathBuf) -> QemuFacts {
        QemuFacts {
            program,
            version: (10, 0, 2),
            machine: "pc-q35-10.0".into(),
            accelerators: vec!["kvm".into()],
        }
    }

    fn guest_of(state: &Path) -> ProbeGuest {
        ProbeGuest {
            kernel: "/boot/vmlinuz-6.12".into(),
            key: "6.1 10.0 6.12".into(),
            places: places(None, state),
        }
    }

    #[test]
    fn whether_kvm_works_is_cached_for_all_daemons_and_tested_again_on_another_kernel() {
        let (images, one, other) = (
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let image = GuestImage {
            disk: images.path().join("disk"),
            kernel: images.path().join("vmlinuz"),
            initrd: images.path().join("initrd"),
            kernel_version: "6.12".into(),
        };
        let cached = Cached {
            key: "6.1 10.0 6.12".into(),
            verdict: KvmVerdict::Works,
            tried_at_unix_s: Some(1000),
        };
        for place in places(Some(&image), one.path()) {
            remember(&place, &cached).unwrap();
        }
        let found = |state: &Path, key: &str| {
            let places = places(Some(&image), state);
            places
                .iter()
                .find_map(|place| kept_at(place, |of| of == key, 2000))
        };
        assert_eq!(found(other.path(), &cached.key), Some(KvmVerdict::Works));
        assert_eq!(found(other.path(), "6.2 10.0 6.12"), None);
    }

    #[test]
    fn a_failed_probe_of_kvm_counts_for_a_day_and_success_counts_for_ever() {
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("qemu");
        // This QEMU fails at its first start, and boots a kernel at each later one.
        let script = "#!/bin/sh\n\
            [ -e \"$0.failed\" ] && exec echo 'Linux version 6.12'\n\
            : > \"$0.failed\"\n\
            echo 'cannot allocate memory' >&2\n\
            exit 1\n";
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let (qemu, guest) = (qemu_at(program), guest_of(place.path()));
        let now = 1_700_000_000;
        let first = guest.verdict(&qemu, now);
        let KvmVerdict::Unusable { why } = &first else {
            panic!("a QEMU that failed counts as {first:?}");
        };
        assert!(why.starts_with(BOOT_FAILED), "{why}");
        assert!(why.ends_with("cannot allocate memory"), "{why}");
        assert_eq!(guest.verdict(&qemu, now + KEEP_FAILURE_S - 1), first);
        let later = now + KEEP_FAILURE_S;
        assert_eq!(guest.verdict(&qemu, later), KvmVerdict::Works);
        // A QEMU that is missing now would be noticed if it were started again.
        let missing = qemu_at(place.path().join("missing"));
        let much_later = later + 1000 * KEEP_FAILURE_S;
        assert_eq!(guest.verdict(&missing, much_later), KvmVerdict::Works);
    }

    #[test]
    fn a_process_that_can_read_no_kernel_uses_the_result_of_another_process_on_this_host() {
        let place = tempfile::tempdir().unwrap();
        let qemu = qemu_at("/usr/bin/qemu".into());
        let keep = |key: String, verdict| {
            let cached = Cached {
                key,
                verdict,
                tried_at_unix_s: Some(1000),
            };
            remember(&place.path().join("kvm.json"), &cached).unwrap();
        };
        let kernel = "/lib/modules/6.12/vmlinuz";
        let found = |now_unix_s| kept_of_host(&qemu, place.path(), now_unix_s);
        assert_eq!(found(1000), None);
        keep(format!("0.1 {:?} ", qemu.version), KvmVerdict::Works);
        assert_eq!(found(1000), None, "of another kernel of the host");
        keep(format!("{}{kernel}", host_key(&qemu)), KvmVerdict::Works);
        assert_eq!(found(1000), Some(KvmVerdict::Works));
        let failed = unusable(format!("{BOOT_FAILED} it ended"));
        keep(format!("{}{kernel}", host_key(&qemu)), failed.clone());
        assert_eq!(found(1001), Some(failed));
        assert_eq!(found(1000 + KEEP_FAILURE_S), None, "after a day");
    }

    #[test]
    fn no_result_is_kept_if_the_probe_guest_cannot_be_started() {
        let place = tempfile::tempdir().unwrap();
        let guest = guest_of(place.path());
        let verdict = guest.verdict(&qemu_at(place.path().join("missing")), 1000);
        assert!(matches!(verdict, KvmVerdict::Unusable { .. }));
        assert!(!guest.places[0].exists());
    }

    #[test]
    fn a_kept_failure_without_a_time_or_from_the_future_does_not_count() {
        let unusable = r#""verdict": {"verdict": "unusable", "why": "no reason"}"#;
        let works = r#""verdict": {"verdict": "works"}"#;
        for (rest, is_valid) in [
            (unusable.to_owned(), false),
            (format!(r#"{unusable}, "tried_at_unix_s": 999"#), true),
            (format!(r#"{unusable}, "tried_at_unix_s": 1001"#), false),
            (works.to_owned(), true),
        ] {
            let text = format!(r#"{{"key": "6.1", {rest}}}"#);
            let cached: Cached = serde_json::from_str(&text).unwrap();
            assert_eq!(cached.is_valid(1000), is_valid, "{text}");
        }
    }

    #[test]
    fn without_a_guest_image_kvm_is_tried_with_the_kernel_that_is_found_first() {
        let root = tempfile::tempdir().unwrap();
        let release = "6.12.1-test";
        let write = |name: &str, changed_s: u64| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let file = File::create(&path).unwrap();
            let changed = UNIX_EPOCH + Duration::from_secs(changed_s);
            file.set_modified(changed).unwrap();
            path
        };
        let found = || host_kernel(root.path(), release);
        assert_eq!(found(), None);
        // Neither a directory nor a dangling link is a kernel that can be read.
        fs::create_dir_all(root.path().join("boot/vmlinuz-7.0")).unwrap();
        std::os::unix::fs::symlink("gone", root.path().join("boot/vmlinuz-7.1")).unwrap();
        write("boot/initrd.img-6.12", 9000);
        assert_eq!(found(), None);
        // From the last choice to the first.
        let expected = write("boot/vmlinuz-6.9", 1000);
        assert_eq!(found(), Some(expected));
        let expected = write("boot/vmlinuz-6.10", 2000);
        assert_eq!(found(), Some(expected));
        for name in [
            "run/current-system/kernel",
            "lib/modules/6.12.1-test/vmlinuz",
            "boot/vmlinuz-6.12.1-test",
        ] {
            let expected = write(name, 10);
            assert_eq!(found(), Some(expected));
        }
        let qemu = qemu_at("/usr/bin/qemu".into());
        let state = root.path().join("state");
        let guest = ProbeGuest::choose(&qemu, None, &state, root.path()).unwrap();
        assert_eq!(guest.places, [state.join("kvm.json")]);
        let kernel = root.path().join("run/current-system/kernel");
        assert!(guest.key.ends_with(&kernel.display().to_string()));
        assert_eq!(guest.kernel, kernel);
    }
}
