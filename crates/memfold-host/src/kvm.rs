//! Tests whether KVM works by booting a probe guest. Opening `/dev/kvm` is not enough: a nested
//! host may have the device but be unable to run an ordinary kernel.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memfold_sys::descriptor::wait_readable;
use serde::{Deserialize, Serialize};

use super::files::GuestImage;
use super::qemu::QemuFacts;

/// Time limit for the first output of the probe guest's kernel. On hardware, this output appears
/// within a second.
const PATIENCE: Duration = Duration::from_secs(8);

/// Beginning of the first output of a Linux kernel.
const FIRST_WORDS: &[u8] = b"Linux version";

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
        /// What is missing for a probe guest: QEMU, or a guest image.
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

#[derive(Serialize, Deserialize)]
struct Cached {
    key: String,
    verdict: KvmVerdict,
}

/// Tests whether KVM works by booting the guest image. If the test was done before with the same
/// host kernel, QEMU and guest kernel, the cached result is returned. The cache files `kvm.json`
/// are in the directory `state` and beside the image, where other daemons of this host find them.
pub fn probe(qemu: &QemuFacts, image: Option<&GuestImage>, state: &Path) -> KvmVerdict {
    if let Err(e) = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        return unusable(format!("/dev/kvm: {e}"));
    }
    if !qemu.accelerators.iter().any(|a| a == "kvm") {
        return unusable(format!("{} was built without KVM", qemu.program.display()));
    }
    let Some(image) = image else {
        return KvmVerdict::Untried {
            why: "no guest image to boot".into(),
        };
    };
    let (kernel, guest) = (rustix::system::uname(), &image.kernel_version);
    let kernel = kernel.release().to_string_lossy();
    let key = format!("{kernel} {:?} {guest}", qemu.version);
    let places = places(image, state);
    if let Some(verdict) = places.iter().find_map(|place| kept(place, &key)) {
        return verdict;
    }
    let verdict = boots(qemu, image)
        .unwrap_or_else(|e| unusable(format!("cannot start the probe guest: {e}")));
    let cached = Cached { key, verdict };
    for place in &places {
        if let Err(error) = remember(place, &cached) {
            tracing::debug!(path = %place.display(), %error, "cannot save the result of the KVM check for later starts");
        }
    }
    cached.verdict
}

fn unusable(why: String) -> KvmVerdict {
    KvmVerdict::Unusable { why }
}

/// Returns the paths of the cache files for the result.
fn places(image: &GuestImage, state: &Path) -> Vec<PathBuf> {
    let places = [Some(state), image.kernel.parent()];
    let places = places.into_iter().flatten();
    places.map(|place| place.join("kvm.json")).collect()
}

/// Returns the result in a cache file, if the file has this key.
fn kept(place: &Path, key: &str) -> Option<KvmVerdict> {
    let bytes = std::fs::read(place).ok()?;
    let cached: Cached = serde_json::from_slice(&bytes).ok()?;
    (cached.key == key).then_some(cached.verdict)
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

/// Boots the image's kernel without a disk, and waits for the kernel's first output on the serial
/// console.
fn boots(qemu: &QemuFacts, image: &GuestImage) -> io::Result<KvmVerdict> {
    let mut child = Command::new(&qemu.program)
        .args(["-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-display", "none", "-machine", &qemu.machine])
        .args(["-accel", "kvm", "-cpu", "host", "-m", "256"])
        .args(["-serial", "stdio"])
        .args(["-append", "console=ttyS0 panic=-1 earlyprintk=serial"])
        .arg("-kernel")
        .arg(&image.kernel)
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
            "/dev/kvm opens, but a Linux kernel under KVM printed nothing in {} s",
            PATIENCE.as_secs()
        )),
        Output::End => {
            let words = String::from_utf8_lossy(&output.stderr);
            let first = words.lines().next().unwrap_or("without a word").chars();
            unusable(format!(
                "/dev/kvm opens, but QEMU with a Linux kernel under KVM ended: {}",
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
        };
        for place in places(&image, one.path()) {
            remember(&place, &cached).unwrap();
        }
        let found = |state: &Path, key: &str| {
            let places = places(&image, state);
            places.iter().find_map(|place| kept(place, key))
        };
        assert_eq!(found(other.path(), &cached.key), Some(KvmVerdict::Works));
        assert_eq!(found(other.path(), "6.2 10.0 6.12"), None);
    }
}
