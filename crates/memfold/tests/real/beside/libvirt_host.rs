//! Starts a libvirtd for one test in a mount namespace, in which no other libvirt has files. All
//! its files vanish with the namespace.
//!
//! With `MEMFOLD_LIBVIRT_SUITE` (scripts/soak.txt), the namespace has the file system of that
//! Debian suite, with its libvirt and its QEMU, made by `scripts/libvirt-root`. Files of this host
//! that the test and memfold use have the same paths there.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_host::{files, guest_images};
use memfold_testkit::{report_skip, wait_until};
use rustix::process::Pid;

/// Shell script that makes the namespace's directories and keeps the namespace until it is killed.
/// Images are read-only, because libvirt changes the owner of files that a domain may open. A
/// domain's user may use `/dev/kvm`, or it does not exist, as on any host. (If only the probe of a
/// QEMU could use it, libvirt would probe every QEMU again at each query, which takes nine minutes
/// of this test and once exceeded virsh's timeout.)
const NAMESPACE: &str = r#"set -e
own=$1
if test -d "$own/root"; then
    root=$own/root
    mount --bind "$root" "$root"
    for directory in /dev /proc /sys; do mount --rbind "$directory" "$root$directory"; done
    while read -r directory; do
        mkdir -p "$root$directory"
        mount --bind "$directory" "$root$directory"
    done < "$own/shared"
    cd "$root"
    pivot_root . mnt
    umount --lazy /mnt
    cd /
fi
cat /etc/passwd > "$own/passwd"
cat /etc/group > "$own/group"
if ! getent passwd libvirt-qemu > "$own/found"; then
    echo 'libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin' >> "$own/passwd"
    echo 'libvirt-qemu:x:64055:' >> "$own/group"
fi
mount --bind "$own/passwd" /etc/passwd
mount --bind "$own/group" /etc/group
mount --bind "$own/etc" /etc/libvirt
if mountpoint -q /sys/fs/cgroup; then umount --recursive --lazy /sys/fs/cgroup; fi
for directory in /run /var/lib /var/cache /var/log; do mount -t tmpfs -o mode=755 libvirt "$directory"; done
mkdir /var/lib/libvirt
if test -c /dev/kvm; then
    cp --archive /dev/kvm "$own/kvm"
    chmod 666 "$own/kvm"
    mount --bind "$own/kvm" /dev/kvm
fi
while read -r from to; do
    mount --bind "$from" "$to"
    mount -o remount,bind,ro "$to"
done < "$own/images"
touch "$own/ready"
exec sleep infinity
"#;

/// Shell script that kills every QEMU of the namespace's libvirt.
const KILL: &str = r#"for file in /run/libvirt/qemu/*.pid; do
    case $file in */driver.pid | *'*'*) ;; *) kill -9 "$(cat "$file")" ;; esac
done"#;

/// Returns the Debian suite whose libvirt and QEMU are tested; `None`: those of this host.
pub fn suite() -> Option<String> {
    std::env::var("MEMFOLD_LIBVIRT_SUITE").ok()
}

/// Unpacks the file system of a suite, and records which files of this host are visible in it.
fn unpack_root(suite: &str, place: &Path, own: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/libvirt-root");
    let output = Command::new(script).arg(suite).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{wrong}");
    let root = own.join("root");
    fs::create_dir(&root).unwrap();
    let archive = said.lines().last().unwrap();
    let unpacked = Command::new("tar")
        .args(["-xf", archive, "-C"])
        .arg(&root)
        .status();
    assert!(unpacked.unwrap().success());
    let program = Path::new(env!("CARGO_BIN_EXE_memfold")).parent().unwrap();
    let images = memfold_host::image_directory().unwrap();
    let shared = [place, program, &images].map(|path| format!("{}\n", path.display()));
    fs::write(own.join("shared"), shared.concat()).unwrap();
}

/// Returns whether there is a libvirt to test with.
pub fn is_there() -> bool {
    let missing = ["libvirtd", "virsh", "unshare", "nsenter"]
        .into_iter()
        .find(|name| files::program(name).is_none());
    let Some(name) = missing else { return true };
    assert!(
        std::env::var_os("MEMFOLD_REAL").is_none(),
        "MEMFOLD_REAL is set and there is no {name}; run 'scripts/setup tests'"
    );
    report_skip(&format!("no {name}; run 'scripts/setup tests'"));
    false
}

/// Prepares files that all hosts of a test see: the user's QEMU, memfold's library, kernels and
/// images of guests, disks.
pub fn prepare(place: &Path) {
    let open = |path: &Path| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    open(place);
    for directory in ["qemu", "lib", "images", "disks"] {
        fs::create_dir(place.join(directory)).unwrap();
    }
    let qemu = files::program("qemu-system-x86_64").unwrap();
    std::os::unix::fs::symlink(qemu, emulator(place)).unwrap();
    let library = memfold_host::library().unwrap();
    fs::copy(library, place.join("lib/libmemfold_qemu.so")).unwrap();
    open(&place.join("lib/libmemfold_qemu.so"));
    for (name, image) in guest_images().unwrap() {
        File::create(place.join("images").join(&name)).unwrap();
        for (from, kind) in [(&image.kernel, "kernel"), (&image.initrd, "initrd")] {
            fs::copy(from, place.join(format!("images/{name}.{kind}"))).unwrap();
        }
    }
}

/// Returns the path of the user's QEMU.
pub fn emulator(place: &Path) -> PathBuf {
    place.join("qemu/qemu-system-x86_64")
}

/// Makes a disk over a guest image.
pub fn disk(place: &Path, name: &str, image: &str) -> PathBuf {
    let path = place.join(format!("disks/{name}.qcow2"));
    let made = Command::new("qemu-img")
        // The size is given, because the image is not visible here.
        .args(["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b"])
        .args([&place.join("images").join(image), &path])
        .arg("6G")
        .status();
    assert!(made.unwrap().success());
    path
}

/// Returns the XML of a domain as users write it.
pub fn domain_xml(place: &Path, name: &str, disk: &Path, image: &str) -> String {
    let at = place.display();
    format!(
        r#"<domain type='qemu'>
  <name>{name}</name>
  <metadata><other:thing xmlns:other="urn:other" a='1'>  kept &amp; whole </other:thing></metadata>
  <memory unit='MiB'>512</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{at}/images/{image}.kernel</kernel>
    <initrd>{at}/images/{image}.initrd</initrd>
    <cmdline>root=/dev/vda rw console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='maximum'/>
  <on_reboot>restart</on_reboot>
  <devices>
    <emulator>{}</emulator>
    <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{}'/><target dev='vda' bus='virtio'/></disk>
    <serial type='pty'/>
    <graphics type='vnc' port='-1' autoport='yes' passwd='secret'/>
    <memballoon model='virtio' freePageReporting='on'/>
  </devices>
</domain>
"#,
        emulator(place).display(),
        disk.display()
    )
}

/// Returns a command for a program in the mount namespace of a process.
pub fn command_in(pid: u32, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--mount=/proc/{pid}/ns/mnt"));
    command.arg("--").arg(program).stdin(Stdio::null());
    command
}

/// A host with a libvirtd.
pub struct Host {
    ended: Arc<AtomicBool>,
    own: PathBuf,
    holder: Child,
    libvirtd: Child,
}

impl Host {
    /// Starts libvirtd. The host's own files are in `place/NAME`.
    pub fn start(place: &Path, name: &str, number: u32) -> Self {
        let own = place.join(name);
        fs::create_dir_all(own.join("etc")).unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
        let images = guest_images().unwrap();
        let line = |(name, image): (&String, &memfold_host::GuestImage)| {
            let to = place.join("images").join(name);
            format!("{} {}\n", image.disk.display(), to.display())
        };
        fs::write(
            own.join("images"),
            images.iter().map(line).collect::<String>(),
        )
        .unwrap();
        if let Some(suite) = suite() {
            unpack_root(&suite, place, &own);
        }
        // Migration identifies hosts by this UUID. The sockets are at paths that other namespaces
        // see.
        let conf = format!(
            "auth_unix_rw = \"none\"\nunix_sock_dir = \"{}\"\nhost_uuid = \"11111111-2222-4333-8444-{number:012}\"\n",
            own.display()
        );
        fs::write(own.join("etc/libvirtd.conf"), conf).unwrap();
        // virtlogd would be one more process. Each host has ports of its own: two libvirtds that
        // look for a free port at once find the same one.
        let [vnc, migration] = [6100, 49_300].map(|first| first + number * 20);
        let qemu = format!(
            "stdio_handler = \"file\"\nremote_display_port_min = {vnc}\nremote_display_port_max = {}\nmigration_port_min = {migration}\nmigration_port_max = {}\n",
            vnc + 10,
            migration + 10
        );
        fs::write(own.join("etc/qemu.conf"), qemu).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        reap(ended.clone());
        let holder = Command::new("unshare")
            .args([
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                NAMESPACE,
                "sh",
            ])
            .arg(&own)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        wait("the namespace", || own.join("ready").exists());
        let mut host = Self {
            ended,
            libvirtd: spawn_libvirtd(&holder, &own),
            own,
            holder,
        };
        host.answers();
        let versions = host.virsh(&["version"]).unwrap();
        println!("{}", versions.trim());
        host
    }

    /// Returns the first number of libvirt's version.
    pub fn libvirt_major(&self) -> u32 {
        let versions = self.virsh(&["version"]).unwrap();
        let line = versions
            .lines()
            .find_map(|line| line.split_once("libvirt "));
        let (_, version) = line.unwrap_or_else(|| panic!("{versions}"));
        version.split('.').next().unwrap().parse().unwrap()
    }

    fn answers(&mut self) {
        let socket = self.own.join("libvirt-sock");
        wait("libvirtd", || {
            let ended = self.libvirtd.try_wait().unwrap();
            assert!(ended.is_none(), "libvirtd ended: {}", self.log());
            socket.exists() && self.virsh(&["list"]).is_ok()
        });
    }

    /// Kills libvirtd and starts another one after `away`; domains keep running.
    pub fn restart_libvirtd(&mut self, away: Duration) {
        self.libvirtd.kill().unwrap();
        self.libvirtd.wait().unwrap();
        std::thread::sleep(away);
        self.libvirtd = spawn_libvirtd(&self.holder, &self.own);
        self.answers();
    }

    pub fn libvirtd(&self) -> Pid {
        Pid::from_child(&self.libvirtd)
    }

    /// Returns the process whose mount namespace is the host's.
    pub fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// Returns the URI by which another host connects to this libvirt.
    pub fn uri(&self) -> String {
        let socket = self.own.join("libvirt-sock");
        format!("qemu+unix:///system?socket={}", socket.display())
    }

    /// Returns a command for a program on this host.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        command_in(self.pid(), program)
    }

    pub fn virsh(&self, arguments: &[&str]) -> Result<String, String> {
        let mut virsh = self.command("virsh");
        let output = virsh
            .args(["-q", "-c", "qemu:///system"])
            .args(arguments)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            Ok(said)
        } else {
            Err(format!(
                "virsh {arguments:?}: {said}{}",
                String::from_utf8_lossy(&output.stderr)
            ))
        }
    }

    /// Runs `virsh`, which must succeed, and returns its output.
    #[track_caller]
    pub fn ask(&self, arguments: &[&str]) -> String {
        let began = Instant::now();
        let said = self.virsh(arguments).unwrap();
        println!(
            "virsh {}: {:.1} s",
            arguments.join(" "),
            began.elapsed().as_secs_f64()
        );
        said
    }

    /// Returns the state of a domain, in virsh's words.
    pub fn state(&self, domain: &str) -> String {
        let said = self.virsh(&["domstate", domain]).unwrap();
        said.trim().to_owned()
    }

    /// Returns the XML of a domain, as libvirt stores it.
    pub fn xml(&self, domain: &str) -> String {
        self.virsh(&["dumpxml", "--inactive", "--security-info", domain])
            .unwrap()
    }

    /// Returns the output of a domain's QEMU and of its wrapper.
    pub fn qemu_log(&self, domain: &str) -> String {
        let path = format!("/var/log/libvirt/qemu/{domain}.log");
        let output = self.command("cat").arg(path).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.own.join("libvirtd.log")).unwrap_or_default()
    }
}

fn spawn_libvirtd(holder: &Child, own: &Path) -> Child {
    let log = File::options()
        .create(true)
        .append(true)
        .open(own.join("libvirtd.log"))
        .unwrap();
    // virsh, and so memfold, finds the sockets at their usual paths.
    let begin = r#"mkdir -p /run/libvirt
for name in libvirt-sock libvirt-sock-ro; do ln -sf "$1/$name" /run/libvirt/; done
exec libvirtd --config "$1/etc/libvirtd.conf""#;
    Command::new("nsenter")
        .arg(format!("--mount=/proc/{}/ns/mnt", holder.id()))
        .args(["--", "sh", "-c", begin, "sh"])
        .arg(own)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("libvirtd's last words:\n{}", self.log());
        }
        let _ = self.libvirtd.kill();
        let _ = self.libvirtd.wait();
        let _ = self.command("sh").args(["-c", KILL]).status();
        let _ = self.holder.kill();
        let _ = self.holder.wait();
        self.ended.store(true, Ordering::Release);
    }
}

/// The line of `/proc/PID/status` with Debian's user libvirt-qemu.
const USER: &str = "Uid:\t64055\t";

/// Waits for QEMU processes of libvirt that have ended. They have no parent, and if process 1 does
/// not wait for them soon, libvirt waits half a minute until it takes them for gone.
fn reap(ended: Arc<AtomicBool>) {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    std::thread::spawn(move || {
        while !ended.load(Ordering::Acquire) {
            for entry in fs::read_dir("/proc").unwrap().flatten() {
                let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
                let has = |line: &str| status.lines().any(|l| l.starts_with(line));
                // Processes that this process has started itself are left out.
                if has("State:\tZ") && has(USER) && has(&format!("PPid:\t{}", std::process::id())) {
                    let pid = entry.file_name().to_string_lossy().parse().ok();
                    let pid = pid.and_then(Pid::from_raw);
                    let _ = rustix::process::waitpid(pid, rustix::process::WaitOptions::NOHANG);
                }
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    });
}

#[track_caller]
fn wait(what: &str, ready: impl FnMut() -> bool) {
    wait_until(what, Duration::from_secs(300), ready);
}
