//! Attaches and detaches the iSCSI disk of one lease, with the kernel's iSCSI initiator
//! (open-iscsi's `iscsiadm`). The disk is RAM that another host lends to this host's swap volume.
//!
//! The lender's iSCSI target accepts only one session in its life. Therefore memfold does no
//! discovery, which would be a session. When a lender does not answer, pending requests fail within
//! seconds. Waiting for the lender would be useless, because the target ends with its session.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::LvmError;
use super::run::run;
use crate::endpoint::Key;
use crate::files;
use crate::iscsi::{LUN, bridge, target_name};
use crate::lease::Durability;

/// Time limit for `iscsiadm`, which has its own, shorter time limits for hosts.
const LIMIT: Duration = Duration::from_secs(300);

/// Time limit for the disk to appear after the login.
const READY: Duration = Duration::from_secs(15);

const LOOK: Duration = Duration::from_millis(50);

/// Time after which a scan that found no disk is repeated.
const SCAN_AGAIN: Duration = Duration::from_secs(1);

/// Directories in which open-iscsi may keep its records of targets.
const RECORDS: [&str; 2] = ["/etc/iscsi/nodes", "/var/lib/iscsi/nodes"];

/// Directory of the kernel's iSCSI sessions in sysfs.
const SESSIONS: &str = "/sys/class/iscsi_session";

/// Time limits for a lender that does not answer, in seconds.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// Time without any answer after which the lender is pinged (`noop_out_interval`).
    ask: u32,
    /// Time without an answer to the ping after which the session is ended (`noop_out_timeout`).
    answer: u32,
    /// Time after which the kernel aborts a SCSI command. The kernel's default is 30.
    command: u32,
}

/// Time limits if this host's disk has a copy, from which a waiting reader can be served. 2 s would
/// be too short for a busy link or lender: the lent image would be dropped needlessly.
const WITH_COPY: Patience = Patience {
    ask: 1,
    answer: 4,
    command: 10,
};

/// Time limits if there is no copy, so that ending the session loses the bytes.
const WITHOUT: Patience = Patience {
    ask: 10,
    answer: 60,
    command: 90,
};

const fn patience(durability: Durability) -> Patience {
    match durability {
        Durability::None => WITHOUT,
        Durability::Disk | Durability::Replica => WITH_COPY,
    }
}

/// Exit status of `iscsiadm` if the session or record does not exist (`ISCSI_ERR_NO_OBJS_FOUND`).
const NOTHING_THERE: i32 = 21;

/// The iSCSI target that serves a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// iSCSI name (IQN) of the target.
    pub name: String,
    /// IP address and TCP port of the lender's tgtd.
    pub portal: SocketAddr,
}

impl Target {
    /// Returns the iSCSI target of the lease with this key, at the address `portal`.
    #[must_use]
    pub fn new(portal: SocketAddr, key: &Key) -> Self {
        Self {
            name: target_name(key),
            portal,
        }
    }
}

/// An iSCSI session of this host's kernel with a lender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Whether the session is logged in to the lender's target.
    pub is_up: bool,
    /// Path of the disk that the session provides; `None` until the kernel has found the disk.
    pub device: Option<PathBuf>,
}

/// Checks that open-iscsi is installed; an error if not.
pub fn check() -> Result<(), LvmError> {
    iscsiadm(&["--version"])
}

/// Logs in to a lease's iSCSI target and returns the path of the disk. `durability` decides how
/// long the kernel waits for a lender that does not answer.
pub fn log_in(target: &Target, key: &Key, durability: Durability) -> Result<PathBuf, LvmError> {
    let patience = patience(durability);
    record(target, key, patience)?;
    let failed = |why: String| LvmError::Session {
        portal: target.portal,
        why,
    };
    node(target, &["--login"]).map_err(|error| failed(error.to_string()))?;
    let end = Instant::now() + READY;
    let device = scanned(&target.name, end).map_err(failed)?;
    // The disk must not be written before other initiators are locked out.
    let closed = bridge::wait_closed(target.portal, end, || false);
    closed.map_err(|error| failed(error.to_string()))?;
    limit_commands(&device, patience)?;
    Ok(device)
}

/// Returns the disk of a session after login. Makes the kernel scan for the disk until it appears.
///
/// iscsid is told not to scan (`node.session.scan`), because its requests to the kernel may not
/// wait for memory (`PR_SET_IO_FLUSHER`). On a host that is short of memory, as a borrower is,
/// Linux before 6.15 then finds no disk ("Allocation failure during SCSI scanning").
fn scanned(target: &str, end: Instant) -> Result<PathBuf, String> {
    let mut next = Instant::now();
    loop {
        let device = find(Path::new(SESSIONS), target).and_then(|found| found.device);
        if let Some(device) = device.filter(|device| device.exists()) {
            return Ok(device);
        }
        let now = Instant::now();
        if now > end {
            return Err("logged in, but the kernel found no disk there".into());
        }
        if now >= next {
            scan(Path::new(SESSIONS), target).map_err(|error| format!("no scan: {error}"))?;
            next = Instant::now() + SCAN_AGAIN;
        }
        std::thread::sleep(LOOK);
    }
}

/// Logs out of a lease's iSCSI target and deletes open-iscsi's record of the target. Succeeds if
/// there was no session and no record.
pub fn log_out(target: &Target) -> Result<(), LvmError> {
    for words in [["--logout"].as_slice(), &["--op", "delete"]] {
        match node(target, words) {
            Err(LvmError::Failed { .. }) if find(Path::new(SESSIONS), &target.name).is_none() => {
                // The session is gone already, and perhaps the record, too.
            }
            done => done?,
        }
    }
    Ok(())
}

/// Returns the session of this host's kernel with an iSCSI target; `None` if there is none.
#[must_use]
pub fn of(target: &Target) -> Option<Session> {
    find(Path::new(SESSIONS), &target.name)
}

fn node(target: &Target, words: &[&str]) -> Result<(), LvmError> {
    let portal = target.portal.to_string();
    let mut all = vec!["--mode", "node", "--targetname", &target.name];
    all.extend(["--portal", &portal]);
    all.extend(words);
    iscsiadm(&all)
}

fn iscsiadm(words: &[&str]) -> Result<(), LvmError> {
    let program = ("iscsiadm", "open-iscsi");
    run(program, words, Some(LIMIT), NOTHING_THERE).map(drop)
}

/// Creates open-iscsi's record of a target. The secret is written into the record's file, which
/// only root can read. On a command line, all users of the host could read the secret.
fn record(target: &Target, key: &Key, patience: Patience) -> Result<(), LvmError> {
    node(target, &["--op", "new"])?;
    let mut records = RECORDS
        .map(|place| Path::new(place).join(&target.name))
        .into_iter();
    let file = records.find_map(|path| only_file(&path));
    let file = file.ok_or_else(|| LvmError::Session {
        portal: target.portal,
        why: format!(
            "iscsiadm created no record of {} in {}",
            target.name,
            RECORDS.join(" or ")
        ),
    })?;
    let change = || -> io::Result<()> {
        let text = std::fs::read_to_string(&file)?;
        let new = file.with_extension("new");
        files::write_private(&new, &with_settings(&text, &settings(key, patience)))?;
        std::fs::rename(new, &file)
    };
    change().map_err(|source| LvmError::Files {
        path: file.clone(),
        source,
    })
}

fn only_file(directory: &Path) -> Option<PathBuf> {
    below(directory).find_map(|(_, path)| {
        if path.is_dir() {
            only_file(&path)
        } else {
            Some(path)
        }
    })
}

/// Returns the settings of a target's record; `iscsid.conf(5)` explains them.
fn settings(key: &Key, patience: Patience) -> Vec<(&'static str, String)> {
    let (ask, answer) = (patience.ask.to_string(), patience.answer.to_string());
    let all = [
        ("node.session.auth.username", key.identity.as_str()),
        ("node.session.auth.password", &key.hex),
        // A lease does not survive a reboot of this host, so there must be no login at boot.
        ("node.startup", "manual"),
        ("node.session.auth.authmethod", "CHAP"),
        // The function [`scanned`] starts the scan.
        ("node.session.scan", "manual"),
        // Pending requests must fail at once when the connection ends, because there will be no
        // other.
        ("node.session.timeo.replacement_timeout", "0"),
        ("node.conn[0].timeo.login_timeout", "5"),
        ("node.conn[0].timeo.logout_timeout", "3"),
        ("node.session.initial_login_retry_max", "2"),
        ("node.session.err_timeo.abort_timeout", "3"),
        ("node.session.err_timeo.lu_reset_timeout", "3"),
        ("node.session.err_timeo.tgt_reset_timeout", "3"),
        ("node.conn[0].timeo.noop_out_interval", &ask),
        ("node.conn[0].timeo.noop_out_timeout", &answer),
    ];
    all.map(|(name, value)| (name, value.to_owned())).to_vec()
}

/// Replaces settings in the text of an open-iscsi record, and returns the new text.
fn with_settings(record: &str, settings: &[(&str, String)]) -> String {
    let is_set = |line: &&str| {
        let name = line.split('=').next().unwrap_or_default().trim();
        settings.iter().any(|(set, _)| *set == name)
    };
    let others = record.lines().filter(|line| !is_set(line));
    let (end, rest): (Vec<&str>, Vec<&str>) =
        others.partition(|line| line.starts_with("# END RECORD"));
    let ours = settings
        .iter()
        .map(|(name, value)| format!("{name} = {value}"));
    let ours: Vec<String> = ours.collect();
    let ours = ours.iter().map(String::as_str);
    let lines: Vec<&str> = rest.into_iter().chain(ours).chain(end).collect();
    lines.join("\n") + "\n"
}

/// Returns the entries of a directory: names and paths.
fn below(directory: &Path) -> impl Iterator<Item = (String, PathBuf)> + use<> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        (name, entry.path())
    })
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn directory(sessions: &Path, name: &str) -> Option<PathBuf> {
    let mut paths = below(sessions).map(|(_, path)| path);
    paths.find(|path| read(&path.join("targetname")).trim() == name)
}

/// Makes the kernel scan for the disk of a session. Does nothing if the session does not exist.
fn scan(sessions: &Path, name: &str) -> io::Result<()> {
    let Some(session) = directory(sessions, name) else {
        return Ok(());
    };
    // The link leads to the directory `.../hostH/sessionN`.
    let device = std::fs::canonicalize(session.join("device"))?;
    let host = device.parent().unwrap_or(&device);
    let host_name = host.file_name().unwrap_or_default();
    let file = host.join("scsi_host").join(host_name).join("scan");
    // The scan may cover any channel and target, because the SCSI host belongs to this session
    // only.
    std::fs::write(file, format!("- - {LUN}"))
}

/// Returns the session with a target, in the directory `sessions`.
fn find(sessions: &Path, name: &str) -> Option<Session> {
    let session = directory(sessions, name)?;
    Some(Session {
        is_up: read(&session.join("state")).trim() == "LOGGED_IN",
        device: disk(&session.join("device")),
    })
}

/// Returns the disk in `targetH:C:I/H:C:I:LUN/block/sdX` under a session's device.
fn disk(session: &Path) -> Option<PathBuf> {
    let unit = format!(":{LUN}");
    let targets = below(session).filter(|(name, _)| name.starts_with("target"));
    let mut units = targets.flat_map(|(_, path)| below(&path));
    let (_, unit) = units.find(|(name, _)| name.ends_with(&unit))?;
    let (disk, _) = below(&unit.join("block")).next()?;
    Some(Path::new("/dev").join(disk))
}

fn limit_commands(device: &Path, patience: Patience) -> Result<(), LvmError> {
    let name = device.file_name().unwrap_or_default();
    let path = Path::new("/sys/class/block")
        .join(name)
        .join("device/timeout");
    std::fs::write(&path, patience.command.to_string())
        .map_err(|source| LvmError::Files { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_written_to_an_iscsi_node_record_replace_the_previous_settings() {
        let record = "# BEGIN RECORD 2.1.8\nnode.name = n\nnode.session.timeo.replacement_timeout = 120\nnode.conn[0].address = 10.0.0.1\n# END RECORD\n";
        let key = Key {
            identity: "lease-7".into(),
            hex: "0f".repeat(32),
        };
        let new = with_settings(record, &settings(&key, WITH_COPY));
        assert!(new.starts_with("# BEGIN RECORD 2.1.8\nnode.name = n\nnode.conn[0].address"));
        assert!(new.ends_with("# END RECORD\n"));
        let lines = |name: &str| new.lines().filter(|line| line.starts_with(name)).count();
        assert_eq!(lines("node.session.timeo.replacement_timeout = 0"), 1);
        assert_eq!(lines("node.session.timeo.replacement_timeout"), 1);
        assert_eq!(lines("node.session.auth.password = 0f0f"), 1);
        assert_eq!(with_settings(&new, &settings(&key, WITH_COPY)), new);
    }

    #[test]
    fn an_iscsi_session_and_its_disk_are_found_by_the_target_name() {
        let root = tempfile::tempdir().unwrap();
        let sessions = root.path().join("class");
        assert_eq!(find(&sessions, "iqn.x:lease-1"), None);
        for (number, name) in [(1, "iqn.x:other"), (2, "iqn.x:lease-1")] {
            let session = sessions.join(format!("session{number}"));
            for unit in [
                "target3:0:0/3:0:0:0",
                "target3:0:0/3:0:0:1/block/sdc",
                "power",
            ] {
                std::fs::create_dir_all(session.join("device").join(unit)).unwrap();
            }
            std::fs::write(session.join("targetname"), format!("{name}\n")).unwrap();
            std::fs::write(session.join("state"), "LOGGED_IN\n").unwrap();
        }
        let found = find(&sessions, "iqn.x:lease-1").unwrap();
        assert_eq!(found.device.as_deref(), Some(Path::new("/dev/sdc")));
        assert!(found.is_up);
        std::fs::write(sessions.join("session2/state"), "FAILED\n").unwrap();
        assert!(!find(&sessions, "iqn.x:lease-1").unwrap().is_up);
        assert_eq!(find(&sessions, "iqn.x:lease-2"), None);
    }

    #[test]
    fn a_scsi_scan_is_requested_only_on_the_host_of_the_given_iscsi_session() {
        let root = tempfile::tempdir().unwrap();
        let sessions = root.path().join("class");
        let file = |number: u8| {
            let host = format!("devices/host{number}/scsi_host/host{number}/scan");
            root.path().join(host)
        };
        for (number, name) in [(1, "iqn.x:other"), (2, "iqn.x:lease-1")] {
            let session = sessions.join(format!("session{number}"));
            let host = root.path().join(format!("devices/host{number}"));
            std::fs::create_dir_all(host.join("session")).unwrap();
            std::fs::create_dir_all(file(number).parent().unwrap()).unwrap();
            std::fs::create_dir_all(&session).unwrap();
            std::fs::write(file(number), "").unwrap();
            std::fs::write(session.join("targetname"), name).unwrap();
            std::os::unix::fs::symlink(host.join("session"), session.join("device")).unwrap();
        }
        scan(&sessions, "iqn.x:lease-1").unwrap();
        assert_eq!(std::fs::read_to_string(file(2)).unwrap(), "- - 1");
        assert_eq!(std::fs::read_to_string(file(1)).unwrap(), "");
        scan(&sessions, "iqn.x:none").unwrap();
        std::fs::remove_file(file(2)).unwrap();
        std::fs::remove_dir_all(root.path().join("devices/host2/scsi_host")).unwrap();
        let error = scan(&sessions, "iqn.x:lease-1").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }
}
