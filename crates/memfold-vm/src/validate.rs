//! Validates a VM description: each field by itself, and fields that contradict each other.

use memfold_units::ByteSize;

use super::block_device;
use super::image_format;
use super::name::check_name;
use super::segments;
use super::spec::{Aio, Network, VmSpec};
use super::spec_error::{SpecError, value};
use super::swap;

/// Least memory of a VM; with less, no Linux kernel boots.
const MIN_MEMORY: ByteSize = ByteSize::mib(16);
/// QEMU's limit on vCPUs of q35.
const MAX_VCPUS: u32 = 4096;
/// QEMU's limit on memory slots (`ACPI_MAX_RAM_SLOTS`).
const MAX_SLOTS: u32 = 256;

impl VmSpec {
    /// Checks every field, and that every file exists. Makes paths absolute, because QEMU runs in
    /// another directory. Links to block devices are kept, because the device may have another name
    /// after a boot of the host.
    pub fn validate(&mut self) -> Result<(), SpecError> {
        check_name("name", &self.name)?;
        if let Some(domain) = &self.domain {
            check_name("domain", domain)?;
        }
        if let Some(user) = &self.user {
            check_name("user", user)?;
        }
        // The memory of a VM that memfold did not start is valid already.
        if self.foreign.is_none() {
            self.check_memory()?;
        }
        if !(1..=MAX_VCPUS).contains(&self.vcpus) {
            return Err(value(
                "vcpus",
                format!("{} is not 1 to {MAX_VCPUS}", self.vcpus),
            ));
        }
        self.check_boot()?;
        for disk in &self.disks {
            if disk.aio == Aio::Native && !disk.cache.direct() {
                return Err(value(
                    "disks.aio",
                    "'native' works only with cache = \"none\" or \"directsync\"; use \"threads\" or \"io_uring\"".into(),
                ));
            }
            if disk.snapshot && disk.read_only {
                return Err(value(
                    "disks.snapshot",
                    "a read-only disk takes no writes, so it needs no overlay; set one of the two"
                        .into(),
                ));
            }
        }
        let takes_forwards = match &self.foreign {
            Some(foreign) => foreign.takes_forwards(),
            None => self.network == Network::User,
        };
        if !self.forwards.is_empty() && !takes_forwards {
            return Err(value(
                "forwards",
                "forwarding a port needs a network in user mode (network = \"user\"), and the VM has none".into(),
            ));
        }
        if self.boot_snapshot {
            self.check_boot_snapshot()?;
        }
        self.check_arguments()?;
        for disk in &mut self.disks {
            image_format::settle(disk)?;
        }
        swap::check(self)?;
        segments::check(self)?;
        for (field, path) in self.files_mut() {
            let file = |source| SpecError::File {
                field,
                path: path.clone(),
                source,
            };
            let absolute = block_device::lasting_path(path).map_err(file)?;
            if absolute.is_dir() {
                return Err(file(std::io::ErrorKind::IsADirectory.into()));
            }
            // `escape` doubles commas in the path, as QEMU's option syntax needs. A line feed could
            // not be escaped in QEMU's messages.
            *path = absolute;
        }
        Ok(())
    }

    /// Refuses arguments that change which memory is offered to KSM. The trust domain decides that,
    /// but QEMU would obey a later option.
    fn check_arguments(&self) -> Result<(), SpecError> {
        if let Some(place) = self.qemu_directory.as_ref().filter(|p| p.is_relative()) {
            let why = format!("{} is not an absolute path", place.display());
            return Err(value("qemu_directory", why));
        }
        let offers = |argument: &&String| {
            argument.contains("mem-merge")
                || (argument.contains("memory-backend") && argument.contains("merge"))
        };
        match self.qemu_args.iter().find(offers) {
            None => Ok(()),
            Some(argument) => Err(value(
                "qemu_args",
                format!(
                    "'{argument}' would change what KSM may merge; that is merge = \"domain\" or \"never\" (--merge)"
                ),
            )),
        }
    }

    /// Refuses a boot snapshot if it is known before the VM starts that the VM cannot be saved.
    fn check_boot_snapshot(&self) -> Result<(), SpecError> {
        check_name("boot_snapshot", &format!("{}-boot", self.name))?;
        let why = if !self.fold {
            "needs memfold's library (fold = true)"
        } else if self.disks.iter().any(|d| !d.read_only && !d.snapshot) {
            "returns to an earlier state, and so must its disks: set snapshot = true or read_only = true on each"
        } else {
            return Ok(());
        };
        Err(value(
            "boot_snapshot",
            format!("a VM with a boot snapshot {why}"),
        ))
    }

    fn check_memory(&self) -> Result<(), SpecError> {
        let whole = |field, size: ByteSize| {
            if size.0 % (1 << 20) == 0 {
                Ok(())
            } else {
                Err(value(
                    field,
                    format!("{} bytes are not a whole number of MiB", size.0),
                ))
            }
        };
        if self.memory < MIN_MEMORY {
            return Err(value(
                "memory",
                format!("{} is less than {MIN_MEMORY}", self.memory),
            ));
        }
        whole("memory", self.memory)?;
        if let Some(max) = self.memory_max {
            whole("memory_max", max)?;
            if max <= self.memory {
                return Err(value(
                    "memory_max",
                    format!("{max} is not more than memory, {}", self.memory),
                ));
            }
            if !(1..=MAX_SLOTS).contains(&self.memory_slots) {
                return Err(value(
                    "memory_slots",
                    format!("{} is not 1 to {MAX_SLOTS}", self.memory_slots),
                ));
            }
        }
        Ok(())
    }

    fn check_boot(&self) -> Result<(), SpecError> {
        let boot = &self.boot;
        if boot.kernel.is_none() && (boot.initrd.is_some() || boot.cmdline.is_some()) {
            return Err(value(
                "boot",
                "initrd and cmdline belong to a kernel; set kernel too".into(),
            ));
        }
        if boot.kernel.is_some() && boot.firmware.is_some() {
            return Err(value("boot", "set either kernel or firmware".into()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DiskSpec;

    #[test]
    fn contradictions_in_a_vm_description_are_refused_and_named() {
        type Damage = fn(&mut VmSpec);
        let broken: [(&str, Damage); 13] = [
            ("memory", |s| s.memory = ByteSize::mib(1)),
            ("memory_max", |s| s.memory_max = Some(ByteSize::mib(64))),
            ("vcpus", |s| s.vcpus = 0),
            ("swap", |s| s.swap = Some(ByteSize(1))),
            ("boot", |s| s.boot.initrd = Some("/dev/null".into())),
            ("boot.kernel", |s| s.boot.kernel = Some("/nowhere/k".into())),
            ("disks.path", |s| s.disks = vec![DiskSpec::new("/")]),
            ("disks.aio", |s| {
                let mut disk = DiskSpec::new("/dev/null");
                disk.aio = Aio::Native;
                s.disks = vec![disk];
            }),
            ("boot_snapshot", |s| {
                s.boot_snapshot = true;
                s.disks = vec![DiskSpec::new("/dev/null")];
            }),
            ("boot_snapshot", |s| {
                (s.boot_snapshot, s.fold) = (true, false);
            }),
            ("qemu_directory", |s| s.qemu_directory = Some("tmp".into())),
            ("qemu_args", |s| {
                s.qemu_args = vec!["-machine".into(), "mem-merge=on".into()];
            }),
            ("qemu_args", |s| {
                let backend = "memory-backend-ram,id=more,size=64M,merge=on";
                s.qemu_args = vec!["-object".into(), backend.into()];
            }),
        ];
        for (field, damage) in broken {
            let mut spec = VmSpec::new("a", ByteSize::mib(128));
            spec.validate().unwrap();
            damage(&mut spec);
            let text = spec.validate().unwrap_err().to_string();
            assert!(text.starts_with(&format!("{field}:")), "{text}");
        }
    }
}
