//! Runs the program in docs/kernel that shows a fault of Linux 6.18, and compares what the program
//! sees with the table of known faults.

use std::path::Path;
use std::process::Command;

use memfold_host::kernel_faults::{FAULTS, Presence};
use memfold_host::kernel_release::Release;

/// Time for the program to see the fault, in seconds. Linux 6.18.44 showed it within a second.
const SECONDS: &str = "5";

#[test]
fn the_program_in_docs_sees_uncounted_moves_only_on_kernels_that_the_table_names() {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/kernel/uffdio-move-count.c");
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("uffdio-move-count");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .args([&program, &source]);
    let Ok(compiled) = compiler.output() else {
        memfold_testkit::skip!("no C compiler");
    };
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
    let output = Command::new(&program).arg(SECONDS).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let fault = FAULTS.iter().find(|f| f.id == "commit f025ca73decd");
    let presence = Release::parse(&release).map(|release| fault.unwrap().presence(release));
    match output.status.code() {
        // The program may need more time to see the fault than this test gives it.
        Some(0) => assert!(text.contains("not seen"), "{text}"),
        Some(1) => {
            assert!(
                text.contains("SEEN: moved pages were not counted"),
                "{text}"
            );
            assert!(text.contains("told (uffdio_move.move)"), "{text}");
            assert_ne!(presence, Some(Presence::Absent), "{release}: {text}");
        }
        Some(77) => memfold_testkit::skip!("{text}"),
        code => panic!("{code:?}: {text}"),
    }
}
