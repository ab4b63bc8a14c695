//! What all studies have in common: command-line options, and functions that run a study and draw
//! its figures.

use anyhow::ensure;
use clap::Args;
use memfold_units::ByteSize;
use serde_json::Value;

use crate::figure::Figure;

/// Options of a study.
#[derive(Args, Clone, Debug, Default)]
pub struct Options {
    /// Run a smaller and shorter study
    #[arg(long)]
    pub quick: bool,
    /// Run only this arm of `hints` or `rightsize` (may be given several times), `block-path` of
    /// `remote`, `starts` of `desktops`, `stalls` or `neighbours` of `mappings`, `engine` or
    /// `daemon` of `scale`, or `pipeline`, `vms`, `study-disk` or `warmth` of `snapshots`. A wrong
    /// name prints all
    #[arg(long = "arm", value_name = "NAME")]
    pub arms: Vec<String>,
    /// Most VMs at once, for `ksm` (4 by default; with --quick 2)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub vms: Option<u8>,
    /// RAM of the VM of `snapshots` (default: 512M to 8G; with --quick 1G and 2G), or of `fork`
    /// (2G; with --quick 512M)
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
}

impl Options {
    /// Fails if the user requested a part (`--arm`) that the study `study` does not have. `known`:
    /// names of its parts.
    pub fn check_arms(&self, study: &str, known: &[impl AsRef<str>]) -> anyhow::Result<()> {
        let known: Vec<&str> = known.iter().map(AsRef::as_ref).collect();
        let is_known = |name: &String| known.contains(&name.as_str());
        ensure!(
            self.arms.iter().all(is_known),
            "of '{study}' these parts can be had alone: {}",
            known.join(", ")
        );
        Ok(())
    }

    /// Returns whether the part `part` of a study is to run: the user requested this part, or no
    /// part at all.
    pub fn is_wanted(&self, part: &str) -> bool {
        self.arms.is_empty() || self.arms.iter().any(|name| name == part)
    }

    /// Returns `quick` if the user asked for a smaller and shorter study, else `full`.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// The functions of one study.
#[derive(Clone, Copy, Debug)]
pub struct Study {
    /// Function that runs the study. It returns a JSON object with `results`, `samples` and, if the
    /// study has VMs, `vms`. Key names contain the units.
    pub run: fn(&Options) -> anyhow::Result<Value>,
    /// Function that draws the study's figures from its record.
    pub figures: fn(&Value) -> Vec<Figure>,
    /// Whether the study has parts that the user can request with `--arm`.
    pub has_arms: bool,
}
