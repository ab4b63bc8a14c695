//! `memfold serve`: runs the daemon.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use memfold_api::{
    DEFAULT_DEFINITIONS, DEFAULT_RECORDS, DEFAULT_SOCKET, DEFAULT_STATE, LendRequest, RightsizeMode,
};
use memfold_daemon::{BorrowWhen, Daemon, DaemonOptions};
use memfold_fold::EngineSettings;
use memfold_host::{private_memory, privileges};
use memfold_ledger::{BrakePolicy, Reserve};
use memfold_lend::place::PlaceError;
use memfold_lend::registry::check_name;
use memfold_lend::{RegistryAt, RegistryError, RegistryFiles, Transport};
use memfold_libvirt::DEFAULT_RUN;
use memfold_server::{
    Doors, Groups, HTTP_THREAD, PublicUrl, REQUEST_THREAD, Runtimes, TcpDoor, TcpDoorError,
    TlsFiles,
};
use memfold_snapshot::keys::KeySource;
use memfold_snapshot::{DEFAULT_SHELF, KeyError, Keys, NamedKey};
use memfold_units::ByteSize;
use rustix::process::{Resource, getrlimit, setrlimit};
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

use super::context::Context;
use super::debt::cover;
use super::failure::IMPOSSIBLE_HERE;
use super::lend::ports;
use super::log::LogFormat;
use super::number::number;
use super::user_mode::UserDirectories;
use super::{log, systemd};

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Configuration file with these options by name; options of the command line take precedence
    /// (/etc/memfold/memfold.toml, if it exists)
    #[arg(long, env = "MEMFOLD_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Run without root's rights, for the VMs of the user who starts the daemon: directories and
    /// socket are those of the user (XDG), unless they are given
    #[arg(long)]
    user: bool,
    /// What to log: error, warn, info, debug or trace, also by module (`info,memfold::fold=debug`)
    #[arg(long, env = "MEMFOLD_LOG", default_value = "info", value_name = "FILTER", value_parser = log_filter)]
    log: String,
    /// Format of the log
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(super) log_format: LogFormat,
    /// Directory for files and sockets of VMs
    #[arg(long, env = "MEMFOLD_STATE", default_value = DEFAULT_STATE, value_name = "DIR")]
    state: PathBuf,
    /// CPU limit of folding over time, in percent of one core, 0 to 100 (by default 1 for each core
    /// of this host, but at least 5)
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    cpu: Option<f64>,
    /// Most pages that folding may examine a second, 0 for no limit (the default)
    #[arg(long, value_name = "PAGES")]
    pages_per_second: Option<u64>,
    /// Seconds that a hint waits for its page to be read from disk; fractions are allowed
    #[arg(long, default_value = "1", value_name = "SECONDS", value_parser = seconds)]
    settle: Duration,
    /// Largest size of a trust domain's page store
    #[arg(long, default_value = "16G", value_name = "SIZE")]
    store_cap: ByteSize,
    /// Have agents report only files whose path in the guest matches; several allowed
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Exclude files whose path in the guest matches, even if --include matches
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Memory that this host keeps for itself: a size, or percent of its RAM (6.25% by default)
    #[arg(long, value_name = "SIZE|PERCENT%")]
    reserve: Option<Reserve>,
    /// Percent of shared memory that available memory must cover in case guests write to it, 0 to
    /// 100 (50 by default): otherwise nothing more is shared and no VM is started; 0 disables the
    /// brake
    #[arg(long, value_name = "PERCENT", value_parser = cover)]
    cover: Option<f64>,
    /// Whether to size VMs by their need: 'watch' says what would be done, 'on' trims page caches
    /// of guests and moves their balloons
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    rightsize: RightsizeMode,
    /// Start with folding paused
    #[arg(long)]
    paused: bool,
    /// Start although this host's kernel has a known fault with which a VM can lose data
    #[arg(long)]
    despite_kernel: bool,
    /// Directory of snapshots
    #[arg(long, env = "MEMFOLD_SNAPSHOTS", default_value = DEFAULT_SHELF, value_name = "DIR")]
    snapshots: PathBuf,
    /// Key for encrypted snapshots ('snapshot save --encrypt'), 64 hexadecimal digits:
    /// NAME=file:PATH (mode 0600), NAME=credential:NAME (of the systemd unit), or
    /// NAME='command:PROGRAM ARGUMENT ...' (its output); several allowed
    #[arg(long, value_name = "NAME=SOURCE")]
    snapshot_key: Vec<NamedKey>,
    /// Directory of segments
    #[arg(long, env = "MEMFOLD_SEGMENTS", default_value = memfold_segment::DEFAULT_SHELF, value_name = "DIR")]
    segments: PathBuf,
    /// Directory of the definitions of VMs (/etc/memfold/vms; with another --state: 'definitions'
    /// in that directory)
    #[arg(long, value_name = "DIR")]
    definitions: Option<PathBuf>,
    /// Directory where libvirt records its QEMU processes, to adopt enabled domains
    /// (/run/libvirt/qemu; with another --state: none)
    #[arg(long, value_name = "DIR")]
    libvirt: Option<PathBuf>,
    /// Root directory of the node of Proxmox VE whose enabled VMs are attached (/; with another
    /// --state: none)
    #[arg(long, value_name = "DIR")]
    pve: Option<PathBuf>,
    /// Directory of the history, the audit log and the tokens of --listen (/var/lib/memfold; with
    /// another --state: that directory)
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
    // The headings also apply to all options below them.
    #[command(flatten, next_help_heading = "Lending")]
    lending: LendingArguments,
    #[command(flatten, next_help_heading = "Access")]
    access: AccessArguments,
}

#[derive(Args, Debug)]
struct LendingArguments {
    /// Name of this host among those that lend and borrow memory (the kernel's host name by
    /// default)
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    host: Option<String>,
    /// Registry of leases: the socket of another daemon on this host, https://HOST:PORT of a daemon
    /// on another host, or etcd+https://HOST:PORT,... of an etcd; by default, this daemon serves a
    /// registry
    #[arg(long, value_name = "PATH|URL")]
    registry: Option<String>,
    /// Certificates (PEM) of the CA that signed the certificate of the registry's server
    #[arg(long, value_name = "FILE", requires = "registry")]
    registry_ca: Option<PathBuf>,
    /// File with the token for this host that 'memfold host add' printed on the registry's host
    #[arg(long, value_name = "FILE", requires = "registry")]
    registry_token: Option<PathBuf>,
    /// Certificate (PEM) of this host, for an etcd that requires one
    #[arg(long, value_name = "FILE", requires_all = ["registry", "registry_key"])]
    registry_cert: Option<PathBuf>,
    /// Key (PEM) of the certificate for etcd
    #[arg(long, value_name = "FILE", requires = "registry_cert")]
    registry_key: Option<PathBuf>,
    /// Whether VMs with a swap disk borrow only on request, or also automatically while they swap
    /// (with a copy on disk)
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    borrow: BorrowWhen,
    /// Most of this host's RAM to lend from the start, as 'memfold lend --max' does; that command
    /// overrides it until the next boot
    #[arg(long, value_name = "SIZE")]
    lend: Option<ByteSize>,
    /// Export on this IP address, with TLS; by default on Unix sockets
    #[arg(long, value_name = "ADDRESS", requires = "lend")]
    lend_listen: Option<IpAddr>,
    /// Tell borrowers this address instead of that of --lend-listen
    #[arg(long, value_name = "ADDRESS", requires = "lend_listen")]
    lend_announce: Option<IpAddr>,
    /// Ports for exports; any free port by default
    #[arg(long, value_name = "FIRST-LAST", requires = "lend_listen", value_parser = ports)]
    lend_ports: Option<(u16, u16)>,
    /// Protocol of exports; with iSCSI they listen on 127.0.0.1 unless --lend-listen is given
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        requires = "lend",
        default_value_t
    )]
    lend_transport: Transport,
    /// Accept that iSCSI sends guests' swapped memory in clear text
    #[arg(long, requires = "lend")]
    lend_cleartext: bool,
}

#[derive(Args, Debug)]
struct AccessArguments {
    /// Also serve the dashboard and the API over TCP, to clients with a token or a login of
    /// 'memfold dashboard'
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Certificate for TLS (PEM); without it, only clients on this host are served
    #[arg(long, value_name = "FILE", requires_all = ["listen", "tls_key"])]
    tls_cert: Option<PathBuf>,
    /// Key of the certificate for TLS (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Further name of this host for browsers, beside its addresses and 'localhost'; several
    /// allowed
    #[arg(long, value_name = "NAME", requires = "listen")]
    allow_host: Vec<String>,
    /// Address of the dashboard behind a reverse proxy that ends TLS, as browsers show it; several
    /// allowed
    #[arg(long, value_name = "URL", requires = "listen")]
    public_url: Vec<PublicUrl>,
    /// Group whose members may read over the socket ('memfold-read', if it exists)
    #[arg(long, value_name = "GROUP")]
    read_group: Option<String>,
    /// Group whose members may do everything, which equals root ('memfold-operate', if it exists)
    #[arg(long, value_name = "GROUP")]
    operate_group: Option<String>,
}

impl LendingArguments {
    fn registry(&self) -> anyhow::Result<Option<RegistryAt>> {
        let files = RegistryFiles {
            ca: self.registry_ca.clone(),
            token: self.registry_token.clone(),
            certificate: self.registry_cert.clone(),
            key: self.registry_key.clone(),
        };
        let at = self.registry.as_ref();
        Ok(at.map(|said| RegistryAt::new(said, &files)).transpose()?)
    }

    /// Returns the request to lend memory from the start; `None` without `--lend`.
    fn lend(&self) -> anyhow::Result<Option<LendRequest>> {
        let Some(max) = self.lend else {
            return Ok(None);
        };
        let request = LendRequest {
            max_bytes: max.0,
            listen: self.lend_listen,
            announce: self.lend_announce,
            ports: self.lend_ports,
            transport: self.lend_transport,
            cleartext: self.lend_cleartext,
        };
        request.listens().map_err(anyhow::Error::msg)?;
        Ok(Some(request))
    }
}

impl AccessArguments {
    fn tcp_door(&self) -> Result<Option<TcpDoor>, TcpDoorError> {
        let Some(address) = self.listen else {
            return Ok(None);
        };
        let tls = self.tls_cert.clone().zip(self.tls_key.clone());
        let tls = tls.map(|(certificate, key)| TlsFiles { certificate, key });
        let (names, public) = (self.allow_host.clone(), self.public_url.clone());
        TcpDoor::new(address, names, public, tls.as_ref()).map(Some)
    }
}

impl Arguments {
    fn records(&self) -> PathBuf {
        self.records.clone().unwrap_or_else(|| {
            if self.state == Path::new(DEFAULT_STATE) {
                DEFAULT_RECORDS.into()
            } else {
                self.state.clone()
            }
        })
    }

    /// Returns the directory of the definitions of VMs. The default applies only to the default
    /// state directory, because otherwise two daemons would start the same VMs.
    fn definitions(&self) -> PathBuf {
        self.definitions.clone().unwrap_or_else(|| {
            if self.state == Path::new(DEFAULT_STATE) {
                DEFAULT_DEFINITIONS.into()
            } else {
                self.state.join("definitions")
            }
        })
    }

    /// Returns a directory of VMs that other programs start, or `None` with another state directory
    /// than the default, because otherwise two daemons would adopt the same VMs.
    fn own(&self, default: &str) -> Option<PathBuf> {
        (self.state == Path::new(DEFAULT_STATE)).then(|| default.into())
    }

    fn doors(&self, socket: &Path) -> anyhow::Result<Doors> {
        let access = &self.access;
        Ok(Doors {
            socket: socket.to_owned(),
            groups: Groups::find(
                access.read_group.as_deref(),
                access.operate_group.as_deref(),
            )?,
            tcp: access.tcp_door()?,
            // The tokens must survive a reboot, because TCP clients have copies of them.
            tokens: self.records().join("access"),
            records: self.records(),
        })
    }

    /// Returns what is wrong with the first key of snapshots that cannot be used. Programs are not
    /// run, and credentials are there only in the unit.
    fn wrong_key(&self) -> Option<KeyError> {
        let is_file = |key: &&NamedKey| matches!(key.source, KeySource::File(_));
        let files = self.snapshot_key.iter().filter(is_file).cloned();
        let all = Keys::new(self.snapshot_key.iter().cloned());
        all.err().or_else(|| Keys::new(files).ok()?.unusable())
    }

    /// Returns the fields whose file or group does not exist, or which this host cannot support,
    /// with the reason. Changes nothing, and contacts no other host.
    pub(super) fn unusable(&self) -> Vec<(&'static str, String)> {
        let (access, lending) = (&self.access, &self.lending);
        let door = access.tcp_door().err().map(|error| {
            let field = match &error {
                TcpDoorError::Plain(_) => "listen",
                TcpDoorError::File { path, .. } if Some(path) == access.tls_key.as_ref() => {
                    "tls_key"
                }
                TcpDoorError::File { .. } | TcpDoorError::Tls(_) => "tls_cert",
            };
            (field, error.into())
        });
        let registry = lending.registry().err().map(|error| {
            let files = [
                (
                    "registry_token",
                    "--registry-token",
                    &lending.registry_token,
                ),
                ("registry_ca", "--registry-ca", &lending.registry_ca),
                ("registry_cert", "--registry-cert", &lending.registry_cert),
                ("registry_key", "--registry-key", &lending.registry_key),
            ];
            let mut files = files.into_iter();
            let found = files.find(|(_, named, file)| match error.downcast_ref() {
                Some(PlaceError::File { path, .. }) => file.as_ref() == Some(path),
                Some(PlaceError::Unused { option, .. }) => named == option,
                // If an option is missing, there is no field to name.
                _ => false,
            });
            (found.map_or("registry", |(field, ..)| field), error)
        });
        let group = |field, read: &Option<String>, operate: &Option<String>| {
            let found = Groups::find(read.as_deref(), operate.as_deref());
            found.err().map(|error| (field, error.into()))
        };
        let failed = [
            door,
            group("read_group", &access.read_group, &None),
            group("operate_group", &None, &access.operate_group),
            registry,
            lending.lend().err().map(|error| ("lend", error)),
            self.wrong_key().map(|error| ("snapshot_key", error.into())),
        ];
        let failed = failed.into_iter().flatten();
        failed
            .map(|(field, error): (_, anyhow::Error)| (field, format!("{error:#}")))
            .collect()
    }
}

fn host_name(text: &str) -> Result<String, RegistryError> {
    check_name("host", text).map(|()| text.to_owned())
}

fn percent(text: &str) -> Result<f64, String> {
    number(text, 0.0..=100.0, "give 0 to 100")
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().map(Duration::try_from_secs_f64);
    match seconds {
        Some(Ok(time)) => Ok(time),
        _ => Err("give a number of seconds from 0 on".to_owned()),
    }
}

fn log_filter(text: &str) -> Result<String, ParseError> {
    log::filter(text).map(|_| text.to_owned())
}

impl Arguments {
    pub(super) fn log_filter(&self) -> EnvFilter {
        // The text was checked when the arguments were parsed.
        log::filter(&self.log).unwrap_or_default()
    }
}

impl Arguments {
    /// Replaces the default directories and the default socket by those of a user, with `--user`.
    fn for_user(&mut self, socket: &mut PathBuf) -> anyhow::Result<()> {
        if !self.user {
            return Ok(());
        }
        let own = UserDirectories::find()?;
        let replace = |path: &mut PathBuf, default: &str, by: PathBuf| {
            if path == Path::new(default) {
                *path = by;
            }
        };
        let mut state = std::mem::take(&mut self.state);
        // A daemon with another state directory keeps everything there, as without --user.
        if state == Path::new(DEFAULT_STATE) {
            self.definitions.get_or_insert(own.config.join("vms"));
            self.records.get_or_insert(own.records.clone());
        }
        replace(&mut state, DEFAULT_STATE, own.state.clone());
        replace(
            &mut self.snapshots,
            DEFAULT_SHELF,
            own.data.join("snapshots"),
        );
        let segments = memfold_segment::DEFAULT_SHELF;
        replace(&mut self.segments, segments, own.data.join("segments"));
        replace(socket, DEFAULT_SOCKET, own.socket());
        self.state = state;
        Ok(())
    }
}

pub(super) fn run(context: &Context, mut arguments: Arguments) -> anyhow::Result<ExitCode> {
    let kernel = rustix::system::uname();
    let kernel = kernel.release().to_string_lossy();
    if let Err(refusal) = check_kernel(&kernel, arguments.despite_kernel) {
        memfold_host::say!("memfold: {refusal}");
        return Ok(ExitCode::from(IMPOSSIBLE_HERE));
    }
    keep_secrets()?;
    allow_many_files();
    let mut socket = context.socket.clone();
    arguments.for_user(&mut socket)?;
    let arguments = &arguments;
    let doors = arguments.doors(&socket)?;
    let brake = BrakePolicy::default();
    let options = DaemonOptions {
        state: arguments.state.clone(),
        settings: EngineSettings {
            cpu_share: arguments
                .cpu
                .map_or(EngineSettings::default().cpu_share, |p| p / 100.0),
            pages_per_second: arguments.pages_per_second.filter(|&n| n > 0),
            settle: arguments.settle,
            store_cap: arguments.store_cap,
            ..EngineSettings::default()
        },
        include: arguments.include.clone(),
        exclude: arguments.exclude.clone(),
        paused: arguments.paused,
        brake: BrakePolicy {
            reserve: arguments.reserve.unwrap_or(brake.reserve),
            cover_percent: arguments.cover.unwrap_or(brake.cover_percent),
        },
        rightsize: arguments.rightsize,
        shelf: arguments.snapshots.clone(),
        snapshot_keys: Keys::new(arguments.snapshot_key.iter().cloned())?,
        segments: arguments.segments.clone(),
        definitions: arguments.definitions(),
        host: arguments.lending.host.clone(),
        registry: arguments.lending.registry()?,
        borrow: arguments.lending.borrow,
        lend: arguments.lending.lend()?,
        history: Some(arguments.records().join("history.sqlite")),
        libvirt: arguments
            .libvirt
            .clone()
            .or_else(|| arguments.own(DEFAULT_RUN)),
        pve: arguments.pve.clone().or_else(|| arguments.own("/")),
    };
    // Threads inherit what this thread gave up.
    if let Err(error) = privileges::drop_unneeded() {
        warn!(%error, "cannot drop the capabilities that the daemon does not need, so it keeps them; allow capset(2) and prctl(2) where the daemon runs");
    }
    let runtimes = Runtimes::start()?;
    end_with_threads();
    let daemon = Daemon::start(&options)?;
    info!(socket = %socket.display(), state = %arguments.state.display(), "serving");
    systemd::watch(&daemon)?;
    let served = daemon.clone();
    let Runtimes { http, workers } = runtimes;
    let ending = workers.handle().clone();
    // A signal that comes as soon as the socket listens ends the daemon in the usual way, too.
    let (mut terminate, mut interrupt) = {
        use tokio::signal::unix::{SignalKind, signal};
        let _inside = http.enter();
        (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        )
    };
    let done = http.block_on(memfold_server::serve(daemon.clone(), &doors, async move {
        // systemd is notified after the socket has begun to listen.
        systemd::ready(&served);
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        systemd::stopping();
        // The daemon still serves here, because borrowers may need its registry to return memory.
        let hurry = Arc::new(AtomicBool::new(false));
        let told = hurry.clone();
        let mut given_back = ending.spawn_blocking(move || {
            served.lending().end(&|| told.load(Ordering::Relaxed));
        });
        tokio::select! {
            _ = &mut given_back => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = tokio::time::sleep(LENDING_LIMIT) => {}
        }
        hurry.store(true, Ordering::Relaxed);
        // From here on, the daemon's end has a time limit: the daemon may be killed at any instant
        // without harm to VMs.
        end_within(END_LIMIT, 0);
    }));
    if done.is_err() {
        end_within(END_LIMIT, 1);
    }
    info!("daemon ends; VMs go on, and shared (folded) pages stay shared");
    daemon.shut_down();
    // Unfinished requests to other hosts are abandoned.
    for runtime in [http, workers] {
        runtime.shutdown_timeout(Duration::from_millis(100));
    }
    done?;
    Ok(ExitCode::SUCCESS)
}

/// Checks that no VM can lose data by a known fault of the kernel of release `kernel`, unless
/// `despite` is set; then the fault is only logged. Returns the reason to refuse.
fn check_kernel(kernel: &str, despite: bool) -> Result<(), String> {
    match memfold_host::kernel_faults::refusal(kernel) {
        None => Ok(()),
        Some(fault) if despite => {
            warn!(
                fault,
                "serving despite a fault of this kernel; upgrade the kernel"
            );
            Ok(())
        }
        Some(fault) => Err(format!(
            "{fault}, or pass --despite-kernel. 'memfold doctor' shows the kernel's faults and workarounds"
        )),
    }
}

/// Time limit for borrowers to return this host's memory when the daemon ends. It is slightly
/// longer than the lender's own limit.
const LENDING_LIMIT: Duration = Duration::from_secs(50);

/// Time limit for the rest of the daemon's end, after lending has ended.
const END_LIMIT: Duration = Duration::from_secs(4);

/// Exit code after a panic (`EX_SOFTWARE`, sysexits(3)).
const BROKEN: i32 = 70;

/// Keeps the daemon's secrets from child processes, core dumps and debuggers. Called before any
/// thread starts.
fn keep_secrets() -> anyhow::Result<()> {
    memfold_transfer::take_credentials()
        .context("cannot take credentials of object stores out of the environment")?;
    private_memory::protect().context("cannot keep the daemon's memory out of core dumps")
}

/// Most open files that the daemon allows itself. Programs that it starts inherit the limit, and
/// some of them close every descriptor below it.
const MOST_FILES: u64 = 1 << 20;

/// Lets the daemon open as many files as its hard limit allows: it has about eight open for each
/// VM, and the usual soft limit is 1,024.
fn allow_many_files() {
    let mut limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(MOST_FILES).min(MOST_FILES);
    limit.current = limit.current.map(|current| current.max(most));
    // Raising the soft limit to the hard one needs no right.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Ends the process after `limit`, even if threads still wait.
fn end_within(limit: Duration, code: i32) {
    let thread = std::thread::Builder::new()
        .name("end".into())
        .spawn(move || {
            std::thread::sleep(limit);
            warn!("daemon's shutdown timed out; the daemon exits now, and VMs go on");
            std::process::exit(code);
        });
    if let Err(error) = thread {
        warn!(%error, "cannot start the thread that limits the shutdown time, so shutdown may take longer; no action is needed");
    }
}

/// Ends the process when a thread of the daemon panics, because the daemon would be incomplete
/// without its engine or a VM's watch thread. The supervisor starts a new daemon, and VMs keep
/// running. A panic while a request is executed only fails that request.
fn end_with_threads() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed").to_owned();
        let payload = panic.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref().copied());
        let what = text.unwrap_or("no words");
        let place = panic
            .location()
            .map_or_else(String::new, ToString::to_string);
        let is_caught = REQUESTS.contains(&name.as_str()) || memfold_host::caught::is_caught();
        error!(
            thread = name,
            place,
            what,
            ends = !is_caught,
            "a thread of the daemon panicked; report this bug"
        );
        if !is_caught {
            std::process::exit(BROKEN);
        }
    }));
}

/// Names of the threads that execute requests.
const REQUESTS: [&str; 2] = [HTTP_THREAD, REQUEST_THREAD];

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Environment variable with the name of the thread that panics in
    /// [`helper_process_panics_in_the_named_thread`].
    const WHO: &str = "MEMFOLD_TEST_PANIC";

    /// Returns the exit code of a process in which the thread `who` panics.
    fn code_of_a_panic(who: &str) -> Option<i32> {
        let test = "cli::serve::tests::helper_process_panics_in_the_named_thread";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([test, "--exact", "--ignored", "--nocapture"])
            .env(WHO, who);
        command.output().unwrap().status.code()
    }

    #[test]
    fn serve_refuses_a_kernel_that_loses_data_unless_it_is_told_to_start_despite_it() {
        let refusal = check_kernel("6.8.1", false).unwrap_err();
        for word in [
            "CVE-2024-27007",
            "Linux 6.8.8",
            "--despite-kernel",
            "doctor",
        ] {
            assert!(refusal.contains(word), "no '{word}' in: {refusal}");
        }
        assert_eq!(check_kernel("6.8.1", true), Ok(()));
        for kernel in ["6.8.0-71-generic", "6.12.57+deb13-amd64", "no version"] {
            assert_eq!(check_kernel(kernel, false), Ok(()), "{kernel}");
        }
    }

    #[test]
    fn unless_it_is_caught_or_in_a_request_a_panic_ends_the_daemon() {
        assert_eq!(code_of_a_panic("fold-engine"), Some(BROKEN));
        for request in REQUESTS {
            assert_eq!(code_of_a_panic(request), Some(0));
        }
        assert_eq!(code_of_a_panic("caught"), Some(0));
    }

    #[test]
    #[ignore = "the process that another test starts"]
    fn helper_process_panics_in_the_named_thread() {
        let Ok(who) = std::env::var(WHO) else { return };
        end_with_threads();
        let work = || {
            if std::thread::current().name() == Some("caught") {
                assert!(memfold_host::caught::caught(|| panic!("told to")).is_err());
            } else {
                panic!("told to");
            }
        };
        let _ = std::thread::Builder::new()
            .name(who)
            .spawn(work)
            .unwrap()
            .join();
    }

    #[test]
    fn a_host_name_that_the_lease_registry_does_not_accept_is_refused() {
        assert_eq!(host_name("Node-1.example").unwrap(), "Node-1.example");
        assert!(host_name("-a").is_err());
    }
}
