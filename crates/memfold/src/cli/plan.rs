//! `memfold plan`: how many VMs fit.

use std::process::ExitCode;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use memfold_units::ByteSize;

use super::Context;
use crate::api::FullReport;
use crate::ledger::plan::{Plan, caches, kinds_by_domain, plan};

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// VMs that are alike, under a name; several kinds. By default the VMs of each trust domain are one
    #[arg(long = "kind", value_name = "KIND=VM[,VM...]", value_parser = kind)]
    kinds: Vec<(String, Vec<String>)>,
    /// Predict the host's memory with so many VMs of a kind in all; several kinds. By default as many as run
    #[arg(long, value_name = "KIND=NUMBER", value_parser = number)]
    vms: Vec<(String, u64)>,
    /// Plan for so much memory instead of this host's
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
}

fn kind(text: &str) -> Result<(String, Vec<String>), String> {
    let (name, vms) = text.split_once('=').unwrap_or((text, ""));
    let vms: Vec<String> = vms.split(',').map(str::to_owned).collect();
    if name.is_empty() || vms.iter().any(String::is_empty) {
        return Err(format!(
            "'{text}' is no kind; give its name and its VMs: web=web1,web2"
        ));
    }
    Ok((name.to_owned(), vms))
}

fn number(text: &str) -> Result<(String, u64), String> {
    let parts = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let parts = parts.and_then(|(name, number)| Some((name, number.parse::<u32>().ok()?)));
    let (name, number) =
        parts.ok_or_else(|| format!("'{text}' is no number of a kind; give both: web=20"))?;
    Ok((name.to_owned(), u64::from(number)))
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let report: FullReport = context.client()?.get("/v1/report")?;
    let kinds = if arguments.kinds.is_empty() {
        kinds_by_domain(&report.ledger)
    } else {
        arguments.kinds.clone()
    };
    let plan = plan(
        &report.ledger,
        &caches(&report.fold),
        &kinds,
        &arguments.vms,
        arguments.memory.map(|bytes| bytes.0),
    )?;
    context.print(&plan, render)?;
    Ok(ExitCode::SUCCESS)
}

fn render(plan: &Plan) -> String {
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let error = |bytes: Option<u64>| bytes.map_or_else(|| "?".into(), size);
    let mut kinds = Table::new();
    kinds.load_preset(presets::NOTHING).set_header([
        "KIND",
        "MEASURED",
        "ONE MORE TAKES",
        "+-",
        "CACHE OF IT",
        "SHARES",
        "OWES",
        "AT MOST",
        "MORE FIT",
        "BY MEMORY ALONE",
    ]);
    for kind in &plan.kinds {
        kinds.add_row([
            kind.name.clone(),
            kind.vms.len().to_string(),
            size(kind.own_bytes),
            error(kind.plus_minus_bytes),
            size(kind.page_cache_bytes),
            size(kind.shared_bytes),
            size(kind.owed_bytes),
            size(kind.most_bytes),
            kind.more_fit.to_string(),
            kind.more_fit_by_memory.to_string(),
        ]);
    }
    for at in 1..10 {
        if let Some(column) = kinds.column_mut(at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let wanted: Vec<String> = plan
        .kinds
        .iter()
        .map(|kind| format!("{} of {}", kind.wanted, kind.name))
        .collect();
    format!(
        "{}\n\nwith {}: {} +- {} used of {} ({} now, {} kept in reserve), {} owed, of which {} % are to be there: {}",
        kinds.trim_fmt(),
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
    use crate::ledger::plan::Kind;

    #[test]
    fn kinds_and_numbers_are_read_and_others_refused() {
        let web = ("web".to_owned(), vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(kind("web=a,b"), Ok(web));
        assert_eq!(number("web=20"), Ok(("web".to_owned(), 20)));
        for wrong in ["", "web", "web=", "=a", "web=a,"] {
            assert!(kind(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "web", "web=", "=3", "web=-1", "web=x"] {
            assert!(number(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_not_known_is_shown_as_such() {
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
        for word in ["ONE MORE TAKES", "with 3 of web", "+- ?", ": fits"] {
            assert!(text.contains(word), "no '{word}' in\n{text}");
        }
    }
}
