//! Runs all tests of lending RAM ([`crate::beside::lend`]) with iSCSI as the transport.

use std::process::Command;

use memfold_lend::Transport;
use memfold_testkit::skip;

use crate::beside::lend;

#[test]
fn when_iscsi_lenders_die_a_guest_that_swaps_to_their_memory_loses_no_byte() {
    if Command::new("tgtd").arg("--version").output().is_err() {
        skip!("tgtd is not installed (scripts/setup tests)");
    }
    lend::swap_while_lenders_die(Transport::Iscsi, lend::kills(2));
    lend::copy_fails(Transport::Iscsi);
    lend::lack_writes(Transport::Iscsi);
}
