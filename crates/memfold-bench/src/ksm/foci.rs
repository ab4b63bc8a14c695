//! Measures the memory that KSM saves by number of VMs and by workload, and the effect on programs
//! whose memory is merged.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use memfold_fold::EngineSettings;
use memfold_ksm::{Controls, Ksmd, NOTES, Run};
use memfold_lab::Lab;
use serde_json::{Map, Value, json};

use super::guest::{self, Held, Took};
use super::scale::Scale;
use super::speed::{full_speed, merge_all};
use crate::figure::{self, Axis, Figure, Series};

/// Figures of a guest program that accesses its memory.
#[derive(Clone, Copy, Debug, Default)]
struct Access {
    read: Took,
    write: Took,
}

#[derive(Clone, Debug)]
struct Focus {
    held: Held,
    vms: usize,
    /// Memory that the VMs' RAM takes before merging, in MiB.
    apart_mib: f64,
    merged_mib: f64,
    merged_pages: u64,
    ksmd_cpu_s: f64,
    took_s: f64,
    /// Accesses before merging, those of the slowest guest. The next field: after merging.
    before: Access,
    after: Access,
}

impl Focus {
    fn saved_mib(&self) -> f64 {
        self.apart_mib - self.merged_mib
    }

    fn json(&self) -> Value {
        let took = |took: Took| {
            json!({
                "seconds": took.seconds, "minor_faults": took.minor, "major_faults": took.major,
                "host_minor_faults": took.host_minor, "host_major_faults": took.host_major,
            })
        };
        let access = |of: Access| {
            if self.held.is_data() {
                json!({ "read": took(of.read), "write": took(of.write) })
            } else {
                Value::Null
            }
        };
        json!({
            "part": "foci", "work": self.held.name(), "vms": self.vms, "apart_mib": self.apart_mib, "merged_mib": self.merged_mib,
            "saved_mib": self.saved_mib(), "merged_pages": self.merged_pages, "ksmd_cpu_s": self.ksmd_cpu_s, "took_s": self.took_s,
            "before": access(self.before), "after": access(self.after),
        })
    }
}

/// Measures 1, 2, ... VMs.
pub(super) fn measure(scale: &Scale) -> anyhow::Result<(Map<String, Value>, Vec<Value>)> {
    let lab = Lab::new(EngineSettings::default())?;
    let names: Vec<String> = (1..=scale.vms)
        .map(|number| format!("vm{number}"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut found = Vec::new();
    for vms in 1..=names.len() {
        guest::boot(&lab, names[vms - 1], scale.memory)?;
        for held in Held::ALL {
            let focus = look(&lab, &names[..vms], held, scale.data_mib)?;
            eprintln!(
                "{vms} VMs, {}: {:.0} MiB, merged {:.0} MiB",
                held.name(),
                focus.apart_mib,
                focus.merged_mib
            );
            found.push(focus);
        }
    }
    let samples = found.iter().map(Focus::json).collect();
    Ok((results(&found, scale.vms), samples))
}

fn look(lab: &Lab, names: &[&str], held: Held, mib: u64) -> anyhow::Result<Focus> {
    let controls = Controls::default();
    let ksmd = Ksmd::find().context("cannot measure ksmd: no ksmd thread runs on this host")?;
    guest::hold(lab, names, held, mib)?;
    let apart = guest::ram_bytes(lab)?;
    let before = access(lab, names, held)?;
    let (cpu, began) = (ksmd.cpu_time()?, Instant::now());
    let run = Run::start(&controls, NOTES.as_ref(), &full_speed())?;
    let merged_pages = merge_all(lab, names, &controls)?;
    let (took, cpu) = (began.elapsed(), ksmd.cpu_time()?.saturating_sub(cpu));
    let merged = guest::ram_bytes(lab)?;
    // ksmd stops, because it would merge again the pages that writes have unmerged.
    controls.write("run", &0)?;
    let after = access(lab, names, held)?;
    run.stop(true)?;
    guest::let_go(lab, names, held)?;
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let seconds = |time: Duration| time.as_secs_f64();
    Ok(Focus {
        held,
        vms: names.len(),
        apart_mib: mib(apart),
        merged_mib: mib(merged),
        merged_pages,
        ksmd_cpu_s: seconds(cpu),
        took_s: seconds(took),
        before,
        after,
    })
}

fn access(lab: &Lab, names: &[&str], held: Held) -> anyhow::Result<Access> {
    if !held.is_data() {
        return Ok(Access::default());
    }
    Ok(Access {
        read: worst(&guest::ask(lab, names, "read", 1)?),
        write: worst(&guest::ask(lab, names, "write", 1)?),
    })
}

fn worst(all: &[Took]) -> Took {
    all.iter().fold(Took::default(), |worst, took| Took {
        seconds: worst.seconds.max(took.seconds),
        minor: worst.minor.max(took.minor),
        major: worst.major.max(took.major),
        host_minor: worst.host_minor.max(took.host_minor),
        host_major: worst.host_major.max(took.host_major),
    })
}

fn results(found: &[Focus], most: usize) -> Map<String, Value> {
    let mut results = Map::new();
    let of = |held: Held, vms: usize| found.iter().find(|f| f.held == held && f.vms == vms);
    for held in Held::ALL {
        for vms in 1..=most {
            if let Some(focus) = of(held, vms) {
                let key = format!("{}_saved_mib_{vms}_vms", held.name());
                results.insert(key, focus.saved_mib().into());
            }
        }
    }
    if let (Some(same), Some(random)) = (of(Held::Identical, most), of(Held::Random, most)) {
        let more = same.saved_mib() - random.saved_mib();
        results.insert("identical_over_random_saved_mib".into(), more.into());
        let ratio = |part: fn(&Access) -> f64| part(&same.after) / part(&same.before);
        results.insert(
            "read_time_merged_over_apart".into(),
            ratio(|access| access.read.seconds).into(),
        );
        // Each page that is written to is copied first.
        results.insert(
            "write_time_merged_over_apart".into(),
            ratio(|access| access.write.seconds).into(),
        );
    }
    let major = found.iter().map(|focus| {
        let parts = [focus.after.read, focus.after.write];
        parts
            .iter()
            .map(|took| took.major + took.host_major)
            .sum::<u64>()
    });
    results.insert("major_faults_when_merged".into(), major.sum::<u64>().into());
    results
}

/// Draws memory by number of VMs, merged and unmerged.
pub(super) fn figures(samples: &[Value]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for held in Held::ALL {
        let mine: Vec<&Value> = samples
            .iter()
            .filter(|s| s["part"] == "foci" && s["work"] == held.name())
            .collect();
        if mine.is_empty() {
            continue;
        }
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let line = |name: &str, key: &str, dashed| Series {
            name: name.to_owned(),
            points: mine
                .iter()
                .map(|s| (number(&s["vms"]), number(&s[key])))
                .collect(),
            dashed,
        };
        let series = [
            line("apart", "apart_mib", true),
            line("merged", "merged_mib", false),
        ];
        let svg = figure::lines(
            &format!("RAM of all VMs, {}", held.name()),
            &Axis::linear("VMs"),
            &Axis::linear("MiB"),
            &series,
        );
        figures.push((format!("ksm-{}", held.name()), svg));
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn savings_are_reported_by_kind_of_work_and_number_of_vms() {
        let focus = |held, vms, merged_mib, major| Focus {
            held,
            vms,
            apart_mib: 200.0,
            merged_mib,
            merged_pages: 0,
            ksmd_cpu_s: 1.0,
            took_s: 1.0,
            before: Access {
                read: Took {
                    seconds: 1.0,
                    ..Took::default()
                },
                write: Took {
                    seconds: 1.0,
                    ..Took::default()
                },
            },
            after: Access {
                read: Took {
                    seconds: 1.0,
                    major,
                    ..Took::default()
                },
                write: Took {
                    seconds: 3.0,
                    host_major: major,
                    ..Took::default()
                },
            },
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
        assert!(!found.contains_key("idle_saved_mib_1_vms"));
        let samples: Vec<Value> = all.iter().map(Focus::json).collect();
        let names: Vec<String> = figures(&samples)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["ksm-random", "ksm-identical"]);
    }
}
