//! The serial console of a VM, and the logs of its console and of QEMU.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use memfold_api::VmLogs;
use memfold_host::socket;
use memfold_vm::{MachineError, VmDirectory};

use crate::error::{DaemonError, refused, state_error};
use crate::machine::Machine;
use crate::vm_logs;
use crate::vms::Vms;

/// Time limit for connecting to QEMU's socket of the console.
const CONNECT: Duration = Duration::from_secs(2);

/// A connection to the serial console of a VM. No second one can be opened until this is dropped,
/// because QEMU serves one client at a time and lets others wait without a word.
#[derive(Debug)]
pub struct Console {
    /// Connection to QEMU's socket of the console.
    pub stream: UnixStream,
    machine: Arc<Machine>,
}

impl Drop for Console {
    fn drop(&mut self) {
        self.machine.release_console();
    }
}

impl Vms {
    /// Connects to the serial console of a VM.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] if the console is in use.
    pub fn console(&self, name: &str) -> Result<Console, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        let path = directory(&machine)?.console();
        let in_use = || {
            refused(
                format!("the console of VM '{name}' is in use"),
                "end the other 'memfold vm console' (Ctrl-]), or the other client of console.sock",
            )
        };
        if !machine.take_console() {
            return Err(in_use());
        }
        let stream = socket::connect(&path, CONNECT);
        let console = stream.map(|stream| Console {
            stream,
            machine: machine.clone(),
        });
        console.map_err(|error| {
            machine.release_console();
            match error.kind() {
                std::io::ErrorKind::TimedOut => in_use(),
                _ => state_error(&path)(error),
            }
        })
    }

    /// Returns the newest parts of the logs of a VM.
    pub fn logs(&self, name: &str) -> Result<VmLogs, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        let directory = directory(&machine)?;
        let read = |log: std::path::PathBuf| vm_logs::end_of(&log).map_err(state_error(&log));
        Ok(VmLogs {
            qemu: read(directory.qemu_log())?,
            console: read(directory.console_log())?,
        })
    }
}

/// Returns the directory of a VM that memfold started.
fn directory(machine: &Machine) -> Result<&VmDirectory, DaemonError> {
    machine.vm().directory().ok_or_else(|| {
        let name = machine.name().to_owned();
        MachineError::NotOurs { name }.into()
    })
}
