//! Commands for snapshots in object stores: `memfold snapshot push` and `pull`, and `list` and
//! `remove` with `--remote`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use memfold_api::{Client, PullBody, PushBody, RemoteStore};
use memfold_transfer::{PullReport, PushReport, RemoteSnapshot, RemoveReport};
use memfold_units::ByteSize;

use super::context::{Context, write_line};
use super::failure;
use super::table::table;
use super::vm_info::segment;
use super::watch::watched;

#[derive(Args, Debug)]
pub(super) struct Push {
    /// Snapshot to push
    name: String,
    /// Object store: a URL that begins with file://, s3://, gs://, az://, http:// or https://. The
    /// daemon's environment has the credentials
    url: String,
    /// Name of the snapshot in the store; by default its name here
    #[arg(long = "as", value_name = "NAME")]
    to: Option<String>,
    /// Sign the snapshot with this Ed25519 private key (a PEM file)
    #[arg(long, value_name = "FILE")]
    sign: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(super) struct Pull {
    /// Snapshot in the store
    name: String,
    /// Object store, as for push
    url: String,
    /// Name of the snapshot here; by default its name in the store
    #[arg(long = "as", value_name = "NAME")]
    to: Option<String>,
    /// Trust domain of the snapshot's VMs; by default, they share no memory with other VMs
    #[arg(long)]
    domain: Option<String>,
    /// Refuse the snapshot unless it is signed with the private key of this Ed25519 public key (a
    /// PEM file)
    #[arg(long, value_name = "FILE")]
    trust: Option<PathBuf>,
    /// Accept arguments for QEMU from a snapshot whose signature is not checked
    #[arg(long, conflicts_with = "trust")]
    allow_arguments: bool,
    /// Return as soon as VMs can be started from the snapshot, and fetch the rest while they run
    #[arg(long)]
    stream: bool,
}

pub(super) fn push(context: &Context, client: &Client, push: Push) -> anyhow::Result<ExitCode> {
    let body = PushBody {
        url: push.url,
        to: push.to,
        key: push.sign.as_deref().map(read_key).transpose()?,
    };
    let snapshot = format!("/v1/snapshots/{}", segment(&push.name)?);
    let report: PushReport = watched(context, format!("{snapshot}/progress"), || {
        Ok(client.post(&format!("{snapshot}/push"), &body)?)
    })?;
    context.print(&report, pushed)
}

pub(super) fn pull(context: &Context, client: &Client, pull: Pull) -> anyhow::Result<ExitCode> {
    let here = pull.to.unwrap_or_else(|| pull.name.clone());
    let body = PullBody {
        url: pull.url,
        from: Some(pull.name),
        domain: pull.domain,
        trust: pull.trust.as_deref().map(read_key).transpose()?,
        allow_arguments: pull.allow_arguments,
        stream: pull.stream,
    };
    let snapshot = format!("/v1/snapshots/{}", segment(&here)?);
    let report: PullReport = watched(context, format!("{snapshot}/progress"), || {
        Ok(client.post(&format!("{snapshot}/pull"), &body)?)
    })?;
    context.print(&report, pulled)
}

/// Makes a snapshot in an object store ready for its first VM; the rest is fetched meanwhile.
pub(super) fn stream(
    context: &Context,
    client: &Client,
    name: &str,
    url: &str,
) -> anyhow::Result<()> {
    let body = PullBody {
        url: url.to_owned(),
        stream: true,
        ..PullBody::default()
    };
    let report: PullReport =
        client.post(&format!("/v1/snapshots/{}/pull", segment(name)?), &body)?;
    if !context.json {
        write_line(&pulled(&report))?;
    }
    Ok(())
}

pub(super) fn list(context: &Context, client: &Client, url: String) -> anyhow::Result<ExitCode> {
    let list: Vec<RemoteSnapshot> =
        client.post("/v1/remote-snapshots/list", &RemoteStore { url })?;
    context.print(&list, |list| snapshots(list))
}

pub(super) fn remove(
    context: &Context,
    client: &Client,
    names: &[String],
    url: String,
) -> anyhow::Result<ExitCode> {
    let store = RemoteStore { url };
    let remove = |name: &String| {
        memfold_vm::check_name("snapshot", name)?;
        let place = format!("/v1/remote-snapshots/{name}/remove");
        client
            .post(&place, &store)
            .with_context(|| format!("cannot remove snapshot '{name}' from {}", store.url))
    };
    let (reports, errors): (Vec<RemoveReport>, _) = failure::separate(names.iter().map(remove));
    let is_nothing = reports.is_empty();
    failure::print_done(context, (&reports, is_nothing), &errors, |reports| {
        removed(reports)
    })
}

fn read_key(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("cannot read key {}", file.display()))
}

fn pushed(report: &PushReport) -> String {
    format!(
        "pushed {} to {} in {:.1} s: {}, of which {} were new there; {} sent{}",
        report.name,
        report.url,
        report.took_s,
        ByteSize(report.stored_bytes),
        ByteSize(report.new_bytes),
        ByteSize(report.sent_bytes),
        if report.signed { "; signed" } else { "" }
    )
}

fn pulled(report: &PullReport) -> String {
    if !report.complete {
        return format!(
            "{} can be started after {:.1} s: {} of {} have arrived from {}, and the rest is being fetched",
            report.name,
            report.took_s,
            ByteSize(report.fetched_bytes),
            ByteSize(report.stored_bytes),
            report.url
        );
    }
    format!(
        "pulled {} from {} in {:.1} s: {}, of which {} were fetched; {} received{}",
        report.name,
        report.url,
        report.took_s,
        ByteSize(report.stored_bytes),
        ByteSize(report.fetched_bytes),
        ByteSize(report.received_bytes),
        if report.trusted {
            "; the signature is right"
        } else {
            "; no signature checked"
        }
    )
}

fn removed(reports: &[RemoveReport]) -> String {
    let line = |report: &RemoveReport| {
        let left = match report.objects_left {
            0 => String::new(),
            left => format!("; {left} unused objects are younger than a day, and stay"),
        };
        if let Some(why) = &report.kept_because {
            return format!("removed {}; its chunks stay: {why}", report.name);
        }
        format!(
            "removed {}: {} objects ({}) that no other snapshot has{left}",
            report.name,
            report.objects_removed,
            ByteSize(report.bytes_removed)
        )
    };
    reports.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn snapshots(list: &[RemoteSnapshot]) -> String {
    if list.is_empty() {
        return "no snapshots there; 'memfold snapshot push NAME URL' copies one".into();
    }
    let row = |snapshot: &RemoteSnapshot| {
        [
            snapshot.name.clone(),
            snapshot.vm.clone(),
            ByteSize(snapshot.memory_bytes).to_string(),
            ByteSize(snapshot.stored_bytes).to_string(),
            if snapshot.signed { "yes" } else { "no" }.to_owned(),
            snapshot.problem.clone().unwrap_or_default(),
        ]
    };
    table(
        "NAME  VM  >RAM  >WITHOUT ZEROES  SIGNED  PROBLEM",
        list.iter().map(row),
    )
}
