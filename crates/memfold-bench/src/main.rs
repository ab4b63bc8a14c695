//! The program `memfold-bench`: the studies, the demo and the self-test. Each uses a test lab
//! ([`memfold_lab::Lab`]): a private daemon with its own VMs.

mod clones;
mod command_line;
mod demo;
mod desktops;
mod figure;
mod fleet;
mod fold;
mod folding;
mod fork;
mod generate;
mod hints;
mod host;
mod images;
mod ksm;
mod loop_disk;
mod mappings;
mod output;
mod pipeline;
mod qemu_way;
mod random;
mod record;
mod remote;
mod report;
mod rightsize;
mod scale;
mod segments;
mod selftest;
mod snapshots;
mod study;
mod wait;
mod warmth;

use std::process::ExitCode;

fn main() -> ExitCode {
    memfold_host::set_commit(env!("MEMFOLD_GIT"));
    command_line::main()
}
