//! Describes whether a VM runs. If it does not, the description gives QEMU's run state, the cause,
//! and what the operator can do to make the VM run again.
//!
//! Source: `RunState`, `query-block` (`io-status`) and the events of QEMU's `qapi/run-state.json`
//! and `qapi/block-core.json`.

use std::path::PathBuf;

use serde_json::Value;

use memfold_vm::{Qmp, QmpError};

use crate::error::{DaemonError, refused};

/// Run state of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunState {
    /// `running`, another run state of QEMU such as `io-error`, `unknown` ([`UNKNOWN`]), or
    /// `silent` ([`SILENT`]) if QEMU does not answer.
    pub name: String,
    pub cause: Option<String>,
    pub fix: Option<String>,
    /// Disk files whose file system is full.
    pub full: Vec<PathBuf>,
}

/// Name of the state of a VM whose QEMU does not answer.
pub(crate) const SILENT: &str = "silent";

/// Name of the state of a VM whose QEMU reports none of [`QEMU_STATES`].
const UNKNOWN: &str = "unknown";

/// Run states of QEMU: `RunState` in `qapi/run-state.json`.
const QEMU_STATES: [&str; 16] = [
    "colo",
    "debug",
    "finish-migrate",
    "guest-panicked",
    "inmigrate",
    "internal-error",
    "io-error",
    "paused",
    "postmigrate",
    "prelaunch",
    "restore-vm",
    "running",
    "save-vm",
    "shutdown",
    "suspended",
    "watchdog",
];

/// Run states of QEMU in which the guest stands still until somebody resumes the VM, of which QEMU
/// tells by an event. Not `io-error`, whose disks are looked at meanwhile, and not `suspended`,
/// which ends without such an event.
const AT_REST: [&str; 7] = [
    "guest-panicked",
    "internal-error",
    "paused",
    "postmigrate",
    "prelaunch",
    "shutdown",
    "watchdog",
];

/// Names of the QMP events that explain a run state.
const TELLING: [&str; 3] = ["BLOCK_IO_ERROR", "GUEST_PANICKED", "WATCHDOG"];

/// Names of the QMP events that come with a change of the run state, other than [`TELLING`].
pub(crate) const CHANGING: [&str; 2] = ["STOP", "RESUME"];

const NOTHING: &str = "no action is needed";

/// Command that resumes the VM.
const AGAIN: &str = "memfold vm resume {vm}";

/// Returns the name of the run state in QEMU's answer to `query-status`. A guest may have taken its
/// QEMU over, and the name becomes the label of a metric, so no other text passes.
fn name_of(answer: &Value) -> &'static str {
    let told = answer["status"].as_str();
    let mut states = QEMU_STATES.into_iter();
    let known = states.find(|&state| told == Some(state));
    known.unwrap_or(UNKNOWN)
}

/// Returns the cause of one of QEMU's run states, and what the operator can do; `{vm}` stands for
/// the VM's name.
fn explain(state: &str) -> (&'static str, &'static str) {
    match state {
        "paused" => (
            "'memfold vm pause' or QMP's 'stop' has paused the VM",
            AGAIN,
        ),
        "prelaunch" => ("QEMU was started with -S and waits for 'cont'", AGAIN),
        "guest-panicked" => (
            "the guest's kernel has crashed",
            "read 'memfold vm logs {vm}', then end the VM (memfold vm stop {vm}) and start it again",
        ),
        "watchdog" => (
            "the guest's watchdog has expired: the guest hangs",
            "memfold vm resume {vm}, or end the VM (memfold vm stop {vm}) and start it again",
        ),
        "suspended" => (
            "the guest sleeps (ACPI S3)",
            "wake the guest: 'system_wakeup' on the QMP socket",
        ),
        "shutdown" => (
            "the guest has shut down, and QEMU was told to stay (-no-shutdown)",
            "memfold vm stop {vm}",
        ),
        "postmigrate" => (
            "the VM was migrated away by another program",
            "if the VM does not run at the destination: memfold vm resume {vm}; else memfold vm stop {vm}",
        ),
        "internal-error" => (
            "QEMU or KVM failed; qemu.log in the VM's directory says why",
            "end the VM (memfold vm stop {vm}) and start it again",
        ),
        "inmigrate" => ("the VM's memory is still being received", NOTHING),
        "save-vm" | "restore-vm" | "finish-migrate" => {
            ("the VM's state is being saved or loaded", NOTHING)
        }
        UNKNOWN => (
            "QEMU reports a run state that memfold does not know",
            "memfold vm resume {vm}, or end the VM (memfold vm stop {vm}) and start it again",
        ),
        _ => ("QEMU gives no reason", AGAIN),
    }
}

impl Default for RunState {
    fn default() -> Self {
        Self {
            name: "running".into(),
            cause: None,
            fix: None,
            full: Vec::new(),
        }
    }
}

impl RunState {
    pub fn is_running(&self) -> bool {
        self.name == "running"
    }

    /// Returns whether the guest stands still until somebody resumes the VM.
    pub fn is_at_rest(&self) -> bool {
        AT_REST.contains(&&*self.name)
    }

    /// Returns whether the VM's memory and devices still come from another QEMU or from a file.
    pub fn is_incoming(&self) -> bool {
        self.name == "inmigrate"
    }

    /// Returns the run state and its cause as text, in one line.
    pub fn words(&self) -> String {
        match &self.cause {
            Some(cause) => format!("{}: {cause}", self.name),
            None => self.name.clone(),
        }
    }

    /// Returns the error for an operation (`what`) that is refused because the VM is not running.
    pub fn refusal(&self, vm: &str, what: &str) -> DaemonError {
        let why = format!("VM '{vm}' stands still ({}): {what}", self.words());
        refused(why, self.fix.clone().unwrap_or_default())
    }

    fn new(name: &str, cause: String, fix: String) -> Self {
        Self {
            name: name.to_owned(),
            cause: Some(cause),
            fix: Some(fix),
            full: Vec::new(),
        }
    }

    /// Returns the state of a VM whose QEMU process is stopped by a signal or a debugger.
    pub fn stopped(pid: i32) -> Self {
        Self::new(
            SILENT,
            format!("process {pid} of QEMU is stopped, by SIGSTOP or a debugger"),
            format!("resume it: kill -CONT {pid}"),
        )
    }

    /// Returns the state of a VM whose QEMU does not answer.
    pub fn silent(vm: &str, error: &QmpError) -> Self {
        Self::new(
            SILENT,
            format!("QEMU does not answer: {error}"),
            format!(
                "find out what QEMU waits for (usually a disk on another host); 'memfold vm stop {vm}' ends the VM"
            ),
        )
    }

    /// Returns whether QEMU has sent an event that may come with a change of the run state. QEMU is
    /// not asked.
    pub fn may_have_changed(qmp: &mut Qmp) -> bool {
        let [stop, resume] = CHANGING;
        let [error, panic, watchdog] = TELLING;
        qmp.has_event(&[stop, resume, error, panic, watchdog])
    }

    /// Asks QEMU for the VM's run state, and for the cause if the VM is not running.
    pub fn ask(vm: &str, qmp: &mut Qmp) -> Result<Self, QmpError> {
        let answer = qmp.query("query-status")?;
        let name = name_of(&answer);
        let events = qmp.take_events_named(&TELLING);
        if name == "running" {
            return Ok(Self::default());
        }
        let last = |kind: &str| {
            let event = events.iter().rfind(|event| event["event"] == kind);
            event.map(|event| &event["data"])
        };
        if name == "io-error" {
            let block = qmp.query("query-block")?;
            return Ok(io_error(vm, &block, last("BLOCK_IO_ERROR")));
        }
        let (cause, fix) = explain(name);
        let mut cause = cause.to_owned();
        if let Some(data) = last("GUEST_PANICKED").filter(|_| name == "guest-panicked") {
            cause = panic_words(data);
        }
        let fix = fix.replace("{vm}", vm);
        Ok(Self::new(name, cause, fix))
    }
}

fn panic_words(data: &Value) -> String {
    match &data["info"] {
        Value::Null => "the guest's kernel has crashed".into(),
        info => format!("the guest's kernel has crashed ({info})"),
    }
}

/// Makes the state `io-error`, with the disks that could not be read or written and the reason.
fn io_error(vm: &str, block: &Value, event: Option<&Value>) -> RunState {
    let devices = block.as_array().into_iter().flatten();
    let failed =
        devices.filter(|device| matches!(device["io-status"].as_str(), Some("nospace" | "failed")));
    let (mut disks, mut full, mut is_full) = (Vec::new(), Vec::new(), false);
    for device in failed {
        let text = |value: &Value| {
            let text = value.as_str().filter(|text| !text.is_empty());
            text.map(str::to_owned)
        };
        let qdev = text(&device["qdev"]).map(|path| device_name(&path));
        let name = qdev.or_else(|| text(&device["device"]));
        let name = name.unwrap_or_else(|| "?".into());
        let (image, file) = (&device["inserted"]["image"], &device["inserted"]["file"]);
        let path = text(&image["filename"]).or_else(|| text(file));
        let path = path.map(|name| file_of(&name));
        if device["io-status"] == "nospace" {
            is_full = true;
            full.extend(path.as_ref().map(PathBuf::from));
        }
        let path = path.unwrap_or_else(|| "no file".into());
        disks.push(format!("disk {name} ({path})"));
    }
    let event = event.unwrap_or(&Value::Null);
    let operation = event["operation"].as_str().unwrap_or("write");
    let reason = event["reason"].as_str();
    is_full |= event["nospace"] == true;
    let (reason, first) = if is_full {
        (
            "no space left",
            "free space on the file system of that file",
        )
    } else {
        let reason = reason.unwrap_or("an error of the host's storage");
        (reason, "repair that storage")
    };
    let which = if disks.is_empty() {
        "one of the VM's disks".to_owned()
    } else {
        disks.join(", ")
    };
    let state = RunState::new(
        "io-error",
        format!("a {operation} on {which} failed: {reason}"),
        format!("{first}, then: memfold vm resume {vm} (the guest notices only the time)"),
    );
    RunState { full, ..state }
}

/// Returns the file of a block node named `name`. If the node's options do not fit in a file name,
/// for example after a snapshot, QEMU reports `json:` and all options; the file is then one of
/// them.
fn file_of(name: &str) -> String {
    let described = name.strip_prefix("json:");
    let described = described.and_then(|text| serde_json::from_str::<Value>(text).ok());
    let file = described
        .as_ref()
        .and_then(|node| node["file"]["filename"].as_str());
    file.unwrap_or(name).to_owned()
}

/// Returns the device's name in a QOM path: `vd0` for `/machine/peripheral/vd0/virtio-backend`.
fn device_name(path: &str) -> String {
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    if parts.next() == Some("machine")
        && matches!(parts.next(), Some("peripheral" | "peripheral-anon"))
    {
        return parts.next().unwrap_or(path).to_owned();
    }
    path.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_run_state_that_is_not_one_of_qemus_is_named_unknown() {
        for state in QEMU_STATES {
            assert_eq!(name_of(&json!({ "status": state })), state);
        }
        let forged = "paused\"} 1\nmemfold_vms 99 #";
        for told in [forged, "silent", "starting", "Running", ""] {
            assert_eq!(name_of(&json!({ "status": told })), UNKNOWN, "{told}");
        }
        assert_eq!(name_of(&json!({ "status": 1 })), UNKNOWN);
        assert_eq!(name_of(&Value::Null), UNKNOWN);
    }

    #[test]
    fn a_vm_that_runs_or_whose_state_may_end_without_an_event_is_not_at_rest() {
        let is_at_rest = |name: &str| {
            let state = RunState {
                name: name.to_owned(),
                ..RunState::default()
            };
            state.is_at_rest()
        };
        for name in ["paused", "prelaunch", "guest-panicked", "shutdown"] {
            assert!(is_at_rest(name), "{name}");
        }
        let others = ["running", "io-error", "inmigrate", "suspended", "save-vm"];
        for name in others.into_iter().chain([SILENT, UNKNOWN]) {
            assert!(!is_at_rest(name), "{name}");
        }
        assert!(AT_REST.iter().all(|state| QEMU_STATES.contains(state)));
    }

    #[test]
    fn if_a_vm_has_an_io_error_the_message_names_the_disk_the_file_and_the_fix() {
        let block = json!([
            { "qdev": "/machine/peripheral/vd0/virtio-backend", "io-status": "ok", "inserted": { "file": "/a" } },
            { "qdev": "/machine/peripheral/vd1/virtio-backend", "io-status": "nospace", "inserted": { "file": "/full/b", "image": { "filename": "/full/b" } } },
        ]);
        let state = io_error("web", &block, None);
        assert_eq!(
            state.words(),
            "io-error: a write on disk vd1 (/full/b) failed: no space left"
        );
        assert_eq!(state.full, [PathBuf::from("/full/b")]);
        assert!(state.fix.unwrap().starts_with(
            "free space on the file system of that file, then: memfold vm resume web"
        ));
        let saved = r#"json:{"backing": {"driver": "qcow2", "file": {"driver": "file", "filename": "/old"}}, "driver": "qcow2", "file": {"driver": "file", "filename": "/full/new"}}"#;
        let block =
            json!([{ "qdev": "vd0", "io-status": "nospace", "inserted": { "file": saved } }]);
        assert_eq!(
            io_error("web", &block, None).words(),
            "io-error: a write on disk vd0 (/full/new) failed: no space left"
        );
        let event =
            json!({ "operation": "read", "nospace": false, "reason": "Input/output error" });
        let block = json!([{ "qdev": "sd", "device": "", "io-status": "failed", "inserted": { "file": "nbd://h" } }]);
        let state = io_error("web", &block, Some(&event));
        assert_eq!(
            state.words(),
            "io-error: a read on disk sd (nbd://h) failed: Input/output error"
        );
        assert_eq!(state.full, Vec::<PathBuf>::new());
    }
}
