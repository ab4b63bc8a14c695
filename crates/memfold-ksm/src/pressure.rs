//! Reads pressure stall information (PSI): the percentage of time in which tasks of this host
//! waited for CPU or memory. Under pressure, memfold makes KSM scan more slowly.
//!
//! Source: `Documentation/accounting/psi.rst`.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Percentage of the last ten seconds in which at least one task of this host waited
/// (`some avg10`). A value is null if the kernel does not measure it (no `CONFIG_PSI`, or `psi=0`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pressure {
    /// Percentage of the last ten seconds in which a task waited for a CPU.
    pub cpu_some_avg10: Option<f64>,
    /// Percentage of the last ten seconds in which a task waited for memory.
    pub memory_some_avg10: Option<f64>,
}

impl Pressure {
    /// Returns the present CPU and memory pressure of this host.
    #[must_use]
    pub fn now() -> Self {
        Self::read(Path::new("/proc/pressure"))
    }

    /// Returns the pressure that the files `cpu` and `memory` in directory `root` report.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let some = |name: &str| some_avg10(&fs::read_to_string(root.join(name)).ok()?);
        Self {
            cpu_some_avg10: some("cpu"),
            memory_some_avg10: some("memory"),
        }
    }
}

/// Returns 1.17 for `some avg10=1.17 avg60=4.06 avg300=4.69 total=106052673`.
fn some_avg10(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let word = line.split(' ').find_map(|w| w.strip_prefix("avg10="))?;
    word.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_avg10_value_of_partial_pressure_is_parsed_from_a_psi_file() {
        let tree = tempfile::tempdir().unwrap();
        let text = "some avg10=1.17 avg60=4.06 avg300=4.69 total=9\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=0\n";
        fs::write(tree.path().join("cpu"), text).unwrap();
        let pressure = Pressure::read(tree.path());
        assert_eq!(pressure.cpu_some_avg10, Some(1.17));
        assert_eq!(pressure.memory_some_avg10, None);
    }
}
