//! Test of the Python client's examples (`clients/python/examples`) with a daemon and real guests.

use std::path::{Path, PathBuf};
use std::process::Command;

use memfold_api::VmInfo;
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::dose;

use super::snapshots::MEMORY;
use crate::served::{Served, wait_agent};
use crate::support;

const VM: &str = "python";

/// Debian's Python, to which Debian's packages of Python modules belong.
const PYTHON: &str = "/usr/bin/python3";

/// Program that uses the rest of the client. Its arguments are a VM and a directory.
const STORY: &str = r#"
import asyncio, memfold, sys
from memfold.aio import AsyncClient

name, store, clones = sys.argv[1:]
client = memfold.Client()
vm = client.vm(name)
vm.wait_agent()
assert vm.exec("echo out; echo err >&2; exit 7") == memfold.models.ExecResult(
    stdout="out\n", stderr="err\n", code=7)

assert vm.pause().state == "paused"
try:
    vm.exec("true")
    raise SystemExit("a paused guest ran a command")
except memfold.Refused as error:
    assert error.status == 409 and "paused" in error.error, error
    assert error.hint == f"memfold vm resume {name}", error.hint
assert vm.resume().state == "running"

# A snapshot of a VM without a guest is small.
with client.run({"name": "bare", "memory": "64M", "network": "none"}) as bare:
    assert client.vm("bare").info.pid == bare.info.pid
    assert bare.save("small")["vm"] == "bare"
pushed = client.push("small", store)
client.remove_snapshot("small")
assert client.snapshots() == []
assert [there.name for there in client.remote_snapshots(store)] == ["small"]
pulled = client.pull("small", store, allow_arguments=True)
assert pulled.stored_bytes == pushed.stored_bytes
assert client.remove_remote_snapshot("small", store).name == "small"
assert [here.name for here in client.snapshots()] == ["small"]
assert client.snapshot("small")["vm"] == "bare"
client.remove_snapshot("small")

vm.exec("echo kept > /run/kept")
assert vm.save("warm", live=True)["vm"] == name

async def one(client):
    async with client.clone("warm") as vm:
        done = await vm.exec("cat /run/kept; hostname")
        assert done.stdout == f"kept\n{vm.name}\n", done

async def both():
    client = AsyncClient()
    await asyncio.gather(one(client), one(client))

asyncio.run(both())
for number in range(int(clones)):
    with client.clone("warm") as clone:
        assert clone.exec(f"cat /run/kept; echo {number}").stdout == f"kept\n{number}\n"
with client.restore("warm", "again") as again:
    assert again.exec(["cat", "/run/kept"]).stdout == "kept\n"
assert [vm.name for vm in client.vms()] == [name]
assert client.doctor() and client.version().pid > 0
assert any(event.kind == "daemon" and event.vm is None for event in client.events())
"#;

fn client() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/python")
}

/// Runs Python with the client, which must succeed. Returns its standard output.
#[track_caller]
fn python(state: &Path, arguments: &[&str]) -> String {
    let output = Command::new(PYTHON)
        .args(arguments)
        .current_dir(client().join("examples"))
        .env("PYTHONPATH", client())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("MEMFOLD_SOCKET", state.join("s"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}{error}");
    print!("{said}");
    said
}

#[test]
fn the_examples_of_the_python_client_run_with_real_guests_and_leave_no_guest() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-python.")
        .tempdir()
        .unwrap();
    let disks = tempfile::Builder::new()
        .prefix("memfold-python.")
        .tempdir_in("/var/tmp")
        .unwrap();
    let state = directory.path();
    let mut served = Served::new(state, &[VM, "bare", "again"]).temporary(disks.path());
    served.start();
    let api = served.answers();
    let spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    served.run_warm(&spec);
    wait_agent(&api, VM);

    let store = format!("file://{}", disks.path().display());
    let clones = dose("MEMFOLD_PYTHON_CLONES", 2).to_string();
    python(state, &["-c", STORY, VM, &store, &clones]);

    let write = |name: &str, text: &str| {
        let path = state.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let good = write("good.py", "open('/etc/mark', 'x').write('x'); print(6 * 7)");
    let bad = write("bad.py", "import shutil; shutil.rmtree('/etc'); exit(3)");
    // The first program runs twice: its second guest has no mark of the first.
    let said = python(state, &["sandbox.py", "warm", &good, &bad, &good]);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 3, "{said}");
    assert!(
        lines[0].contains("exit code 0") && lines[0].ends_with(": 42"),
        "{said}"
    );
    assert!(lines[1].contains("exit code 3"), "{said}");
    assert!(
        lines[2].contains("exit code 0") && lines[2].ends_with(": 42"),
        "{said}"
    );

    let tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "pytest"];
    assert!(python(state, &tests).contains("2 passed"));

    let table = python(state, &["density.py"]);
    let row = table.lines().find(|line| line.starts_with(VM)).unwrap();
    let ram_mib = format!("{:.1}", MEMORY.0 as f64 / f64::from(1 << 20));
    assert!(row.contains(&ram_mib), "{table}");
    assert!(table.contains("1 VMs with"), "{table}");

    let left: Vec<VmInfo> = api.get("/v1/vms").unwrap();
    let left: Vec<&str> = left.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(left, [VM]);
}
