//! The commands that lend RAM to VMs of other hosts, and borrow RAM: `memfold lend`, `borrow`,
//! `return` and `leases`.

// Writing to a String cannot fail.
use std::fmt::Write as _;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::SystemTime;

use clap::Args;

use memfold_api::{BorrowRequest, Borrowed, LeaseReport, LendRequest, SwapPlace};
use memfold_lend::lvm::Volume;
use memfold_lend::{Durability, Lease, LenderStatus, Transport};
use memfold_units::ByteSize;
use serde::Serialize;

use super::context::Context;
use super::table::table;
use super::vm_info::segment as name_of_vm;
use super::watch::watched;

#[derive(Args, Debug)]
pub(super) struct LendArguments {
    /// Most of this host's RAM to lend; never more than the host can spare. Without --max: show
    /// what is lent now. While the host lends, --max alone changes only the limit
    #[arg(long, value_name = "SIZE", conflicts_with = "stop")]
    max: Option<ByteSize>,
    /// Export on this IP address, each lease on a port of its own, with TLS and a key of its own
    #[arg(long, value_name = "ADDRESS", requires = "max")]
    listen: Option<IpAddr>,
    /// Tell borrowers this address instead, if it forwards to the address of --listen
    #[arg(long, value_name = "ADDRESS", requires = "listen")]
    announce: Option<IpAddr>,
    /// Ports for exports, for a firewall; any free port by default
    #[arg(long, value_name = "FIRST-LAST", requires = "listen", value_parser = ports)]
    ports: Option<(u16, u16)>,
    /// Export on Unix sockets, to borrowers on this host (the default)
    #[arg(long, requires = "max", conflicts_with = "listen")]
    unix: bool,
    /// Protocol of exports: NBD (the default), encrypted between hosts, or iSCSI, not encrypted.
    /// With iSCSI, exports listen on 127.0.0.1 unless --listen is given
    #[arg(long, value_enum, value_name = "WHAT", requires = "max")]
    transport: Option<Transport>,
    /// Accept that iSCSI sends guests' swapped memory in clear text
    #[arg(long, requires = "max")]
    cleartext: bool,
    /// Stop lending, and take all lent RAM back
    #[arg(long)]
    stop: bool,
}

impl LendArguments {
    /// Returns whether an option says how to export memory. If none does, the operator wants to
    /// change only the limit of a host that lends.
    const fn describe_exports(&self) -> bool {
        self.listen.is_some()
            || self.announce.is_some()
            || self.ports.is_some()
            || self.unix
            || self.transport.is_some()
            || self.cleartext
    }
}

#[derive(Args, Debug)]
pub(super) struct BorrowArguments {
    /// VM whose swap disk to move; needs a swap disk (vm run --swap)
    #[arg(value_name = "VM", required_unless_present = "lvm")]
    vm: Option<String>,
    /// Size to borrow: that of the swap disk, which is the default; with --lvm, at least that of
    /// the volume
    #[arg(conflicts_with = "lvm")]
    size: Option<ByteSize>,
    /// Move a swap volume of this host's LVM to lent RAM, instead of a VM's swap disk; the lender
    /// must export by iSCSI
    #[arg(long, value_name = "VG/LV")]
    lvm: Option<Volume>,
    /// Place of a copy in case the lender dies: on this host's disk, in another lender's RAM, or
    /// none (unsafe: programs of the guest die with the lender)
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Durability::Disk)]
    durability: Durability,
    /// Number of lenders over which to stripe the disk, 1 to 8; by default, as few as have enough
    /// RAM
    #[arg(long, value_name = "N")]
    stripes: Option<u8>,
}

#[derive(Args, Debug)]
pub(super) struct LeasesArguments {
    /// Trust a lender again that has served wrong bytes
    #[arg(long, value_name = "HOST")]
    trust: Option<String>,
}

#[derive(Args, Debug)]
pub(super) struct ReturnArguments {
    /// VM whose swap disk to move back
    #[arg(value_name = "VM", required_unless_present_any = ["lvm", "lease"])]
    vm: Option<String>,
    /// Move a swap volume of this host's LVM back to this host's disk
    #[arg(long, value_name = "VG/LV", conflicts_with = "vm")]
    lvm: Option<Volume>,
    /// Recall one lease that this host has granted; 'memfold leases' shows the numbers
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["vm", "lvm"])]
    lease: Option<u64>,
}

pub(super) fn ports(text: &str) -> Result<(u16, u16), String> {
    let parsed = text
        .split_once('-')
        .and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    parsed.ok_or_else(|| "give the first and the last port, such as 10900-10999".to_owned())
}

pub(super) fn lend(context: &Context, arguments: &LendArguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    let status: Option<LenderStatus> = match arguments.max {
        Some(max) => {
            let mut present = None;
            if !arguments.describe_exports() {
                let report: LeaseReport = client.get("/v1/leases")?;
                present = report.lends_as;
            }
            let request = present.unwrap_or(LendRequest {
                max_bytes: max.0,
                listen: arguments.listen,
                announce: arguments.announce,
                ports: arguments.ports,
                transport: arguments.transport.unwrap_or_default(),
                cleartext: arguments.cleartext,
            });
            let request = LendRequest {
                max_bytes: max.0,
                ..request
            };
            Some(client.post("/v1/lend", &request)?)
        }
        None if arguments.stop => client.delete("/v1/lend")?,
        None => client.get("/v1/lend")?,
    };
    context.print(&status, |status| {
        let nothing = || "this host lends nothing".into();
        status.as_ref().map_or_else(nothing, lender)
    })
}

fn lender(status: &LenderStatus) -> String {
    let mut text = format!(
        "'{}' lends up to {} on {}: {} offered, {} of that lent ({})",
        status.host,
        ByteSize(status.max_bytes),
        status.listens,
        ByteSize(status.offer_bytes),
        ByteSize(status.lent_bytes),
        status.why
    );
    if status.is_ending {
        text.push_str("\nstops lending: waits for leases to end");
    } else if status.recalled_bytes > 0 {
        let _ = write!(text, "\ntakes {} back", ByteSize(status.recalled_bytes));
    }
    if status.refused > 0 {
        let _ = write!(
            text,
            "\n{} connections to exports were refused or broken off",
            status.refused
        );
    }
    if let Some(problem) = &status.problem {
        let _ = write!(text, "\nproblem: {problem}");
    }
    text
}

pub(super) fn borrow(context: &Context, arguments: &BorrowArguments) -> anyhow::Result<ExitCode> {
    let (vm, lvm) = (arguments.vm.as_deref(), arguments.lvm.as_ref());
    let mut size = arguments.size;
    if lvm.is_some() {
        // With --lvm, the only positional argument is the size.
        size = vm.map(size_alone);
    }
    let place = swap_disk_path(vm, lvm, "borrow")?;
    let request = BorrowRequest {
        bytes: size.map(|size| size.0),
        durability: arguments.durability,
        stripes: arguments.stripes,
    };
    let done = move_disk(context, vm, lvm, &place, &request)?;
    context.print(&done, borrowed)
}

/// Returns the API path of the action `what` on the swap volume `lvm`, or else on the swap disk of
/// the VM `vm`. Names of volumes contain no character that needs escaping.
fn swap_disk_path(vm: Option<&str>, lvm: Option<&Volume>, what: &str) -> anyhow::Result<String> {
    Ok(match lvm {
        Some(volume) => format!("/v1/volumes/{}/{}/{what}", volume.group, volume.name),
        None => format!("/v1/vms/{}/{what}", name_of_vm(vm.unwrap_or_default())?),
    })
}

fn size_alone(word: &str) -> ByteSize {
    word.parse().unwrap_or_else(|error| {
        let why = format!(
            "cannot parse '{word}' as a size ({error}); with --lvm, give no VM, only a size\n"
        );
        clap::Error::raw(clap::error::ErrorKind::ValueValidation, why).exit()
    })
}

pub(super) fn give_back(
    context: &Context,
    arguments: &ReturnArguments,
) -> anyhow::Result<ExitCode> {
    if let Some(number) = arguments.lease {
        let place = format!("/v1/leases/{number}/return");
        let lease: Lease = context.client()?.post(&place, &())?;
        return context.print(&lease, |lease| {
            let seconds = lease.time_to_give_back().as_secs();
            format!(
                "{} of '{}' on host '{}' are asked for; they are back within {seconds} s",
                ByteSize(lease.bytes),
                lease.vm,
                lease.borrower
            )
        });
    }
    let (vm, lvm) = (arguments.vm.as_deref(), arguments.lvm.as_ref());
    let place = swap_disk_path(vm, lvm, "return")?;
    let done = move_disk(context, vm, lvm, &place, &())?;
    context.print(&done, borrowed)
}

/// Sends the request to move a swap disk to the API path `place`, and shows the progress on a
/// terminal.
fn move_disk(
    context: &Context,
    vm: Option<&str>,
    lvm: Option<&Volume>,
    place: &str,
    request: &impl Serialize,
) -> anyhow::Result<Borrowed> {
    let work = || -> anyhow::Result<Borrowed> { Ok(context.client()?.post(place, request)?) };
    watched(context, swap_disk_path(vm, lvm, "swap/progress")?, work)
}

fn borrowed(done: &Borrowed) -> String {
    let mut text = format!("swap of '{}' is on {}", done.vm, done.where_it_is());
    if done.changed {
        let _ = write!(text, ", after {} ms", done.took_ms);
    }
    text
}

pub(super) fn leases(context: &Context, arguments: &LeasesArguments) -> anyhow::Result<ExitCode> {
    if let Some(lender) = &arguments.trust {
        let place = format!("/v1/lenders/{}/distrust", name_of_vm(lender)?);
        let was: bool = context.client()?.delete(&place)?;
        return context.print(&was, |was| {
            if *was {
                format!("'{lender}' is trusted again")
            } else {
                format!("'{lender}' was not distrusted")
            }
        });
    }
    let report: LeaseReport = context.client()?.get("/v1/leases")?;
    context.print(&report, render)?;
    if let Some(why) = &report.registry_away {
        anyhow::bail!("{why}; the output shows only what this host itself knows");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the whole minutes until a time, at least one.
fn minutes_until(unix_s: u64) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let left = unix_s.saturating_sub(now.map_or(0, |now| now.as_secs()));
    left.div_ceil(60).max(1)
}

fn render(report: &LeaseReport) -> String {
    let size = |bytes| ByteSize(bytes).to_string();
    let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1e3);
    let lenders = report.lenders.iter().map(|lender| {
        let offered = if lender.left_ms == 0 {
            0
        } else {
            lender.offered_bytes
        };
        [
            lender.lender.host.clone(),
            size(offered),
            size(lender.lent_bytes),
            size(offered.saturating_sub(lender.lent_bytes)),
            seconds(lender.silent_ms),
        ]
    });
    let leases = report.leases.iter().map(|lease| {
        let word = match lease.recall_ms {
            Some(left) => format!("wanted back in {}", seconds(left)),
            None => lease.state.to_string(),
        };
        [
            lease.id.to_string(),
            lease.lender.host.clone(),
            format!("{}/{}", lease.borrower, lease.vm),
            size(lease.bytes),
            lease.durability.name().into(),
            word,
            seconds(lease.left_ms),
        ]
    });
    let mut text = format!(
        "this host is '{}'; registry at {}\n",
        report.host, report.registry
    );
    if report.registry_away.is_none() {
        let lenders = table("LENDER  >OFFERED  >LENT  >FREE  >HEARD OF", lenders);
        let leases = table(
            ">LEASE  LENDER  VM  >SIZE  DURABILITY  STATE  >LEFT",
            leases,
        );
        let _ = writeln!(text, "\nlenders\n{lenders}\n\nleases\n{leases}");
    }
    for blast in &report.blast {
        let _ = writeln!(text, "\nif '{}' dies", blast.lender);
        for vm in &blast.vms {
            let _ = writeln!(
                text,
                "  {}/{} ({}) {}",
                vm.host,
                vm.vm,
                size(vm.bytes),
                vm.effect
            );
        }
    }
    for one in &report.distrusted {
        let _ = writeln!(
            text,
            "\nlender '{}' is not used for {} min: it served wrong bytes to VM '{}' ({}); trust it again with 'memfold leases --trust {}'",
            one.lender,
            minutes_until(one.until_unix_s),
            one.vm,
            one.what,
            one.lender
        );
    }
    text += &of_this_host(report);
    text.trim_end().to_owned()
}

/// Describes loans of this host's VMs and volumes that need attention.
fn of_this_host(report: &LeaseReport) -> String {
    let mut text = String::new();
    for borrowed in &report.borrowed {
        // If the registry answers, the table of leases shows lent disks.
        if borrowed.place != SwapPlace::Lent || report.registry_away.is_some() {
            let _ = write!(text, "\n{}", self::borrowed(borrowed));
        }
        if let Some(waits) = borrowed.waits.filter(|waits| waits.over_1_s > 0) {
            let _ = write!(
                text,
                "\nthe guest of '{}' has waited longer than 1 s for {} of {} requests to its swap disk, longer than 5 s for {}",
                borrowed.vm, waits.over_1_s, waits.requests, waits.over_5_s
            );
        }
    }
    for vm in &report.again {
        let _ = write!(
            text,
            "\n'{vm}' borrows again when a lender has room; 'memfold return {vm}' cancels that"
        );
    }
    text
}

/// Runs a relay between a VM and its lenders, until the VM disconnects or a lender fails. The
/// daemon reads the relay's output.
pub(super) fn relay() -> ExitCode {
    ExitCode::from(u8::from(!memfold_lend::relay::main()))
}
