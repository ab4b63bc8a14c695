//! Tests of file paths that users give to `memfold`'s commands: how relative paths are resolved,
//! and how errors name the path.

use std::path::Path;

use crate::support::{Daemon, code, err, program, refused};

#[test]
fn relative_paths_in_qemu_arguments_are_resolved_in_the_directory_of_the_caller() {
    let daemon = Daemon::start();
    let here = tempfile::tempdir().unwrap();
    std::fs::write(here.path().join("cd.iso"), vec![0; 1 << 20]).unwrap();
    let run = |directory: &Path, name: &str| {
        let mut memfold = program();
        memfold
            .arg("--socket")
            .arg(daemon.socket())
            .current_dir(directory);
        let vm = ["vm", "run", "--name", name, "--memory", "64M", "--no-fold"];
        memfold.args(vm).args(["--", "-S", "-cdrom", "cd.iso"]);
        memfold.output().unwrap()
    };
    let ran = run(here.path(), "here");
    assert_eq!(code(&ran), 0, "{}", err(&ran));
    refused(&run(Path::new("/"), "elsewhere"), 1, &["cd.iso"]);
}

#[test]
fn a_too_long_socket_path_is_refused_and_the_error_names_the_limit() {
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("s".repeat(100));
    let mut serve = program();
    serve
        .arg("--socket")
        .arg(&socket)
        .arg("serve")
        .arg("--state");
    let done = serve.arg(place.path()).output().unwrap();
    refused(
        &done,
        1,
        &[socket.to_str().unwrap(), "at most 107", "--socket"],
    );
}

#[test]
fn if_root_lacks_a_capability_doctor_names_it() {
    let mut setpriv = std::process::Command::new("setpriv");
    let state = tempfile::tempdir().unwrap();
    let done = setpriv
        .args(["--bounding-set", "-sys_ptrace"])
        .arg(program().get_program())
        .args(["doctor", "--state"])
        .arg(state.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert_eq!(done.status.code(), Some(3), "{said}");
    assert!(said.contains("root without CAP_SYS_PTRACE"), "{said}");
    assert!(!said.contains("run memfold as root"), "{said}");
    assert!(!said.contains("CAP_SYS_ADMIN"), "{said}");
}
