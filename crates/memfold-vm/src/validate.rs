//! Validates a VM description: the value of each field, and fields that contradict each other.

use memfold_units::ByteSize;

use super::block_device;
use super::image_format;
use super::name::check_name;
use super::network::Network;
use super::segments;
use super::spec::{Aio, VmSpec};
use super::spec_error::{SpecError, require, value};
use super::swap;
use super::virtio_mem;

/// Least memory of a VM; with less, no Linux kernel boots.
const MIN_MEMORY: ByteSize = ByteSize::mib(16);
/// QEMU's limit on vCPUs of q35.
const MAX_VCPUS: u32 = 4096;
/// QEMU's limit on memory slots (`ACPI_MAX_RAM_SLOTS`).
const MAX_SLOTS: u32 = 256;

impl VmSpec {
    /// Checks every field of the VM description, and that every file exists. Makes paths absolute,
    /// because QEMU runs in another directory. Keeps links to block devices, because a device may
    /// have another name after a boot of the host.
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
        let sizing = self.sizing.check(self.largest_memory());
        sizing.map_err(|why| value("sizing", why))?;
        let why = format!("{} is not 1 to {MAX_VCPUS}", self.vcpus);
        require((1..=MAX_VCPUS).contains(&self.vcpus), "vcpus", why)?;
        self.check_boot()?;
        for disk in &self.disks {
            let why = "'native' works only with cache = \"none\" or \"directsync\"; use \"threads\" or \"io_uring\"";
            let can_be_native = disk.cache.direct();
            require(disk.aio != Aio::Native || can_be_native, "disks.aio", why)?;
            let why =
                "a read-only disk takes no writes, so it needs no overlay; set one of the two";
            require(!(disk.snapshot && disk.read_only), "disks.snapshot", why)?;
        }
        let takes_forwards = match &self.foreign {
            Some(foreign) => foreign.takes_forwards(),
            None => self.network == Network::User,
        };
        let why = "forwarding a port needs a network in user mode (network = \"user\"), and the VM has none";
        require(self.forwards.is_empty() || takes_forwards, "forwards", why)?;
        let why = "a MAC address needs a network card; set network, or leave out mac";
        require(self.mac.is_none() || self.cards() > 0, "mac", why)?;
        if self.boot_snapshot {
            self.check_boot_snapshot()?;
        }
        self.check_arguments()?;
        for disk in &mut self.disks {
            image_format::settle(disk)?;
        }
        swap::check(self)?;
        if let Some(of) = self.cloud_init.as_ref().filter(|of| of.seed.is_none()) {
            of.read()?;
        }
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
        if let Some(place) = &self.qemu_directory {
            let why = format!("{} is not an absolute path", place.display());
            require(place.is_absolute(), "qemu_directory", why)?;
        }
        let offers = |argument: &&String| {
            argument.contains("mem-merge")
                || (argument.contains("memory-backend") && argument.contains("merge"))
        };
        self.qemu_args.iter().find(offers).map_or(Ok(()), |argument| {
            let why = format!(
                "'{argument}' would change what KSM may merge; that is merge = \"domain\" or \"never\" (--merge)"
            );
            Err(value("qemu_args", why))
        })
    }

    /// Refuses a boot snapshot if it is known before the VM starts that the VM cannot be saved.
    fn check_boot_snapshot(&self) -> Result<(), SpecError> {
        check_name("boot_snapshot", &format!("{}-boot", self.name))?;
        let why = "a VM with a boot snapshot needs memfold's library (fold = true)";
        require(self.fold, "boot_snapshot", why)?;
        let is_unchanged = self.disks.iter().all(|d| d.read_only || d.snapshot);
        let why = "a VM with a boot snapshot returns to an earlier state, and so must its disks: set snapshot = true or read_only = true on each";
        require(is_unchanged, "boot_snapshot", why)
    }

    fn check_memory(&self) -> Result<(), SpecError> {
        let whole = |field, size: ByteSize| {
            let why = format!("{} bytes are not a whole number of MiB", size.0);
            require(size.0 % (1 << 20) == 0, field, why)
        };
        let why = format!("{} is less than {MIN_MEMORY}", self.memory);
        require(self.memory >= MIN_MEMORY, "memory", why)?;
        whole("memory", self.memory)?;
        let Some(max) = self.memory_max else {
            return Ok(());
        };
        whole("memory_max", max)?;
        let why = format!("{max} is not more than memory, {}", self.memory);
        require(max > self.memory, "memory_max", why)?;
        let why = format!("{} is not 0 to {MAX_SLOTS}", self.memory_slots);
        require(self.memory_slots <= MAX_SLOTS, "memory_slots", why)?;
        let Some(size) = self.pluggable() else {
            return Ok(());
        };
        let granule = virtio_mem::GRANULE;
        let why = format!(
            "{max} exceeds memory by {size}, and Linux can only use multiples of {granule} of that; choose {} or {}",
            ByteSize(max.0 - size.0 % granule.0),
            ByteSize(max.0 - size.0 % granule.0 + granule.0)
        );
        require(size.0 % granule.0 == 0, "memory_max", why)
    }

    fn check_boot(&self) -> Result<(), SpecError> {
        let boot = &self.boot;
        let needs_kernel = boot.initrd.is_some() || boot.cmdline.is_some();
        let why = "initrd and cmdline belong to a kernel; set kernel too";
        require(boot.kernel.is_some() || !needs_kernel, "boot", why)?;
        let why = "set either kernel or firmware";
        require(
            boot.kernel.is_none() || boot.firmware.is_none(),
            "boot",
            why,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DiskSpec;

    #[test]
    fn a_vm_description_with_a_contradiction_is_refused_and_the_error_names_the_field() {
        type Damage = fn(&mut VmSpec);
        let broken: [(&str, Damage); 15] = [
            ("memory", |s| s.memory = ByteSize::mib(1)),
            ("memory_max", |s| s.memory_max = Some(ByteSize::mib(64))),
            ("memory_max", |s| s.memory_max = Some(ByteSize::mib(300))),
            ("memory_slots", |s| {
                (s.memory_max, s.memory_slots) = (Some(ByteSize::mib(256)), 257);
            }),
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
