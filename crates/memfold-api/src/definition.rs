//! Requests and reports of defined VMs, which the daemon can start after each boot of the host.

use memfold_vm::Definition;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A defined VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DefinitionInfo {
    /// Name of the VM.
    pub name: String,
    /// `off`, or the state of the VM as in `VmInfo`.
    pub state: String,
    /// Why the file of the definition cannot be used, or why the VM was not started after the
    /// host's boot; null: there is no problem, or the VM has been started since.
    pub problem: Option<String>,
    /// Action that would solve the problem, as text; null: there is no problem.
    pub fix: Option<String>,
    /// The definition; null: its file cannot be used.
    pub definition: Option<Definition>,
}

/// Request body of `PUT /v1/definitions/{name}/autostart`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AutostartRequest {
    /// Whether the daemon starts the VM after each boot of the host.
    pub autostart: bool,
}
