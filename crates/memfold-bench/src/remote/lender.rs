//! The host of the study `remote` that lends RAM: a daemon at the other end of a simulated network
//! link. The daemon also serves the lease registry.

use std::cell::Cell;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use memfold_api::{Client, LendRequest};
use memfold_lab::{undo_at_interrupt, wait_for};
use memfold_lend::{LenderStatus, Transport};
use memfold_units::ByteSize;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Time limit for the lender's daemon to answer, and to have enough free memory.
const PATIENCE: Duration = Duration::from_secs(120);

/// The lending host of the study: a daemon in the network namespace at the other end of the link,
/// or on this host.
#[derive(Debug)]
pub struct Lender {
    child: Arc<Mutex<Child>>,
    directory: tempfile::TempDir,
    client: Client,
    most: ByteSize,
    /// Address at which the lending host lends.
    address: IpAddr,
    /// Transport by which the lending host lends now.
    by: Cell<Option<Transport>>,
}

impl Lender {
    /// Starts the daemon of the lending host, which then lends `most` bytes by NBD at `address`.
    /// `memfold`: command that starts the program `memfold` there.
    pub fn start(mut memfold: Command, address: IpAddr, most: ByteSize) -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("memfold-lender.")
            .tempdir()?;
        let socket = directory.path().join("s");
        let child = memfold
            .arg("--socket")
            .arg(&socket)
            .args(["serve", "--paused", "--host", "lender", "--config"])
            .args(["/dev/null", "--state"])
            .arg(directory.path().join("state"))
            .stderr(Stdio::null())
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start the lending host's daemon; it needs 'memfold' and nsenter (apt install util-linux)")?;
        let child = Arc::new(Mutex::new(child));
        let (process, place) = (child.clone(), directory.path().to_owned());
        undo_at_interrupt(move || {
            end(&process);
            let _ = std::fs::remove_dir_all(place);
        });
        let lender = Self {
            child,
            client: Client::new(&socket)?,
            directory,
            most,
            address,
            by: Cell::new(None),
        };
        wait("the lender's daemon answers", || {
            lender.client.get::<Value>("/v1/version").is_ok()
        })?;
        lender.lend(Transport::Nbd)?;
        Ok(lender)
    }

    /// Makes the lending host use the transport `by`, and waits until its earlier leases have
    /// ended.
    pub fn lend(&self, by: Transport) -> anyhow::Result<()> {
        if self.by.get() == Some(by) {
            return Ok(());
        }
        let _: Option<LenderStatus> = self.client.delete("/v1/lend")?;
        let request = LendRequest {
            max_bytes: self.most.0,
            listen: Some(self.address),
            announce: None,
            ports: None,
            transport: by,
            // iSCSI between hosts is always unencrypted.
            cleartext: by == Transport::Iscsi,
        };
        // Memory that was lent before may still be in the process of being returned.
        let mut last = String::new();
        wait("the lender lends anew", || {
            let lends = self.client.post::<_, LenderStatus>("/v1/lend", &request);
            lends.map_err(|error| last = error.to_string()).is_ok()
        })
        .with_context(|| last)?;
        self.by.set(Some(by));
        self.wait_free(self.most)
    }

    /// Returns the Unix socket of the lending host's daemon, by which the lease registry is called.
    /// Calls by this socket do not use the link.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    /// Waits until the lending host offers `bytes` of memory.
    pub fn wait_free(&self, bytes: ByteSize) -> anyhow::Result<()> {
        let mut last = String::new();
        wait("the lender has so much to spare", || {
            match self.client.get::<Option<LenderStatus>>("/v1/lend") {
                Ok(Some(status)) => {
                    last = format!("offers {}: {}", ByteSize(status.offer_bytes), status.why);
                    status.offer_bytes >= bytes.0 && status.lent_bytes == 0
                }
                _ => false,
            }
        })
        .with_context(|| last)
    }

    /// Kills the process that exports the memory of the only lease.
    pub fn kill_export(&self) -> anyhow::Result<()> {
        let place = self.directory.path().join("state/lend");
        let is_log = |path: &Path| path.starts_with(&place);
        let found = std::fs::read_dir("/proc")?.flatten().find(|entry| {
            std::fs::read_link(entry.path().join("fd/2")).is_ok_and(|to| is_log(&to))
        });
        let pid = found
            .and_then(|entry| entry.file_name().to_str()?.parse().ok())
            .and_then(Pid::from_raw)
            .context("cannot find the process that exports the lender's memory")?;
        Ok(kill_process(pid, Signal::KILL)?)
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        end(&self.child);
    }
}

/// Kills the lender's daemon, with which its exports end.
fn end(child: &Mutex<Child>) {
    let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = child.kill();
    let _ = child.wait();
}

/// Waits until `ready` returns `true`. `what`: the condition, for the error message.
pub fn wait(what: &str, mut ready: impl FnMut() -> bool) -> anyhow::Result<()> {
    let late = format!("timed out waiting until {what}; not");
    let limits = (PATIENCE, Duration::from_millis(20));
    wait_for(late, limits, || Ok(ready().then_some(())))
}
