//! Test of `memfold serve --user`: a user without root's rights runs a daemon and VMs. The user may
//! open `/dev/userfaultfd`, as with the udev rule that memfold's package contains.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use memfold_testkit::skip;
use rustix::fs::{major, minor};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Value, json};

use super::support::{code, err, refused, wait};

/// User and group of the test: those of `nobody`.
const USER: &str = "65534";

/// Shell script that makes the first argument `/dev/userfaultfd` for the rest, run as the user.
const AS_USER: &str = "mount --bind \"$1\" /dev/userfaultfd && shift && exec setpriv --reuid 65534 --regid 65534 --clear-groups -- \"$@\"";

struct User {
    home: tempfile::TempDir,
    daemon: Option<Child>,
}

impl User {
    /// Creates the user's directories, with memfold and its library. `None` if this host does not
    /// allow the test.
    fn create() -> Option<Self> {
        let home = tempfile::tempdir().unwrap();
        let place = home.path();
        let open = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        open(place, 0o755);
        // The user may not be able to read the directory of the build.
        let library = memfold_host::files::library().unwrap();
        for (file, name) in [
            (Path::new(env!("CARGO_BIN_EXE_memfold")), "memfold"),
            (library.as_path(), "libmemfold_qemu.so"),
        ] {
            std::fs::copy(file, place.join(name)).unwrap();
            open(&place.join(name), 0o755);
        }
        for name in ["run", "home", "tmp"] {
            std::fs::create_dir(place.join(name)).unwrap();
            std::os::unix::fs::chown(place.join(name), Some(65534), Some(65534)).unwrap();
        }
        let device = std::fs::metadata("/dev/userfaultfd").ok()?.rdev();
        let numbers = [major(device).to_string(), minor(device).to_string()];
        let mut make = Command::new("mknod");
        make.arg(place.join("userfaultfd")).arg("c").args(numbers);
        if !make.status().ok()?.success() {
            return None;
        }
        open(&place.join("userfaultfd"), 0o666);
        // A file system may refuse to open devices.
        std::fs::File::open(place.join("userfaultfd")).ok()?;
        Some(Self { home, daemon: None })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let place = self.home.path();
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                AS_USER,
                "sh",
            ])
            .arg(place.join("userfaultfd"))
            .arg(place.join("memfold"))
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", place.join("home"))
            .env("XDG_RUNTIME_DIR", place.join("run"))
            .env("TMPDIR", place.join("tmp"))
            .env("MEMFOLD_QEMU_LIBRARY", place.join("libmemfold_qemu.so"))
            .current_dir("/")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        assert_eq!(code(&output), 0, "{arguments:?}: {}", err(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn start_daemon(&mut self) {
        let log = std::fs::File::create(self.home.path().join("log")).unwrap();
        let mut serve = self.command(&["serve", "--user"]);
        self.daemon = Some(serve.stderr(log).spawn().unwrap());
        wait("the user's daemon answers", || {
            code(&self.run(&["vm", "list"])) == 0
        });
    }

    fn end_daemon(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        kill_process(Pid::from_child(&daemon), Signal::TERM).unwrap();
        daemon.wait().unwrap();
    }
}

impl Drop for User {
    fn drop(&mut self) {
        if self.daemon.is_some() {
            self.run(&["vm", "stop", "--all", "--timeout", "0"]);
            self.end_daemon();
        }
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.home.path().join("log"));
            eprintln!("{}", log.unwrap_or_default());
        }
    }
}

#[test]
fn a_user_without_root_rights_runs_saves_and_clones_vms_with_a_daemon_of_their_own() {
    if !geteuid().is_root() {
        skip!("only root can become another user");
    }
    let Some(mut user) = User::create() else {
        skip!("no userfaultfd, or no device files in the temporary directory");
    };
    user.start_daemon();
    let vm = user.json(&[
        "vm", "run", "--name", "web", "--memory", "64M", "--domain", "d",
    ]);
    let pid = vm["pid"].as_u64().unwrap();
    let owner = std::fs::metadata(format!("/proc/{pid}")).unwrap().uid();
    assert_eq!(owner.to_string(), USER);
    // Nothing prevents folding.
    assert_eq!(vm["fold_problems"], json!([]), "{vm}");
    user.json(&["snapshot", "save", "web", "warm", "--keep", "all"]);
    user.json(&["clone", "warm", "--number", "2", "--no-wait", "--force"]);
    // A new daemon takes the VMs over.
    user.end_daemon();
    user.start_daemon();
    wait("all VMs are taken over", || {
        let vms = user.json(&["vm", "list"]);
        let mut vms = vms.as_array().unwrap().iter();
        vms.all(|vm| vm["state"] != "taking-over")
    });
    let vms = user.json(&["vm", "list"]);
    let names: Vec<&str> = vms
        .as_array()
        .unwrap()
        .iter()
        .map(|vm| vm["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["warm-1", "warm-2", "web"]);
    assert!(
        vms.as_array()
            .unwrap()
            .iter()
            .all(|vm| vm["fold_problems"] == json!([])),
        "{vms}"
    );
    let report = user.json(&["report"]);
    assert!(
        report["ledger"]["vms"].as_array().unwrap().len() == 3,
        "{report}"
    );
    // The user's files are in the user's directories.
    let place = user.home.path();
    for path in [
        "run/memfold/memfold.sock",
        "home/.local/share/memfold/snapshots/warm",
        "home/.local/state/memfold",
    ] {
        assert!(place.join(path).exists(), "{path}");
    }
    // What needs root says so.
    let tap = [
        "vm",
        "run",
        "--name",
        "t",
        "--memory",
        "64M",
        "--network",
        "disconnected",
    ];
    refused(&user.run(&tap), 1, &["CAP_NET_ADMIN"]);
    refused(&user.run(&["ksm", "start", "--domain", "d"]), 1, &["root"]);
}
