//! Runs all tests of lending RAM ([`crate::beside::lend`]) with iSCSI as the transport.

use std::process::Command;

use memfold_lend::Transport;
use memfold_testkit::skip;

use crate::beside::lend;

#[test]
fn a_guest_swapping_on_memory_lent_over_iscsi_loses_no_byte_when_lenders_die() {
    if Command::new("tgtd").arg("--version").output().is_err() {
        skip!("tgtd is not installed (scripts/setup tests)");
    }
    lend::swap_while_lenders_die(Transport::Iscsi, lend::kills(2));
    lend::lack_writes(Transport::Iscsi);
}
