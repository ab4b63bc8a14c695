//! QEMU's block nodes under a VM's swap disk, and how one set of nodes replaces another while the
//! guest uses the disk.
//!
//! Each column of the drawing shows the block nodes for one location of the disk. The node at the
//! top is the one that the guest's device uses. N is a number, the generation, which increases with
//! each move of the disk.
//!
//! ```text
//!   on its disk            lent, durability disk          replica               none
//!
//!     swapN  raw             swapN  quorum, fifo            swapN  quorum         swap-lentN-0  nbd
//!       |                      |            |                 |         |
//!   swap-fileN           swap-lentN-0   swap-copyN      swap-lentN-0  swap-lentN-1
//!                           nbd         raw on swap-fileN    nbd         nbd
//! ```
//! Each move creates block nodes of a new generation N, mirrors the old nodes onto the new ones
//! (`blockdev-mirror`), and then lets the guest's device use the new ones (`job-complete`). If a
//! step before the last fails, the new nodes are removed again.
//!
//! **Why writes are mirrored in the background.** With `copy-mode=write-blocking`, each guest write
//! goes to the old and the new nodes at once, and the job ends under any load. But if such a job
//! fails or is cancelled while the guest writes, QEMU 10.0 writes to freed memory and may crash
//! (docs/decisions/0042). In the background mode, blocks that the guest writes during the job are
//! copied again. A guest that writes faster than the job copies is slowed down.
//!
//! **Why no byte is lost.** A quorum with `read-pattern=fifo` and `vote-threshold=1` writes to all
//! children, waits for all answers, and succeeds if one child succeeded. The quorum reads from the
//! first child, and from the next child if that read fails (`block/quorum.c`). So every byte that
//! the guest may rely on is in every child that has failed no request. A child that has failed a
//! write must never be read again:
//! - For a child on lent RAM, the connection has ended (an export serves one connection only, see
//!   `export`), or is ended as soon as QEMU reports the failure.
//! - The copy on disk is removed from the quorum as soon as QEMU reports the failure.
//!
//! Each `nbd` node is the client of a relay on this host ([`relay`](super::relay)). The relay
//! remembers checksums of all written blocks, and so detects a lender that returns wrong bytes.

use std::ops::DerefMut;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_vm::qemu_user::{self, QemuUser};
use memfold_vm::swap::{self, DEVICE};
use memfold_vm::{Qmp, QmpError};
use serde_json::{Value, json};

use super::borrowing::lent_node;
pub use super::borrowing::{Borrowing, Part, Phase, Stripe, Top};
pub use super::copy_pace::{Copying, NO_GAIN};
use super::copy_pace::{LIMITS, Pace};
use super::lease::Durability;

/// ID of the mirror job that performs a switch.
const JOB: &str = "memfold-swap";

/// How long a switch may make no progress before it is cancelled.
const STUCK: Duration = Duration::from_secs(30);

/// Time between two polls of a job.
const LOOK: Duration = Duration::from_millis(20);

/// Reason why the block nodes under a VM's swap disk could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// QEMU refused a command or has ended.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The VM has no swap disk made by memfold.
    #[error(
        "VM '{0}' has no swap disk made by memfold; start the VM with --swap SIZE (swap = ... in its description)"
    )]
    NoSwapDisk(String),
    /// The file for the copy of the swap disk on the host's disk cannot be created.
    #[error("cannot create {path} with {bytes} bytes for the swap disk's data on this host")]
    Copy {
        /// Path of the file for the copy.
        path: PathBuf,
        /// Size of the file for the copy, in bytes.
        bytes: u64,
        /// The kernel's error of creating the file.
        #[source]
        source: std::io::Error,
    },
    /// No connection to the relay for QEMU can be made.
    #[error(
        "cannot connect to the relay's socket {path}; relay.log in the VM's directory may say why"
    )]
    Relay {
        /// Path of the relay's socket.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// The switch to other block nodes failed before its last step. The VM still uses the previous
    /// nodes.
    #[error(
        "cannot move the swap disk ({0}); the VM continues to use the disk at its previous location"
    )]
    Switch(String),
    /// QEMU was told to switch to other block nodes, but does not say whether it has. Both the old
    /// and the new nodes must stay.
    #[error(
        "QEMU did not say whether it moved the swap disk; memfold asks again, and keeps both locations until QEMU answers"
    )]
    Unknown(#[source] QmpError),
}

/// Returns the ID of the TLS key object that daemons without relays created.
fn tls(generation: u64, part: usize) -> String {
    format!("swap-tls{generation}-{part}")
}

fn copy_node(generation: u64) -> String {
    format!("swap-copy{generation}")
}

/// Parses the generation number in a node's name: 7 for `swap7` and `swap-lent7-0`.
fn generation_of(node: &str) -> Option<u64> {
    let rest = node.strip_prefix("swap")?;
    let digits = rest.trim_start_matches(|c: char| c.is_ascii_lowercase() || c == '-');
    digits.split('-').next()?.parse().ok()
}

fn nodes(qmp: &mut Qmp) -> Result<Vec<Value>, QmpError> {
    let all = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    Ok(all.as_array().cloned().unwrap_or_default())
}

/// Returns whether `device`, an entry of `query-block` or `query-blockstats`, is the swap device.
fn is_swap_device(device: &Value) -> bool {
    let name = device["qdev"].as_str();
    name.is_some_and(|name| {
        let of_it = name.strip_prefix("/machine/peripheral/").unwrap_or(name);
        of_it.split('/').next() == Some(DEVICE)
    })
}

/// Returns the swap device in the answer of `query-block` or `query-blockstats`.
pub(super) fn swap_device(devices: &Value) -> Option<&Value> {
    let mut devices = devices.as_array()?.iter();
    devices.find(|device| is_swap_device(device))
}

/// Returns the block node that the VM's swap device uses now. `vm`: name of the VM, for the error
/// message.
///
/// # Errors
/// Fails if the VM has no swap disk made by memfold, or QEMU does not answer.
pub fn top(qmp: &mut Qmp, vm: &str) -> Result<Top, GraphError> {
    let missing = || GraphError::NoSwapDisk(vm.to_owned());
    let devices = qmp.query("query-block")?;
    let inserted = &swap_device(&devices).ok_or_else(missing)?["inserted"];
    let node = inserted["node-name"].as_str().ok_or_else(missing)?;
    let generation = generation_of(node).ok_or_else(missing)?;
    let bytes = inserted["image"]["virtual-size"].as_u64();
    let bytes = bytes.ok_or_else(missing)?;
    let file_node = swap::file_node(generation);
    let file = nodes(qmp)?
        .iter()
        .find(|other| other["node-name"] == file_node)
        .and_then(|other| Some(PathBuf::from(other["file"].as_str()?)));
    Ok(Top {
        node: node.to_owned(),
        generation,
        bytes,
        file,
    })
}

/// Returns a number for the swap disk's next block nodes that is not in the name of any existing
/// node.
pub fn free_generation(qmp: &mut Qmp) -> Result<u64, QmpError> {
    let all = nodes(qmp)?;
    let names = all.iter().filter_map(|node| node["node-name"].as_str());
    let newest = names.filter_map(generation_of).max();
    Ok(newest.map_or(0, |newest| newest + 1))
}

fn has_node(qmp: &mut Qmp, name: &str) -> Result<bool, QmpError> {
    Ok(nodes(qmp)?.iter().any(|node| node["node-name"] == name))
}

fn add_node(qmp: &mut Qmp, node: Value) -> Result<(), QmpError> {
    qmp.execute("blockdev-add", node).map(drop)
}

/// Adds an NBD block node with the name `node` to QEMU. The node's client gets a connection to the
/// relay that listens on the Unix socket `relay`: a QEMU that has switched to a user without root's
/// rights cannot connect itself.
pub fn connect(qmp: &mut Qmp, node: &str, relay: &Path) -> Result<(), GraphError> {
    let failed = |source| GraphError::Relay {
        path: relay.to_owned(),
        source,
    };
    let socket = UnixStream::connect(relay).map_err(failed)?;
    qmp.pass(node, socket.as_fd())?;
    let server = json!({ "type": "fd", "str": node });
    let nbd = json!({ "driver": "nbd", "node-name": node, "export": "", "server": server });
    add_node(qmp, nbd).inspect_err(|_| {
        // This fails if the node has taken the descriptor.
        let _ = qmp.execute("closefd", json!({ "fdname": node }));
    })?;
    Ok(())
}

/// Adds the node `name`, which uses a file on disk. The file must already have its full size.
fn add_file(qmp: &mut Qmp, name: &str, generation: u64, file: &Path) -> Result<(), QmpError> {
    let cache = json!({ "direct": false, "no-flush": true });
    let file = json!({
        "driver": "file", "node-name": swap::file_node(generation), "filename": file, "cache": cache,
    });
    let node = json!({ "driver": "raw", "node-name": name, "cache": cache, "file": file });
    add_node(qmp, node)
}

/// Creates the block nodes above the NBD nodes of the swap disk's copies on lent RAM, which exist
/// already: the quorum, and the node of the copy on disk. `user`: user that QEMU runs as.
pub fn build(
    qmp: &mut Qmp,
    borrowing: &Borrowing,
    user: Option<QemuUser>,
) -> Result<(), GraphError> {
    let generation = borrowing.generation;
    let parts = 0..borrowing.parts.len();
    let mut children: Vec<String> = parts.map(|part| borrowing.lent(part)).collect();
    if let Some(copy) = &borrowing.copy {
        let name = copy_node(generation);
        make_file(copy, borrowing.bytes, user)?;
        add_file(qmp, &name, generation, copy)?;
        children.push(name);
    }
    if borrowing.durability != Durability::None {
        let node = json!({
            "driver": "quorum", "node-name": borrowing.top(), "vote-threshold": 1,
            "read-pattern": "fifo", "children": children,
        });
        add_node(qmp, node)?;
    }
    Ok(())
}

fn make_file(path: &Path, bytes: u64, user: Option<QemuUser>) -> Result<(), GraphError> {
    let made = swap::create(path, bytes, false).and_then(|()| qemu_user::give(path, user));
    made.map_err(|source| GraphError::Copy {
        path: path.to_owned(),
        bytes,
        source,
    })
}

/// Creates the block nodes of a swap disk that is on the host's disk only, in a new file that
/// belongs to QEMU's user. Returns the name of the topmost node.
pub fn build_on_disk(
    qmp: &mut Qmp,
    generation: u64,
    (file, user): (&Path, Option<QemuUser>),
    bytes: u64,
) -> Result<String, GraphError> {
    make_file(file, bytes, user)?;
    let name = swap::node(generation);
    add_file(qmp, &name, generation, file)?;
    Ok(name)
}

/// Makes the swap device use block node `to` instead of `from`, after all bytes were copied.
/// `monitor` gives access to the QMP monitor for one command at a time. If `failed`, which gets the
/// progress of the copy, returns a reason, the switch is cancelled.
///
/// # Errors
/// After an error, the swap device still uses `from`. Only after [`GraphError::Unknown`] it may use
/// either node.
pub fn switch<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    from: &str,
    to: &str,
    failed: &dyn Fn(&Copying) -> Option<String>,
) -> Result<(), GraphError> {
    let mirror = json!({
        "job-id": JOB, "device": from, "target": to, "sync": "full",
        "copy-mode": "background", "on-source-error": "report", "on-target-error": "report",
    });
    monitor().execute("blockdev-mirror", mirror)?;
    let done = copy(monitor, failed).and_then(|()| go_over(monitor));
    // If this call fails, `cancel` removes the limit when it cleans up the switch.
    let _ = limit_writes(&mut monitor(), 0);
    if done? == to {
        return Ok(());
    }
    Err(GraphError::Switch(
        "QEMU did not switch to the new disk at the end".into(),
    ))
}

/// Waits until the job has copied the whole disk, and the writes that the guest made meanwhile.
/// After an error, the job has ended.
fn copy<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    failed: &dyn Fn(&Copying) -> Option<String>,
) -> Result<(), GraphError> {
    let (mut offset, mut moved) = (0, Instant::now());
    let mut pace = Pace::default();
    loop {
        let job = job(&mut monitor())?;
        let why = match &job {
            None => Some("a write to the new disk, or a read of the old one, failed".to_owned()),
            Some(_) if moved.elapsed() > STUCK => {
                Some(format!("nothing was copied in {} s", STUCK.as_secs()))
            }
            Some(_) => failed(&pace.seen()),
        };
        if let Some(why) = why {
            cancel(monitor)?;
            return Err(GraphError::Switch(why));
        }
        let Some(job) = job else { continue };
        if job["ready"] == true {
            return Ok(());
        }
        let number = |key: &str| job[key].as_u64().unwrap_or(0);
        let (now, length) = (number("offset"), number("len"));
        if now != offset {
            (offset, moved) = (now, Instant::now());
        }
        // The job's `len` grows as the guest writes.
        if let Some(limit) = pace.look(now, length, Instant::now()) {
            limit_writes(&mut monitor(), limit)?;
        }
        std::thread::sleep(LOOK);
    }
}

/// Limits the guest's writes to its swap disk to `limit` bytes per second, or removes the limit if
/// `limit` is 0. Limits that other programs have set stay.
fn limit_writes(qmp: &mut Qmp, limit: u64) -> Result<(), QmpError> {
    let devices = qmp.query("query-block")?;
    let Some(device) = swap_device(&devices) else {
        return Ok(());
    };
    let before = device["inserted"]["bps_wr"].as_u64();
    let is_ours = |before: u64| before == 0 || LIMITS.contains(&before);
    if before == Some(limit) || !before.is_some_and(is_ours) {
        return Ok(());
    }
    let limits = json!({ "id": device["qdev"], "bps": 0, "bps_rd": 0, "bps_wr": limit, "iops": 0, "iops_rd": 0, "iops_wr": 0 });
    qmp.execute("block_set_io_throttle", limits).map(drop)
}

/// Completes the job and returns the name of the node that the device uses afterwards. Only the
/// device shows whether the job completed or failed, because QEMU's answer may be lost or come too
/// late.
fn go_over<M: DerefMut<Target = Qmp>>(monitor: &impl Fn() -> M) -> Result<String, GraphError> {
    let asked = monitor().execute("job-complete", json!({ "id": JOB }));
    if let Err(error @ QmpError::Refused { .. }) = asked {
        return Err(error.into());
    }
    let end = Instant::now() + STUCK;
    loop {
        let error = match used(monitor) {
            Ok(Some(top)) => return Ok(top.node),
            Ok(None) if Instant::now() < end => None,
            Ok(None) => cancel(monitor).err(),
            Err(GraphError::Qmp(error)) => Some(error),
            Err(error) => return Err(error),
        };
        let is_gone = matches!(error, Some(QmpError::Connect { .. }));
        if let Some(error) = error.filter(|_| is_gone || Instant::now() > end) {
            return Err(GraphError::Unknown(error));
        }
        std::thread::sleep(LOOK);
    }
}

/// Returns the node that the device uses; `None` while a switch is in progress.
fn used<M: DerefMut<Target = Qmp>>(monitor: &impl Fn() -> M) -> Result<Option<Top>, GraphError> {
    let mut qmp = monitor();
    if job(&mut qmp)?.is_some() {
        return Ok(None);
    }
    top(&mut qmp, "").map(Some)
}

fn job(qmp: &mut Qmp) -> Result<Option<Value>, QmpError> {
    let jobs = qmp.query("query-block-jobs")?;
    let mut jobs = jobs.as_array().into_iter().flatten();
    Ok(jobs.find(|job| job["device"] == JOB).cloned())
}

/// Cancels a switch of the swap device to other block nodes, if one is in progress. Without an
/// error, no switch is in progress afterwards.
pub fn cancel<M: DerefMut<Target = Qmp>>(monitor: &impl Fn() -> M) -> Result<(), QmpError> {
    let end = Instant::now() + STUCK;
    while job(&mut monitor())?.is_some() {
        if Instant::now() > end {
            return Err(QmpError::Timeout {
                command: "block-job-cancel".into(),
                seconds: STUCK.as_secs_f64(),
            });
        }
        // The job may end by itself before the command.
        let asked = monitor().execute("block-job-cancel", json!({ "device": JOB, "force": true }));
        if let Err(error @ QmpError::Lost { .. }) = asked {
            return Err(error);
        }
        std::thread::sleep(LOOK);
    }
    // An earlier daemon may have been killed during its switch and left the limit.
    limit_writes(&mut monitor(), 0)
}

/// Removes copy number `part` on lent RAM from the swap disk's quorum, which continues on the other
/// copy. The removed copy must not be the last child of the quorum.
pub fn take_out(qmp: &mut Qmp, borrowing: &Borrowing, part: usize) -> Result<(), GraphError> {
    let node = borrowing.lent(part);
    // Without `yank`, the node's NBD client would keep trying to connect.
    let instances = json!({ "instances": [{ "type": "block-node", "node-name": node }] });
    match qmp.execute("yank", instances) {
        // If QEMU refuses the command, the node is gone already.
        Ok(_) | Err(QmpError::Refused { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    take_child_out(qmp, borrowing, &node, part)?;
    remove(qmp, &[node], &[tls(borrowing.generation, part)])
}

/// Removes the copy on the host's disk from the swap disk's quorum, after the copy has failed a
/// write. If the lender dies later, reads then fail instead of returning older data.
pub fn take_copy_out(qmp: &mut Qmp, borrowing: &Borrowing) -> Result<(), GraphError> {
    let node = copy_node(borrowing.generation);
    take_child_out(qmp, borrowing, &node, borrowing.parts.len())?;
    remove(qmp, &[node, swap::file_node(borrowing.generation)], &[])
}

/// Removes a child of the quorum. `number` is the child's position at the creation of the quorum.
fn take_child_out(
    qmp: &mut Qmp,
    borrowing: &Borrowing,
    node: &str,
    number: usize,
) -> Result<(), GraphError> {
    if !has_node(qmp, node)? {
        return Ok(());
    }
    let child = json!({ "parent": borrowing.top(), "child": format!("children.{number}") });
    match qmp.execute("x-blockdev-change", child) {
        // The child was removed earlier, but its node was not.
        Err(QmpError::Refused { description, .. }) if description.contains("child") => {}
        other => drop(other?),
    }
    Ok(())
}

/// Removes all block nodes of the swap disk whose names contain the number `generation`. The caller
/// ensures that nothing uses them.
pub fn remove_generation(qmp: &mut Qmp, generation: u64) -> Result<(), GraphError> {
    // The names are in order from the top node down.
    let names = [
        swap::node(generation),
        copy_node(generation),
        lent_node(generation, 0),
        lent_node(generation, 1),
        swap::file_node(generation),
    ];
    remove(qmp, &names, &[tls(generation, 0), tls(generation, 1)])
}

fn remove(qmp: &mut Qmp, names: &[String], keys: &[String]) -> Result<(), GraphError> {
    for name in names {
        // A node may have been removed together with another one.
        if has_node(qmp, name)? {
            qmp.execute("blockdev-del", json!({ "node-name": name }))?;
        }
    }
    let objects = qmp.execute("qom-list", json!({ "path": "/objects" }))?;
    let objects = objects.as_array().into_iter().flatten();
    let names = objects.filter_map(|object| object["name"].as_str());
    for key in names.filter(|name| keys.iter().any(|key| key == name)) {
        qmp.execute("object-del", json!({ "id": key }))?;
    }
    Ok(())
}

/// Which child of a swap disk's quorum failed a request, as QEMU reports it (`QUORUM_REPORT_BAD`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    /// The copy on lent RAM with this number, which must not be read again.
    Lent(usize),
    /// The copy on the host's disk. The failed request may have been a write, even if the report
    /// names a read: of several reports within a second, QEMU may send only the last.
    Copy,
}

/// Returns which child of the swap disk's quorum failed a request, according to a QMP event; `None`
/// if the event is another one or names no node of `borrowing`.
#[must_use]
pub fn failed(event: &Value, borrowing: &Borrowing) -> Option<Failed> {
    let data = &event["data"];
    let node = data["node-name"].as_str()?;
    if event["event"] != "QUORUM_REPORT_BAD" {
        return None;
    }
    if node == copy_node(borrowing.generation) {
        return Some(Failed::Copy);
    }
    let is_it = |part: &usize| node == borrowing.lent(*part);
    (0..borrowing.parts.len()).find(is_it).map(Failed::Lent)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::sync::Mutex;

    use super::super::copy_pace::CATCH_UP;
    use super::super::endpoint::Address;
    use super::super::lease::LeaseId;
    use super::*;

    /// Runs a fake QEMU that closes the connection when it receives `job-complete`. Then its device
    /// uses `used`, or QEMU has ended if `used` is `None`.
    fn qemu(listener: UnixListener, used: Option<&'static str>) {
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                writeln!(stream, r#"{{"QMP": {{}}}}"#).unwrap();
                for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                    let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
                    let answer = match asked["execute"].as_str().unwrap() {
                        "job-complete" if used.is_none() => return,
                        "job-complete" => break,
                        "query-block" => json!([{ "qdev": DEVICE, "inserted": {
                            "node-name": used, "image": { "virtual-size": 4096 },
                        } }]),
                        _ => json!([]),
                    };
                    let answer = json!({ "return": answer, "id": asked["id"] });
                    writeln!(stream, "{answer}").unwrap();
                }
            }
        });
    }

    #[test]
    fn if_the_answer_to_a_disk_switch_is_lost_qemu_is_asked_which_block_node_is_in_use() {
        for used in [Some("swap1"), Some("swap0"), None] {
            let place = tempfile::tempdir().unwrap();
            let path = place.path().join("q");
            qemu(UnixListener::bind(&path).unwrap(), used);
            let qmp = Mutex::new(Qmp::connect(&path, Duration::from_secs(5)).unwrap());
            let known = go_over(&|| qmp.lock().unwrap());
            match (known, used) {
                (Ok(node), Some(used)) => assert_eq!(node, used),
                (Err(GraphError::Unknown(_)), None) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Runs a fake QEMU whose guest writes faster than a job copies until the guest is slowed down.
    /// `told` receives the write limits that were set.
    fn busy_qemu(listener: &UnixListener, told: &Mutex<Vec<u64>>) {
        let (mut stream, _) = listener.accept().unwrap();
        writeln!(stream, r#"{{"QMP": {{}}}}"#).unwrap();
        let (mut copied, mut switched) = (0, false);
        for line in BufReader::new(stream.try_clone().unwrap()).lines() {
            let Ok(line) = line else { return };
            let asked: Value = serde_json::from_str(&line).unwrap();
            let limit = told.lock().unwrap().last().copied().unwrap_or(0);
            let answer = match asked["execute"].as_str().unwrap() {
                "block_set_io_throttle" => {
                    assert_eq!(asked["arguments"]["id"], "/machine/peripheral/swap/x");
                    let limit = asked["arguments"]["bps_wr"].as_u64().unwrap();
                    told.lock().unwrap().push(limit);
                    json!({})
                }
                "blockdev-mirror" => {
                    assert_eq!(asked["arguments"]["copy-mode"], "background");
                    json!({})
                }
                "job-complete" => {
                    switched = true;
                    json!({})
                }
                "query-block-jobs" if switched => json!([]),
                "query-block-jobs" => {
                    copied += 4096;
                    json!([{ "device": JOB, "offset": copied, "len": copied + 4096, "ready": limit > 0 }])
                }
                "query-block" => json!([{ "qdev": "/machine/peripheral/swap/x", "inserted": {
                    "node-name": if switched { "swap1" } else { "swap0" }, "bps_wr": limit,
                    "image": { "virtual-size": 8192 },
                } }]),
                _ => json!([]),
            };
            writeln!(stream, "{}", json!({ "return": answer, "id": asked["id"] })).unwrap();
        }
    }

    /// Switches the disk of a [`busy_qemu`] whose guest's writes have the limit `before`; `None`:
    /// no limit. Returns all limits, and how long the switch took.
    fn switch_busy(before: Option<u64>) -> (Vec<u64>, Duration) {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let told = Mutex::new(before.into_iter().collect());
        let began = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| busy_qemu(&listener, &told));
            let qmp = Mutex::new(Qmp::connect(&path, Duration::from_secs(5)).unwrap());
            switch(&|| qmp.lock().unwrap(), "swap0", "swap1", &|_| None).unwrap();
        });
        (told.into_inner().unwrap(), began.elapsed())
    }

    #[test]
    fn a_guest_that_writes_faster_than_its_disk_is_mirrored_is_throttled_until_the_switch() {
        let (limits, took) = switch_busy(None);
        assert!(took >= CATCH_UP);
        assert_eq!(limits, [LIMITS[0], 0]);
    }

    #[test]
    fn a_switch_removes_each_write_limit_of_memfold_and_no_limit_of_another_program() {
        for limit in LIMITS {
            assert_eq!(switch_busy(Some(limit)).0, [limit, 0]);
        }
        assert_eq!(switch_busy(Some(5 << 20)).0, [5 << 20]);
    }

    #[test]
    fn the_generation_number_is_parsed_from_the_name_of_a_swap_disks_block_node() {
        for (name, generation) in [
            ("swap0", Some(0)),
            ("swap12", Some(12)),
            ("swap-file3", Some(3)),
            ("swap-lent7-1", Some(7)),
            ("swap-copy4", Some(4)),
            ("swap", None),
            ("disk0", None),
            ("#block123", None),
        ] {
            assert_eq!(generation_of(name), generation, "{name}");
        }
    }

    #[test]
    fn a_record_of_a_loan_that_an_older_daemon_version_wrote_is_read() {
        let note = r#"{"generation":1,"durability":"disk","bytes":4096,
            "parts":[{"lease":7,"lender":"a","address":{"tcp":{"ip":"127.0.0.1","port":1}},"lost":false}],
            "copy":"/c","copy_failed":false,"copy_unwatched":false,"phase":"lent"}"#;
        let borrowing: Borrowing = serde_json::from_str(note).unwrap();
        let part = &borrowing.parts[0];
        assert_eq!((part.first.lease, &*part.lenders()), (LeaseId(7), "a"));
        assert_eq!(part.reached_at(), part.first.address);
        assert!(!borrowing.by_itself);
        let again = serde_json::to_string(&borrowing).unwrap();
        assert_eq!(
            serde_json::from_str::<Borrowing>(&again).unwrap(),
            borrowing
        );
    }

    #[test]
    fn qemu_events_distinguish_failures_of_the_copy_from_failures_of_lent_memory() {
        let part = Part {
            first: Stripe {
                lease: LeaseId(1),
                lender: "a".into(),
                address: Address::Unix("/x".into()),
            },
            others: Vec::new(),
            relay: None,
            lost: false,
        };
        let borrowing = Borrowing {
            generation: 2,
            durability: Durability::Disk,
            bytes: 1,
            parts: vec![part],
            copy: Some("/c".into()),
            copy_failed: false,
            copy_unwatched: false,
            phase: Phase::Lent,
            by_itself: false,
        };
        let event = |name: &str, node: &str, kind: &str| json!({ "event": name, "data": { "node-name": node, "type": kind } });
        let bad = "QUORUM_REPORT_BAD";
        let said = |e| failed(&e, &borrowing);
        assert_eq!(
            said(event(bad, "swap-lent2-0", "read")),
            Some(Failed::Lent(0))
        );
        assert_eq!(
            said(event(bad, "swap-lent2-0", "write")),
            Some(Failed::Lent(0))
        );
        assert_eq!(said(event(bad, "swap-copy2", "write")), Some(Failed::Copy));
        assert_eq!(said(event(bad, "swap-copy2", "read")), Some(Failed::Copy));
        assert_eq!(said(event(bad, "swap-lent1-0", "write")), None);
        assert_eq!(said(event("STOP", "swap-lent2-0", "write")), None);
    }
}
