//! Changes settings of a VM: in the running VM if that is possible, and in the VM's definition.
//!
//! ```text
//!   setting                      running VM              definition
//!   fold, resume_when_room,
//!   ttl_s, sizing.min, ...       at once                 from the next start on
//!   every other field            no                      from the next start on
//! ```
//! All settings of a request are checked before the first is changed.

use memfold_api::{ChangedSetting, SetReport, SetRequest, SetWhen};
use memfold_host::chain;
use memfold_vm::{Definition, LaunchError, SizingSpec};

use super::Definitions;
use crate::error::{DaemonError, refused};
use crate::machine::Machine;
use crate::machine::settings::Settings;
use crate::rightsizing::Rightsizing;

/// Prefix of the settings that are limits of a VM's size.
const LIMITS: &str = "sizing.";

impl Definitions {
    /// Changes settings of a VM that runs or is defined.
    ///
    /// # Errors
    ///
    /// [`DaemonError::NoSuchVm`] if the VM neither runs nor is defined; [`DaemonError::Refused`] if
    /// a setting would take effect neither now nor later, or not when the request says.
    pub fn set(&self, name: &str, request: &SetRequest) -> Result<SetReport, DaemonError> {
        if request.settings.is_empty() {
            return Err(DaemonError::BadRequest("settings: there are none".into()));
        }
        let machine = match self.boots.below.registry.machine(name) {
            Err(DaemonError::NoSuchVm(_)) => None,
            machine => Some(machine?),
        };
        let defined = match self.files.read(name) {
            Err(DaemonError::NoSuchDefinition(_)) => None,
            definition => Some(definition?),
        };
        if machine.is_none() && defined.is_none() {
            return Err(DaemonError::NoSuchVm(name.to_owned()));
        }
        let live = machine.filter(|_| request.when != SetWhen::NextStart);
        let defined = defined.filter(|_| request.when != SetWhen::Now);
        if live.is_none() && defined.is_none() {
            return Err(nothing_to_change(name, request.when));
        }

        let rightsizing = &self.boots.below.rightsizing;
        let _alone = rightsizing.one_change();
        let before = live.as_ref().map(|machine| Live {
            settings: machine.settings(),
            sizing: rightsizing.sizing(machine).into(),
        });
        let mut changed = before;
        let mut settings = Vec::new();
        for (field, value) in &request.settings {
            let now = match &mut changed {
                Some(changed) => change(changed, field, value)?,
                None => false,
            };
            if !now && defined.is_none() {
                return Err(only_at_a_start(name, field, request.when));
            }
            settings.push(ChangedSetting {
                name: field.clone(),
                value: value.clone(),
                now,
                next_start: defined.is_some(),
            });
        }
        let new = match &defined {
            Some(definition) => Some(self.changed(definition, request)?),
            None => None,
        };
        if let (Some(machine), Some(changed)) = (&live, changed) {
            Rightsizing::check_sizing(machine, changed.sizing.into())?;
        }
        let written = match (defined, new) {
            (Some(definition), Some(new)) => Some(self.write_definition(definition, new, request)?),
            _ => None,
        };
        if let (Some(machine), Some(before), Some(changed)) = (&live, before, changed) {
            let is_own = |one: &ChangedSetting| one.now && !one.name.starts_with(LIMITS);
            let is_own = settings.iter().any(is_own);
            if let Err(error) = change_running(rightsizing, machine, (before, changed), is_own) {
                let undone = written.map(|(before, now)| self.files.replace(&now, &before));
                if let Some(Ok(false) | Err(_)) = undone {
                    let what =
                        "the running VM is as it was, and its definition has the new settings";
                    return Err(refused(
                        format!("{}: {what}", chain(&error)),
                        "fix the cause, or set the old values again with --next-start",
                    ));
                }
                return Err(error);
            }
        }
        let name = name.to_owned();
        Ok(SetReport { name, settings })
    }

    /// Writes the changed definition. Returns what it was, and what it is now.
    fn write_definition(
        &self,
        mut definition: Definition,
        mut new: Definition,
        request: &SetRequest,
    ) -> Result<(Definition, Definition), DaemonError> {
        let name = definition.vm.name.clone();
        while !self.files.replace(&definition, &new)? {
            // Another request has changed other settings meanwhile, and they stay.
            definition = self.files.read(&name)?;
            new = self.changed(&definition, request)?;
        }
        self.forget_problem(&name);
        Ok((definition, new))
    }

    /// Returns the definition with the settings of the request. The result was checked.
    fn changed(
        &self,
        definition: &Definition,
        request: &SetRequest,
    ) -> Result<Definition, DaemonError> {
        let fields = request.settings.iter();
        let fields = fields.map(|(field, value)| (field.as_str(), value.as_str()));
        let mut new = definition.with(fields).map_err(LaunchError::from)?;
        self.boots.check(&mut new)?;
        self.check_snapshot(&new)?;
        Ok(new)
    }
}

/// Changes a running VM, or leaves it as it was. `is_own`: settings beside the limits change.
fn change_running(
    rightsizing: &Rightsizing,
    machine: &Machine,
    (before, changed): (Live, Live),
    is_own: bool,
) -> Result<(), DaemonError> {
    if is_own {
        machine.change_settings(changed.settings)?;
    }
    if changed.sizing == before.sizing {
        return Ok(());
    }
    let replaced = rightsizing.replace_sizing(machine, changed.sizing.into());
    if replaced.is_err() && is_own {
        // The first error says more.
        let _ = machine.change_settings(before.settings);
    }
    replaced
}

/// What can change while a VM runs.
#[derive(Clone, Copy)]
struct Live {
    settings: Settings,
    sizing: SizingSpec,
}

/// Changes a setting of a running VM. Returns `false` if the setting cannot change while a VM runs.
fn change(live: &mut Live, field: &str, value: &str) -> Result<bool, DaemonError> {
    let bad = |why: &str| DaemonError::BadRequest(format!("{field}={value}: {why}"));
    if let Some(limit) = field.strip_prefix(LIMITS) {
        live.sizing.set(limit, value).map_err(|why| bad(&why))?;
        return Ok(true);
    }
    let settings = &mut live.settings;
    let yes_or_no = || {
        value
            .parse()
            .map_err(|_| bad("the value must be true or false"))
    };
    match field {
        "fold" => settings.fold = yes_or_no()?,
        "resume_when_room" => settings.resume_when_room = yes_or_no()?,
        "ttl_s" if value.is_empty() => settings.ttl_s = None,
        "ttl_s" => {
            let wrong = "the value must be a number of seconds, at least 1";
            settings.ttl_s = Some(value.parse().map_err(|_| bad(wrong))?);
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn nothing_to_change(name: &str, when: SetWhen) -> DaemonError {
    if when == SetWhen::Now {
        return refused(
            format!("VM '{name}' does not run"),
            "leave out --now to change the VM's definition",
        );
    }
    refused(
        format!("VM '{name}' has no definition, so it has no next start"),
        "leave out --next-start to change the running VM, or define the VM (memfold vm define)",
    )
}

fn only_at_a_start(name: &str, field: &str, when: SetWhen) -> DaemonError {
    let why = match field {
        "domain" => ": its memory may be shared with the VMs of its trust domain",
        _ => "",
    };
    let fix = if when == SetWhen::Now {
        "leave out --now, so that the setting takes effect at the next start of a defined VM"
    } else {
        "stop the VM and start it with this setting; or define it (memfold vm define), and set it for its next start"
    };
    refused(
        format!("'{field}' of VM '{name}' cannot change while the VM runs{why}"),
        fix,
    )
}
