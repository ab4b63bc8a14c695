//! The record of attached VMs, for the next daemon.

use std::path::PathBuf;

use memfold_api::AttachRequest;
use tracing::warn;

use crate::json_file::write_json;
use crate::vms::Vms;

impl Vms {
    fn attached_file(&self) -> PathBuf {
        self.below.registry.state().join("attached.json")
    }

    pub(super) fn read_attached(&self) -> Vec<AttachRequest> {
        std::fs::read(self.attached_file())
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default()
    }

    /// Records the attached VMs for the next daemon.
    pub(super) fn write_attached(&self) {
        let machines = self.below.registry.machines();
        let mut list: Vec<AttachRequest> =
            machines.iter().filter_map(|m| m.attach_request()).collect();
        // Attached VMs that this daemon has not reached yet are included.
        let arriving = self.below.registry.arrivals().all();
        let missing = arriving
            .iter()
            .filter_map(|arrival| arrival.attach_request());
        for request in missing {
            if list.iter().all(|known| known.name != request.name) {
                list.push(request.clone());
            }
        }
        if let Err(error) = write_json(&self.attached_file(), &list) {
            warn!(%error, "cannot record which VMs are attached; free space, and attach these VMs again after the daemon's next start");
        }
    }
}
