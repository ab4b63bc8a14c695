//! Test of VMs that are defined with autostart: they run again after a boot of the host, or the
//! brake refuses them. The host's boot is simulated: QEMUs and the files of VMs are gone, and
//! `autostart.json` names another boot.

use std::fs;
use std::path::Path;
use std::time::Duration;

use memfold_api::{Client, DefinitionInfo, VmInfo};
use memfold_lab::{DiskMode, Lab, Warm};
use memfold_testkit::wait_until;
use memfold_units::ByteSize;
use memfold_vm::{Definition, Record, Vm, VmDirectory};
use serde_json::Value;

use crate::served::{Served, exec, succeeds, wait_agent};
use crate::support;

/// Names of the VMs. The second one starts first.
const NAMES: [&str; 2] = ["app", "db"];
const MEMORY: ByteSize = ByteSize::mib(384);
const LIMIT: Duration = Duration::from_secs(60);

/// Ends the daemon and the defined VMs as a boot of the host does, and starts the daemon again.
fn boot_host(served: &mut Served<'_>, state: &Path) -> Client {
    served.kill();
    for name in NAMES {
        if let Ok(vm) = Vm::find(state, name) {
            vm.stop(Duration::ZERO).unwrap();
            drop(vm);
            assert!(Vm::clear_if_stale(&VmDirectory::of(state, name)).unwrap());
        }
    }
    let file = state.join("autostart.json");
    let mut said: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    said["boot"] = "another".into();
    fs::write(&file, said.to_string()).unwrap();
    served.start();
    served.answers()
}

fn definitions(client: &Client) -> Vec<DefinitionInfo> {
    client.get("/v1/definitions").unwrap()
}

#[test]
fn defined_vms_run_again_after_a_boot_in_order_or_the_brake_refuses_them_with_words() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-defined.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let config = state.join("memfold.toml");
    fs::write(&config, "").unwrap();
    let more = ["--config", config.to_str().unwrap()];
    let mut served = Served::new(state, &["app", "db", "warm-1"]).with(&more);
    served.start();
    served.answers();
    let mut saved = Vec::new();
    for (name, order) in NAMES.into_iter().zip([20, 10]) {
        let mut vm = Lab::spec(name, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
        saved.push(Warm::prepare(&mut vm).unwrap());
        let definition = Definition {
            autostart: true,
            order,
            snapshot: None,
            vm,
        };
        let file = state.join(format!("{name}.toml"));
        fs::write(&file, definition.to_toml().unwrap()).unwrap();
        succeeds(state, &["vm", "define", file.to_str().unwrap()]);
    }

    let client = boot_host(&mut served, state);
    wait_until("both VMs run", LIMIT, || {
        let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        vms.len() == NAMES.len() && vms.iter().all(|vm| vm.state != "starting")
    });
    let started = NAMES.map(|name| {
        let record: Record =
            VmDirectory::read_json(&VmDirectory::of(state, name).record()).unwrap();
        record.process.start_ticks
    });
    assert!(started[1] < started[0], "{started:?}");
    for (name, warm) in NAMES.into_iter().zip(saved) {
        if let Some(warm) = warm {
            warm.load(&VmDirectory::of(state, name)).unwrap();
        }
        wait_agent(&client, name);
        exec(&client, name, "true");
    }

    // The memory that a clone shares with its snapshot is the debt. The clone survives the boot.
    succeeds(state, &["snapshot", "save", "db", "warm"]);
    succeeds(state, &["clone", "warm", "--no-wait"]);
    fs::write(&config, "reserve = \"100%\"\n").unwrap();
    let client = boot_host(&mut served, state);
    wait_until("both VMs are refused", LIMIT, || {
        definitions(&client).iter().all(|vm| vm.problem.is_some())
    });
    for info in definitions(&client) {
        let (problem, fix) = (info.problem.unwrap(), info.fix.unwrap());
        assert_eq!(info.state, "off");
        assert!(problem.contains("the brake is on"), "{problem}");
        let start = format!("memfold vm start {}", info.name);
        assert!(
            fix.contains("memfold debt") && fix.contains(&start),
            "{fix}"
        );
    }
    let log = fs::read_to_string(state.join("daemon.log")).unwrap();
    let warned = |line: &&str| line.contains("WARN") && line.contains("not started after the");
    assert_eq!(log.lines().filter(warned).count(), NAMES.len(), "{log}");
    succeeds(state, &["vm", "start", "db", "--despite-brake"]);
    let mut now = definitions(&client).into_iter();
    assert_eq!(now.find(|vm| vm.name == "db").unwrap().problem, None);
}
