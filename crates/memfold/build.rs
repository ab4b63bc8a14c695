//! Tells the program from which commit it is built, by setting `MEMFOLD_GIT` for the compiler.
//! Metrics and the studies' results contain the commit.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=Cargo.toml");
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    // The log of HEAD grows with every commit and checkout; a package without a repository has
    // none.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        if Path::new(&log).exists() {
            println!("cargo:rerun-if-changed={log}");
        }
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into());
    println!("cargo:rustc-env=MEMFOLD_GIT={commit}");
}
