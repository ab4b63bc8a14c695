//! Tests of the settings of `memfold lend`: limit, addresses and protocol.

use crate::support::{Daemon, code, err, refused, wait};

const MIB: u64 = 1 << 20;

#[test]
fn while_a_host_lends_the_option_max_alone_changes_the_limit_and_keeps_the_addresses() {
    let lender = Daemon::start_with(&["--host", "a"]);
    for (how, other) in [
        (&["--listen", "127.0.0.1"][..], &["--unix"][..]),
        (&["--unix"], &["--listen", "127.0.0.1"]),
    ] {
        let output = lender.run(&[&["lend", "--max", "64M"], how].concat());
        if code(&output) == 3 {
            return memfold_testkit::report_skip(&err(&output));
        }
        assert_eq!(code(&output), 0, "{}", err(&output));
        let listens = lender.json(&["lend"])["listens"].clone();
        let status = lender.json(&["lend", "--max", "32M"]);
        assert_eq!(status["max_bytes"], 32 * MIB);
        assert_eq!(status["listens"], listens);
        // The next daemon lends in the same way.
        let settings = lender.json(&["leases"])["lends_as"].clone();
        assert_eq!(settings["max_bytes"], 32 * MIB);
        assert_eq!(settings["listen"].is_null(), how == ["--unix"]);
        refused(
            &lender.run(&[&["lend", "--max", "48M"], other].concat()),
            1,
            &["already lends", "without other options", "--stop"],
        );
        assert_eq!(lender.json(&["lend"])["max_bytes"], 32 * MIB);
        lender.json(&["lend", "--stop"]);
        wait("it lends no more", || lender.json(&["lend"]).is_null());
    }
}
