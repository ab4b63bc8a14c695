//! Table of QEMU's options: whether each takes a value, and whether the copy of a command line
//! keeps, drops, rewrites or refuses it.
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

/// All options of QEMU: name, whether a value follows, treatment in the copy.
const OPTIONS: &[(&str, bool, Fate)] = &[
    ("D", true, Dropped),
    ("L", true, Made),
    ("M", true, Made),
    ("S", false, Dropped),
    ("accel", true, Kept),
    ("acpitable", true, Kept),
    ("action", true, Kept),
    ("add-fd", true, Dropped),
    ("append", true, Kept),
    ("async-teardown", false, Dropped),
    ("audio", true, Made),
    ("audiodev", true, Made),
    ("bios", true, Kept),
    ("blockdev", true, Made),
    ("boot", true, Kept),
    ("cdrom", true, Made),
    ("chardev", true, Made),
    ("chroot", true, Dropped),
    ("compat", true, Kept),
    ("cpu", true, Kept),
    ("d", true, Dropped),
    ("daemonize", false, Dropped),
    ("debugcon", true, Made),
    ("device", true, Made),
    ("dfilter", true, Dropped),
    ("display", true, Dropped),
    ("drive", true, Made),
    ("dtb", true, Kept),
    ("dump-vmstate", true, Dropped),
    ("echr", true, Dropped),
    ("enable-kvm", false, Kept),
    ("enable-sync-profile", false, Dropped),
    ("fda", true, Made),
    ("fdb", true, Made),
    ("fsdev", true, Refused(SHARED)),
    ("full-screen", false, Dropped),
    ("fw_cfg", true, Kept),
    ("gdb", true, Dropped),
    ("global", true, Kept),
    ("hda", true, Made),
    ("hdb", true, Made),
    ("hdc", true, Made),
    ("hdd", true, Made),
    ("icount", true, Made),
    // Proxmox VE adds this option, so that `ps` shows the VM's number.
    ("id", true, Dropped),
    ("incoming", true, Dropped),
    ("initrd", true, Kept),
    ("iscsi", true, Dropped),
    ("jitdump", false, Dropped),
    ("k", true, Dropped),
    ("kernel", true, Kept),
    ("loadvm", true, Dropped),
    ("m", true, Kept),
    ("machine", true, Made),
    ("mem-path", true, Refused(RAM_FILE)),
    // A VM that runs from a snapshot maps its RAM, so filling RAM first would only take time.
    ("mem-prealloc", false, Dropped),
    ("mon", true, Dropped),
    ("monitor", true, Dropped),
    ("msg", true, Dropped),
    ("mtdblock", true, Made),
    ("name", true, Dropped),
    ("net", true, Made),
    ("netdev", true, Made),
    ("nic", true, Made),
    ("no-fd-bootchk", false, Kept),
    ("no-reboot", false, Kept),
    ("no-shutdown", false, Dropped),
    ("no-user-config", false, Kept),
    ("nodefaults", false, Kept),
    ("nographic", false, Made),
    ("numa", true, Kept),
    ("object", true, Made),
    ("only-migratable", false, Dropped),
    ("option-rom", true, Kept),
    ("overcommit", true, Made),
    ("parallel", true, Made),
    ("perfmap", false, Dropped),
    ("pflash", true, Made),
    ("pidfile", true, Dropped),
    ("plugin", true, Refused(PLUGIN)),
    ("preconfig", false, Dropped),
    ("qmp", true, Dropped),
    ("qmp-pretty", true, Dropped),
    ("qtest", true, Refused(QTEST)),
    ("qtest-log", true, Dropped),
    ("readconfig", true, Made),
    ("rtc", true, Kept),
    ("run-with", true, Dropped),
    ("runas", true, Dropped),
    ("s", false, Dropped),
    ("sandbox", true, Dropped),
    ("sd", true, Made),
    ("seed", true, Kept),
    ("serial", true, Made),
    ("set", true, Made),
    ("shim", true, Kept),
    ("smbios", true, Kept),
    ("smp", true, Kept),
    ("snapshot", false, Dropped),
    ("spice", true, Dropped),
    ("tpmdev", true, Refused(TPM)),
    ("trace", true, Dropped),
    ("usb", false, Kept),
    ("usbdevice", true, Made),
    ("uuid", true, Kept),
    ("vga", true, Kept),
    ("virtfs", true, Refused(SHARED)),
    ("vnc", true, Dropped),
    ("watchdog-action", true, Kept),
    ("win2k-hack", false, Kept),
    ("xen-attach", false, Refused(XEN)),
    ("xen-domid", true, Refused(XEN)),
    ("xen-domid-restrict", false, Refused(XEN)),
];

/// Name and value of an option.
pub(super) type Named = (String, Option<String>);

/// Returns whether a value follows an option, and the option's treatment; `None` if QEMU 10 has no
/// such option.
pub(super) fn known(name: &str) -> Option<(bool, Fate)> {
    let found = OPTIONS.iter().find(|(known, ..)| *known == name);
    found.map(|(_, has_value, fate)| (*has_value, *fate))
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
    fn every_qemu_option_is_known_with_its_number_of_arguments() {
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
        for (name, ours, _) in OPTIONS {
            // Options of other QEMU versions are unknown to the installed QEMU.
            if let Some(qemus) = has_value(name) {
                assert_eq!(*ours, qemus, "-{name}");
            }
        }
        let sorted = OPTIONS.windows(2).all(|pair| pair[0].0 < pair[1].0);
        assert!(sorted && OPTIONS.len() > 110);
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
