//! `memfold snapshot` and `memfold clone`: save VMs as snapshots, restore and clone VMs from
//! snapshots, and list, verify and remove snapshots.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};

use memfold_api::{
    Client, CompactReport, KeepChoice, RekeyReport, RekeyRequest, RestoreRequest, SaveRequest,
    VerifyReport, VmInfo,
};
use memfold_snapshot::{Manifest, Renew, SnapshotInfo};
use memfold_units::{ByteSize, PAGE_SIZE};
use memfold_vm::Forward;
use serde::Serialize;

use super::context::{Context, write_line};
use super::failure;
use super::table::table;
use super::transfer::{self, Pull, Push};
use super::vm_info::segment;

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Save a VM: memory, devices and disks at one instant; the VM goes on
    Save {
        /// VM to save
        vm: String,
        /// Name of the snapshot
        name: String,
        /// Which of the guest's caches to save
        #[arg(long, value_enum, default_value_t)]
        keep: KeepChoice,
        /// Let the VM run while its RAM is copied; the snapshot shows the instant before
        #[arg(long)]
        live: bool,
        /// Compress the RAM image: it takes less space on disk, but is decompressed into memory
        /// before the first VM runs from it
        #[arg(long, conflicts_with = "parent")]
        compress: bool,
        /// Encrypt memory and device state with a key of the daemon (serve --snapshot-key): the one
        /// named KEY, or the only one. The snapshot has all pages, and is decrypted into memory
        /// before the first VM runs from it
        #[arg(
            long,
            value_name = "KEY",
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = "",
            conflicts_with = "parent"
        )]
        encrypt: Option<String>,
        /// Accept that the encrypted snapshot holds disks and other files unencrypted
        #[arg(long, requires = "encrypt")]
        plain_disks: bool,
        /// Save only pages that differ from snapshot PARENT, and refer to PARENT for all others; by
        /// default, the snapshot that the VM runs from
        #[arg(long)]
        parent: Option<String>,
        /// Save all pages, even if the VM runs from a snapshot
        #[arg(long, conflicts_with = "parent")]
        whole: bool,
        /// Seconds that the guest may take to drop its caches, 1 to 3600; by default, the time to
        /// write the caches to disk (5 to 120). Caches that are not dropped by then are saved
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
        drop_timeout: Option<u32>,
        /// Leave the guest's clock behind by the pause; by default, it is set to the host's clock
        /// after a long pause
        #[arg(long)]
        keep_clock: bool,
    },
    /// Start a VM from a snapshot
    Restore {
        /// Snapshot to restore
        name: String,
        /// Name of the restored VM; by default the name of the saved VM
        #[arg(long = "as", value_name = "NAME")]
        vm: Option<String>,
        /// Start the VM even if another VM runs from the same memory and the new VM's identity
        /// cannot be renewed
        #[arg(long)]
        force: bool,
        /// Start the VM even if the brake is on: guests could claim more memory than this host has
        /// available (see 'memfold debt')
        #[arg(long)]
        despite_brake: bool,
        /// Prefetch the pages that an earlier VM of this snapshot used first, instead of loading
        /// each page on demand
        #[arg(long)]
        prefetch: bool,
        /// Leave the guest's clock at the time of the save; by default, it is set to the host's
        /// clock when the agent answers
        #[arg(long)]
        keep_clock: bool,
        /// Create the VM's own disks in DIR, which stay when the VM ends; by default, its writes
        /// are temporary
        #[arg(long, value_name = "DIR")]
        disks: Option<PathBuf>,
        /// Forward a port of this host (127.0.0.1 by default) to the guest; HOST-PORT 0 is a free
        /// port; several allowed. By default, the saved VM's ports that are free
        #[arg(long = "forward", value_name = "HOST-PORT:GUEST-PORT")]
        forwards: Vec<Forward>,
        /// Switch the VM off when so many seconds have passed since its start, or since its time to
        /// live was last set ('vm set')
        #[arg(long, value_name = "SECONDS")]
        ttl: Option<NonZeroU32>,
    },
    /// Copy a snapshot to an object store; chunks that are there already are not sent
    Push(Push),
    /// Copy a snapshot from an object store; an interrupted pull continues
    Pull(Pull),
    /// List all snapshots
    List {
        /// List the snapshots in this object store instead
        #[arg(long, value_name = "URL", conflicts_with = "tree")]
        remote: Option<String>,
        /// Show each layer below its parent, which may be a layer that forks start from
        #[arg(long)]
        tree: bool,
    },
    /// Show a snapshot's manifest
    Inspect {
        /// Snapshot whose manifest to show
        name: String,
    },
    /// Read a whole snapshot and compare its checksums
    Verify {
        /// Snapshot to verify
        name: String,
    },
    /// Make a layer complete: copy what it needs of other snapshots into it
    Compact {
        /// Snapshots to make complete
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Change the key of encrypted snapshots; VMs that run from them go on
    Rekey {
        /// Encrypted snapshots
        #[arg(required = true)]
        names: Vec<String>,
        /// Name of the new key among those of the daemon (serve --snapshot-key), which needs the
        /// old key, too
        #[arg(long, value_name = "KEY")]
        key: String,
    },
    /// Remove snapshots that no VM runs from
    Remove {
        /// Snapshots to remove
        #[arg(required = true)]
        names: Vec<String>,
        /// Make layers that need the snapshots complete first; by default, such snapshots are not
        /// removed
        #[arg(long)]
        merge: bool,
        /// Remove the snapshots from this object store instead
        #[arg(long, value_name = "URL", conflicts_with = "merge")]
        remote: Option<String>,
    },
}

/// Start VMs from one snapshot; they share memory until they write to it
#[derive(Args, Debug)]
#[allow(clippy::struct_excessive_bools)] // flags
pub(super) struct CloneArguments {
    /// Snapshot to start from
    snapshot: String,
    /// Fetch the snapshot from this object store while the clones run ('memfold snapshot pull
    /// --stream'), unless it is here
    #[arg(long, value_name = "URL")]
    from: Option<String>,
    /// Number of clones
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    number: u32,
    /// Prefix of the clones' names, which end with a number; by default the snapshot's name
    #[arg(long)]
    prefix: Option<String>,
    /// Give each clone its own host name, machine ID and SSH host keys; random numbers and MAC
    /// addresses are always renewed
    #[arg(long)]
    identity: bool,
    /// Do not wait until the clones' agents have renewed their identities
    #[arg(long)]
    no_wait: bool,
    /// Prefetch the pages that an earlier VM of this snapshot used first, instead of loading each
    /// page on demand
    #[arg(long)]
    prefetch: bool,
    /// Leave the guests' clocks at the time of the save; by default, they are set to the host's
    /// clock when the agents answer
    #[arg(long)]
    keep_clock: bool,
    /// Start the clones even if their identities cannot be renewed: the guest has neither an agent
    /// nor a driver for VM generation IDs
    #[arg(long)]
    force: bool,
    /// Start the clones even if the brake is on: guests could claim more memory than this host has
    /// available (see 'memfold debt')
    #[arg(long)]
    despite_brake: bool,
    /// Forward a port of this host (127.0.0.1 by default) to each guest; HOST-PORT 0 is a free port
    /// for each clone, which several clones need; several allowed
    #[arg(long = "forward", value_name = "HOST-PORT:GUEST-PORT")]
    forwards: Vec<Forward>,
    /// Switch each clone off when so many seconds have passed since its start, or since its time to
    /// live was last set ('vm set')
    #[arg(long, value_name = "SECONDS")]
    ttl: Option<NonZeroU32>,
}

/// Time for which `clone` waits for the agents of the clones. The next constant: additional time
/// for each clone, because only some guests renew their identities at the same time.
const RENEW_TIMEOUT: Duration = Duration::from_secs(60);
const RENEW_TIMEOUT_EACH: Duration = Duration::from_secs(10);

/// Time between two reads of a VM's state.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Time that `restore` waits for the guest's clock to be set.
const CLOCK_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn run(context: &Context, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    match arguments {
        Arguments::Save {
            vm,
            name,
            keep,
            live,
            compress,
            encrypt,
            plain_disks,
            parent,
            whole,
            drop_timeout,
            keep_clock,
        } => {
            let request = SaveRequest {
                vm,
                name,
                keep,
                live,
                compress,
                parent,
                whole,
                drop_s: drop_timeout,
                keep_clock,
                encrypt: encrypt.is_some(),
                // Without a name, the option has an empty value.
                key: encrypt.filter(|name| !name.is_empty()),
                plain_disks,
            };
            let manifest: Manifest = watched(context, &request.name, || {
                Ok(client.post("/v1/snapshots", &request)?)
            })?;
            context.print(&manifest, saved)
        }
        Arguments::Restore {
            name,
            vm,
            force,
            despite_brake,
            prefetch,
            keep_clock,
            disks,
            forwards,
            ttl,
        } => {
            let manifest: Manifest = client.get(&path(&name)?)?;
            let vm = vm.unwrap_or(manifest.vm);
            let request = RestoreRequest {
                force,
                despite_brake,
                prefetch,
                keep_clock,
                // The path is made absolute, because the daemon has another working directory.
                disks: disks.map(std::path::absolute).transpose()?,
                forwards,
                ttl_s: ttl,
                ..RestoreRequest::new(vm)
            };
            let mut info = watched(context, &name, || restore(&client, &name, &request))?;
            if manifest.agent && clock_pending(&info) {
                wait(&client, vec![&mut info], CLOCK_TIMEOUT, clock_pending)?;
            }
            context.print(&info, |vm| super::vm_info::describe("restored", vm))
        }
        Arguments::Push(arguments) => transfer::push(context, &client, arguments),
        Arguments::Pull(arguments) => transfer::pull(context, &client, arguments),
        Arguments::List {
            remote: Some(url), ..
        } => transfer::list(context, &client, url),
        Arguments::List { remote: None, tree } => {
            let list: Vec<SnapshotInfo> = client.get("/v1/snapshots")?;
            context.print(&list, |list| snapshots(list, tree))
        }
        Arguments::Inspect { name } => {
            let manifest: Manifest = client.get(&path(&name)?)?;
            context.print(&manifest, |m| {
                serde_json::to_string_pretty(m).unwrap_or_default()
            })
        }
        Arguments::Verify { name } => verify(context, &client, &name),
        Arguments::Compact { names } => make_complete(context, &client, &names),
        Arguments::Rekey { names, key } => rekey(context, &client, &names, key),
        Arguments::Remove {
            names,
            remote: Some(url),
            ..
        } => transfer::remove(context, &client, &names, url),
        Arguments::Remove {
            names,
            merge,
            remote: None,
        } => remove(context, &client, &names, merge),
    }
}

fn verify(context: &Context, client: &Client, name: &str) -> anyhow::Result<ExitCode> {
    let place = format!("{}/verify", path(name)?);
    let report: VerifyReport = watched(context, name, || Ok(client.post(&place, &())?))?;
    let right = report.problems.is_empty();
    context.print(&report, |report| {
        if right {
            format!("{}: unchanged since it was saved", report.name)
        } else {
            report.problems.join("\n")
        }
    })?;
    Ok(ExitCode::from(u8::from(!right)))
}

/// Removes snapshots, one after the other.
fn remove(
    context: &Context,
    client: &Client,
    names: &[String],
    merge: bool,
) -> anyhow::Result<ExitCode> {
    let query = if merge { "?merge=true" } else { "" };
    let one = |name: &String| {
        let place = format!("{}{query}", path(name)?);
        watched(context, name, || Ok(client.delete::<()>(&place)?))
            .with_context(|| format!("cannot remove snapshot '{name}'"))?;
        Ok(name.clone())
    };
    let (removed, errors) = failure::separate(names.iter().map(one));
    let json = serde_json::json!({ "removed": removed });
    let text = format!("removed {}", removed.join(", "));
    failure::print_done(context, (&json, removed.is_empty()), &errors, |_| text)
}

/// Makes layers complete, one after the other.
fn make_complete(context: &Context, client: &Client, names: &[String]) -> anyhow::Result<ExitCode> {
    let compact = |name: &String| {
        let place = format!("{}/compact", path(name)?);
        let made = watched(context, name, || Ok(client.post(&place, &())?));
        made.with_context(|| format!("cannot make snapshot '{name}' complete"))
    };
    let (complete, errors): (Vec<CompactReport>, _) = failure::separate(names.iter().map(compact));
    let is_nothing = complete.is_empty();
    failure::print_done(context, (&complete, is_nothing), &errors, |all| {
        let describe = |made: &CompactReport| {
            format!(
                "{} is complete: {} copied from other snapshots; it holds {} of RAM itself, and uses {} on disk",
                made.name,
                ByteSize(made.copied_bytes),
                ByteSize(made.own_bytes),
                ByteSize(made.disk_bytes)
            )
        };
        all.iter().map(describe).collect::<Vec<_>>().join("\n")
    })
}

/// Changes the keys of encrypted snapshots, one after the other.
fn rekey(
    context: &Context,
    client: &Client,
    names: &[String],
    key_name: String,
) -> anyhow::Result<ExitCode> {
    let request = RekeyRequest { key_name };
    let one = |name: &String| {
        let place = format!("{}/rekey", path(name)?);
        let changed = watched(context, name, || Ok(client.post(&place, &request)?));
        changed.with_context(|| format!("cannot change the key of snapshot '{name}'"))
    };
    let (changed, errors): (Vec<RekeyReport>, _) = failure::separate(names.iter().map(one));
    let is_nothing = changed.is_empty();
    failure::print_done(context, (&changed, is_nothing), &errors, |all| {
        let describe = |one: &RekeyReport| match &one.old_key {
            Some(old) => format!(
                "{} is encrypted with key '{}', and needs key '{old}' no more",
                one.name, one.key
            ),
            None => format!("{} was encrypted with key '{}' already", one.name, one.key),
        };
        all.iter().map(describe).collect::<Vec<_>>().join("\n")
    })
}

/// A clone, as it is printed.
#[derive(Debug, Serialize)]
pub(super) struct Clone {
    /// Time from the command until guest code runs, in milliseconds.
    ms: f64,
    vm: VmInfo,
}

pub(super) fn clone(context: &Context, arguments: &CloneArguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    let snapshot = &arguments.snapshot;
    if let Some(url) = &arguments.from {
        let here: Vec<SnapshotInfo> = client.get("/v1/snapshots")?;
        if here.iter().all(|info| info.name != *snapshot) {
            transfer::stream(context, &client, snapshot, url)?;
        }
    }
    let manifest: Manifest = client.get(&path(snapshot)?)?;
    if arguments.number > 1 && !manifest.tells_twins_apart() && !arguments.force {
        bail!(
            "the guest in snapshot '{snapshot}' has neither a driver for VM generation IDs nor memfold's agent: its clones \
             would generate the same random numbers and keys; start one, or all with --force"
        );
    }
    if let Some(port) = arguments.forwards.iter().find(|port| !port.is_any()) {
        if arguments.number > 1 {
            bail!(
                "only one VM can use host port {port}; use --forward 0:GUEST-PORT to give each VM a free host port"
            );
        }
    }
    let prefix = arguments.prefix.as_ref().unwrap_or(snapshot);
    let names = (1..=arguments.number).map(|number| format!("{prefix}-{number}"));
    let request = RestoreRequest {
        renew: renew(arguments.identity),
        force: arguments.force,
        despite_brake: arguments.despite_brake,
        prefetch: arguments.prefetch,
        keep_clock: arguments.keep_clock,
        forwards: arguments.forwards.clone(),
        ttl_s: arguments.ttl,
        ..RestoreRequest::new("")
    };
    let of = (snapshot.as_str(), "cloned");
    let mut clones = start_clones(context, &client, of, names, &request, |clones| {
        context.print(&clones, |_| String::new()).map(drop)
    })?;
    if arguments.no_wait {
        return context.print(&clones, |_| {
            "each guest's identity is renewed when its agent answers".into()
        });
    }
    let left = wait_for_identities(&client, &mut clones)?;
    context.print(&clones, |clones| {
        if left.is_empty() {
            format!("{} with renewed identity", clones.len())
        } else {
            left.join("\n")
        }
    })?;
    Ok(ExitCode::from(u8::from(!left.is_empty())))
}

pub(super) const fn renew(identity: bool) -> Renew {
    if identity {
        Renew::Identity
    } else {
        Renew::Network
    }
}

/// Starts VMs with these names from a snapshot, one after the other, and tells each. If one does
/// not start, calls `tell` with those that run before it returns the error: a program that reads
/// the JSON has to know them.
pub(super) fn start_clones(
    context: &Context,
    client: &Client,
    (snapshot, done): (&str, &str),
    names: impl Iterator<Item = String>,
    request: &RestoreRequest,
    tell: impl FnOnce(Vec<Clone>) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Clone>> {
    let mut clones = Vec::new();
    for vm in names {
        let request = RestoreRequest {
            vm,
            ..request.clone()
        };
        let began = Instant::now();
        let started = watched(context, snapshot, || restore(client, snapshot, &request));
        let vm = match started {
            Ok(vm) => vm,
            Err(error) => {
                let others = clones.len();
                let why = format!("VM '{}' did not start; {others} others run", request.vm);
                if context.json && others > 0 {
                    if let Err(unprinted) = tell(clones) {
                        let more = format!("cannot print the VMs that run: {unprinted:#}");
                        return Err(error.context(more).context(why));
                    }
                }
                return Err(error.context(why));
            }
        };
        let ms = began.elapsed().as_secs_f64() * 1000.0;
        if !context.json {
            let described = super::vm_info::describe(done, &vm);
            write_line(&format!("{ms:.0} ms: {described}"))?;
        }
        clones.push(Clone { ms, vm });
    }
    Ok(clones)
}

/// Waits until the clones' agents have renewed their identities. Returns what is left, one identity
/// in each line.
pub(super) fn wait_for_identities(
    client: &Client,
    clones: &mut [Clone],
) -> anyhow::Result<Vec<String>> {
    let number = u32::try_from(clones.len()).unwrap_or(u32::MAX);
    let limit = RENEW_TIMEOUT + RENEW_TIMEOUT_EACH * number;
    let vms = clones.iter_mut().map(|clone| &mut clone.vm).collect();
    wait(client, vms, limit, |vm| {
        vm.renewal.as_ref().is_some_and(|r| r.pending) || clock_pending(vm)
    })?;
    Ok(left_as_it_was(clones))
}

/// Reads the state of `vms` again and again, until `pending` is `false` for each VM that still
/// runs, but at most for `limit`.
fn wait(
    client: &Client,
    mut vms: Vec<&mut VmInfo>,
    limit: Duration,
    pending: impl Fn(&VmInfo) -> bool,
) -> anyhow::Result<()> {
    let end = Instant::now() + limit;
    loop {
        let mut now: Vec<VmInfo> = client.get("/v1/vms")?;
        vms.retain_mut(|vm| {
            let at = now.iter().position(|found| found.name == vm.name);
            at.map(|at| **vm = now.swap_remove(at)).is_some()
        });
        if !vms.iter().any(|vm| pending(vm)) || Instant::now() > end {
            return Ok(());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn clock_pending(vm: &VmInfo) -> bool {
    vm.clock.as_ref().is_some_and(|clock| clock.pending)
}

/// Returns the identities that clones still share with other VMs, one in each line.
fn left_as_it_was(clones: &[Clone]) -> Vec<String> {
    let mut lines = Vec::new();
    for Clone { vm, .. } in clones {
        let Some(renewal) = &vm.renewal else { continue };
        let name = &vm.name;
        if renewal.pending {
            lines.push(format!(
                "{name}: identity not renewed yet; that happens as soon as the agent answers"
            ));
        }
        let left = renewal.left.iter();
        lines.extend(left.map(|left| format!("{name}: as in the snapshot: {left}")));
    }
    lines
}

fn path(name: &str) -> anyhow::Result<String> {
    Ok(format!("/v1/snapshots/{}", segment(name)?))
}

fn restore(client: &Client, snapshot: &str, request: &RestoreRequest) -> anyhow::Result<VmInfo> {
    Ok(client.post(&format!("{}/restore", path(snapshot)?), request)?)
}

/// Describes the result of a save, as text.
fn saved(m: &Manifest) -> String {
    let mut lines = vec![format!(
        "saved {} as {} in {:.0} ms ({}; the VM stood still for {:.0} ms)",
        m.vm,
        m.name,
        m.save_ms,
        held(m),
        m.pause_ms
    )];
    let keep = format!("{:?}", m.keep).to_lowercase();
    for (what, why) in [
        ("saved all pages", &m.whole_reason),
        (&*format!("chose --keep {keep}"), &m.keep_reason),
        (
            "caches that the guest had not dropped were saved too",
            &m.cache_kept,
        ),
        ("the guest's free memory was saved too", &m.free_kept),
    ] {
        lines.extend(why.iter().map(|why| format!("{what}: {why}")));
    }
    if let Some(of) = &m.encryption {
        let rest = if of.plain_disks {
            "; disks and other files in the snapshot are not encrypted"
        } else {
            ""
        };
        lines.push(format!(
            "memory and device state are encrypted with key '{}'{rest}",
            of.key
        ));
    }
    if !m.of_one_vm.is_empty() {
        lines.push(format!(
            "one VM alone can have these, or none of a snapshot: another VM of it lacks them, or those that are taken then (see --forward): {}",
            m.of_one_vm.join(", ")
        ));
    }
    lines.join("\n")
}

/// Describes what a snapshot's image consists of, as text.
fn held(manifest: &Manifest) -> String {
    let saved = manifest.counts.saved_pages.saturating_mul(PAGE_SIZE);
    let all = manifest.counts.pages * PAGE_SIZE;
    let referred = manifest.references.as_ref().map_or(0, |r| r.pages) * PAGE_SIZE;
    let mut parts = vec![format!("{} of {}", ByteSize(saved), ByteSize(all))];
    let of_parent = manifest.parent_bytes();
    if let Some(parent) = &manifest.parent {
        let own = ByteSize(saved - referred);
        let of_parent = ByteSize(of_parent);
        parts.push(format!(
            "of it {own} saved, {of_parent} in '{}'",
            parent.name
        ));
    }
    if referred > of_parent {
        let on_disks = ByteSize(referred - of_parent);
        parts.push(format!("of it {on_disks} on its disks"));
    }
    if let Some(packed) = &manifest.packed {
        let rest = ByteSize(saved - referred);
        let how = match &manifest.encryption {
            None => "compressed to",
            Some(of) if of.compressed => "compressed and encrypted to",
            Some(_) => "encrypted to",
        };
        parts.push(format!("{rest} {how} {}", ByteSize(packed.bytes)));
    }
    parts.join(", ")
}

/// Runs an operation on a snapshot, with a progress bar on a terminal.
fn watched<T>(
    context: &Context,
    snapshot: &str,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    super::watch::watched(context, format!("{}/progress", path(snapshot)?), work)
}

fn snapshots(list: &[SnapshotInfo], is_tree: bool) -> String {
    if list.is_empty() {
        return "no snapshots; 'memfold snapshot save VM NAME' makes one".into();
    }
    let all = if is_tree {
        in_tree(list)
    } else {
        list.iter().map(|snapshot| (0, snapshot)).collect()
    };
    let rows = all.into_iter().map(|(depth, snapshot)| {
        // Nobody has given this snapshot its name.
        let kind = if snapshot.fork {
            " (layer of forks)"
        } else {
            ""
        };
        [
            format!("{}{}{kind}", "  ".repeat(depth), snapshot.name),
            snapshot.vm.clone(),
            snapshot.domain.clone().unwrap_or_default(),
            ByteSize(snapshot.memory_bytes).to_string(),
            ByteSize(snapshot.disk_bytes).to_string(),
            snapshot.parent.as_ref().map_or_else(String::new, |parent| {
                format!("{} {parent}", ByteSize(snapshot.parent_bytes))
            }),
            snapshot.key.clone().unwrap_or_default(),
            snapshot.users.join(", "),
            snapshot.problem.clone().unwrap_or_default(),
        ]
    });
    table(
        "NAME  VM  DOMAIN  RAM  ON DISK  IN PARENT  KEY  RUNS IN  PROBLEM",
        rows,
    )
}

/// Returns snapshots with their depths, each after its parent. One whose parent is gone has
/// depth 0.
fn in_tree(list: &[SnapshotInfo]) -> Vec<(usize, &SnapshotInfo)> {
    let has = |name: &String| list.iter().any(|other| other.name == *name);
    let mut found = Vec::new();
    let roots = list.iter().filter(|s| !s.parent.as_ref().is_some_and(has));
    let mut open: Vec<(usize, &SnapshotInfo)> = roots.rev().map(|root| (0, root)).collect();
    while let Some((depth, snapshot)) = open.pop() {
        found.push((depth, snapshot));
        let is_child = |s: &&SnapshotInfo| s.parent.as_ref() == Some(&snapshot.name);
        open.extend(
            list.iter()
                .filter(is_child)
                .rev()
                .map(|child| (depth + 1, child)),
        );
    }
    found
}
