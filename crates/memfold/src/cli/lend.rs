//! `memfold lend`, `borrow`, `return`, `leases`.

// Writing to a String can't fail.
use std::fmt::Write as _;
use std::net::IpAddr;
use std::process::ExitCode;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use memfold_units::ByteSize;

use super::Context;
use super::vm::segment as name_of_vm;
use crate::api::{BorrowRequest, Borrowed, LeaseReport, LendRequest, SwapPlace};
use crate::lend::{Durability, LenderStatus};

#[derive(Args, Debug)]
pub(super) struct LendArguments {
    /// Lend at most so much of this host's RAM; never more than the host can spare. Without it: what is lent now
    #[arg(long, value_name = "SIZE", conflicts_with = "stop")]
    max: Option<ByteSize>,
    /// Export on this IP address, each lease on a port of its own, with TLS and a key of its own
    #[arg(long, value_name = "ADDRESS", requires = "max")]
    listen: Option<IpAddr>,
    /// Export on Unix sockets, to borrowers on this host (the default)
    #[arg(long, requires = "max", conflicts_with = "listen")]
    unix: bool,
    /// Take everything back, and lend no more
    #[arg(long)]
    stop: bool,
}

#[derive(Args, Debug)]
pub(super) struct BorrowArguments {
    /// The VM; it needs a swap disk (vm run --swap)
    vm: String,
    /// How much: at least what the swap disk has, which is also the default
    size: Option<ByteSize>,
    /// What keeps the bytes if the lender dies: a copy on this host's disk, one in another lender's RAM, or nothing (unsafe: programs of
    /// the guest die with the lender)
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Durability::Disk)]
    durability: Durability,
}

#[derive(Args, Debug)]
pub(super) struct ReturnArguments {
    /// The VM
    vm: String,
}

pub(super) fn lend(context: &Context, arguments: &LendArguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    let status: Option<LenderStatus> = match arguments.max {
        Some(max) => {
            let request = LendRequest {
                max_bytes: max.0,
                listen: arguments.listen,
            };
            Some(client.post("/v1/lend", &request)?)
        }
        None if arguments.stop => client.delete("/v1/lend")?,
        None => client.get("/v1/lend")?,
    };
    context.print(&status, |status| {
        status
            .as_ref()
            .map_or_else(|| "this host lends nothing".into(), lender)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn lender(status: &LenderStatus) -> String {
    let mut text = format!(
        "'{}' lends up to {}: {} offered, {} of it lent ({})",
        status.host,
        ByteSize(status.max_bytes),
        ByteSize(status.offer_bytes),
        ByteSize(status.lent_bytes),
        status.why
    );
    if status.is_ending {
        text.push_str("\ntakes everything back, and lends no more");
    } else if status.recalled_bytes > 0 {
        let _ = write!(text, "\ntakes {} back", ByteSize(status.recalled_bytes));
    }
    if let Some(problem) = &status.problem {
        let _ = write!(text, "\nproblem: {problem}");
    }
    text
}

pub(super) fn borrow(context: &Context, arguments: &BorrowArguments) -> anyhow::Result<ExitCode> {
    let request = BorrowRequest {
        bytes: arguments.size.map(|size| size.0),
        durability: arguments.durability,
    };
    let place = format!("/v1/vms/{}/borrow", name_of_vm(&arguments.vm)?);
    let done: Borrowed = context.client()?.post(&place, &request)?;
    context.print(&done, borrowed)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn give_back(
    context: &Context,
    arguments: &ReturnArguments,
) -> anyhow::Result<ExitCode> {
    let place = format!("/v1/vms/{}/return", name_of_vm(&arguments.vm)?);
    let done: Borrowed = context.client()?.post(&place, &())?;
    context.print(&done, borrowed)?;
    Ok(ExitCode::SUCCESS)
}

fn borrowed(done: &Borrowed) -> String {
    let place = match done.place {
        SwapPlace::Lent => format!(
            "{} of {} ({})",
            ByteSize(done.bytes),
            done.lenders.join(" and "),
            match done.durability {
                Some(Durability::Disk) => "with a copy on this host's disk",
                Some(Durability::Replica) => "one a copy of the other",
                _ => "without a copy: programs of the guest die with the lender",
            }
        ),
        SwapPlace::Degraded => format!("{}, with one copy only", done.lenders.join(" and ")),
        SwapPlace::OnCopy => "this host's disk: its lender is gone".into(),
        SwapPlace::OnDisk => "this host's disk".into(),
        SwapPlace::Lost => "nowhere: lost with its lender".into(),
    };
    if done.changed {
        format!(
            "swap of '{}' is on {place}, after {} ms",
            done.vm, done.took_ms
        )
    } else {
        format!("swap of '{}' is on {place}", done.vm)
    }
}

pub(super) fn leases(context: &Context) -> anyhow::Result<ExitCode> {
    let report: LeaseReport = context.client()?.get("/v1/leases")?;
    context.print(&report, render)?;
    Ok(ExitCode::SUCCESS)
}

fn table(header: &[&str], right: &[usize], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_header(header.to_vec());
    table.add_rows(rows);
    for at in right {
        if let Some(column) = table.column_mut(*at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
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
        vec![
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
        vec![
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
    for (title, table) in [
        (
            "lenders",
            table(
                &["LENDER", "OFFERED", "LENT", "FREE", "HEARD OF"],
                &[1, 2, 3, 4],
                lenders.collect(),
            ),
        ),
        (
            "leases",
            table(
                &[
                    "LEASE",
                    "LENDER",
                    "VM",
                    "SIZE",
                    "DURABILITY",
                    "STATE",
                    "LEFT",
                ],
                &[0, 3, 6],
                leases.collect(),
            ),
        ),
    ] {
        let _ = writeln!(text, "\n{title}\n{table}");
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
    for borrowed in &report.borrowed {
        if borrowed.place != SwapPlace::Lent {
            let _ = write!(text, "\n{}", self::borrowed(borrowed));
        }
    }
    text.trim_end().to_owned()
}
