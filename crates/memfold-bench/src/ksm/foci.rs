//! The part `foci` of the study `ksm`: measures how much memory KSM saves, by number of VMs and by
//! workload, and how merging affects programs whose memory is merged.

use std::time::Instant;

use memfold_fold::EngineSettings;
use memfold_ksm::Controls;
use memfold_lab::Lab;
use serde::Serialize;
use serde_json::{Value, json};

use super::guest::{self, Held, Took};
use super::scale::Scale;
use super::speed::{full_speed, merge_all};
use crate::figure::{self, Axis, Figure, Series, number};
use crate::host::{ksmd, start_ksm};
use crate::record::{Found, mib};

/// Figures of a guest program that accesses its memory, those of the slowest guest.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Access {
    read: Took,
    write: Took,
}

#[derive(Clone, Debug, Serialize)]
struct Focus {
    part: &'static str,
    work: &'static str,
    vms: usize,
    /// Memory that the VMs' RAM takes before merging, in MiB.
    apart_mib: f64,
    merged_mib: f64,
    saved_mib: f64,
    merged_pages: u64,
    ksmd_cpu_s: f64,
    took_s: f64,
    /// Accesses before merging; `None`: the guests hold no data. The next field: after merging.
    before: Option<Access>,
    after: Option<Access>,
}

/// Measures the memory of 1, 2, ... VMs with each workload, before and after KSM has merged it.
pub(super) fn measure(scale: &Scale) -> anyhow::Result<Found> {
    let lab = Lab::new(EngineSettings::default())?;
    let names: Vec<String> = (1..=scale.vms).map(|n| format!("vm{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut found = Vec::new();
    for vms in 1..=names.len() {
        guest::boot(&lab, names[vms - 1], scale.memory)?;
        for held in Held::ALL {
            let focus = look(&lab, &names[..vms], held, scale.data_mib)?;
            eprintln!(
                "{vms} VMs, {}: {:.0} MiB, merged {:.0} MiB",
                focus.work, focus.apart_mib, focus.merged_mib
            );
            found.push(focus);
        }
    }
    Ok(Found {
        samples: found.iter().map(|focus| json!(focus)).collect(),
        results: results(&found, scale.vms),
        ..Found::default()
    })
}

fn look(lab: &Lab, names: &[&str], held: Held, data_mib: u64) -> anyhow::Result<Focus> {
    let controls = Controls::default();
    let ksmd = ksmd()?;
    guest::hold(lab, names, held, data_mib)?;
    let apart_mib = mib(guest::ram_bytes(lab)?);
    let before = access(lab, names, held)?;
    let (cpu, began) = (ksmd.cpu_time()?, Instant::now());
    let run = start_ksm(&full_speed())?;
    let merged_pages = merge_all(lab, names, &controls)?;
    let (took, cpu) = (began.elapsed(), ksmd.cpu_time()?.saturating_sub(cpu));
    let merged_mib = mib(guest::ram_bytes(lab)?);
    // ksmd stops, because it would merge again the pages that writes have unmerged.
    controls.write("run", &0)?;
    let after = access(lab, names, held)?;
    run.stop(true)?;
    guest::let_go(lab, names, held)?;
    Ok(Focus {
        part: "foci",
        work: held.name(),
        vms: names.len(),
        apart_mib,
        merged_mib,
        saved_mib: apart_mib - merged_mib,
        merged_pages,
        ksmd_cpu_s: cpu.as_secs_f64(),
        took_s: took.as_secs_f64(),
        before,
        after,
    })
}

fn access(lab: &Lab, names: &[&str], held: Held) -> anyhow::Result<Option<Access>> {
    if !held.is_data() {
        return Ok(None);
    }
    Ok(Some(Access {
        read: worst(&guest::ask(lab, names, "read", 1)?),
        write: worst(&guest::ask(lab, names, "write", 1)?),
    }))
}

fn worst(all: &[Took]) -> Took {
    all.iter().fold(Took::default(), |worst, took| Took {
        seconds: worst.seconds.max(took.seconds),
        minor_faults: worst.minor_faults.max(took.minor_faults),
        major_faults: worst.major_faults.max(took.major_faults),
        host_minor_faults: worst.host_minor_faults.max(took.host_minor_faults),
        host_major_faults: worst.host_major_faults.max(took.host_major_faults),
    })
}

fn results(found: &[Focus], most: usize) -> Value {
    let mut results = json!({});
    for focus in found {
        let key = format!("{}_saved_mib_{}_vms", focus.work, focus.vms);
        results[key] = focus.saved_mib.into();
    }
    let of = |held: Held| {
        let mut all = found.iter();
        all.find(|f| f.work == held.name() && f.vms == most)
    };
    if let (Some(same), Some(random)) = (of(Held::Identical), of(Held::Random)) {
        let more = same.saved_mib - random.saved_mib;
        results["identical_over_random_saved_mib"] = more.into();
        let ratio = |part: fn(Access) -> f64| same.after.map(part).zip(same.before.map(part));
        let ratio = |part| ratio(part).map(|(after, before)| after / before);
        results["read_time_merged_over_apart"] = ratio(|access| access.read.seconds).into();
        // Each page that is written to is copied first.
        results["write_time_merged_over_apart"] = ratio(|access| access.write.seconds).into();
    }
    let after = found.iter().filter_map(|focus| focus.after);
    let parts = after.flat_map(|access| [access.read, access.write]);
    let major = parts.map(|took| took.major_faults + took.host_major_faults);
    results["major_faults_when_merged"] = major.sum::<u64>().into();
    results
}

/// Draws the memory of all VMs over the number of VMs, merged and unmerged.
pub(super) fn figures(samples: &[Value]) -> Vec<Figure> {
    let drawn = |held: Held| {
        let mine = samples.iter();
        let mine = mine.filter(|s| s["part"] == "foci" && s["work"] == held.name());
        let line = |name: &str, key: &str, dashed| Series {
            name: name.to_owned(),
            points: mine
                .clone()
                .map(|s| (number(&s["vms"]), number(&s[key])))
                .collect(),
            dashed,
        };
        let series = [
            line("apart", "apart_mib", true),
            line("merged", "merged_mib", false),
        ];
        let title = format!("RAM of all VMs, {}", held.name());
        let (x, y) = (Axis::Linear("VMs"), Axis::Linear("MiB"));
        mine.clone().next()?;
        figure::drawn(&format!("ksm-{}", held.name()), &title, x, y, &series)
    };
    Held::ALL.into_iter().filter_map(drawn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ksm_benchmark_reports_savings_for_each_kind_of_work_and_number_of_vms() {
        let took = |seconds, major_faults, host_major_faults| Took {
            seconds,
            major_faults,
            host_major_faults,
            ..Took::default()
        };
        let focus = |held: Held, vms, merged_mib, major| Focus {
            part: "foci",
            work: held.name(),
            vms,
            apart_mib: 200.0,
            merged_mib,
            saved_mib: 200.0 - merged_mib,
            merged_pages: 0,
            ksmd_cpu_s: 1.0,
            took_s: 1.0,
            before: Some(Access {
                read: took(1.0, 0, 0),
                write: took(1.0, 0, 0),
            }),
            after: Some(Access {
                read: took(1.0, major, 0),
                write: took(3.0, 0, major),
            }),
        };
        let all = [
            focus(Held::Random, 2, 150.0, 0),
            focus(Held::Identical, 1, 190.0, 0),
            focus(Held::Identical, 2, 100.0, 2),
        ];
        let found = results(&all, 2);
        assert_eq!(found["identical_saved_mib_1_vms"], 10.0);
        assert_eq!(found["identical_over_random_saved_mib"], 50.0);
        assert_eq!(found["write_time_merged_over_apart"], 3.0);
        assert_eq!(found["major_faults_when_merged"], 4);
        assert!(found["idle_saved_mib_1_vms"].is_null());
        let samples: Vec<Value> = all.iter().map(|focus| json!(focus)).collect();
        let names: Vec<String> = figures(&samples)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["ksm-random", "ksm-identical"]);
    }
}
