//! Study A's figure 3: the memory that a browser and an office suite add per VM, with their files
//! on disks or executed in place from one segment; also the time until these programs show a
//! window.
//!
//! VMs boot from disks, or from a segment of the whole system. One VM after the other starts the
//! program. When memory use is stable, the study measures how much the program has added to the
//! VM's own memory and to the segment's. It needs the image `trixie-desktop`
//! (`guest/build trixie-desktop`).
//!
//! Then three VMs run side by side, with their files on a disk in the host's page cache, on a disk
//! that bypasses it (`cache=none`), and in the segment. The program is restarted in each VM in
//! turn, with the guest's caches dropped before (cold) and not dropped (warm).

use std::time::Instant;

use anyhow::Context as _;
use memfold_fold::EngineSettings;
use memfold_lab::Lab;
use memfold_units::ByteSize;
use serde_json::{Map, Value, json};

use super::figure::{self, Axis, Figure, Series};
use super::record::{median, spread};
use super::segments::{
    Files, LIMIT, ROOT, booted, build, faults_of, memory, mib, saving_percent, start, took,
};
use super::study::Options;

/// Name of each program, and the command that starts it.
const PROGRAMS: [(&str, &str); 2] = [
    (
        "browser",
        "firefox-esr --no-remote --profile /opt/profile file:///usr/share/doc/",
    ),
    ("office", "soffice --norestore --nologo --impress"),
];

const IMAGE: &str = "trixie-desktop";
const MEMORY: ByteSize = ByteSize::mib(1536);

/// Name of the part of the study that measures starts.
const STARTS: &str = "starts";

/// Runs the study. Returns `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    // At least two VMs are needed, because the first one includes the memory that all VMs share.
    let (vms, rounds) = options.pick((2, 2), (4, 4));
    let starts_alone = options.is_only("desktops", STARTS)?;
    let mut results = Map::new();
    let mut samples = Vec::new();
    for (program, start_it) in PROGRAMS {
        if !starts_alone {
            let found = measure(program, start_it, vms)?;
            results.extend(found.0);
            samples.extend(found.1);
        }
        let found = starts(program, start_it, rounds)?;
        results.extend(found.0);
        samples.push(found.1);
    }
    Ok(json!({ "samples": samples, "results": results }))
}

/// Runs one program in VMs, one more VM at a time, booted from disks and from a segment.
fn measure(
    program: &str,
    start_it: &str,
    most: usize,
) -> anyhow::Result<(Map<String, Value>, Vec<Value>)> {
    let mut samples = Vec::new();
    let mut slopes = Vec::new();
    let mut starts = Vec::new();
    for segment in [false, true] {
        let lab = Lab::new(EngineSettings::default())?;
        let mut files = Files::Disk;
        if segment {
            build(&lab, (ROOT, IMAGE), |request| request.root = true)?;
            files = Files::Root;
        }
        let mut totals = Vec::new();
        let mut times = Vec::new();
        for number in 1..=most {
            let name = format!("vm{number}");
            start(&lab, &name, (IMAGE, MEMORY), files)?;
            booted(&lab, &name)?;
            let before = of_vm(&lab, &name)?;
            let began = Instant::now();
            lab.exec(&name, &shown(start_it), LIMIT)?;
            times.push(began.elapsed().as_secs_f64());
            let with = of_vm(&lab, &name)?;
            totals.push(with - before);
            eprintln!(
                "{program}, VM {number}, segment {segment}: {:.0} MiB, shown after {:.1} s",
                mib(with - before),
                times[number - 1]
            );
        }
        samples.push(json!({
            "program": program, "segment": segment, "start_s": times,
            "added_mib": totals.iter().map(|bytes| mib(*bytes)).collect::<Vec<_>>(),
        }));
        // The first VM is left out, because it includes the memory that all VMs share.
        slopes.push(median(&totals[1.min(totals.len() - 1)..]));
        starts.push(median(&times));
    }
    let mut results = Map::new();
    results.insert(
        format!("{program}_saving_percent"),
        saving_percent(slopes[1], slopes[0]).into(),
    );
    results.insert(format!("{program}_mib"), mib(slopes[0]).into());
    results.insert(format!("{program}_mib_segment"), mib(slopes[1]).into());
    results.insert(
        format!("{program}_start_ratio"),
        (starts[0] / starts[1]).into(),
    );
    Ok((results, samples))
}

/// Measures starts of a program that has been started before, cold and warm, in VMs of each kind in
/// turn. Ratios refer to the VM with the segment.
fn starts(
    program: &str,
    start_it: &str,
    rounds: usize,
) -> anyhow::Result<(Map<String, Value>, Value)> {
    const PLACE: &str = "segment";
    let disks = [
        ("disk", Files::Disk),
        ("disk_uncached", Files::DiskUncached),
    ];
    let lab = Lab::new(EngineSettings::default())?;
    build(&lab, (ROOT, IMAGE), |request| request.root = true)?;
    let vms = [disks[0], disks[1], (PLACE, Files::Root)];
    for (name, files) in vms {
        start(&lab, &vm_name(name), (IMAGE, MEMORY), files)?;
    }
    for (name, _) in vms {
        booted(&lab, &vm_name(name))?;
        lab.exec(&vm_name(name), &shown(start_it), LIMIT)?;
    }
    let mut results = Map::new();
    let mut times = Map::new();
    for (kind, is_cold) in [("cold", true), ("warm", false)] {
        let mut all: [Vec<f64>; 3] = Default::default();
        let mut faults: [Vec<f64>; 3] = Default::default();
        for _ in 0..rounds {
            for (((name, _), times), faults) in vms.iter().zip(&mut all).zip(&mut faults) {
                let said = lab.exec(&vm_name(name), &again(start_it, is_cold), LIMIT)?;
                let (took, touched) = took(&said)?;
                times.push(took);
                faults.push(touched);
            }
        }
        for ((name, _), times) in disks.iter().zip(&all) {
            let ratios: Vec<f64> = times.iter().zip(&all[2]).map(|(a, b)| a / b).collect();
            results.insert(
                format!("{program}_{kind}_start_ratio_{name}"),
                spread(&ratios),
            );
        }
        for (((name, _), all), faults) in vms.iter().zip(&all).zip(&faults) {
            let (took, touched) = (median(all), median(faults));
            eprintln!("{program}, {kind} start, {name}: {took:.0} ms, {touched:.0} page faults");
            times.insert(format!("{kind}_start_ms_{name}"), json!(all));
            times.insert(format!("{kind}_start_faults_{name}"), json!(faults));
            results.insert(
                format!("{program}_{kind}_start_faults_{name}"),
                spread(faults),
            );
        }
    }
    times.insert("program".into(), program.into());
    Ok((results, times.into()))
}

/// Returns the name of the VM whose files are in a place of kind `kind`.
fn vm_name(kind: &str) -> String {
    kind.replace('_', "-")
}

/// Returns a VM's own memory plus the memory that segments take for all VMs, in bytes, when it no
/// longer changes. The RAM of other VMs is left out, because they may still give memory back.
fn of_vm(lab: &Lab, name: &str) -> anyhow::Result<f64> {
    memory(lab)?;
    let vms = lab.report()?.ledger.vms;
    let own = vms.iter().find(|vm| vm.name == name);
    let own = own.with_context(|| format!("'{name}' is in no ledger"))?;
    let segments: u64 = vms.iter().map(|vm| vm.segment_pss_bytes.0).sum();
    Ok((own.ram_pss_bytes.0 + segments) as f64)
}

/// Returns the shell script that starts a program on a display of its own, and waits until the
/// program shows a window.
fn shown(start_it: &str) -> String {
    format!(
        r"set -e
export HOME=/root DISPLAY=:7
systemd-run -q --unit=display Xvfb :7 -screen 0 1280x800x24
until [ -e /tmp/.X11-unix/X7 ]; do sleep 0.1; done
systemd-run -q --collect --unit=program -E HOME=/root -E DISPLAY=:7 {start_it}
{WINDOW}"
    )
}

/// Shell script that waits until a window is shown. A window that disappears during a search (a
/// splash screen) ends this search.
const WINDOW: &str = r"end=$(( $(date +%s) + 600 ))
until xdotool search --onlyvisible --class 'firefox|libreoffice|soffice' > /dev/null 2>&1; do
    [ $(date +%s) -lt $end ]
    sleep 0.1
done
systemctl is-active -q program";

/// Returns the shell script that ends the program, starts it again, and prints the milliseconds and
/// the page faults until it shows a window.
fn again(start_it: &str, is_cold: bool) -> String {
    let drop = if is_cold {
        "echo 3 > /proc/sys/vm/drop_caches"
    } else {
        ""
    };
    format!(
        r"set -e
export HOME=/root DISPLAY=:7
systemctl stop program
sync
{drop}
began=$(date +%s%N)
systemd-run -q --collect --unit=program -E HOME=/root -E DISPLAY=:7 {start_it}
{WINDOW}
echo $(( ($(date +%s%N) - began) / 1000000 )) $({})",
        faults_of("program")
    )
}

/// Draws the study's figures.
#[must_use]
pub fn figures(study: &Value) -> Vec<Figure> {
    let empty = Vec::new();
    let samples = study["samples"].as_array().unwrap_or(&empty);
    let mut figures = Vec::new();
    for (program, _) in PROGRAMS {
        let mut lines = Vec::new();
        for sample in samples.iter().filter(|s| s["program"] == program) {
            // Other samples are those of starts.
            let Some(added) = sample["added_mib"].as_array() else {
                continue;
            };
            let mut sum = 0.0;
            let mut points = vec![(0.0, 0.0)];
            for (number, mib) in added.iter().enumerate() {
                sum += mib.as_f64().unwrap_or(f64::NAN);
                points.push((number as f64 + 1.0, sum));
            }
            let in_place = sample["segment"] == true;
            lines.push(Series {
                name: if in_place {
                    "from a segment"
                } else {
                    "from disks"
                }
                .into(),
                points,
                dashed: !in_place,
            });
        }
        if !lines.is_empty() {
            figures.push((
                format!("desktops-{program}"),
                figure::lines(
                    &format!("Memory of VMs with a program ({program})"),
                    &Axis::linear("VMs"),
                    &Axis::linear("MiB that the program adds, all VMs"),
                    &lines,
                ),
            ));
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figure_of_the_desktop_study_plots_memory_with_and_without_a_segment() {
        let sample = |segment, added: [f64; 2]| json!({ "program": "office", "segment": segment, "added_mib": added });
        let drawn = figures(
            &json!({ "samples": [sample(false, [250.0, 240.0]), sample(true, [180.0, 120.0])] }),
        );
        assert_eq!(drawn.len(), 1);
        assert!(drawn[0].0 == "desktops-office" && drawn[0].1.contains("from a segment"));
        assert!(figures(&json!({ "samples": [] })).is_empty());
    }
}
