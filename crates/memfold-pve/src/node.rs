//! The files of a Proxmox VE node that memfold reads: configurations of VMs, process IDs, marks.
//!
//! Sources: `qm.conf(5)`; `pmxcfs(8)` for `/etc/pve`; `PVE/QemuServer/Helpers.pm` for
//! `/run/qemu-server`.

use std::fs;
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use memfold_vm::endpoints;
use rustix::process::Pid;

use super::mark::{Mark, MarkError};

/// Environment variable with the root directory of the node, for tests.
pub const ROOT_VARIABLE: &str = "MEMFOLD_PVE_ROOT";

/// What memfold needs from a VM's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Node that has the VM; `None`: this one.
    pub node: Option<String>,
    /// The VM's UUID (`smbios1`), if it has one.
    pub uuid: Option<String>,
}

/// A Proxmox VE node, by its root directory.
#[derive(Clone, Debug)]
pub struct Node {
    root: PathBuf,
}

impl Node {
    /// Returns this host, or the node that [`ROOT_VARIABLE`] names.
    #[must_use]
    pub fn here() -> Self {
        let root = std::env::var_os(ROOT_VARIABLE);
        Self::at(root.map_or_else(|| "/".into(), PathBuf::from))
    }

    /// Returns the node with this root directory.
    #[must_use]
    pub const fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// Returns the path of the program that qemu-server runs as `/usr/bin/kvm`.
    pub(crate) fn kvm(&self) -> PathBuf {
        self.root.join("usr/bin/kvm")
    }

    /// Returns the path of the QMP socket that the script makes QEMU create for memfold's daemon.
    #[must_use]
    pub fn qmp(&self, vmid: u32) -> PathBuf {
        self.root.join(format!("run/memfold-pve/{vmid}.qmp"))
    }

    /// Returns the numbers of this node's VMs, sorted; none on a host without Proxmox VE.
    pub fn vms(&self) -> io::Result<Vec<u32>> {
        numbers(&self.root.join("etc/pve/qemu-server"), ".conf")
    }

    /// Returns what the configuration of a VM says, of this node or of another one in the cluster;
    /// `None` if the cluster has no VM with this number.
    pub fn config(&self, vmid: u32) -> io::Result<Option<Config>> {
        let name = format!("qemu-server/{vmid}.conf");
        let read = |place: &Path, node: Option<String>| {
            let text = if_exists(fs::read_to_string(place.join(&name)))?;
            let uuid = text.as_deref().map(uuid);
            Ok::<_, io::Error>(uuid.map(|uuid| Config { node, uuid }))
        };
        if let Some(own) = read(&self.root.join("etc/pve"), None)? {
            return Ok(Some(own));
        }
        let nodes = if_exists(fs::read_dir(self.root.join("etc/pve/nodes")))?;
        for entry in nodes.into_iter().flatten() {
            let entry = entry?;
            let node = entry.file_name().to_string_lossy().into_owned();
            if let Some(other) = read(&entry.path(), Some(node))? {
                return Ok(Some(other));
            }
        }
        Ok(None)
    }

    /// Returns the process of a VM's QEMU; `None` if the VM does not run on this node.
    #[must_use]
    pub fn process(&self, vmid: u32) -> Option<Pid> {
        let file = self.root.join(format!("run/qemu-server/{vmid}.pid"));
        let pid: i32 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
        let pid = Pid::from_raw(pid.max(0))?;
        // After QEMU was killed, its number in the file may have become another process.
        let words = endpoints::command_line(pid).ok()?;
        let name = format!("/qemu-server/{vmid}.pid");
        let is_vm = words
            .windows(2)
            .any(|pair| pair[0] == "-pidfile" && pair[1].ends_with(&name));
        is_vm.then_some(pid)
    }

    fn marks(&self) -> PathBuf {
        self.root.join("etc/memfold/pve")
    }

    /// Returns the numbers of the VMs that have a mark, sorted.
    pub fn marked(&self) -> io::Result<Vec<u32>> {
        numbers(&self.marks(), "")
    }

    /// Returns the mark of a VM; `None` if memfold is not enabled for the VM on this node.
    pub fn mark(&self, vmid: u32) -> Result<Option<Mark>, MarkError> {
        let path = self.marks().join(vmid.to_string());
        match if_exists(fs::read_to_string(&path)) {
            Ok(None) => Ok(None),
            Ok(Some(text)) => toml::from_str(&text)
                .map(Some)
                .map_err(|source| MarkError::Content { path, source }),
            Err(source) => Err(MarkError::File { path, source }),
        }
    }

    /// Writes a mark. The daemon sees the old or the new content, also after a power failure: an
    /// empty mark would be valid, and would take the VM out of its trust domain.
    pub(crate) fn write_mark(&self, vmid: u32, mark: &Mark) -> Result<(), MarkError> {
        let path = self.marks().join(vmid.to_string());
        // Two optional strings are always valid TOML.
        let text = toml::to_string(mark).unwrap_or_default();
        let write = || {
            fs::create_dir_all(self.marks())?;
            let mut file = tempfile::NamedTempFile::new_in(self.marks())?;
            file.write_all(text.as_bytes())?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            fs::File::open(self.marks())?.sync_all()
        };
        write().map_err(|source| MarkError::File {
            path: path.clone(),
            source,
        })
    }

    /// Removes a mark, and the directory of the marks if it is empty then. Returns whether there
    /// was a mark.
    pub(crate) fn remove_mark(&self, vmid: u32) -> Result<bool, MarkError> {
        let path = self.marks().join(vmid.to_string());
        let removed = if_exists(fs::remove_file(&path));
        // Fails if the directory has other marks.
        let _ = fs::remove_dir(self.marks());
        let removed = removed.map_err(|source| MarkError::File { path, source })?;
        Ok(removed.is_some())
    }
}

/// Returns `None` if a file or directory does not exist.
fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// Returns the numbers that are names of files in a directory, before `ending`, sorted; none if the
/// directory does not exist.
fn numbers(directory: &Path, ending: &str) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in if_exists(fs::read_dir(directory))?.into_iter().flatten() {
        let name = entry?.file_name();
        let stem = name.to_str().and_then(|name| name.strip_suffix(ending));
        found.extend(stem.and_then(|stem| stem.parse::<u32>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

/// Returns the VM's UUID from a configuration. The settings of snapshots follow in sections, and do
/// not count.
fn uuid(config: &str) -> Option<String> {
    let current = config.lines().take_while(|line| !line.starts_with('['));
    let mut smbios = current.filter_map(|line| line.strip_prefix("smbios1:"));
    let mut fields = smbios.next()?.split(',');
    let uuid = fields.find_map(|field| field.trim().strip_prefix("uuid="));
    uuid.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uuid_of_a_configuration_is_that_of_the_vm_and_not_of_its_snapshots() {
        let snapshot = "\n[before]\nsmbios1: uuid=old\n";
        let own = "#note\nname: web\nsmbios1: manufacturer=eA==,uuid=7b10d7af-b932,base64=1\n";
        assert_eq!(
            uuid(&format!("{own}{snapshot}")).as_deref(),
            Some("7b10d7af-b932")
        );
        assert_eq!(uuid(&format!("name: web\n{snapshot}")), None);
    }

    #[test]
    fn a_vm_is_found_on_its_node_of_the_cluster() {
        let root = tempfile::tempdir().unwrap();
        let node = Node::at(root.path().to_owned());
        assert_eq!(node.vms().unwrap(), Vec::<u32>::new());
        assert_eq!(node.config(100).unwrap(), None);
        for name in ["one", "two"] {
            fs::create_dir_all(
                root.path()
                    .join(format!("etc/pve/nodes/{name}/qemu-server")),
            )
            .unwrap();
        }
        std::os::unix::fs::symlink(
            "nodes/one/qemu-server",
            root.path().join("etc/pve/qemu-server"),
        )
        .unwrap();
        for (name, text) in [
            ("one/qemu-server/100", ""),
            ("two/qemu-server/101", "smbios1: uuid=a\n"),
        ] {
            fs::write(root.path().join(format!("etc/pve/nodes/{name}.conf")), text).unwrap();
        }
        assert_eq!(node.vms().unwrap(), [100]);
        assert_eq!(node.config(100).unwrap(), Some(Config::default()));
        let other = Config {
            node: Some("two".into()),
            uuid: Some("a".into()),
        };
        assert_eq!(node.config(101).unwrap(), Some(other));
        assert_eq!(node.config(102).unwrap(), None);
    }

    #[test]
    fn a_process_id_of_another_program_is_not_a_running_vm() {
        let root = tempfile::tempdir().unwrap();
        let node = Node::at(root.path().to_owned());
        assert_eq!(node.process(100), None);
        fs::create_dir_all(root.path().join("run/qemu-server")).unwrap();
        let pid = std::process::id().to_string();
        fs::write(root.path().join("run/qemu-server/100.pid"), pid).unwrap();
        assert_eq!(node.process(100), None);
        for wrong in ["-1", "0", "x", ""] {
            fs::write(root.path().join("run/qemu-server/100.pid"), wrong).unwrap();
            assert_eq!(node.process(100), None, "{wrong}");
        }
    }
}
