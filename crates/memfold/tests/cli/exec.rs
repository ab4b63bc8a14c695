//! Test of the exit code of `vm exec` if memfold itself fails.

use serde_json::json;

use super::fake_daemon::{self, FakeDaemon};
use super::support::refused;

#[test]
fn a_command_in_a_guest_that_reaches_its_time_limit_ends_vm_exec_with_code_124() {
    for (status, code) in [(504, 124), (503, 1)] {
        let body = json!({ "error": "it took too long", "hint": null });
        let daemon = FakeDaemon::start(vec![fake_daemon::json(status, &body)]);
        let mut exec = daemon.command(&["vm", "exec", "--timeout", "1", "web1", "--", "sleep 9"]);
        refused(
            &exec.output().unwrap(),
            code,
            &["memfold: it took too long"],
        );
    }
}
