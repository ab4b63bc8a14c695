//! A fake node of Proxmox VE: a root directory with the configurations of a cluster of two nodes,
//! memfold's script as `kvm`, and `qm` with the output that `qm(1)` documents.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// Root directory of the node `one`.
pub struct FakeNode(TempDir);

impl FakeNode {
    /// Creates a node with the package memfold-proxmox. `library`: memfold's library; `kvm`: a
    /// shell script in the place of Proxmox's QEMU.
    pub fn new(library: &Path, kvm: &str) -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        let root = node.root();
        for directory in [
            "etc/memfold",
            "etc/pve/nodes/one/qemu-server",
            "etc/pve/nodes/two/qemu-server",
            "run/qemu-server",
            "showcmd",
            "tools",
            "usr/bin",
            "usr/lib/memfold",
        ] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        symlink("nodes/one/qemu-server", root.join("etc/pve/qemu-server")).unwrap();
        symlink(library, root.join("usr/lib/memfold/libmemfold_qemu.so")).unwrap();
        let script = include_str!("../../../../deploy/proxmox/kvm");
        let qm = "#!/bin/sh\n[ \"$1\" = showcmd ] && cat \"$MEMFOLD_PVE_ROOT/showcmd/$2\" 2>/dev/null && exit\n\
                  echo \"storage 'away' is not online\" >&2\nexit 255\n";
        for (name, text) in [
            ("usr/bin/kvm", script),
            ("usr/bin/memfold-kvm", kvm),
            ("tools/qm", qm),
        ] {
            fs::write(root.join(name), text).unwrap();
            fs::set_permissions(root.join(name), Permissions::from_mode(0o755)).unwrap();
        }
        node
    }

    pub fn root(&self) -> &Path {
        self.0.path()
    }

    /// Writes the configuration of a VM, and its command line as `qm showcmd` prints it.
    pub fn add(&self, node: &str, vmid: u32, config: &str, line: &str) {
        let file = format!("etc/pve/nodes/{node}/qemu-server/{vmid}.conf");
        fs::write(self.root().join(file), config).unwrap();
        fs::write(self.root().join(format!("showcmd/{vmid}")), line).unwrap();
    }

    /// Makes a command run on this node.
    pub fn on(&self, mut command: Command) -> Command {
        let path = std::env::var("PATH").unwrap();
        let tools = self.root().join("tools");
        command.env("MEMFOLD_PVE_ROOT", self.root());
        command.env("PATH", format!("{}:{path}", tools.display()));
        command
    }

    /// Returns an archive of all files that belong to the node's packages and configuration.
    pub fn archive(&self) -> Vec<u8> {
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(self.root());
        tar.args(["--sort=name", "--mtime=@0", "-c", "etc", "usr"]);
        let output = tar.output().unwrap();
        assert!(output.status.success());
        output.stdout
    }
}
