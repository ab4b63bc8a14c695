//! `memfold plan`: predicts how many VMs fit on this host, and proposes which VMs of several hosts
//! to place together.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;

use memfold_ledger::estimate::fingerprint::Fingerprint;
use memfold_ledger::estimate::place::{Proposal, propose};
use memfold_ledger::plan::{Plan, parse_hours, parse_kind, parse_number};
use memfold_ledger::table::signed;
use memfold_units::ByteSize;

use super::context::Context;
use super::number::number;
use super::table::{known, table};

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Name a kind of similar VMs; several allowed. By default the VMs of each trust domain are one
    /// kind
    #[arg(long = "kind", value_name = "KIND=VM[,VM...]", value_parser = parse_kind)]
    kinds: Vec<(String, Vec<String>)>,
    /// Total number of VMs of a kind to predict for; several allowed. By default as many as run now
    #[arg(long, value_name = "KIND=NUMBER", value_parser = parse_number)]
    vms: Vec<(String, u64)>,
    /// Memory to plan for instead of this host's
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Hours from now to plan for; VMs grow as they have lately
    #[arg(long, value_name = "HOURS", default_value = "0", value_parser = parse_hours)]
    ahead: f64,
    /// Instead: propose which VMs to place together, from the fingerprints of two hosts or more
    /// ('memfold estimate --fingerprint')
    #[arg(long, value_name = "FILE", num_args = 2.., conflicts_with_all = ["kinds", "vms", "memory", "ahead"])]
    place: Vec<PathBuf>,
    /// Least bytes that a move must save, with --place
    #[arg(long, value_name = "SIZE", default_value = "64M", requires = "place")]
    least: ByteSize,
    /// Percent of each host's memory to keep free, with --place: 0 to less than 100
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, value_parser = reserve, requires = "place")]
    leave: f64,
}

fn reserve(text: &str) -> Result<f64, String> {
    number(text, 0.0..100.0, "give 0 to less than 100")
}

/// Largest fingerprint file that is read, in bytes: enough for a thousand VMs.
const MOST_BYTES: u64 = 1 << 29;

fn fingerprint(path: &Path) -> anyhow::Result<Fingerprint> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?
            .take(MOST_BYTES)
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&bytes).with_context(|| {
        format!(
            "{} is not a fingerprint of a host; 'memfold estimate --fingerprint FILE --key KEY' makes one on each host",
            path.display()
        )
    })
}

fn placed(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let prints = arguments.place.iter().map(|path| fingerprint(path));
    let prints = prints.collect::<anyhow::Result<Vec<_>>>()?;
    let proposal = propose(&prints, arguments.least.0, arguments.leave, None)?;
    context.print(&proposal, render_proposal)
}

fn render_proposal(proposal: &Proposal) -> String {
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let hosts = proposal.hosts.iter().map(|host| {
        [
            host.host.clone(),
            size(host.limit_bytes),
            size(host.now_bytes),
            size(host.then_bytes),
            host.vms.join(" "),
        ]
    });
    let hosts = table("HOST  >MAY TAKE  >NOW  >THEN  VMS THEN", hosts);
    let mut text = format!("{hosts}\n\n");
    for step in &proposal.moves {
        let (vm, from, to) = (&step.vm, &step.from, &step.to);
        let _ = writeln!(
            text,
            "move {vm} from {from} to {to}: saves {}",
            signed(step.saves_bytes)
        );
    }
    let less = i64::try_from(proposal.now_bytes).unwrap_or(i64::MAX)
        - i64::try_from(proposal.then_bytes).unwrap_or(i64::MAX);
    if proposal.moves.is_empty() {
        text.push_str("no move saves enough: leave all VMs where they are");
    } else {
        let _ = write!(
            text,
            "all hosts together use {} less (+- {}), if everything that VMs of a trust domain have in common is shared",
            signed(less),
            size(proposal.plus_minus_bytes)
        );
    }
    text
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if !arguments.place.is_empty() {
        return placed(context, arguments);
    }
    let path = format!("/v1/plan?{}", query(arguments));
    context.print(&context.client()?.get(&path)?, render)
}

fn query(arguments: &Arguments) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    for (name, vms) in &arguments.kinds {
        query.append_pair("kind", &format!("{name}={}", vms.join(",")));
    }
    for (name, number) in &arguments.vms {
        query.append_pair("vms", &format!("{name}={number}"));
    }
    if let Some(memory) = arguments.memory {
        query.append_pair("memory", &memory.0.to_string());
    }
    query.append_pair("ahead_hours", &arguments.ahead.to_string());
    query.finish()
}

fn render(plan: &Plan) -> String {
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let error = |bytes: Option<u64>| known(bytes.map(ByteSize));
    let kinds = plan.kinds.iter().map(|kind| {
        [
            kind.name.clone(),
            kind.vms.len().to_string(),
            size(kind.own_bytes),
            error(kind.plus_minus_bytes),
            size(kind.page_cache_bytes),
            size(kind.shared_bytes),
            size(kind.owed_bytes),
            size(kind.most_bytes),
            known(kind.grows_bytes_per_hour.map(signed)),
            kind.more_fit.to_string(),
            kind.more_fit_by_memory.to_string(),
        ]
    });
    let headings = "KIND  >MEASURED  >ONE MORE TAKES  >+-  >CACHE OF IT  >SHARES  >OWES  >AT MOST  \
                    >GROWS AN HOUR  >MORE FIT  >BY MEMORY ALONE";
    let wanted = plan.kinds.iter();
    let wanted: Vec<String> = wanted
        .map(|kind| format!("{} of {}", kind.wanted, kind.name))
        .collect();
    let ahead = if plan.ahead_hours > 0.0 {
        format!(
            " in {} h ({} of it grown until then)",
            plan.ahead_hours,
            size(plan.grown_bytes)
        )
    } else {
        String::new()
    };
    format!(
        "{}\n\nwith {}: {} +- {} used{ahead} of {} ({} now, {} kept in reserve), {} owed, of which {} % must be available: {}",
        table(headings, kinds),
        wanted.join(", "),
        size(plan.predicted_bytes),
        error(plan.plus_minus_bytes),
        size(plan.memory_bytes),
        size(plan.used_bytes),
        size(plan.reserve_bytes),
        size(plan.predicted_owed_bytes),
        plan.cover_percent,
        if plan.fits { "fits" } else { "does NOT fit" },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_ledger::plan::Kind;

    #[test]
    fn memfold_plan_shows_unknown_values_as_question_marks() {
        let plan = Plan {
            kinds: vec![Kind {
                name: "web".into(),
                wanted: 3,
                ..Kind::default()
            }],
            fits: true,
            ..Plan::default()
        };
        let text = render(&plan);
        for word in ["ONE MORE TAKES", "with 3 of web", "+- ?", " ? ", ": fits"] {
            assert!(text.contains(word), "no '{word}' in\n{text}");
        }
    }
}
