//! A fake libvirt: a `virsh` that keeps the XML of its domains in files, and a QEMU with memfold's
//! wrapper script.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Output;

use tempfile::TempDir;

use super::support::program;

/// `virsh`, as far as memfold uses it. Before and after each command, a script of the test may
/// change the domains, as another program would: `before-COMMAND`, `after-COMMAND`.
const VIRSH: &str = r#"#!/bin/sh
cd "${0%/*}" || exit 1
while [ "$1" = --quiet ] || [ "$1" = --connect ]; do
    [ "$1" = --connect ] && shift
    shift
done
command=$1
for word; do
    case $word in --domain=*) name=${word#--domain=} ;; esac
done
echo "$*" >> calls
run() { if [ -e "$1" ]; then . "./$1"; fi; }
run "before-$command"
case $command in
dominfo)
    [ -e "$name.xml" ] || { echo "error: failed to get domain '$name'" >&2; exit 1; }
    printf 'Id:             -\nName:           %s\nPersistent:     yes\nManaged save:   no\n' "$name"
    ;;
dumpxml) cat "$name.xml" ;;
define) cp "$3" "$(sed -n 's:.*<name>\(.*\)</name>.*:\1:p' "$3").xml" ;;
esac
run "after-$command"
"#;

/// A host with libvirt.
pub struct FakeLibvirt(TempDir);

impl FakeLibvirt {
    /// Makes a host without domains.
    pub fn new() -> Self {
        let libvirt = Self(tempfile::tempdir().unwrap());
        let library = libvirt.path("library.so");
        fs::write(&library, "").unwrap();
        let wrapper = include_str!("../../../../deploy/libvirt/memfold-qemu-system-x86_64");
        let packaged = "library=/usr/lib/memfold/libmemfold_qemu.so";
        assert!(wrapper.contains(packaged));
        let wrapper = wrapper.replace(packaged, &format!("library={}", library.display()));
        for (name, text) in [
            ("virsh", VIRSH),
            ("qemu-system-x86_64", "#!/bin/sh\n"),
            ("memfold-qemu-system-x86_64", &wrapper),
        ] {
            fs::write(libvirt.path(name), text).unwrap();
            fs::set_permissions(libvirt.path(name), Permissions::from_mode(0o755)).unwrap();
        }
        libvirt
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Defines a domain, with this text among its devices.
    pub fn define(&self, name: &str, devices: &str) {
        let xml = format!(
            "<domain type='kvm'>\n  <name>{name}</name>\n  <os>\n    <type arch='x86_64' machine='q35'>hvm</type>\n  </os>\n  \
             <devices>\n    <emulator>{}</emulator>\n{devices}  </devices>\n</domain>\n",
            self.path("qemu-system-x86_64").display()
        );
        fs::write(self.path(&format!("{name}.xml")), xml).unwrap();
    }

    /// Returns the stored XML of a domain.
    pub fn xml(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.xml"))).unwrap()
    }

    /// Lets a shell script run before or after each call of a command of virsh.
    pub fn meanwhile(&self, when: &str, script: &str) {
        fs::write(self.path(when), script).unwrap();
    }

    /// Runs `memfold libvirt` on this host.
    pub fn run(&self, arguments: &[&str]) -> Output {
        let mut command = program();
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.0.path().display()));
        command.args(["--socket", "/nonexistent", "libvirt"]);
        command.args(arguments).output().unwrap()
    }
}
