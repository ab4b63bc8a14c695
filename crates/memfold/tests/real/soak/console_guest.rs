//! A guest that takes the place of the host: a test types into its serial console, and reads what
//! the console shows.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const IMAGE: &str = "trixie-a";

/// A guest with a console. Dropping it kills its QEMU.
pub struct Machine {
    pub child: Child,
    /// What the console has shown.
    console: PathBuf,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command, which must succeed.
#[track_caller]
pub fn run(command: &mut Command) {
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {said}");
}

/// Boots a guest, and waits for the prompt of its console. Its second disk, of `size`, holds the
/// files of the directory `payload`. `machine`: QEMU's arguments for machine and memory. `words`:
/// more words for the kernel's command line.
pub fn boot(payload: &Path, size: &str, machine: &[&str], words: &str) -> Machine {
    let images = memfold_host::guest_images().unwrap();
    let image = &images[IMAGE];
    let disk = payload.with_extension("img");
    run(Command::new("mke2fs")
        .args(["-q", "-t", "ext4", "-d"])
        .args([payload, &disk])
        .arg(size));
    let console = payload.with_extension("console");
    let drive = |file: &Path| format!("if=virtio,format=raw,snapshot=on,file={}", file.display());
    let root = "root=/dev/vda rw console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable";
    let child = Command::new("qemu-system-x86_64")
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"])
        .args(machine)
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initrd)
        .args(["-append", &format!("{root} {words}")])
        .args(["-drive", &drive(&image.disk), "-drive", &drive(&disk)])
        .args(["-serial", "stdio"])
        .stdout(std::fs::File::create(&console).unwrap())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let machine = Machine { child, console };
    machine.says("root@trixie-a:~# ");
    machine
}

impl Machine {
    /// Waits until the console has shown `words`. Returns all that it has shown.
    #[track_caller]
    pub fn says(&self, words: &str) -> String {
        let end = Instant::now() + memfold_testkit::patience(Duration::from_secs(900));
        loop {
            let said = std::fs::read(&self.console).unwrap_or_default();
            let said = String::from_utf8_lossy(&said).into_owned();
            if said.contains(words) {
                return said;
            }
            assert!(Instant::now() < end, "no '{words}' in: {said}");
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}
