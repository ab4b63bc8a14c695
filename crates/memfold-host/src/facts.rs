//! Finds out what this host can do, such as KVM, userfaultfd or KSM. Each feature is tried out,
//! because version numbers of kernel and QEMU do not tell for certain.

use std::fs;
use std::path::{Path, PathBuf};

use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_sys::userfaultfd::Userfaultfd;
use memfold_units::{ByteSize, Hva, PAGE_SIZE};
use rustix::system::uname;
use serde::Serialize;

use super::files;
use super::fold_budget::cores;
use super::kvm::{self, KvmVerdict};
use super::qemu::{QemuError, QemuFacts};
use super::{chain, qemu_users};

/// The kernel's support for userfaultfd (`userfaultfd(2)`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Userfault {
    /// Whether a userfaultfd that handles kernel-mode faults can be opened.
    pub available: bool,
    /// Whether the kernel supports `UFFDIO_MOVE`.
    pub can_move: bool,
    /// Whether the kernel supports `UFFDIO_WRITEPROTECT`.
    pub can_write_protect: bool,
    /// Why no userfaultfd can be opened, as text; `None` if it can.
    pub error: Option<String>,
}

/// Settings of KSM, the kernel's same-page merging (`/sys/kernel/mm/ksm`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ksm {
    /// Value of KSM's control `run`: 0 off, 1 on, 2 off and all pages unmerged.
    pub run: u32,
    /// Value of KSM's control `pages_to_scan`: pages that ksmd scans before it sleeps.
    pub pages_to_scan: u64,
    /// Value of KSM's control `sleep_millisecs`: time that ksmd sleeps between two scans.
    pub sleep_millisecs: u64,
    /// Value of KSM's control `advisor_mode`; `None` before Linux 6.8.
    pub advisor_mode: Option<String>,
}

/// The QEMU program that memfold uses, and its features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Qemu {
    /// Version and capabilities of the QEMU program; `None`: no working program was found.
    pub facts: Option<QemuFacts>,
    /// Whether QEMU's balloon supports free page reporting.
    pub free_page_reporting: bool,
    /// Whether QEMU has the seccomp sandbox.
    pub sandbox: bool,
    /// Why no working QEMU program was found, as text; `None` if one was found.
    pub error: Option<String>,
}

/// A helper program that memfold calls, such as `qemu-img`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tool {
    /// Name of the helper program.
    pub name: &'static str,
    /// Feature of memfold that needs the helper program.
    pub used_for: &'static str,
    /// Debian package that contains the helper program.
    pub package: &'static str,
    /// Path of the helper program; `None`: the program is missing.
    pub path: Option<PathBuf>,
}

/// All facts about the host that `memfold doctor` checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostFacts {
    /// Kernel release, as in `uname -r`.
    pub kernel: String,
    /// Whether this process runs as root (effective user).
    pub root: bool,
    /// Effective capabilities of this process (`CapEff` of `proc_pid_status(5)`).
    pub capabilities: u64,
    /// The kernel's support for userfaultfd.
    pub userfault: Userfault,
    /// Kernel setting `vm.unprivileged_userfaultfd`; `None` if it cannot be read.
    pub unprivileged_userfaultfd: Option<u64>,
    /// Why the ioctl `PAGEMAP_SCAN` fails, as text; `None` if it works.
    pub pagemap_scan_error: Option<String>,
    /// Settings of KSM; `None`: the kernel has no KSM.
    pub ksm: Option<Ksm>,
    /// Kernel setting `vm.max_map_count`: largest number of mappings of a process.
    pub max_map_count: Option<u64>,
    /// Selected mode of transparent huge pages: the word in brackets in
    /// `/sys/kernel/mm/transparent_hugepage/enabled`.
    pub transparent_hugepage: Option<String>,
    /// Number of cores that this process may use.
    pub cores: usize,
    /// Available memory of the host in bytes (`MemAvailable` of `/proc/meminfo`).
    pub available_bytes: u64,
    /// The QEMU program and its features.
    pub qemu: Qemu,
    /// Whether KVM works, or why it does not.
    pub kvm: KvmVerdict,
    /// Path of memfold's library for QEMU, or the reason why it is missing.
    pub library: Result<PathBuf, String>,
    /// Range of user numbers for QEMU as text, or why the daemon can give QEMU none of them.
    pub qemu_users: Result<String, String>,
    /// Names of the available guest images, or why there are none.
    pub guest_images: Result<Vec<String>, String>,
    /// Helper programs that memfold calls, found or missing.
    pub tools: Vec<Tool>,
}

impl HostFacts {
    /// Collects all facts about the host. This takes about a second, and up to ten when KVM is
    /// tried for the first time. The result for KVM is cached in the directory `state`.
    #[must_use]
    pub fn probe(state: &Path) -> Self {
        let qemu = qemu();
        let images = files::guest_images();
        let first = images.as_ref().ok().and_then(|i| i.values().next());
        let kvm = match &qemu.facts {
            Some(facts) => kvm::probe(facts, first, state),
            None => KvmVerdict::Untried {
                why: "QEMU is not installed".into(),
            },
        };
        Self {
            kernel: uname().release().to_string_lossy().into_owned(),
            root: rustix::process::geteuid().is_root(),
            capabilities: field("/proc/self/status", "CapEff")
                .and_then(|v| u64::from_str_radix(&v, 16).ok())
                .unwrap_or(0),
            userfault: userfault(),
            unprivileged_userfaultfd: number("/proc/sys/vm/unprivileged_userfaultfd"),
            pagemap_scan_error: pagemap_scan().err().map(|e| e.to_string()),
            ksm: ksm(Path::new("/sys/kernel/mm/ksm")),
            max_map_count: number("/proc/sys/vm/max_map_count"),
            transparent_hugepage: chosen(Path::new("/sys/kernel/mm/transparent_hugepage/enabled")),
            cores: cores(),
            available_bytes: available().0,
            qemu,
            kvm,
            library: files::library().map_err(|e| e.to_string()),
            qemu_users: qemu_users::range()
                .map(|range| format!("{}-{}", range.start(), range.end()))
                .map_err(|error| chain(&error)),
            guest_images: images
                .map(|i| i.into_keys().collect())
                .map_err(|e| e.to_string()),
            tools: tools(),
        }
    }
}

fn userfault() -> Userfault {
    let opened = Userfaultfd::open(None);
    let has = |feature: fn(&Userfaultfd) -> bool| opened.as_ref().is_ok_and(feature);
    Userfault {
        available: opened.is_ok(),
        can_move: has(Userfaultfd::can_move),
        can_write_protect: has(Userfaultfd::can_write_protect),
        error: opened.as_ref().err().map(ToString::to_string),
    }
}

/// Scans a page of this process that is certainly in memory, to test `PAGEMAP_SCAN`.
fn pagemap_scan() -> std::io::Result<()> {
    let here = vec![1u8; 3 * memfold_units::PAGE_BYTES];
    let inside = here.as_ptr().expose_provenance() as u64 + PAGE_SIZE;
    let page = Hva(inside - inside % PAGE_SIZE);
    let filter = Filter {
        all_of: category::PRESENT,
        ..Filter::default()
    };
    let map = Pagemap::open(rustix::process::getpid())?;
    let found = map.scan(page, page.add_pages(1), filter)?;
    // This keeps the buffer in memory until after the scan.
    if std::hint::black_box(&here).is_empty() || found.is_empty() {
        return Err(std::io::Error::other(
            "PAGEMAP_SCAN missed a page that is in memory",
        ));
    }
    Ok(())
}

fn ksm(root: &Path) -> Option<Ksm> {
    let read = |file: &str| number(root.join(file));
    Some(Ksm {
        run: u32::try_from(read("run")?).ok()?,
        pages_to_scan: read("pages_to_scan")?,
        sleep_millisecs: read("sleep_millisecs")?,
        advisor_mode: chosen(&root.join("advisor_mode")),
    })
}

/// Returns the selected word of a kernel setting: `madvise` in `always [madvise] never`.
fn chosen(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

fn number(path: impl AsRef<Path>) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the value of a line `NAME: VALUE` of a file in `/proc`.
fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

fn available() -> ByteSize {
    let value = field("/proc/meminfo", "MemAvailable");
    let kib = value.and_then(|value| value.strip_suffix(" kB")?.parse().ok());
    ByteSize::kib(kib.unwrap_or(0))
}

fn qemu() -> Qemu {
    let facts = QemuFacts::probe();
    let has = |feature: fn(&QemuFacts) -> Result<bool, QemuError>| {
        let facts = facts.as_ref().ok();
        facts.is_some_and(|facts| feature(facts).unwrap_or(false))
    };
    Qemu {
        free_page_reporting: has(QemuFacts::has_free_page_reporting),
        sandbox: has(QemuFacts::has_sandbox),
        error: facts.as_ref().err().map(|error| super::chain(error)),
        facts: facts.ok(),
    }
}

fn tools() -> Vec<Tool> {
    const TOOLS: [(&str, &str, &str); 5] = [
        ("qemu-img", "disks with snapshot = true", "qemu-utils"),
        ("nbdkit", "lending memory", "nbdkit"),
        ("mmdebstrap", "building guest images", "mmdebstrap"),
        ("mkfs.ext4", "building guest images", "e2fsprogs"),
        ("cpio", "building guest images", "cpio"),
    ];
    TOOLS
        .into_iter()
        .map(|(name, used_for, package)| Tool {
            name,
            used_for,
            package,
            path: files::program(name),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_selected_value_of_a_sysfs_file_is_the_word_in_brackets() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (text, word) in [
            ("always [madvise] never\n", Some("madvise")),
            ("none", None),
        ] {
            fs::write(&file, text).unwrap();
            assert_eq!(chosen(file.path()).as_deref(), word);
        }
    }

    #[test]
    fn ksm_settings_are_read_although_an_older_kernel_lacks_some_files() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(ksm(root.path()), None);
        for (file, text) in [
            ("run", "1\n"),
            ("pages_to_scan", "100\n"),
            ("sleep_millisecs", "20\n"),
        ] {
            fs::write(root.path().join(file), text).unwrap();
        }
        let found = ksm(root.path()).unwrap();
        assert_eq!(
            (found.run, found.pages_to_scan, found.advisor_mode),
            (1, 100, None)
        );
    }
}
