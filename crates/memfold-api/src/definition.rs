//! Requests and reports of defined VMs, which the daemon can start after each boot of the host.

use std::collections::BTreeMap;

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

/// When changed settings of a VM take effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SetWhen {
    /// As soon as possible: at once if the VM runs and the setting can change then, and at each
    /// later start if the VM is defined.
    #[default]
    Always,
    /// Only at once, until the VM ends.
    Now,
    /// Only at later starts.
    NextStart,
}

/// Request body of `POST /v1/vms/{name}/settings`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetRequest {
    /// Values by the names of settings, which are the fields of a definition: a TOML value, or just
    /// text. An empty text removes the field.
    pub settings: BTreeMap<String, String>,
    /// When the settings take effect.
    #[serde(default)]
    pub when: SetWhen,
}

/// Response of `POST /v1/vms/{name}/settings`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SetReport {
    /// Name of the VM.
    pub name: String,
    /// The settings, sorted by name.
    pub settings: Vec<ChangedSetting>,
}

/// A changed setting of a VM.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ChangedSetting {
    /// Name of the setting.
    pub name: String,
    /// New value, as in the request.
    pub value: String,
    /// Whether the running VM has the new value.
    pub now: bool,
    /// Whether the VM has the new value from its next start on.
    pub next_start: bool,
}
