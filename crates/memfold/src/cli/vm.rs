//! `memfold vm`: runs, defines, lists, stops, resumes, reboots and attaches VMs, and runs commands
//! in guests.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Args, Subcommand};

use memfold_api::{
    AttachRequest, Client, ClientError, DEFAULT_SOCKET, DEFAULT_STATE, RebootRequest, StopReport,
    StopRequest, VmInfo,
};
use memfold_units::ByteSize;
use memfold_vm::{
    DiskFormat, DiskSpec, Forward, MacAddress, MachineError, MergeChoice, Network, Permission,
    SegmentSpec, SizingSpec, Vm, VmSpec,
};

use super::console;
use super::context::Context;
use super::cp;
use super::definitions;
use super::exec;
use super::failure;
use super::table::table;
use super::vm_info::{describe, segment};

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Start a VM
    Run(Box<RunArguments>),
    #[command(flatten)]
    Defined(definitions::Arguments),
    /// List VMs, including defined VMs that are off, and why a VM is not folded
    List,
    /// Shut a VM down; switch it off after the timeout (then exit code 4)
    Stop {
        /// Names of VMs
        #[arg(required_unless_present = "all")]
        names: Vec<String>,
        /// Stop all VMs that memfold has started, at the same time; attached VMs keep running
        #[arg(long, conflicts_with = "names")]
        all: bool,
        /// With --all, if no daemon answers: stop the VMs of this state directory by their power
        /// buttons; by default, those of the default socket's daemon
        #[arg(long, value_name = "DIR", requires = "all")]
        state: Option<PathBuf>,
        /// Seconds that the guest has to shut down; 0 switches the VM off at once
        #[arg(long, default_value_t = 30.0, value_name = "SECONDS")]
        timeout: f64,
    },
    /// Pause a VM: its guest stands still until 'memfold vm resume'
    Pause {
        /// Name of the VM
        name: String,
    },
    /// Resume a VM that stands still, because it was paused or because a disk was full
    Resume {
        /// Name of the VM
        name: String,
    },
    /// Reboot a VM by its guest, or restore its boot snapshot
    Reboot {
        /// Name of the VM
        name: String,
        /// Restore the boot snapshot instead of booting: all later writes to memory and disks are
        /// lost
        #[arg(long)]
        from_boot_snapshot: bool,
        /// Seconds within which the agent of a rebooted guest must answer again
        #[arg(long, default_value_t = 120.0, value_name = "SECONDS")]
        timeout: f64,
    },
    /// Connect the terminal to the serial console of a VM; Ctrl-] ends the connection
    Console {
        /// Name of the VM
        name: String,
    },
    /// Show the newest output of a VM's QEMU and of its serial console
    Logs {
        /// Name of the VM
        name: String,
    },
    /// Adopt a QEMU that is already running, by its QMP socket
    Attach {
        /// Path of the QMP socket
        qmp: PathBuf,
        /// Name that the VM gets in memfold
        #[arg(long)]
        name: String,
        /// Trust domain, whose VMs may share memory with each other
        #[arg(long)]
        domain: Option<String>,
    },
    /// Run a command in a guest through its agent; exit with the command's code
    Exec(exec::Arguments),
    /// Copy a file or directory between this host and a guest; the copy is there whole or not at
    /// all
    Cp(cp::Arguments),
}

#[derive(Args, Debug)]
#[allow(clippy::struct_excessive_bools)] // flags
pub(super) struct RunArguments {
    /// Description of the VM in TOML; flags override its fields
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Name of the VM
    #[arg(long, required_unless_present = "file")]
    name: Option<String>,
    /// RAM, such as 512M or 4G
    #[arg(long, required_unless_present = "file", value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Size up to which RAM can be plugged into the running VM (virtio-mem): right-sizing plugs it
    /// when the guest needs it, and unplugs it when it is idle
    #[arg(long, value_name = "SIZE")]
    memory_max: Option<ByteSize>,
    /// Virtual CPUs
    #[arg(long)]
    vcpus: Option<u32>,
    /// CPU model, such as Skylake-Server-v5, which every host must support that restores the VM's
    /// snapshots; by default this host's CPU
    #[arg(long, value_name = "MODEL")]
    cpu: Option<String>,
    /// Trust domain, whose VMs may share memory with each other. Without one, the VM shares with no
    /// other VM
    #[arg(long)]
    domain: Option<String>,
    /// Disk image; several allowed, in order. Without a format: qcow2 if the name ends so, else raw
    #[arg(long = "disk", value_name = "PATH[,format=raw|qcow2]", value_parser = disk)]
    disks: Vec<DiskSpec>,
    /// Write to temporary overlays instead of the disks
    #[arg(long)]
    snapshot: bool,
    /// Kernel to boot, instead of the disk's own boot loader
    #[arg(long, value_name = "PATH")]
    kernel: Option<PathBuf>,
    /// Initial RAM disk of the kernel
    #[arg(long, value_name = "PATH")]
    initrd: Option<PathBuf>,
    /// Command line of the kernel
    #[arg(long, value_name = "TEXT")]
    cmdline: Option<String>,
    /// User that QEMU switches to after it has opened its files [default: a user of its own, with
    /// no other rights]; 'root' keeps the daemon's rights
    #[arg(long)]
    user: Option<String>,
    /// Save the VM as NAME-boot as soon as it has booted, for 'vm reboot --from-boot-snapshot'
    #[arg(long)]
    boot_snapshot: bool,
    /// Size of a swap disk to create for the guest; 'memfold borrow' moves it to lent RAM
    #[arg(long, value_name = "SIZE")]
    swap: Option<ByteSize>,
    /// Segment to map, and to mount over the guest's files when it boots; several allowed, in order
    #[arg(long = "segment", value_name = "NAME[@GENERATION]")]
    segments: Vec<String>,
    /// Segment to boot from as the root file system; writes go to the first disk that is not
    /// read-only, or to memory
    #[arg(long, value_name = "NAME[@GENERATION]")]
    root_segment: Option<String>,
    /// Number of slots for segments, including --segment, at most 16: the most that the VM can map
    /// while it runs
    #[arg(long, value_name = "NUMBER")]
    segment_slots: Option<u32>,
    /// Whether KSM may merge the VM's memory: if the VM has a trust domain (domain), or never
    #[arg(long, value_enum, value_name = "WHEN")]
    merge: Option<MergeChoice>,
    /// Limits of the VM's size for right-sizing: min and max (sizes), buffer (percent beyond the
    /// working set), priority (VMs with a small one give memory first), pinned (the size never
    /// changes)
    #[arg(long, value_name = "LIMIT=VALUE[,...]")]
    sizing: Option<SizingSpec>,
    /// Start the VM even if the brake is on: guests could claim more memory than this host has
    /// available (see 'memfold debt')
    #[arg(long)]
    despite_brake: bool,
    /// Resume the VM automatically after a full disk stopped it, as soon as 16 MiB are free on the
    /// disk's file system
    #[arg(long)]
    resume_when_room: bool,
    /// Switch the VM off when so many seconds have passed since its start, or since its time to
    /// live was last set ('vm set')
    #[arg(long, value_name = "SECONDS")]
    ttl: Option<NonZeroU32>,
    /// Do not preload memfold's library; the VM's RAM is then not folded
    #[arg(long)]
    no_fold: bool,
    /// Network of the guest's card: in QEMU's user mode (user), in a bridge of this host
    /// (bridge=NAME), or in the network of an interface (macvtap=NAME); none by default
    #[arg(long, value_name = "user|bridge=NAME|macvtap=NAME|none")]
    network: Option<Network>,
    /// MAC address of the guest's network card; by default computed from the names of VM and host
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<MacAddress>,
    /// File with user data for cloud-init in the guest, which gets it on a read-only disk
    #[arg(long, value_name = "FILE")]
    user_data: Option<PathBuf>,
    /// File with SSH public keys that may log in to the guest, by cloud-init; several allowed
    #[arg(long = "ssh-key", value_name = "FILE")]
    ssh_keys: Vec<PathBuf>,
    /// Forward a port of this host (127.0.0.1 by default) to the guest, through a network in user
    /// mode; HOST-PORT 0 is a free port; several allowed
    #[arg(long = "forward", value_name = "HOST-PORT:GUEST-PORT")]
    forwards: Vec<Forward>,
    /// More arguments for QEMU, after --; relative paths in them refer to the current directory
    #[arg(last = true)]
    qemu_args: Vec<String>,
}

/// Parses the value of `--disk`. Only a final `,format=` is special; other commas are part of the
/// path.
fn disk(text: &str) -> Result<DiskSpec, String> {
    let Some((path, format)) = text.rsplit_once(",format=") else {
        return Ok(DiskSpec::new(text));
    };
    let mut disk = DiskSpec::new(path);
    disk.format = Some(match format {
        "raw" => DiskFormat::Raw,
        "qcow2" => DiskFormat::Qcow2,
        other => return Err(format!("format '{other}' is neither raw nor qcow2")),
    });
    Ok(disk)
}

impl RunArguments {
    fn spec(self) -> anyhow::Result<VmSpec> {
        let mut spec = match (&self.file, &self.name, self.memory) {
            (Some(file), ..) => VmSpec::from_toml_file(file)?,
            (None, Some(name), Some(memory)) => VmSpec::new(name.clone(), memory),
            (None, ..) => anyhow::bail!("no VM is described; give --file, or --name and --memory"),
        };
        spec.name = self.name.unwrap_or(spec.name);
        spec.memory = self.memory.unwrap_or(spec.memory);
        spec.memory_max = self.memory_max.or(spec.memory_max);
        spec.vcpus = self.vcpus.unwrap_or(spec.vcpus);
        spec.cpu = self.cpu.or(spec.cpu);
        spec.domain = self.domain.or(spec.domain);
        spec.disks.extend(self.disks);
        for disk in spec.disks.iter_mut().filter(|disk| !disk.read_only) {
            disk.snapshot |= self.snapshot;
        }
        let boot = &mut spec.boot;
        boot.kernel = self.kernel.or(boot.kernel.take());
        boot.initrd = self.initrd.or(boot.initrd.take());
        boot.cmdline = self.cmdline.or(boot.cmdline.take());
        spec.swap = self.swap.or(spec.swap);
        spec.user = self.user.or(spec.user);
        if let Some(name) = self.root_segment {
            let mut root = SegmentSpec::new(name);
            root.root = true;
            spec.segments.insert(0, root);
        }
        spec.segments
            .extend(self.segments.into_iter().map(SegmentSpec::new));
        spec.segment_slots = self.segment_slots.unwrap_or(spec.segment_slots);
        spec.merge = self.merge.unwrap_or(spec.merge);
        spec.sizing = spec.sizing.with(self.sizing.unwrap_or_default());
        spec.fold &= !self.no_fold;
        spec.boot_snapshot |= self.boot_snapshot;
        spec.resume_when_room |= self.resume_when_room;
        spec.ttl_s = self.ttl.or(spec.ttl_s);
        if !self.qemu_args.is_empty() {
            spec.qemu_args.extend(self.qemu_args);
            spec.qemu_directory = Some(std::env::current_dir()?);
        }
        if self.user_data.is_some() || !self.ssh_keys.is_empty() {
            let cloud_init = spec.cloud_init.get_or_insert_default();
            cloud_init.user_data = self.user_data.or(cloud_init.user_data.take());
            cloud_init.ssh_keys.extend(self.ssh_keys);
        }
        spec.network = self.network.unwrap_or(spec.network);
        spec.mac = self.mac.or(spec.mac);
        if !self.forwards.is_empty() {
            if spec.network == Network::None {
                spec.network = Network::User;
            }
            spec.forwards = self.forwards;
        }
        spec.validate()?;
        Ok(spec)
    }
}

pub(super) fn run(context: &Context, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    match arguments {
        Arguments::Run(arguments) => {
            let place = if arguments.despite_brake {
                "/v1/vms?despite_brake=true"
            } else {
                "/v1/vms"
            };
            let info: VmInfo = client.post(place, &arguments.spec()?)?;
            context.print(&info, |vm| describe("started", vm))
        }
        Arguments::Defined(arguments) => definitions::run(context, &client, arguments),
        Arguments::List => context.print(&definitions::all(&client)?, |vms| overview(vms)),
        Arguments::Stop {
            names,
            all,
            state,
            timeout,
        } => {
            let (reports, errors) = if all {
                let is_default = context.socket == Path::new(DEFAULT_SOCKET);
                let default = is_default.then(|| PathBuf::from(DEFAULT_STATE));
                stop_all(&client, timeout, (state, default))?
            } else {
                failure::separate(names.iter().map(|name| stop(&client, name, timeout)))
            };
            let code = if reports.is_empty() && !errors.is_empty() {
                ExitCode::SUCCESS
            } else {
                print_stopped(context, &reports)?
            };
            Ok(failure::fail_each(&errors, code))
        }
        Arguments::Pause { name } => {
            let info: VmInfo = client.post(&format!("/v1/vms/{}/pause", segment(&name)?), &())?;
            context.print(&info, |vm| format!("{} is {}", vm.name, vm.state))
        }
        Arguments::Resume { name } => {
            let info: VmInfo = client.post(&format!("/v1/vms/{}/resume", segment(&name)?), &())?;
            context.print(&info, |vm| format!("{} is {}", vm.name, vm.state))
        }
        Arguments::Reboot {
            name,
            from_boot_snapshot,
            timeout,
        } => {
            let request = RebootRequest {
                from_boot_snapshot,
                timeout_s: timeout,
            };
            let began = Instant::now();
            let info: VmInfo =
                client.post(&format!("/v1/vms/{}/reboot", segment(&name)?), &request)?;
            let what = format!("rebooted in {:.2} s:", began.elapsed().as_secs_f64());
            context.print(&info, |vm| describe(&what, vm))
        }
        Arguments::Console { name } => console::console(context, &client, &name),
        Arguments::Logs { name } => console::logs(context, &client, &name),
        Arguments::Attach { qmp, name, domain } => {
            let qmp = std::path::absolute(qmp)?;
            let info: VmInfo = client.post("/v1/attach", &AttachRequest { qmp, name, domain })?;
            context.print(&info, |vm| describe("attached", vm))
        }
        Arguments::Exec(arguments) => exec::run(context, &client, &arguments),
        Arguments::Cp(arguments) => cp::run(context, &client, &arguments),
    }
}

/// Exit code of `vm stop` if a guest did not shut down in time and was switched off.
const SWITCHED_OFF: u8 = 4;

fn stop(client: &Client, name: &str, timeout_s: f64) -> anyhow::Result<StopReport> {
    let path = format!("/v1/vms/{}/stop", segment(name)?);
    client
        .post(&path, &StopRequest { timeout_s })
        .with_context(|| format!("cannot stop VM '{name}'"))
}

fn how_it_stopped(report: &StopReport) -> String {
    let name = &report.name;
    match &report.why {
        Some(why) => format!("{name}: switched off after {:.0} s: {why}", report.took_s),
        None => format!("stopped {name}"),
    }
}

/// Prints how the VMs were stopped. Returns the exit code.
fn print_stopped(context: &Context, reports: &[StopReport]) -> anyhow::Result<ExitCode> {
    let names: Vec<&str> = reports.iter().map(|report| report.name.as_str()).collect();
    let stopped = serde_json::json!({ "stopped": names, "vms": reports });
    let mut lines: Vec<String> = reports.iter().map(how_it_stopped).collect();
    if lines.is_empty() {
        lines.push("no VM started by memfold is running".to_owned());
    }
    let printed = context.print(&stopped, |_| lines.join("\n"))?;
    let overdue = reports.iter().any(|report| report.overdue);
    Ok(if overdue {
        ExitCode::from(SWITCHED_OFF)
    } else {
        printed
    })
}

/// Stops all VMs that memfold started, at the same time, so that a host's shutdown waits only for
/// the slowest VM; and those that were started meanwhile. Returns the reports of the stopped VMs,
/// and the errors of the others. A VM that has ended by itself meanwhile is in neither. `state`:
/// the state directory whose VMs are stopped if there is no daemon, as it was named and by default.
fn stop_all(
    client: &Client,
    timeout_s: f64,
    state: (Option<PathBuf>, Option<PathBuf>),
) -> anyhow::Result<(Vec<StopReport>, Vec<anyhow::Error>)> {
    let stop_own = |name: &String| {
        let stopped = stop(client, name, timeout_s);
        let error = stopped
            .as_ref()
            .err()
            .and_then(|error| error.downcast_ref());
        let has_ended = matches!(error, Some(ClientError::Refused { status: 404, .. }));
        (!has_ended).then_some(stopped)
    };
    let (mut results, mut tried) = (Vec::new(), BTreeSet::new());
    loop {
        let vms: Vec<VmInfo> = match client.get("/v1/vms") {
            // The daemon has ended meanwhile, and starts no VM any more.
            Err(ClientError::NoDaemon { .. } | ClientError::Http(_)) if !tried.is_empty() => {
                Vec::new()
            }
            Err(error) if is_gone(&error) => {
                let (named, default) = state;
                let Some(place) = named.as_ref().or(default.as_ref()) else {
                    return Err(error.into());
                };
                let (stopped, errors) = stop_all_alone(place, timeout_s)?;
                if named.is_none() && stopped.is_empty() && errors.is_empty() {
                    let why = format!(
                        "no VM runs from {}; if the daemon has another state directory, name it (vm stop --all --state DIR)",
                        place.display()
                    );
                    return Err(anyhow::Error::from(error).context(why));
                }
                return Ok((stopped, errors));
            }
            vms => vms?,
        };
        let own = vms.into_iter().filter(|vm| vm.origin == "started");
        let new = own.filter(|vm| tried.insert((vm.name.clone(), vm.pid)));
        let names: Vec<String> = new.map(|vm| vm.name).collect();
        if names.is_empty() {
            return Ok(failure::separate(results));
        }
        results.extend(at_once(&names, stop_own).into_iter().flatten());
    }
}

/// Stops all VMs of a state directory, at the same time, without a daemon. VMs outlive their
/// daemon; if it cannot start, a host that shuts down must not switch them off.
fn stop_all_alone(
    state: &Path,
    timeout_s: f64,
) -> anyhow::Result<(Vec<StopReport>, Vec<anyhow::Error>)> {
    let timeout = Duration::try_from_secs_f64(timeout_s)
        .with_context(|| format!("cannot use --timeout {timeout_s}: give seconds, 0 or more"))?;
    let look = || {
        format!(
            "no daemon answers, and cannot look for VMs in {}",
            state.display()
        )
    };
    let vms = Vm::look_for_all(state).with_context(look)?;
    // VMs are stopped by threads that share the list, and an error cannot be cloned.
    let vms: Vec<(String, Result<Vm, String>)> = vms
        .into_iter()
        .map(|(name, vm)| {
            let vm = vm.or_else(|_| find_to_end(state, &name));
            (name, vm.map_err(|error| memfold_host::chain(&error)))
        })
        .collect();
    let stop = |(name, vm): &(String, Result<Vm, String>)| {
        let vm = vm.as_ref().map_err(|why| {
            anyhow::anyhow!("cannot stop VM '{name}': {why}; if its QEMU still runs, shut the guest down from within")
        })?;
        let stopped = vm.end(timeout, &|| false, None);
        let stopped = stopped.with_context(|| format!("cannot stop VM '{}'", vm.name()))?;
        let how = serde_json::to_value(stopped.kind)?;
        anyhow::Ok(StopReport {
            name: vm.name().to_owned(),
            how: how.as_str().unwrap_or_default().to_owned(),
            overdue: stopped.overdue,
            took_s: stopped.took.as_secs_f64(),
            why: stopped.why,
        })
    };
    Ok(failure::separate(at_once(&vms, stop)))
}

/// Opens a VM that is going to be stopped. Prints why its description cannot be read.
fn find_to_end(state: &Path, name: &str) -> Result<Vm, MachineError> {
    let (vm, unreadable) = Vm::find_to_end(state, name)?;
    if let Some(error) = unreadable {
        memfold_host::say!("memfold: {}", memfold_host::chain(&error));
    }
    Ok(vm)
}

/// Returns whether there is no daemon at the socket. The socket of a daemon may also be closed to
/// this user.
fn is_gone(error: &ClientError) -> bool {
    matches!(error, ClientError::NoDaemon { source, .. }
        if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused))
}

/// Does `work` for all items at the same time. The panic of a thread was already reported.
fn at_once<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads = items.iter().map(|item| scope.spawn(move || work(item)));
        let threads: Vec<_> = threads.collect();
        let ends = threads.into_iter();
        ends.flat_map(std::thread::ScopedJoinHandle::join).collect()
    })
}

/// Returns what the list shows of a guest's agent: the kernel, and what the owner does not allow.
fn agent(vm: &VmInfo) -> Option<String> {
    let kernel = vm.agent.clone()?;
    let Some(allowed) = &vm.allowed else {
        return Some(kernel);
    };
    let words = Permission::ALL.into_iter().map(Permission::word);
    let missing: Vec<&str> = words
        .filter(|word| !allowed.iter().any(|a| a == word))
        .collect();
    Some(if missing.is_empty() {
        kernel
    } else {
        format!("{kernel}, without {}", missing.join(" "))
    })
}

fn overview(vms: &[VmInfo]) -> String {
    if vms.is_empty() {
        return "no VMs; start one with 'memfold vm run', or attach one with 'memfold vm attach'"
            .into();
    }
    let rows = vms.iter().map(|vm| {
        let is_off = vm.state == "off";
        let is_there = !is_off && !matches!(vm.state.as_str(), "starting" | "taking-over");
        let no_agent = if is_off { "-" } else { "not connected" };
        let folding = match (vm.fold_problems.first(), vm.refold_problems.first()) {
            (Some(problem), _) => format!("no: {problem}"),
            (None, Some(_)) => "yes, again only at pauses (direct I/O)".into(),
            (None, None) if !is_there => "-".into(),
            (None, None) => "yes".into(),
        };
        [
            vm.name.clone(),
            vm.state.clone(),
            vm.domain.clone().unwrap_or_else(|| "-".into()),
            if is_off {
                "-".into()
            } else {
                vm.pid.to_string()
            },
            ByteSize(vm.ram_bytes).to_string(),
            agent(vm).unwrap_or_else(|| no_agent.into()),
            folding,
        ]
    });
    let still = vms.iter().filter_map(|vm| {
        let cause = vm.state_cause.as_deref()?;
        let fix = vm.state_fix.as_ref();
        let fix = fix.map_or_else(String::new, |fix| format!("; {fix}"));
        Some(format!("\n{} is {}: {cause}{fix}", vm.name, vm.state))
    });
    let costs = vms.iter().flat_map(|vm| {
        let told = vm.costs.iter();
        told.map(|cost| format!("\n{}: {cost}", vm.name))
    });
    let vms = table("NAME  STATE  DOMAIN  >PID  >RAM  AGENT  FOLDING", rows);
    vms + &still.chain(costs).collect::<String>()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: RunArguments,
    }

    #[test]
    fn flags_of_vm_run_override_the_values_of_its_file_and_leave_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().canonicalize().unwrap();
        for name in ["disk", "seed", "old", "initrd", "new", "more"] {
            std::fs::write(place.join(name), "").unwrap();
        }
        let file = place.join("web.toml");
        let at = place.display();
        let disks = format!("[[disks]]\npath = '{at}/disk'\n[[disks]]\npath = '{at}/seed'\n");
        let boot = format!("kernel = '{at}/old'\ninitrd = '{at}/initrd'\ncmdline = 'quiet'\n");
        let text = format!("name = 'web'\nmemory = '64M'\n{disks}read_only = true\n[boot]\n{boot}");
        std::fs::write(&file, text).unwrap();
        let spec = |more: &[&str]| {
            let words = [&["run", "--file", file.to_str().unwrap()], more].concat();
            Line::try_parse_from(words).unwrap().run.spec().unwrap()
        };
        let path = |name: &str| place.join(name).display().to_string();
        let (kernel, more) = (path("new"), path("more"));
        let new = spec(&["--snapshot", "--kernel", &kernel, "--disk", &more]);
        let snapshots: Vec<bool> = new.disks.iter().map(|disk| disk.snapshot).collect();
        assert_eq!(snapshots, [true, false, true]);
        let boot = |spec: VmSpec| {
            let text = |path: Option<PathBuf>| path.unwrap().display().to_string();
            let boot = spec.boot;
            (text(boot.kernel), text(boot.initrd), boot.cmdline.unwrap())
        };
        let of = |kernel: &str, cmdline: &str| (path(kernel), path("initrd"), cmdline.to_owned());
        assert_eq!(boot(new), of("new", "quiet"));
        assert_eq!(boot(spec(&["--cmdline", "debug"])), of("old", "debug"));
    }
}
