//! After a start of the daemon, adopts the VMs that an earlier daemon left running, each as soon as
//! its QEMU answers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use memfold_host::chain;
use memfold_units::ByteSize;
use memfold_vm::{MachineError, Process, QmpError, Record, Vm, VmDirectory, VmSpec};
use tracing::{info, warn};

use crate::arrivals::{AttachedVm, Entry, Way};
use crate::error::DaemonError;
use crate::machine::Origin;
use crate::segments::in_guest::recall_segments;
use crate::vms::Vms;
use crate::{boot_snapshot, boot_work, interrupted_save, threads};

/// Pauses between two attempts to adopt a VM: the first, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// Time between two checks whether a VM that is being adopted was stopped by a request.
const LOOK: Duration = Duration::from_millis(100);

impl Vms {
    /// Begins to adopt the VMs that run under the state directory, and the VMs that the earlier
    /// daemon was attached to. Each has its own thread, which repeats attempts.
    pub(crate) fn begin_adoption(self: &Arc<Self>) -> io::Result<()> {
        for directory in VmDirectory::all(self.below.registry.state())? {
            // A directory without a description is left from a start that was interrupted.
            let spec: Option<VmSpec> = VmDirectory::read_json(&directory.spec()).ok();
            let spec = spec.unwrap_or_else(|| VmSpec::new(directory.name(), ByteSize(0)));
            let entry = self.below.registry.arrive(&spec, Way::Adopting);
            self.begin_try("adopt", entry, move |vms, entry| {
                vms.adopt(&directory, entry)
            });
        }
        for vm in self.read_attached() {
            let entry = self.arrive_attached(&vm.request, Some(vm.clone()));
            self.begin_try("attach", entry, move |vms, entry| {
                vms.attach_again(&vm, entry)
            });
        }
        Ok(())
    }

    /// Starts the thread of a VM's adoption. `attempt` returns whether no more attempts are needed.
    fn begin_try(
        self: &Arc<Self>,
        thread: &str,
        entry: Result<Entry, DaemonError>,
        attempt: impl Fn(&Arc<Self>, &Entry) -> bool + Send + 'static,
    ) {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                return warn!(
                    error = chain(&error),
                    "VM not adopted: another VM has the same name; attach this VM under another name"
                );
            }
        };
        let (weak, first) = (
            Arc::downgrade(self),
            self.below.registry.arrivals().unsettled(),
        );
        let work = move || {
            let (mut pause, mut first) = (PAUSE.0, Some(first));
            while let Some(vms) = weak.upgrade() {
                if attempt(&vms, &entry) {
                    return;
                }
                first.take();
                drop(vms);
                threads::wait_until(pause, LOOK, || entry.arrival.cancel.is_set());
                pause = (pause * 2).min(PAUSE.1);
            }
        };
        if let Err(error) = threads::begin(thread, work) {
            warn!(%error, "cannot start the thread that adopts a VM; restart the daemon");
        }
    }

    /// Attempts once to adopt the VM with its files in `directory`. Returns whether no more
    /// attempts are needed.
    fn adopt(self: &Arc<Self>, directory: &VmDirectory, entry: &Entry) -> bool {
        let name = entry.arrival.name();
        let Err(error) = self.try_adopt(directory) else {
            return true;
        };
        if has_ended(directory) {
            if let Err(error) = Vm::clear_if_stale(directory) {
                warn!(vm = name, %error, "cannot remove the files of a VM that ended; the daemon tries again at its next start");
            }
            return true;
        }
        let why = chain(&error);
        if entry.arrival.set_problem(&why) {
            warn!(
                vm = name,
                error = why,
                "cannot adopt the VM; retrying until QEMU answers or ends ('memfold vm stop' ends QEMU)"
            );
        }
        false
    }

    fn try_adopt(self: &Arc<Self>, directory: &VmDirectory) -> Result<(), DaemonError> {
        let vm = Vm::open(directory)?;
        let (name, domain) = (vm.name().to_owned(), vm.domain().map(str::to_owned));
        if vm.is_half_restored() {
            warn!(
                vm = name,
                "partly restored VM killed: the daemon had died during the restore; restore the VM again"
            );
            vm.kill()?;
            return Ok(());
        }
        let pid = vm.pid().as_raw_nonzero();
        let machine = self.take_on(vm, &name, domain, Origin::Started)?;
        info!(vm = name, pid, "VM adopted");
        boot_snapshot::find(&self.below.snapshots, &machine);
        self.below.swap_disks.resume(&machine);
        recall_segments(&machine);
        boot_work::resume(&machine);
        let state = self.below.registry.state();
        if interrupted_save::is_cut_off(state, &machine) {
            interrupted_save::undo_soon(state.to_owned(), machine);
        } else {
            interrupted_save::let_go_of_disks(machine);
        }
        Ok(())
    }

    fn attach_again(self: &Arc<Self>, recorded: &AttachedVm, entry: &Entry) -> bool {
        let request = &recorded.request;
        let attached = Vm::attach(&request.qmp).map_err(DaemonError::from);
        let attached = attached.and_then(|vm| {
            if vm.process().identity() != recorded.process {
                let qmp = request.qmp.display();
                let why = format!("another QEMU has the socket {qmp} now, so it may be another VM");
                return Err(DaemonError::BadRequest(why));
            }
            self.attach_arrived(vm, request, None, entry)
        });
        let Err(error) = attached else {
            return true;
        };
        // No process listens on the socket any more, or a different one does.
        let is_gone = matches!(
            &error,
            DaemonError::Machine(
                MachineError::Qmp(QmpError::Connect { .. }) | MachineError::Peer { .. }
            ) | DaemonError::BadRequest(_)
                | DaemonError::NameTaken(_)
        );
        let why = chain(&error);
        if is_gone {
            info!(
                vm = request.name,
                error = why,
                "VM not attached again after the daemon's start; see 'error'"
            );
        } else if entry.arrival.set_problem(&why) {
            warn!(
                vm = request.name,
                error = why,
                "cannot attach the VM again; retrying until QEMU answers or ends"
            );
        }
        is_gone
    }
}

/// Returns whether the QEMU process of this directory has ended, or was never started.
fn has_ended(directory: &VmDirectory) -> bool {
    match VmDirectory::read_json::<Record>(&directory.record()) {
        Ok(record) => Process::open(record.process)
            .is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}
