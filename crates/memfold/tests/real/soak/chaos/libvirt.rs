//! libvirt in the chaos test: a separate libvirtd with two small domains, which are started and
//! destroyed, enabled and disabled. The domains have no disk, so their firmware waits forever.
//!
//! The daemon and all commands run in libvirtd's mount namespace, where virsh finds it.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use rustix::process::Pid;

use super::disturb::one_of;
use super::testbed::{Faults, lock};
use crate::beside::libvirt_enable::domain;
use crate::beside::libvirt_host::{self as libvirt, Host};
use crate::served::Random;

pub const DOMAINS: [&str; 2] = ["domain-1", "domain-2"];

/// Number of the host among the hosts of all libvirt tests, which use different ports.
const NUMBER: u32 = 4;

/// Without ACPI, libvirt 9 starts QEMU with an option that newer QEMUs do not have. Mergeable
/// memory of a domain that is not enabled keeps the daemon from steering KSM.
const FEATURES: &str = "<features><acpi/></features><memoryBacking><nosharepages/></memoryBacking>";

pub struct Libvirt {
    host: Mutex<Option<Host>>,
    /// Process whose mount namespace libvirtd is in.
    namespace: u32,
    place: PathBuf,
    /// XML of each domain before it was ever enabled.
    before: BTreeMap<&'static str, String>,
}

impl Libvirt {
    pub fn start(place: PathBuf) -> Self {
        std::fs::create_dir(&place).unwrap();
        // A domain's QEMU runs as another user, which must reach its program.
        let parent = place.parent().unwrap();
        std::fs::set_permissions(parent, std::fs::Permissions::from_mode(0o755)).unwrap();
        libvirt::prepare(&place);
        let host = Host::start(&place, "host", NUMBER);
        let define = |name| {
            let file = place.join("domain.xml");
            std::fs::write(&file, domain(&place, name, 0, FEATURES)).unwrap();
            host.ask(&["define", file.to_str().unwrap()]);
            (name, host.xml(name))
        };
        Self {
            before: DOMAINS.map(define).into(),
            namespace: host.pid(),
            host: Mutex::new(Some(host)),
            place,
        }
    }

    /// Returns a command for a program that finds this libvirtd.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = libvirt::command_in(self.namespace, program);
        let library = self.place.join("lib/libmemfold_qemu.so");
        command.env("MEMFOLD_QEMU_LIBRARY", library);
        command
    }

    pub fn libvirtd(&self) -> Option<Pid> {
        lock(&self.host).as_ref().map(Host::libvirtd)
    }

    /// Kills libvirtd, and starts it again after `away`.
    pub fn restart(&self, away: Duration) -> Option<()> {
        lock(&self.host).as_mut()?.restart_libvirtd(away);
        Some(())
    }

    /// Runs a command of virsh on a domain, and returns its name. `None` if libvirt refused it.
    pub fn virsh(&self, command: &str, random: &mut Random, faults: &Faults) -> Option<String> {
        let name = *one_of(&DOMAINS, random)?;
        let done = self.command("virsh").args(["-q", command, name]).output();
        let done = done.unwrap();
        if done.status.success() {
            return Some(name.to_owned());
        }
        let words = String::from_utf8_lossy(&done.stderr);
        faults.note(&format!("virsh {command} {name}: {}", words.trim()));
        None
    }

    /// Destroys the domains.
    pub fn destroy_domains(&self) {
        let host = lock(&self.host);
        for name in DOMAINS {
            // A domain that does not run cannot be destroyed.
            let _ = host.as_ref().unwrap().virsh(&["destroy", name]);
        }
    }

    /// Ends libvirtd. All domains must be disabled: their XML is compared with that before they
    /// were enabled.
    pub fn end(&self, faults: &Faults) {
        let host = lock(&self.host).take().unwrap();
        for (name, before) in &self.before {
            let now = host.xml(name);
            if now != *before {
                faults.add(format!("XML of '{name}' is {now}\ninstead of {before}"));
            }
        }
        drop(host);
        // The sockets stay when libvirtd is killed.
        let _ = std::fs::remove_dir_all(&self.place);
    }
}

/// Time within which the daemon forgets a domain that was destroyed.
pub const FORGOTTEN: Duration = Duration::from_secs(30);

/// Returns whether this machine has libvirt; a skip is reported if not.
pub fn is_there() -> bool {
    libvirt::is_there()
}
