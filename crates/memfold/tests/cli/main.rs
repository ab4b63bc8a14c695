//! Tests of the command line and the API of `memfold` from outside: texts, exit codes, JSON. The
//! VMs in these tests are paused from the start.

mod access;
mod advise;
mod bench;
mod cluster;
mod commands;
mod console_signals;
mod debt;
mod definitions;
mod definitions_need;
mod encrypted_snapshots;
mod estimate;
mod events;
mod exec;
mod failed_lenders;
mod fake_daemon;
mod fake_libvirt;
mod fake_node;
mod flood;
mod forks;
mod hangs;
mod iscsi;
mod ksm;
mod lend_settings;
mod lending;
mod libvirt;
mod lines;
mod metrics;
mod networks;
mod overlays;
mod paths;
mod privileges;
mod program;
mod proxy;
mod pve;
mod python;
mod relays;
mod rightsize;
mod secrets;
mod service;
mod settings;
mod several_names;
mod snapshots;
mod soak;
mod streamed;
mod support;
mod symbols;
mod top;
mod transfers;
mod ttl;
mod unfolded;
mod user_mode;
mod vm_logs;

use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::{Daemon, Foreign, code, err, out, program, refused, run};

#[test]
fn if_the_host_lacks_a_requirement_memfold_prints_the_doctor_report_and_exits_with_code_3() {
    let empty = tempfile::tempdir().unwrap();
    for command in [
        &["doctor"][..],
        &["doctor", "--self-test"],
        &["demo"],
        &["self-test", "--report", "report"],
    ] {
        let state = tempfile::tempdir().unwrap();
        let output = program()
            .args(command)
            .env("MEMFOLD_CACHE", empty.path())
            .env("MEMFOLD_QEMU", empty.path().join("no-qemu"))
            .env("MEMFOLD_STATE", state.path())
            .output()
            .unwrap();
        let text = out(&output);
        assert_eq!(code(&output), 3, "{command:?}: {text}{}", err(&output));
        for word in [
            "FAIL  QEMU",
            "warn  guest images",
            "memfold demo",
            "cannot run here",
        ] {
            assert!(text.contains(word), "{command:?}: no '{word}' in: {text}");
        }
        let output = program()
            .args(command)
            .arg("--json")
            .env("MEMFOLD_QEMU", empty.path().join("no-qemu"))
            .env("MEMFOLD_STATE", state.path())
            .output()
            .unwrap();
        assert_eq!(code(&output), 3, "{command:?}: {}", err(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["can_run"], false);
        let checks = report["checks"].as_array().unwrap();
        let qemu = checks.iter().find(|c| c["name"] == "QEMU").unwrap();
        assert_eq!(qemu["status"], "fail");
        assert!(qemu["fix"].as_str().unwrap().contains("qemu-system-x86"));
    }
}

#[test]
fn from_start_to_stop_of_a_vm_each_command_prints_valid_json() {
    let daemon = Daemon::start();
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
    let started = daemon.paused_vm("one", &["--domain", "d"]);
    assert_eq!(started["name"], "one");
    assert_eq!(started["domain"], "d");
    assert_eq!(started["origin"], "started");
    assert_eq!(daemon.json(&["vm", "list"]), json!([started]));
    let report = daemon.json(&["report", "--vm", "one"]);
    assert_eq!(report["ledger"]["vms"][0]["ram_bytes"], 64 << 20);
    assert_eq!(daemon.json(&["fold", "status"])["paused"], false);
    assert_eq!(daemon.json(&["fold", "pause"])["paused"], true);
    assert_eq!(daemon.json(&["fold", "resume"])["paused"], false);
    let budget = ["fold", "budget", "--cpu", "7", "--pages-per-second", "9"];
    let stats = daemon.json(&budget);
    assert_eq!(stats["cpu_share"], 0.07);
    assert_eq!(stats["pages_per_second"], 9);

    for text in [&["vm", "list"][..], &["report"], &["fold", "status"]] {
        let output = daemon.run(text);
        assert_eq!(code(&output), 0);
        assert!(out(&output).contains("one"), "{}", out(&output));
    }
    let stopped = daemon.json(&["vm", "stop", "one", "--timeout", "0"]);
    assert_eq!(stopped["stopped"], json!(["one"]));
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
    let text = out(&daemon.run(&["vm", "list"]));
    assert!(text.contains("memfold vm run"), "{text}");
}

#[test]
fn memfold_plan_computes_a_plan_from_running_vms_and_is_refused_if_none_runs() {
    let daemon = Daemon::start();
    refused(&daemon.run(&["plan"]), 1, &["no VM runs"]);
    for name in ["one", "two"] {
        daemon.paused_vm(name, &["--domain", "d"]);
    }
    daemon.paused_vm("alone", &[]);
    let plan = daemon.json(&["plan", "--vms", "d=5"]);
    let kinds: Vec<_> = plan["kinds"].as_array().unwrap().iter().collect();
    assert_eq!(kinds.len(), 2, "{plan}");
    assert_eq!(kinds[1]["vms"], json!(["one", "two"]));
    let number = |of: &Value, name: &str| of[name].as_u64().unwrap();
    let more = number(&plan, "predicted_bytes") - number(&plan, "used_bytes");
    assert_eq!(more, 3 * number(kinds[1], "own_bytes"));
    assert!(number(kinds[1], "own_bytes") > 1 << 20, "{plan}");
    assert_eq!(kinds[0]["plus_minus_bytes"], Value::Null);
    assert_eq!(plan["fits"], true);
    // The memory used now is already more than that.
    let small = daemon.json(&["plan", "--memory", "1M"]);
    assert_eq!(
        (&small["fits"], number(&small["kinds"][0], "more_fit")),
        (&json!(false), 0)
    );
    let text = out(&daemon.run(&["plan", "--kind", "k=one,alone", "--vms", "k=9"]));
    for word in ["MORE FIT", "with 9 of k", ": fits"] {
        assert!(text.contains(word), "no '{word}' in {text}");
    }
    // The API gives the same answer.
    let get = |query: &str| daemon.http("GET", &format!("/v1/plan{query}"), b"");
    let (status, body) = get("?vms=d=5&memory=64G");
    assert_eq!(status, 200, "{body}");
    let asked: Value = serde_json::from_str(&body).unwrap();
    let told = daemon.json(&["plan", "--vms", "d=5", "--memory", "64G"]);
    assert_eq!(asked["kinds"][1]["vms"], told["kinds"][1]["vms"]);
    for name in ["shared_bytes", "owed_bytes", "wanted"] {
        assert_eq!(asked["kinds"][1][name], told["kinds"][1][name], "{name}");
    }
    assert_eq!(asked["memory_bytes"], 64_u64 << 30);
    let ahead = daemon.json(&["plan", "--ahead", "24"]);
    assert_eq!(ahead["ahead_hours"], 24.0);
    assert_eq!(ahead["kinds"][1]["grows_bytes_per_hour"], Value::Null);
    for (query, word) in [
        ("?vms=x=1", "no kind of VMs is named 'x'"),
        ("?kind=d=ghost", "no VM named 'ghost'"),
        ("?vms=d=many", "'d=many'"),
        ("?memory=much", "memory"),
        ("?place=x", "'place'"),
    ] {
        let (status, body) = get(query);
        assert!(status == 400 && body.contains(word), "{query}: {body}");
    }
    refused(
        &daemon.run(&["plan", "--kind", "k=ghost"]),
        1,
        &["no VM named 'ghost'", "memfold vm list"],
    );
    refused(
        &daemon.run(&["plan", "--vms", "x=1"]),
        1,
        &["no kind of VMs is named 'x'", "'d'"],
    );
    for wrong in [
        &["plan", "--kind", "k"][..],
        &["plan", "--vms", "k=many"],
        &["plan", "--memory", "x"],
    ] {
        assert_eq!(code(&run(wrong)), 2, "{wrong:?}");
    }
}

#[test]
fn with_the_option_json_file_json_is_written_to_the_file_and_text_is_still_printed() {
    let daemon = Daemon::start();
    let file = daemon.directory.path().join("out.json");
    let option = format!("--json={}", file.display());
    for (command, word) in [
        (&["report"][..], "saved by folding"),
        (&["fold", "status"], "page"),
        (&["vm", "list"], "no VMs"),
        (&["debt"], "reserve"),
        (&["leases"], "this host is"),
    ] {
        let output = daemon.run(&[command, &[&option]].concat());
        assert_eq!(code(&output), 0, "{command:?}: {}", err(&output));
        assert!(out(&output).contains(word), "{command:?}: {}", out(&output));
        let text = std::fs::read(&file).unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let _: Value = serde_json::from_slice(&text).unwrap();
        std::fs::remove_file(&file).unwrap();
    }
}

#[test]
fn if_the_pipe_of_its_output_is_closed_memfold_does_not_fail() {
    let daemon = Daemon::start();
    for command in [
        &["report"][..],
        &["fold", "status"],
        &["vm", "list", "--json"],
    ] {
        let mut child = daemon
            .command(command)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(
            (code(&output), err(&output).as_str()),
            (0, ""),
            "{command:?}"
        );
    }
}

#[test]
fn if_a_command_is_refused_the_error_names_the_condition_and_the_fix() {
    let daemon = Daemon::start();
    let file = daemon.directory.path().join("vm.toml");
    let file = file.to_str().unwrap();
    for command in [
        &["vm", "stop", "ghost"][..],
        &["vm", "exec", "ghost", "--", "true"],
        &["report", "--vm", "ghost"],
    ] {
        refused(&daemon.run(command), 1, &["ghost", "memfold vm list"]);
    }
    for command in [
        &["snapshot", "inspect", "ghost"][..],
        &["snapshot", "verify", "ghost"],
        &["snapshot", "remove", "ghost"],
        &["snapshot", "compact", "ghost"],
        &["snapshot", "rekey", "ghost", "--key", "a"],
        &["snapshot", "push", "ghost", "file:///"],
        &["snapshot", "restore", "ghost", "--as", "a"],
        &["clone", "ghost"],
    ] {
        refused(&daemon.run(command), 1, &["ghost", "memfold snapshot list"]);
    }
    refused(
        &daemon.run(&["snapshot", "save", "ghost", "x"]),
        1,
        &["ghost", "memfold vm list"],
    );
    daemon.paused_vm("still", &[]);
    refused(
        &daemon.run(&["snapshot", "save", "still", "x", "--keep", "all"]),
        1,
        &["stands still", "'prelaunch'"],
    );
    refused(
        &daemon.run(&["snapshot", "save", "still", "../x"]),
        1,
        &["1 to 64 characters"],
    );
    assert_eq!(daemon.json(&["snapshot", "list"]), json!([]));
    daemon.json(&["vm", "stop", "still", "--timeout", "0"]);
    refused(
        &daemon.run(&["vm", "stop", "../x"]),
        1,
        &["'../x'", "1 to 64 characters"],
    );
    refused(
        &daemon.run(&["vm", "run", "--file", file]),
        1,
        &[file, "No such file"],
    );
    std::fs::write(file, "name = \"a\"\nmemory = \"512M\"\nvcpus = \"two\"\n").unwrap();
    refused(
        &daemon.run(&["vm", "run", "--file", file]),
        1,
        &[file, "line 3", "vcpus"],
    );
    std::fs::write(file, "name = \"a\"\nmemory = \"512M\"\nsise = 3\n").unwrap();
    refused(
        &daemon.run(&["vm", "run", "--file", file]),
        1,
        &[file, "line 3", "sise"],
    );
    let disk = [
        "vm", "run", "--name", "a", "--memory", "64M", "--disk", "/no/disk",
    ];
    refused(&daemon.run(&disk), 1, &["/no/disk", "No such file"]);
    let tiny = ["vm", "run", "--name", "a", "--memory", "4K"];
    refused(&daemon.run(&tiny), 1, &["memory"]);

    daemon.paused_vm("twin", &[]);
    let again = ["vm", "run", "--name", "twin", "--memory", "64M"];
    refused(
        &daemon.run(&again),
        1,
        &["'twin' is running", "memfold vm stop twin"],
    );
    refused(
        &daemon.run(&["vm", "exec", "twin", "--timeout", "1", "--", "true"]),
        1,
        &["not connected", "memfold-agent"],
    );
    refused(
        &daemon.run(&["vm", "exec", "twin", "--timeout", "-1", "--", "true"]),
        1,
        &["timeout_s", "-1"],
    );
    refused(
        &daemon.run(&["fold", "budget", "--cpu", "200"]),
        1,
        &["200", "0 to 100"],
    );
    // None of the refused commands changed anything.
    assert_eq!(daemon.json(&["vm", "list"]).as_array().unwrap().len(), 1);
}

#[test]
fn on_a_host_without_qemu_starting_a_vm_is_refused_with_exit_code_3() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let socket = socket.to_str().unwrap();
    let mut daemon = program()
        .args(["--socket", socket, "serve", "--state"])
        .arg(directory.path().join("state"))
        .env("MEMFOLD_QEMU", directory.path().join("no-qemu"))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    support::wait("the daemon answers", || {
        std::os::unix::net::UnixStream::connect(socket).is_ok()
    });
    let vm = [
        "--socket", socket, "vm", "run", "--name", "a", "--memory", "64M",
    ];
    let output = run(&vm);
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    refused(&output, 3, &["no-qemu", "memfold doctor"]);
}

#[test]
fn a_second_daemon_is_refused_and_a_stale_socket_is_replaced() {
    let mut daemon = Daemon::start();
    let serve = |state: &std::path::Path, socket: &std::path::Path| {
        let mut command = program();
        command
            .arg("--socket")
            .arg(socket)
            .arg("serve")
            .arg("--state")
            .arg(state);
        command.output().unwrap()
    };
    let other = daemon.directory.path().join("other");
    refused(
        &serve(&other, &daemon.socket()),
        1,
        &["--socket", "stop it"],
    );
    refused(
        &serve(&daemon.state(), &daemon.directory.path().join("s2")),
        1,
        &["another memfold daemon", "--state"],
    );
    // The first daemon did not notice the second. When it is killed, its socket stays.
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(daemon.socket().exists());
    daemon.start_again();
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
}

#[test]
fn sigterm_ends_the_daemon_and_keeps_its_vms_running() {
    let mut daemon = Daemon::start();
    let before = daemon.paused_vm("survivor", &[]);
    daemon.terminate();
    assert!(!daemon.socket().exists(), "the socket is left behind");
    let pid = before["pid"].as_u64().unwrap();
    let alive = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(alive.contains("qemu"), "{alive}");
    daemon.start_again();
    let after = daemon.json(&["vm", "list"]);
    assert_eq!(
        (&after[0]["pid"], &after[0]["name"]),
        (&before["pid"], &before["name"])
    );
    daemon.json(&["vm", "stop", "survivor", "--timeout", "0"]);
    // A process that has ended has no command line, even if no process has waited for it yet.
    let gone = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    assert_eq!(gone, "");
}

#[test]
fn after_a_timeout_a_vm_is_folded_again_once_the_preload_library_in_its_qemu_answers() {
    let daemon = Daemon::start();
    let vm = daemon.paused_vm("frozen", &[]);
    let pid = Pid::from_raw(vm["pid"].as_i64().unwrap().try_into().unwrap()).unwrap();
    let status = || daemon.json(&["fold", "status"]);
    let problem = || status()["vms"][0]["problem"].clone();
    assert_eq!(problem(), Value::Null);
    // A host that swaps QEMU out has the same effect. The process stops when it is scheduled next.
    kill_process(pid, Signal::STOP).unwrap();
    support::wait("the VM's problem is its stopped process", || {
        problem().to_string().contains("is stopped")
    });
    // While the engine waits for the library, old figures are shown; when it has given the library
    // up, the present ones are.
    support::wait("the engine waits", || status()["age_s"] != 0.0);
    support::wait("it waits no more", || status()["age_s"] == 0.0);
    kill_process(pid, Signal::CONT).unwrap();
    support::wait("it is folded again", || problem() == Value::Null);
    daemon.json(&["vm", "stop", "frozen", "--timeout", "0"]);
}

#[test]
fn when_a_qemu_started_by_hand_is_attached_missing_requirements_for_folding_are_named() {
    let mut daemon = Daemon::start();
    let plain = Foreign::start(&[]);
    let attach = ["vm", "attach", &plain.qmp(), "--name", "plain"];
    let output = daemon.run(&attach);
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert!(out(&output).contains("not folded: "), "{}", out(&output));
    assert!(out(&output).contains("LD_PRELOAD"), "{}", out(&output));
    let vms = daemon.json(&["vm", "list"]);
    assert_eq!(vms[0]["origin"], "attached");
    assert_eq!(vms[0]["pid"], plain.pid());

    let library = memfold_host::library().expect("the library beside the program");
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("library");
    let folded = Foreign::start(&[("LD_PRELOAD", &library), ("MEMFOLD_QEMU_SOCKET", &socket)]);
    let vm = daemon.json(&[
        "vm",
        "attach",
        &folded.qmp(),
        "--name",
        "folded",
        "--domain",
        "d",
    ]);
    assert_eq!(vm["fold_problems"], json!([]), "{vm}");

    let twice = ["vm", "attach", &plain.qmp(), "--name", "again"];
    assert_eq!(code(&daemon.run(&twice)), 1);
    let ghost = ["vm", "attach", "/no/socket", "--name", "ghost"];
    refused(&daemon.run(&ghost), 1, &["/no/socket", "-qmp unix:"]);
    let taken = ["vm", "attach", &plain.qmp(), "--name", "folded"];
    refused(&daemon.run(&taken), 1, &["'folded' is running"]);
    refused(
        &daemon.run(&["vm", "stop", "plain", "--timeout", "0"]),
        1,
        &["not started by memfold"],
    );
    // When the host shuts down, attached VMs are not memfold's responsibility.
    for name in ["one", "two"] {
        daemon.paused_vm(name, &[]);
    }
    let all = ["vm", "stop", "--all", "--timeout", "0"];
    for stopped in [json!(["one", "two"]), json!([])] {
        assert_eq!(daemon.json(&all)["stopped"], stopped);
    }
    assert_eq!(daemon.json(&["vm", "list"]).as_array().unwrap().len(), 2);
    refused(
        &daemon.run(&["vm", "stop", "--all", "plain"]),
        2,
        &["cannot be used with"],
    );
    // A new daemon knows the attached VMs, and forgets one that has ended.
    daemon.terminate();
    drop(folded);
    daemon.start_again();
    support::wait("only the living is attached", || {
        let vms = daemon.json(&["vm", "list"]);
        vms.as_array().unwrap().len() == 1 && vms[0]["name"] == "plain"
    });
}

#[test]
fn without_a_daemon_vm_stop_all_stops_the_vms_of_the_state_directory_that_is_named() {
    let mut daemon = Daemon::start();
    for name in ["one", "two"] {
        daemon.paused_vm(name, &[]);
    }
    daemon.terminate();
    let all = ["vm", "stop", "--all", "--timeout", "0"];
    // The socket is not the default one, so it is not known which VMs are meant.
    refused(&daemon.run(&all), 1, &["memfold serve"]);
    let state = daemon.state();
    let alone = [&all[..], &["--state", state.to_str().unwrap()]].concat();
    let place = memfold_vm::VmDirectory::of(&state, "two");
    let record = std::fs::read(place.record()).unwrap();
    std::fs::write(place.record(), "{").unwrap();
    refused(&daemon.run(&alone), 1, &["VM 'two'"]);
    std::fs::write(place.record(), record).unwrap();
    make_description_newer(&place);
    let stopped = daemon.run(&alone);
    assert_eq!(code(&stopped), 0, "{}", err(&stopped));
    assert!(err(&stopped).contains("of_tomorrow"), "{}", err(&stopped));
    assert!(out(&stopped).contains("two"), "{}", out(&stopped));
    assert_eq!(daemon.json(&alone)["stopped"], json!([]));
}

/// Changes a VM's description as a newer memfold could have written it.
fn make_description_newer(place: &memfold_vm::VmDirectory) {
    let spec = std::fs::read_to_string(place.spec()).unwrap();
    let newer = spec.replacen('{', "{ \"of_tomorrow\": 1,", 1);
    std::fs::write(place.spec(), newer).unwrap();
}

#[test]
fn a_vm_whose_description_cannot_be_read_is_listed_with_the_file_and_can_be_stopped() {
    let mut daemon = Daemon::start();
    daemon.paused_vm("web", &[]);
    daemon.terminate();
    let place = memfold_vm::VmDirectory::of(&daemon.state(), "web");
    let record: memfold_vm::Record = memfold_vm::VmDirectory::read_json(&place.record()).unwrap();
    make_description_newer(&place);
    daemon.start_again();
    support::wait("the list says why the VM is not adopted", || {
        let vms = daemon.json(&["vm", "list"]);
        let cause = vms[0]["state_cause"].as_str().unwrap_or_default();
        cause.contains("spec.json") && cause.contains("of_tomorrow")
    });
    let stopped = daemon.json(&["vm", "stop", "web", "--timeout", "0"]);
    assert_eq!(stopped["stopped"], json!(["web"]));
    let process = memfold_vm::Process::open(record.process);
    assert!(process.is_err(), "QEMU runs");
    assert!(!place.path().exists());
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
}

#[test]
fn the_http_api_serves_its_openapi_description_and_reports_errors_in_json() {
    let daemon = Daemon::start();
    let (status, body) = daemon.http("GET", "/openapi.json", b"");
    let description: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200);
    let paths = description["paths"].as_object().unwrap();
    for (path, method) in [
        ("/v1/version", "get"),
        ("/v1/vms", "get"),
        ("/v1/vms", "post"),
        ("/v1/attach", "post"),
        ("/v1/vms/{name}/stop", "post"),
        ("/v1/vms/{name}/exec", "post"),
        ("/v1/report", "get"),
        ("/v1/fold", "get"),
        ("/v1/fold", "put"),
    ] {
        assert!(!paths[path][method].is_null(), "{method} {path}");
    }
    // Every described path exists: none answers "no such path" or "no such method".
    for (path, methods) in paths {
        let path = path.replace("{name}", "ghost");
        for (method, described) in methods.as_object().unwrap() {
            // A stream does not end, so `access` tests it.
            let answer = &described["responses"]["200"]["content"];
            if !answer["text/event-stream"].is_null() {
                continue;
            }
            let (status, body) = daemon.http(&method.to_uppercase(), &path, b"");
            assert!(
                status != 405 && !body.contains("no such path"),
                "{method} {path}"
            );
        }
    }

    let long = vec![b' '; (1 << 20) + 1];
    for (method, path, body, wanted) in [
        ("GET", "/v1/nothing", &b""[..], 404),
        ("GET", "/v1", b"", 404),
        ("DELETE", "/v1/vms", b"", 405),
        ("POST", "/v1/vms", b"{", 400),
        ("POST", "/v1/vms", b"{\"name\": \"a\"}", 400),
        ("POST", "/v1/vms", b"\xff\xfe", 400),
        ("PUT", "/v1/fold", b"{\"cpu_percent\": -1}", 400),
        ("PUT", "/v1/fold", &long, 413),
        ("POST", "/v1/vms/ghost/stop", b"{\"timeout_s\": 1}", 404),
        (
            "POST",
            "/v1/vms/ghost/exec",
            b"{\"script\": \"x\", \"timeout_s\": -1}",
            400,
        ),
    ] {
        let (status, answer) = daemon.http(method, path, body);
        assert_eq!(status, wanted, "{method} {path}: {answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(
            !answer["error"].as_str().unwrap().is_empty(),
            "{method} {path}"
        );
    }
    assert_eq!(daemon.http("GET", "/v1/version", b"").0, 200);
}

#[test]
fn the_daemon_raises_its_limit_of_open_files_to_the_hard_limit() {
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("s");
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh"])
        .arg(env!("CARGO_BIN_EXE_memfold"))
        .arg("--socket")
        .arg(&socket)
        .arg("serve")
        .env("MEMFOLD_CONFIG", "/dev/null")
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    for directory in ["state", "snapshots"] {
        let option = format!("--{directory}");
        command.arg(option).arg(place.path().join(directory));
    }
    let mut daemon = command.spawn().unwrap();
    // The daemon is ended before anything is asserted.
    let answers = (0..600).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        UnixStream::connect(&socket).is_ok()
    });
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.id()));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(answers, "no daemon answers");
    let limits = limits.unwrap();
    let files = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let words: Vec<&str> = files.unwrap().split_whitespace().collect();
    let limit = |word: usize| words[word].parse::<u64>().unwrap();
    assert_eq!(limit(3), limit(4).min(1 << 20), "{limits}");
}
