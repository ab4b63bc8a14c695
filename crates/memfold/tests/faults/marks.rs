//! Faults while a mark of a VM of Proxmox VE is written.

use std::fs;
use std::path::Path;

use crate::fake_node::FakeNode;
use crate::injector::{Fault, Injector};
use crate::program::program;

#[test]
fn a_mark_of_a_proxmox_vm_is_whole_and_on_the_disk_before_the_command_succeeds() {
    let node = FakeNode::new(Path::new("/dev/null"), "#!/bin/sh\nexit 1\n");
    node.add("one", 100, "cores: 2\n", "/usr/bin/kvm -id 100\n");
    let place = node.root().join("etc/memfold");
    let directory = tempfile::tempdir().unwrap();
    let Some(injector) = Injector::new(directory.path(), &place) else {
        memfold_testkit::skip!("no C compiler");
    };
    let mark = place.join("pve/100");
    let mut failed = Vec::new();
    for at in 1.. {
        let _ = fs::remove_dir_all(place.join("pve"));
        injector.arm(at, Fault::IO_ERROR);
        let mut command = program();
        command.args(["--socket", "/nonexistent", "pve", "enable", "100"]);
        command.args(["--domain", "shop"]);
        command.envs(injector.environment());
        let output = node.on(command).output().unwrap();
        let fired = injector.disarm();
        let text = fs::read_to_string(&mark);
        assert!(
            text.is_err() || text.is_ok_and(|text| text.contains("shop")),
            "{fired}"
        );
        assert!(!output.status.success() || mark.exists(), "{fired}");
        if fired.faults == 0 {
            assert!(output.status.success(), "{output:?}");
            break;
        }
        failed.push((fired.what, output.status.success()));
    }
    // The content is on the disk before its name, and the name before the command succeeds.
    let syncs = failed.iter().filter_map(|(what, _)| {
        let (call, path) = what.split_once(' ')?;
        call.contains("sync").then_some(path)
    });
    let syncs: Vec<&str> = syncs.collect();
    assert!(
        syncs.len() == 2 && syncs[0].starts_with("pve/") && syncs[1] == "pve",
        "{failed:?}"
    );
    let has_succeeded = failed.iter().find(|(_, succeeded)| *succeeded);
    assert_eq!(has_succeeded, None, "{failed:?}");
}
