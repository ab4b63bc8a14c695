//! Copies snapshots to an object store (for example S3) and back, and lists and removes snapshots
//! there.

use std::sync::Arc;

use memfold_api::{PullBody, PushBody};
use memfold_transfer::{PullReport, PushReport, PushRequest, Remote, RemoteSnapshot, RemoveReport};
use tracing::info;

use crate::error::DaemonError;
use crate::snapshots::Snapshots;
use crate::snapshots::streaming::request;

impl Snapshots {
    /// Copies a snapshot of this host to an object store.
    pub fn push(&self, name: &str, body: PushBody) -> Result<PushReport, DaemonError> {
        let progress = self.below.snapshot_locks.begin(name)?;
        let remote = Remote::open(&body.url)?;
        let request = PushRequest {
            name: name.to_owned(),
            to: body.to.unwrap_or_else(|| name.to_owned()),
            key: body.key,
        };
        let report = memfold_transfer::push(&self.below.snapshots, &remote, &request, &progress)?;
        info!(
            snapshot = name,
            url = report.url,
            new_bytes = report.new_bytes,
            "snapshot copied to the object store (pushed)"
        );
        Ok(report)
    }

    /// Copies a snapshot from an object store to this host. `name`: the copy's name on this host.
    pub fn pull(self: &Arc<Self>, name: &str, body: PullBody) -> Result<PullReport, DaemonError> {
        if body.stream {
            check_domain(&body)?;
            return self.stream(name, body);
        }
        self.refuse_if_interrupted(name)?;
        let progress = self.below.snapshot_locks.begin(name)?;
        check_domain(&body)?;
        let remote = Remote::open(&body.url)?;
        let request = request(name, body);
        let report = memfold_transfer::pull(&self.below.snapshots, &remote, &request, &progress)?;
        info!(
            snapshot = name,
            url = report.url,
            fetched_bytes = report.fetched_bytes,
            "snapshot copied from the object store (pulled)"
        );
        Ok(report)
    }

    /// Returns the snapshots in an object store.
    pub fn list_remote(&self, url: &str) -> Result<Vec<RemoteSnapshot>, DaemonError> {
        Ok(Remote::open(url)?.list()?)
    }

    /// Removes a snapshot from an object store.
    pub fn remove_remote(&self, name: &str, url: &str) -> Result<RemoveReport, DaemonError> {
        let report = memfold_transfer::remove(&Remote::open(url)?, name)?;
        info!(
            snapshot = name,
            url, "snapshot removed from the object store"
        );
        Ok(report)
    }
}

fn check_domain(body: &PullBody) -> Result<(), DaemonError> {
    let checked = body
        .domain
        .as_ref()
        .map(|domain| memfold_vm::check_name("trust domain", domain));
    checked
        .transpose()
        .map(drop)
        .map_err(|error| DaemonError::BadRequest(error.to_string()))
}
