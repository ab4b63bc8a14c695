//! Makes the report of `memfold doctor`: which features of memfold work on this host, and which
//! commands make the others work.

use memfold_units::ByteSize;
use serde::Serialize;

use super::facts::HostFacts;
use super::fold_budget::default_fold_cpu_percent;
use super::kernel_faults::{self, Conduct, Found, Presence};
use super::kernel_release::Release;
use super::kvm::{BOOT_FAILED, KvmVerdict};
use super::qemu_users;

/// The kernel's default of `vm.max_map_count`. Folding a busy VM creates about 5,000 mappings.
const DEFAULT_MAP_COUNT: u64 = 65_530;
/// Memory that `memfold demo` needs: three VMs of 512 MiB and their QEMUs.
const DEMO_MEMORY: ByteSize = ByteSize::mib(2560);

/// Result of one of the checks of `memfold doctor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The checked feature works.
    Ok,
    /// Booting and folding VMs works, but a secondary feature does not.
    Warn,
    /// VMs cannot be booted and folded.
    Fail,
}

/// One line of the report of `memfold doctor`: the result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Name of the feature that was checked.
    pub name: &'static str,
    /// Whether the checked feature works.
    pub status: Status,
    /// What the check found and what follows from that, as text.
    pub meaning: String,
    /// Command that fixes the problem; `None` if no command is known or needed.
    pub fix: Option<String>,
}

/// Report of `memfold doctor` on this host.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether VMs can be booted and folded on this host: no check has the result [`Status::Fail`].
    pub can_run: bool,
    /// Results of the checks, in the order in which they are shown.
    pub checks: Vec<Check>,
    /// Known faults that this host's kernel has or may have; `None` if its release cannot be
    /// parsed.
    pub kernel_faults: Option<Vec<Found>>,
    /// Facts about the host that the checks are based on.
    pub host: HostFacts,
}

/// Checks the facts about the host, and makes the report of `memfold doctor`.
#[must_use]
pub fn examine(host: HostFacts) -> Report {
    let mut checks = Vec::new();
    kernel(&host, &mut checks);
    let kernel_faults = kernel_faults::find(&host.kernel);
    checks.push(faults(&host.kernel, kernel_faults.as_deref()));
    checks.push(fold_budget(&host));
    memory(&host, &mut checks);
    qemu(&host, &mut checks);
    // Without root's rights, VMs run as the daemon's user.
    checks.extend(host.root.then(|| qemu_users(&host)));
    own_files(&host, &mut checks);
    Report {
        can_run: checks.iter().all(|c| c.status != Status::Fail),
        checks,
        kernel_faults,
        host,
    }
}

/// Makes the check of known faults of the kernel. Faults that memfold avoids are named, but are no
/// reason for a warning.
fn faults(kernel: &str, found: Option<&[Found]>) -> Check {
    const NAME: &str = "kernel faults";
    let Some(found) = found else {
        return ok(
            NAME,
            format!("cannot tell: '{kernel}' is not the version of a Linux kernel"),
        );
    };
    if found.is_empty() {
        return ok(NAME, format!("none known in Linux {kernel}"));
    }
    let words = |found: &Found| {
        let does = match found.conduct {
            Conduct::Avoids => return format!("{} (memfold avoids it)", found.id),
            Conduct::Meets => found.effect.words(),
            Conduct::Refuses => "a VM can lose data, so 'memfold serve' refuses",
        };
        match found.presence {
            Presence::Unknown => format!(
                "{} ({does}, unless the distribution added the fix)",
                found.id
            ),
            Presence::Present | Presence::Absent => format!("{} ({does})", found.id),
        }
    };
    let (avoided, met): (Vec<_>, Vec<_>) = found
        .iter()
        .partition(|found| found.conduct == Conduct::Avoids);
    let all: Vec<_> = met
        .iter()
        .chain(&avoided)
        .map(|found| words(found))
        .collect();
    let meaning = all.join("; ");
    if met.is_empty() {
        return ok(NAME, meaning);
    }
    let fixes = met.iter().filter_map(|found| found.fixed_in.as_deref());
    let newest = fixes.max_by_key(|fix| Release::parse(fix).map(|release| release.version));
    let fix = format!(
        "upgrade to Linux {} or newer, or to a kernel of your distribution with these fixes; 'memfold doctor --json' has workarounds in kernel_faults",
        newest.unwrap_or_default()
    );
    if kernel_faults::refusal(kernel).is_some() {
        fail(NAME, meaning, &fix)
    } else {
        warn(NAME, meaning, &fix)
    }
}

fn ok(name: &'static str, meaning: impl Into<String>) -> Check {
    Check {
        name,
        status: Status::Ok,
        meaning: meaning.into(),
        fix: None,
    }
}

fn warn(name: &'static str, meaning: impl Into<String>, fix: &str) -> Check {
    Check {
        status: Status::Warn,
        fix: Some(fix.into()),
        ..ok(name, meaning)
    }
}

fn fail(name: &'static str, meaning: impl Into<String>, fix: &str) -> Check {
    Check {
        status: Status::Fail,
        ..warn(name, meaning, fix)
    }
}

const NEWER_KERNEL: &str = "install Linux 6.8 or newer (Debian 13's, or on Debian 12: apt install -t bookworm-backports linux-image-amd64)";

/// Capabilities that root needs for folding: bit (`include/uapi/linux/capability.h`), name,
/// purpose.
const CAPABILITIES: [(u32, &str, &str); 2] = [
    (
        19,
        "CAP_SYS_PTRACE",
        "reading other processes' memory, kernel-mode page faults",
    ),
    (
        21,
        "CAP_SYS_ADMIN",
        "page frame numbers, mounts of segments",
    ),
];

fn kernel(host: &HostFacts, checks: &mut Vec<Check>) {
    let lacks = |bit: u32| host.capabilities >> bit & 1 == 0;
    let missing: Vec<_> = CAPABILITIES
        .iter()
        .filter(|(bit, ..)| lacks(*bit))
        .collect();
    checks.push(if host.root && missing.is_empty() {
        ok("rights", "root")
    } else if host.root {
        let words = missing.iter().map(|(_, name, use_)| format!("{name} ({use_})"));
        let names: Vec<_> = missing.iter().map(|(_, name, _)| *name).collect();
        fail(
            "rights",
            format!("root without {}", words.collect::<Vec<_>>().join(" and ")),
            &format!(
                "grant the capability again: CapabilityBoundingSet= of a systemd unit, --cap-add of a container ({})",
                names.join(", ")
            ),
        )
    } else {
        fail(
            "rights",
            format!(
                "not root (capabilities {:#x}): no access to other processes' page maps and kernel-mode page faults",
                host.capabilities
            ),
            "run memfold as root (sudo memfold ...); a daemon for VMs of your own needs no root (memfold serve --user)",
        )
    });
    let uffd = &host.userfault;
    checks.push(match (uffd.available, uffd.can_move, uffd.can_write_protect) {
        (false, ..) => fail(
            "userfaultfd",
            format!(
                "no userfaultfd that takes kernel-mode faults ({}; vm.unprivileged_userfaultfd={}): VMs cannot be folded",
                uffd.error.as_deref().unwrap_or("no reason given"),
                host.unprivileged_userfaultfd.map_or("?".into(), |n| n.to_string()),
            ),
            if host.root {
                "see 'rights'; a container's seccomp filter may also forbid userfaultfd: allow userfaultfd(2), or give the container /dev/userfaultfd"
            } else {
                "run as root, or let the group kvm open /dev/userfaultfd (copy 70-memfold-userfaultfd.rules of memfold's examples to /etc/udev/rules.d), and join that group"
            },
        ),
        (true, false, _) => fail(
            "userfaultfd",
            format!("Linux {} has no UFFDIO_MOVE: VMs cannot be folded", host.kernel),
            NEWER_KERNEL,
        ),
        (true, true, false) => warn(
            "userfaultfd",
            "UFFDIO_MOVE without write protection: pages are folded again at pauses only",
            "use a kernel built with CONFIG_HAVE_ARCH_USERFAULTFD_WP",
        ),
        (true, true, true) => ok(
            "userfaultfd",
            format!("UFFDIO_MOVE and UFFDIO_WRITEPROTECT on Linux {}", host.kernel),
        ),
    });
    checks.push(match &host.pagemap_scan_error {
        None => ok("PAGEMAP_SCAN", "page maps can be scanned"),
        Some(e) => fail(
            "PAGEMAP_SCAN",
            format!("cannot scan page maps ({e}): the ledger has no figures"),
            NEWER_KERNEL,
        ),
    });
    checks.push(match &host.ksm {
        None => warn(
            "KSM",
            "this kernel has no KSM: folding works, the comparison with KSM does not",
            "use a kernel built with CONFIG_KSM=y (Debian's are)",
        ),
        Some(ksm) => {
            let state = if ksm.run == 1 { "on" } else { "off" };
            let advisor = ksm.advisor_mode.as_deref().unwrap_or("not in this kernel");
            ok(
                "KSM",
                format!(
                    "{state}, {} pages each {} ms, advisor: {advisor}",
                    ksm.pages_to_scan, ksm.sleep_millisecs
                ),
            )
        }
    });
}

fn memory(host: &HostFacts, checks: &mut Vec<Check>) {
    let count = host.max_map_count.unwrap_or(0);
    checks.push(if count >= DEFAULT_MAP_COUNT {
        ok("vm.max_map_count", format!("{count} mappings a VM"))
    } else {
        warn(
            "vm.max_map_count",
            format!("at most {count} mappings a process, which limits how many runs of a VM can be folded"),
            "sysctl -w vm.max_map_count=262144",
        )
    });
    checks.push(ok(
        "huge pages",
        match host.transparent_hugepage.as_deref() {
            Some("always") => {
                "transparent huge pages are always used; folding splits them where it saves memory"
                    .to_owned()
            }
            Some(word) => format!("transparent huge pages: {word}"),
            None => "this kernel has no transparent huge pages".to_owned(),
        },
    ));
    let available = ByteSize(host.available_bytes);
    checks.push(if available >= DEMO_MEMORY {
        ok("memory", format!("{available} available"))
    } else {
        warn(
            "memory",
            format!("{available} available; the demo's three VMs need {DEMO_MEMORY}"),
            "end other programs, or start fewer VMs",
        )
    });
}

/// Tells the default CPU limit of folding on this host.
fn fold_budget(host: &HostFacts) -> Check {
    let (cores, percent) = (host.cores, default_fold_cpu_percent(host.cores));
    ok(
        "CPU for folding",
        format!(
            "at most {percent} % of one core by default (1 for each of {cores} cores, at least 5, at most 100); change it with 'memfold serve --cpu PERCENT'"
        ),
    )
}

const INSTALL_QEMU: &str = "apt install qemu-system-x86 qemu-utils (on Debian 12 with -t bookworm-backports; on Proxmox VE: upgrade to Proxmox VE 9; in a checkout: make setup)";

fn qemu(host: &HostFacts, checks: &mut Vec<Check>) {
    let qemu = &host.qemu;
    let fail = |meaning: String| fail("QEMU", meaning, INSTALL_QEMU);
    checks.push(if let Some(facts) = &qemu.facts {
        let (major, minor, micro) = facts.version;
        let text = format!("{major}.{minor}.{micro} at {}", facts.program.display());
        if !facts.is_supported() {
            fail(format!("{text} is older than 10.0"))
        } else if !qemu.sandbox {
            fail(format!(
                "{text} was built without -sandbox, which VMs are started with"
            ))
        } else if !qemu.free_page_reporting {
            fail(format!(
                "{text} has no balloon with free page reporting, which VMs are started with"
            ))
        } else {
            let accelerators = facts.accelerators.join(", ");
            let machine = &facts.machine;
            ok(
                "QEMU",
                format!("{text}, {machine}, accelerators: {accelerators}"),
            )
        }
    } else {
        fail(qemu.error.clone().unwrap_or_else(|| "not found".into()))
    });
    checks.push(kvm(&host.kvm));
}

/// Makes the check of KVM.
fn kvm(verdict: &KvmVerdict) -> Check {
    match verdict {
        KvmVerdict::Works => ok("KVM", "KVM works: the kernel of a probe guest ran"),
        KvmVerdict::Untried { why } => warn(
            "KVM",
            format!("KVM not tried: {why}; VMs run under TCG, slowly"),
            "run 'memfold doctor' as root in a shell, with the daemon's --state: only root may be able to read the kernel, and the daemon's unit hides /lib/modules; the daemon uses doctor's result. Or run memfold demo, which builds a guest image to try KVM with (package memfold-bench); in a checkout: make setup",
        ),
        KvmVerdict::Unusable { why } => {
            let mut fix = if why.contains("Permission denied") {
                "join the group of /dev/kvm (usermod -aG kvm $USER), and log in again"
            } else {
                "switch virtualization on in the firmware, or use a host that has it"
            }
            .to_owned();
            if why.starts_with(BOOT_FAILED) {
                fix.push_str("; memfold tries KVM again after a day, or at once after you remove kvm.json in the state directory (/run/memfold by default) and beside the guest images");
            }
            warn("KVM", format!("{why}; VMs run under TCG, slowly"), &fix)
        }
    }
}

/// Makes the check of the users that QEMUs switch to.
fn qemu_users(host: &HostFacts) -> Check {
    const NAME: &str = "users of QEMUs";
    match &host.qemu_users {
        Ok(range) => ok(
            NAME,
            format!("each VM's QEMU gets a user number of its own in {range}"),
        ),
        Err(error) => fail(
            NAME,
            format!("{error}: only VMs with user = \"root\" or another named user start"),
            &format!(
                "systemctl edit memfold: Environment={}=FIRST-LAST, with user numbers that nobody else uses",
                qemu_users::RANGE_VARIABLE
            ),
        ),
    }
}

fn own_files(host: &HostFacts, checks: &mut Vec<Check>) {
    checks.push(match &host.library {
        Ok(path) => ok("library", path.display().to_string()),
        Err(e) => fail(
            "library",
            format!("{e}: QEMU cannot fold without this library"),
            "apt install memfold-qemu; in a checkout: make build",
        ),
    });
    checks.push(match &host.guest_images {
        Ok(names) if !names.is_empty() => ok("guest images", names.join(", ")),
        other => warn(
            "guest images",
            format!(
                "{}: the demo and the self-test have no guest image to boot",
                other.as_ref().err().map_or("none", String::as_str)
            ),
            "memfold demo, which builds them (package memfold-bench); in a checkout: make setup",
        ),
    });
    let missing: Vec<_> = host.tools.iter().filter(|t| t.path.is_none()).collect();
    checks.push(if missing.is_empty() {
        let names: Vec<_> = host.tools.iter().map(|t| t.name).collect();
        ok("tools", names.join(", "))
    } else {
        let words: Vec<_> = missing
            .iter()
            .map(|t| format!("{} ({})", t.name, t.used_for))
            .collect();
        let packages: Vec<_> = missing.iter().map(|t| t.package).collect();
        warn(
            "tools",
            format!("missing: {}", words.join(", ")),
            &format!("apt install {}", packages.join(" ")),
        )
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Ksm, Qemu, Userfault};
    use crate::qemu::QemuFacts;

    fn good_host() -> HostFacts {
        HostFacts {
            kernel: "7.3.1".into(),
            root: true,
            capabilities: u64::MAX,
            userfault: Userfault {
                available: true,
                can_move: true,
                can_write_protect: true,
                error: None,
            },
            unprivileged_userfaultfd: Some(0),
            pagemap_scan_error: None,
            ksm: Some(Ksm {
                run: 0,
                pages_to_scan: 100,
                sleep_millisecs: 20,
                advisor_mode: Some("none".into()),
            }),
            max_map_count: Some(65_530),
            transparent_hugepage: Some("madvise".into()),
            cores: 64,
            available_bytes: 8 << 30,
            qemu: Qemu {
                facts: Some(QemuFacts {
                    program: "/usr/bin/qemu-system-x86_64".into(),
                    version: (10, 0, 2),
                    machine: "pc-q35-10.0".into(),
                    accelerators: vec!["tcg".into(), "kvm".into()],
                }),
                free_page_reporting: true,
                sandbox: true,
                error: None,
            },
            kvm: KvmVerdict::Works,
            library: Ok("/usr/lib/memfold/libmemfold_qemu.so".into()),
            qemu_users: Ok("2100000000-2139999999".into()),
            guest_images: Ok(vec!["trixie-a".into()]),
            tools: Vec::new(),
        }
    }

    #[test]
    fn doctor_reports_no_fix_for_a_host_that_meets_all_requirements() {
        let report = examine(good_host());
        assert!(report.can_run);
        assert!(
            report
                .checks
                .iter()
                .all(|c| c.status == Status::Ok && c.fix.is_none())
        );
    }

    #[test]
    fn doctor_tells_the_default_cpu_limit_of_folding_by_the_number_of_cores() {
        for (cores, percent) in [
            (2, "at most 5 %"),
            (64, "at most 64 %"),
            (512, "at most 100 %"),
        ] {
            let report = examine(HostFacts {
                cores,
                ..good_host()
            });
            let check = report.checks.iter().find(|c| c.name == "CPU for folding");
            let meaning = &check.unwrap().meaning;
            assert!(meaning.starts_with(percent), "{meaning}");
        }
    }

    #[test]
    fn doctor_names_the_faults_of_the_kernel_what_they_do_and_the_version_without_them() {
        let check_of = |kernel: &str| {
            let report = examine(HostFacts {
                kernel: kernel.into(),
                ..good_host()
            });
            let check = report.checks.iter().find(|c| c.name == "kernel faults");
            (check.cloned().unwrap(), report.kernel_faults)
        };
        let (check, found) = check_of("6.18.44");
        let (what, fix) = (check.meaning, check.fix.unwrap());
        assert_eq!(check.status, Status::Warn);
        assert!(
            what.starts_with("commit 4165b7d1c45c (the host can crash)"),
            "{what}"
        );
        assert!(
            what.contains("commit f025ca73decd (memfold avoids it)"),
            "{what}"
        );
        assert!(fix.contains("Linux 6.18.46 or newer"), "{fix}");
        assert_eq!(found.unwrap().len(), 2);
        let (check, _) = check_of("6.18.46");
        assert_eq!((check.status, check.fix), (Status::Ok, None));
        assert_eq!(check.meaning, "commit f025ca73decd (memfold avoids it)");
        let (check, _) = check_of("6.8.0-71-generic");
        assert_eq!(check.status, Status::Warn);
        assert!(
            check
                .meaning
                .contains("unless the distribution added the fix")
        );
        let (check, found) = check_of("Hurd 0.9");
        assert_eq!((check.status, found), (Status::Ok, None));
        assert!(check.meaning.contains("cannot tell: 'Hurd 0.9'"));
    }

    #[test]
    fn doctor_names_the_file_to_remove_only_if_the_failure_of_kvm_was_kept() {
        for (why, is_kept) in [
            (format!("{BOOT_FAILED} the kernel printed nothing"), true),
            ("/dev/kvm: No such file or directory".to_owned(), false),
        ] {
            let fix = kvm(&KvmVerdict::Unusable { why }).fix.unwrap();
            assert_eq!(fix.contains("remove kvm.json"), is_kept, "{fix}");
            assert!(fix.contains("firmware"), "{fix}");
        }
    }

    #[test]
    fn doctor_names_each_missing_requirement_and_the_fix() {
        type Damage = fn(&mut HostFacts);
        let cases: [(&str, Status, Damage); 14] = [
            ("rights", Status::Fail, |h| h.root = false),
            ("rights", Status::Fail, |h| h.capabilities &= !(1 << 19)),
            ("userfaultfd", Status::Fail, |h| {
                h.userfault.can_move = false;
            }),
            ("userfaultfd", Status::Fail, |h| {
                h.userfault.available = false;
            }),
            ("PAGEMAP_SCAN", Status::Fail, |h| {
                h.pagemap_scan_error = Some("ENOTTY".into());
            }),
            ("kernel faults", Status::Warn, |h| {
                h.kernel = "6.12.1".into();
            }),
            ("kernel faults", Status::Fail, |h| h.kernel = "6.8.1".into()),
            ("KSM", Status::Warn, |h| h.ksm = None),
            ("vm.max_map_count", Status::Warn, |h| {
                h.max_map_count = Some(1000);
            }),
            ("QEMU", Status::Fail, |h| {
                if let Some(facts) = &mut h.qemu.facts {
                    facts.version = (7, 2, 0);
                }
            }),
            ("KVM", Status::Warn, |h| {
                h.kvm = KvmVerdict::Unusable {
                    why: "no device".into(),
                }
            }),
            ("library", Status::Fail, |h| {
                h.library = Err("not there".into());
            }),
            ("users of QEMUs", Status::Fail, |h| {
                h.qemu_users = Err("not mapped".into());
            }),
            ("guest images", Status::Warn, |h| {
                h.guest_images = Ok(Vec::new());
            }),
        ];
        for (name, status, damage) in cases {
            let mut host = good_host();
            damage(&mut host);
            let report = examine(host);
            let wrong: Vec<_> = report
                .checks
                .iter()
                .filter(|c| c.status != Status::Ok)
                .collect();
            assert_eq!(wrong.len(), 1, "{name}: {wrong:?}");
            assert_eq!((wrong[0].name, wrong[0].status), (name, status));
            assert!(wrong[0].fix.is_some());
            assert_eq!(report.can_run, status != Status::Fail);
        }
    }
}
