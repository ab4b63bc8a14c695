//! Table of QEMU's command-line options: whether each takes a value, and what memfold does with the
//! option when it copies the command line of a QEMU for a second one (keep, drop, rewrite, refuse).
//!
//! Source: `qemu-options.hx` of QEMU 10. A test compares the table with the installed QEMU.

use Fate::{Dropped, Kept, Made, Refused};

/// Treatment of an option in the copy of a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The option is copied unchanged.
    Kept,
    /// The option is left out: it concerns the host, and no device depends on it.
    Dropped,
    /// [`super::rewrite`] replaces the option.
    Made,
    /// The command line cannot be copied; the text says why.
    Refused(&'static str),
}

const SHARED: &str = "cannot save a directory of this host that the guest shares; start the VM without that directory, or use a disk";
const RAM_FILE: &str =
    "the VM's RAM is a file; start the VM without that option, or with -object memory-backend-ram";
const PLUGIN: &str = "the option loads code of this host into QEMU; start the VM without it";
const QTEST: &str = "the option is for tests of QEMU, and no guest runs";
const TPM: &str = "another process holds a TPM's state; start the VM without a TPM";
const XEN: &str = "the VM runs under Xen";

/// Name and value of an option.
pub(super) type Named = (String, Option<String>);

/// Returns whether a value follows an option, and the option's treatment; `None` if QEMU 10 has no
/// such option.
pub(super) fn known(name: &str) -> Option<(bool, Fate)> {
    Some(match name {
        "accel" | "acpitable" | "action" | "append" | "bios" | "boot" | "compat" | "cpu"
        | "dtb" | "fw_cfg" | "global" | "initrd" | "kernel" | "m" | "numa" | "option-rom"
        | "rtc" | "seed" | "shim" | "smbios" | "smp" | "uuid" | "vga" | "watchdog-action" => {
            (true, Kept)
        }
        "enable-kvm" | "no-fd-bootchk" | "no-reboot" | "no-user-config" | "nodefaults" | "usb"
        | "win2k-hack" => (false, Kept),
        // Proxmox VE adds `id`, so that `ps` shows the VM's number.
        "D" | "add-fd" | "chroot" | "d" | "dfilter" | "display" | "dump-vmstate" | "echr"
        | "gdb" | "id" | "incoming" | "iscsi" | "k" | "loadvm" | "mon" | "monitor" | "msg"
        | "name" | "pidfile" | "qmp" | "qmp-pretty" | "qtest-log" | "run-with" | "runas"
        | "sandbox" | "spice" | "trace" | "vnc" => (true, Dropped),
        // A VM that runs from a snapshot maps its RAM, so filling RAM first (`mem-prealloc`) would
        // only take time.
        "S"
        | "async-teardown"
        | "daemonize"
        | "enable-sync-profile"
        | "full-screen"
        | "jitdump"
        | "mem-prealloc"
        | "no-shutdown"
        | "only-migratable"
        | "perfmap"
        | "preconfig"
        | "s"
        | "snapshot" => (false, Dropped),
        "L" | "M" | "audio" | "audiodev" | "blockdev" | "cdrom" | "chardev" | "debugcon"
        | "device" | "drive" | "fda" | "fdb" | "hda" | "hdb" | "hdc" | "hdd" | "icount"
        | "machine" | "mtdblock" | "net" | "netdev" | "nic" | "object" | "overcommit"
        | "parallel" | "pflash" | "readconfig" | "sd" | "serial" | "set" | "usbdevice" => {
            (true, Made)
        }
        "nographic" => (false, Made),
        "fsdev" | "virtfs" => (true, Refused(SHARED)),
        "mem-path" => (true, Refused(RAM_FILE)),
        "plugin" => (true, Refused(PLUGIN)),
        "qtest" => (true, Refused(QTEST)),
        "tpmdev" => (true, Refused(TPM)),
        "xen-attach" | "xen-domid-restrict" => (false, Refused(XEN)),
        "xen-domid" => (true, Refused(XEN)),
        _ => return None,
    })
}

/// Parses a command line, which begins with the program, into options and values.
pub(super) fn read(line: &[String]) -> Result<Vec<Named>, String> {
    let mut options = Vec::new();
    let mut words = line.iter().skip(1);
    while let Some(word) = words.next() {
        let Some(name) = word.strip_prefix('-') else {
            // A bare file name is a disk, as in QEMU (`system/vl.c`).
            options.push(("hda".to_owned(), Some(word.clone())));
            continue;
        };
        let name = name.strip_prefix('-').unwrap_or(name);
        let unknown = || {
            format!(
                "memfold does not know QEMU's option '{word}', nor whether a value follows; start the VM without this option to save the VM"
            )
        };
        let (has_value, _) = known(name).ok_or_else(unknown)?;
        let lacks = || format!("'{word}' on QEMU's command line lacks its value");
        let value = has_value
            .then(|| words.next().cloned().ok_or_else(lacks))
            .transpose()?;
        options.push((name.to_owned(), value));
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const QEMU: &str = "qemu-system-x86_64";

    /// Returns whether a value follows an option, according to the installed QEMU; `None` if QEMU
    /// has no such option. QEMU ends before it creates any device.
    fn has_value(name: &str) -> Option<bool> {
        let option = format!("-{name}");
        let line = [&option, "-kernel", "-no-such-option", "-kernel"];
        let output = Command::new(QEMU).args(line).output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{words}");
        if words.contains(&format!("{option}: invalid option")) {
            return None;
        }
        let found = [
            ("-kernel: requires an argument", false),
            ("-no-such-option: invalid option", true),
        ];
        let found = found.iter().find(|(said, _)| words.contains(said));
        Some(found.unwrap_or_else(|| panic!("{option}: {words}")).1)
    }

    #[test]
    fn memfold_knows_every_option_of_the_installed_qemu() {
        if Command::new(QEMU).arg("-version").output().is_err() {
            memfold_testkit::skip!("QEMU is not installed");
        }
        let help = Command::new(QEMU).arg("-help").output().unwrap().stdout;
        let help = String::from_utf8(help).unwrap();
        let names = help.lines().filter_map(|line| line.strip_prefix('-'));
        let names = names.map(|line| line.split_whitespace().next().unwrap());
        let names: Vec<&str> = names
            .flat_map(|name| name.split('/'))
            .map(|name| name.trim_start_matches('-'))
            .filter(|name| !["h", "version"].contains(name))
            .collect();
        assert!(names.len() > 100, "{names:?}");
        let unknown: Vec<&&str> = names.iter().filter(|name| known(name).is_none()).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        // QEMU does not print these. Options of other QEMU versions are unknown to the installed
        // one.
        let hidden = [
            "M",
            "async-teardown",
            "chroot",
            "id",
            "qtest",
            "qtest-log",
            "runas",
        ];
        for name in names.into_iter().chain(hidden) {
            let (ours, _) = known(name).unwrap();
            if let Some(qemus) = has_value(name) {
                assert_eq!(ours, qemus, "-{name}");
            }
        }
    }

    #[test]
    fn an_unknown_or_incomplete_qemu_option_is_refused_and_named() {
        let line = |text: &str| {
            let words = std::iter::once("qemu").chain(text.split_whitespace());
            words.map(str::to_owned).collect::<Vec<_>>()
        };
        let read = |text: &str| super::read(&line(text));
        for (text, word) in [
            ("-mem-prealloc -brand-new -name x", "'-brand-new'"),
            ("-no-hpet --of-tomorrow=1", "'-no-hpet'"),
            ("-m", "'-m'"),
            ("-", "'-'"),
        ] {
            let why = read(text).unwrap_err();
            assert!(why.contains(word), "no {word} in: {why}");
        }
        let named = read("-mem-prealloc --name x disk.img -usb").unwrap();
        let names: Vec<&str> = named.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["mem-prealloc", "name", "hda", "usb"]);
        assert_eq!(named[2].1.as_deref(), Some("disk.img"));
    }
}
