//! All of [`crate::beside::lend`], by iSCSI.

use std::process::Command;

use memfold_lend::Transport;
use memfold_testkit::skip;

use crate::beside::lend;

#[test]
fn by_iscsi_a_guest_swaps_on_lent_memory_and_loses_no_byte_when_lenders_die() {
    if Command::new("tgtd").arg("--version").output().is_err() {
        skip!("tgtd is not installed (scripts/setup tests)");
    }
    lend::swap_while_lenders_die(Transport::Iscsi, lend::kills(2));
    lend::lack_writes(Transport::Iscsi);
}
