//! Test of the symbols that the program `memfold` exports. It must export none of the functions
//! that memfold's library replaces in QEMU, such as `madvise`.

use std::path::Path;
use std::process::Command;

use crate::support::{out, program};

/// Returns the symbol names that `nm` lists for a file.
fn names(file: &Path, options: &[&str]) -> Vec<String> {
    let listed = Command::new("nm").args(options).arg(file).output();
    let listed = out(&listed.expect("nm (binutils) comes with the linker"));
    let name = |line: &str| line.split_whitespace().last().map(str::to_owned);
    listed.lines().filter_map(name).collect()
}

#[test]
fn the_preload_library_interposes_madvise_and_the_program_memfold_does_not() {
    let program = program().get_program().to_owned();
    let program = Path::new(&program);
    let library = program.with_file_name(memfold_host::files::LIBRARY);
    let shown = ["-D", "--defined-only"];
    assert!(names(&library, &shown).contains(&"madvise".to_owned()));
    let of_program = names(program, &shown);
    assert!(
        !of_program.contains(&"madvise".to_owned()),
        "{of_program:?}"
    );
    // The constructor that starts the library's thread is in this crate.
    let all = names(program, &["--defined-only"]);
    assert!(all.len() > 1000, "{} symbols, stripped?", all.len());
    let of_library: Vec<_> = all
        .iter()
        .filter(|name| name.contains("memfold_qemu"))
        .collect();
    assert!(of_library.is_empty(), "{of_library:?}");
}
