//! Commands for definitions of VMs: define, show, edit and undefine a VM, start it, and have the
//! daemon start it after each boot of the host.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, anyhow, bail};
use clap::Subcommand;
use memfold_api::{
    AutostartRequest, ChangedSetting, Client, DefinitionInfo, SetReport, SetRequest, SetWhen,
    VmInfo,
};
use memfold_vm::Definition;

use super::context::Context;
use super::vm_info::{describe, segment};

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Define a VM: check its description and store it in place of an older one, for 'vm start' and
    /// for starts after a boot of the host
    Define {
        /// Description of the VM in TOML, as for 'vm run --file'; with 'autostart = true' the VM
        /// starts after each boot of the host, VMs with a smaller 'order' first
        file: PathBuf,
    },
    /// Show the definition of a VM, and why the VM was not started after the host's boot
    Show {
        /// Name of the VM
        name: String,
    },
    /// Edit the definition of a VM with $VISUAL or $EDITOR; a running VM is not changed
    Edit {
        /// Name of the VM
        name: String,
    },
    /// Remove the definition of a VM; if the VM runs, it keeps running
    Undefine {
        /// Name of the VM
        name: String,
    },
    /// Start a defined VM
    Start {
        /// Name of the VM
        name: String,
        /// Start the VM even if the brake is on: guests could claim more memory than this host has
        /// available (see 'memfold debt')
        #[arg(long)]
        despite_brake: bool,
    },
    /// Change settings of a VM: at once where a running VM allows it (folding, going on after a
    /// full disk, limits of its size), and in its definition, for its next start
    Set {
        /// Name of the VM
        name: String,
        /// Fields of a definition with their new values, such as fold=false or sizing.min=1G;
        /// without a value, the field gets its default
        #[arg(required = true, value_name = "FIELD=VALUE", value_parser = setting)]
        settings: Vec<(String, String)>,
        /// Change only the running VM, until it ends
        #[arg(long, conflicts_with = "next_start")]
        now: bool,
        /// Change only the definition
        #[arg(long)]
        next_start: bool,
    },
    /// Have the daemon start a defined VM after each boot of the host
    Autostart {
        /// Name of the VM
        name: String,
        /// No longer start the VM after a boot
        #[arg(long)]
        disable: bool,
    },
}

pub(super) fn run(
    context: &Context,
    client: &Client,
    arguments: Arguments,
) -> anyhow::Result<ExitCode> {
    match arguments {
        Arguments::Define { file } => {
            let mut definition = Definition::from_toml_file(&file)?;
            definition.validate()?;
            let info = define(client, &definition.vm.name, &definition)?;
            context.print(&info, |info| format!("defined {}", in_words(info)))
        }
        Arguments::Show { name } => {
            let info: DefinitionInfo = client.get(&place(&name)?)?;
            let text = text_of(&info)?;
            context.print(&info, |_| text)
        }
        Arguments::Edit { name } => edit(context, client, &name),
        Arguments::Undefine { name } => {
            let () = client.delete(&place(&name)?)?;
            let undefined = serde_json::json!({ "undefined": name });
            context.print(&undefined, |_| format!("undefined {name}"))
        }
        Arguments::Start {
            name,
            despite_brake,
        } => {
            let query = if despite_brake {
                "?despite_brake=true"
            } else {
                ""
            };
            let path = format!("{}/start{query}", place(&name)?);
            let info: VmInfo = client.post(&path, &())?;
            context.print(&info, |vm| describe("started", vm))
        }
        Arguments::Set {
            name,
            settings,
            now,
            next_start,
        } => {
            let when = match (now, next_start) {
                (true, _) => SetWhen::Now,
                (_, true) => SetWhen::NextStart,
                _ => SetWhen::Always,
            };
            let request = SetRequest {
                settings: settings.into_iter().collect(),
                when,
            };
            let path = format!("/v1/vms/{}/settings", segment(&name)?);
            let report: SetReport = client.post(&path, &request)?;
            context.print(&report, |report| {
                let lines: Vec<String> = report.settings.iter().map(in_force).collect();
                lines.join("\n")
            })
        }
        Arguments::Autostart { name, disable } => {
            let request = AutostartRequest {
                autostart: !disable,
            };
            let path = format!("{}/autostart", place(&name)?);
            let info: DefinitionInfo = client.put(&path, &request)?;
            context.print(&info, in_words)
        }
    }
}

/// Returns the VMs of `/v1/vms`, and the defined VMs that are off, sorted by name.
pub(super) fn all(client: &Client) -> anyhow::Result<Vec<VmInfo>> {
    // A VM that starts between the two requests is listed as running.
    let defined: Vec<DefinitionInfo> = client.get("/v1/definitions")?;
    let mut vms: Vec<VmInfo> = client.get("/v1/vms")?;
    for info in defined {
        if vms.iter().all(|vm| vm.name != info.name) {
            vms.push(off(info));
        }
    }
    vms.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(vms)
}

fn off(info: DefinitionInfo) -> VmInfo {
    let vm = info.definition.map(|definition| definition.vm);
    VmInfo {
        name: info.name,
        ram_bytes: vm.as_ref().map_or(0, |vm| vm.memory.0),
        domain: vm.and_then(|vm| vm.domain),
        origin: "defined".into(),
        state: "off".into(),
        state_cause: info.problem,
        state_fix: info.fix,
        ..VmInfo::default()
    }
}

/// Parses `FIELD=VALUE`.
fn setting(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(field, _)| !field.is_empty());
    let (field, value) = parts.ok_or_else(|| format!("'{text}' is not FIELD=VALUE"))?;
    Ok((field.trim().to_owned(), value.to_owned()))
}

/// Says from when on a setting is in force.
fn in_force(setting: &ChangedSetting) -> String {
    let when = match (setting.now, setting.next_start) {
        (true, true) => "now and at later starts",
        (true, false) => "now, until the VM ends",
        _ => "from the next start on",
    };
    format!("{}={}: {when}", setting.name, setting.value)
}

fn place(name: &str) -> anyhow::Result<String> {
    Ok(format!("/v1/definitions/{}", segment(name)?))
}

fn define(client: &Client, name: &str, definition: &Definition) -> anyhow::Result<DefinitionInfo> {
    Ok(client.put(&place(name)?, definition)?)
}

/// Describes a defined VM in one line.
fn in_words(info: &DefinitionInfo) -> String {
    let definition = info.definition.as_ref();
    let starts = match definition.filter(|definition| definition.autostart) {
        Some(definition) => format!("starts after each boot, order {}", definition.order),
        None => "does not start after a boot".into(),
    };
    format!("{} ({}): {starts}", info.name, info.state)
}

/// Returns the definition as TOML, with the VM's state and problem as comments.
fn text_of(info: &DefinitionInfo) -> anyhow::Result<String> {
    let mut text = format!("# {} is {}\n", info.name, info.state);
    for said in [&info.problem, &info.fix].into_iter().flatten() {
        text.extend(said.lines().map(|line| format!("# {line}\n")));
    }
    if let Some(definition) = &info.definition {
        text += &definition.to_toml()?;
    }
    Ok(text.trim_end().to_owned())
}

/// Has the user edit a copy of a definition, and stores the copy.
fn edit(context: &Context, client: &Client, name: &str) -> anyhow::Result<ExitCode> {
    let info: DefinitionInfo = client.get(&place(name)?)?;
    let Some(definition) = &info.definition else {
        bail!("{}", info.problem.unwrap_or_default());
    };
    let before = definition.to_toml()?;
    let prefix = format!("{name}.");
    let mut copy = tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".toml")
        .tempfile()
        .context("cannot make a copy of the definition")?;
    copy.write_all(before.as_bytes())
        .context("cannot make a copy of the definition")?;
    open_editor(copy.path())?;
    if std::fs::read_to_string(copy.path()).is_ok_and(|now| now == before) {
        return context.print(&info, |info| format!("{} was not changed", info.name));
    }
    let stored = match client.get::<DefinitionInfo>(&place(name)?) {
        Ok(now) if now.definition == info.definition => store(client, name, copy.path()),
        Ok(_) => Err(anyhow!(
            "another command has changed it while the editor was open, see 'memfold vm show {name}'"
        )),
        Err(error) => Err(error.into()),
    };
    match stored {
        Ok(info) => context.print(&info, |info| format!("changed {}", in_words(info))),
        Err(error) => {
            let (_, path) = copy.keep()?;
            let path = path.display();
            Err(error.context(format!(
                "the edited definition of '{name}' was not stored; correct {path}, and run 'memfold vm define {path}'"
            )))
        }
    }
}

fn store(client: &Client, name: &str, file: &Path) -> anyhow::Result<DefinitionInfo> {
    let mut definition = Definition::from_toml_file(file)?;
    definition.validate()?;
    define(client, name, &definition)
}

fn open_editor(file: &Path) -> anyhow::Result<()> {
    let set = ["VISUAL", "EDITOR"].map(|name| std::env::var(name).ok());
    let editor = set.into_iter().flatten().find(|word| !word.is_empty());
    let editor = editor.unwrap_or_else(|| "vi".into());
    // The variable may contain arguments: `code --wait`.
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &format!("{editor} \"$1\""), "sh"])
        .arg(file);
    let ended = shell.status().context("cannot run /bin/sh")?;
    if !ended.success() {
        bail!(
            "the editor '{editor}' failed ({ended}), so nothing was changed; set EDITOR to another one"
        );
    }
    Ok(())
}
