//! The study `memfold bench desktops`, which repeats figure 3 of a published study (study A). It
//! measures how much memory a browser and an office suite add to each VM. Their files are on the
//! VM's disk, or are executed in place from one segment that all VMs share. The study also measures
//! the time until these programs show a window.
//!
//! VMs boot from disks, or from a segment of the whole system. One VM after the other starts the
//! program. When memory use is stable, the study measures how much the program has added to the
//! VM's own memory and to the memory of the segment. The study needs the image `trixie-desktop`
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
use serde_json::{Value, json};

use crate::figure::{self, Axis, Figure, Series, number};
use crate::record::{Found, median, mib, ratios, spread};
use crate::segments::{
    Files, LIMIT, ROOT, Starts, booted, build, measure_starts, memory, saving_percent, start,
};
use crate::study::Options;

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

/// Runs the study `desktops`. Returns its JSON record, with the parts `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    // At least two VMs are needed, because the first one includes the memory that all VMs share.
    let (vms, rounds) = options.pick((2, 2), (4, 4));
    options.check_arms("desktops", &[STARTS])?;
    let mut found = Found::default();
    for (program, start_it) in PROGRAMS {
        if options.arms.is_empty() {
            found.add(measure(program, start_it, vms)?);
        }
        found.add(starts(program, start_it, rounds)?);
    }
    Ok(json!(found))
}

/// Runs one program in VMs, one more VM at a time, booted from disks and from a segment.
fn measure(program: &str, start_it: &str, most: usize) -> anyhow::Result<Found> {
    let mut found = Found::default();
    let (mut slopes, mut starts) = (Vec::new(), Vec::new());
    for segment in [false, true] {
        let lab = Lab::new(EngineSettings::default())?;
        let mut files = Files::Disk;
        if segment {
            build(&lab, (ROOT, IMAGE), |request| request.root = true)?;
            files = Files::Root;
        }
        let (mut added_mib, mut times) = (Vec::new(), Vec::new());
        for number in 1..=most {
            let name = format!("vm{number}");
            start(&lab, &name, (IMAGE, MEMORY), files)?;
            booted(&lab, &name)?;
            let before = of_vm(&lab, &name)?;
            let began = Instant::now();
            lab.exec(&name, &shown(start_it), LIMIT)?;
            let took = began.elapsed().as_secs_f64();
            let added = mib(of_vm(&lab, &name)? - before);
            eprintln!(
                "{program}, VM {number}, segment {segment}: {added:.0} MiB, shown after {took:.1} s"
            );
            times.push(took);
            added_mib.push(added);
        }
        // The first VM is left out, because it includes the memory that all VMs share.
        slopes.push(median(&added_mib[1.min(most - 1)..]));
        starts.push(median(&times));
        found.samples.push(json!({
            "program": program, "segment": segment, "start_s": times, "added_mib": added_mib,
        }));
    }
    found.results = json!({
        format!("{program}_saving_percent"): saving_percent(slopes[1], slopes[0]),
        format!("{program}_mib"): slopes[0],
        format!("{program}_mib_segment"): slopes[1],
        format!("{program}_start_ratio"): starts[0] / starts[1],
    });
    Ok(found)
}

/// Measures starts of a program that has been started before, cold and warm, in VMs of each kind in
/// turn. Ratios refer to the VM with the segment.
fn starts(program: &str, start_it: &str, rounds: usize) -> anyhow::Result<Found> {
    let kinds = ["disk", "disk_uncached", "segment"];
    let files = [Files::Disk, Files::DiskUncached, Files::Root];
    let vms = ["disk", "disk-uncached", "segment"];
    let lab = Lab::new(EngineSettings::default())?;
    build(&lab, (ROOT, IMAGE), |request| request.root = true)?;
    for (name, files) in vms.into_iter().zip(files) {
        start(&lab, name, (IMAGE, MEMORY), files)?;
    }
    for name in vms {
        booted(&lab, name)?;
        lab.exec(name, &shown(start_it), LIMIT)?;
    }
    let mut found = Found::default();
    let mut sample = json!({ "program": program });
    for (kind, is_cold) in [("cold", true), ("warm", false)] {
        let script = again(start_it, is_cold);
        let Starts { ms, faults } = measure_starts(&lab, &vms, ("program", &script), rounds)?;
        for ((name, ms_of), faults) in kinds.into_iter().zip(&ms).zip(&faults) {
            let (took, touched) = (median(ms_of), median(faults));
            eprintln!("{program}, {kind} start, {name}: {took:.0} ms, {touched:.0} page faults");
            sample[format!("{kind}_start_ms_{name}")] = json!(ms_of);
            sample[format!("{kind}_start_faults_{name}")] = json!(faults);
            let key = |what: &str| format!("{program}_{kind}_start_{what}_{name}");
            found.results[key("faults")] = spread(faults);
            if name != "segment" {
                found.results[key("ratio")] = spread(ratios(ms_of, &ms[2]));
            }
        }
    }
    found.samples.push(sample);
    Ok(found)
}

/// Returns a VM's own memory plus the memory that segments take for all VMs, in bytes, when it no
/// longer changes. The RAM of other VMs is left out, because they may still give memory back.
fn of_vm(lab: &Lab, name: &str) -> anyhow::Result<f64> {
    memory(lab)?;
    let vms = lab.report()?.ledger.vms;
    let own = vms.iter().find(|vm| vm.name == name);
    let own = own.with_context(|| format!("the ledger has no VM '{name}'"))?;
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

/// Returns the shell script that ends the program, starts it again, and prints the milliseconds
/// until it shows a window.
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
echo $(( ($(date +%s%N) - began) / 1000000 ))"
    )
}

/// Draws the figures of the study `desktops` from its record `study`.
pub fn figures(study: &Value) -> Vec<Figure> {
    let drawn = |(program, _): (&str, &str)| {
        let samples = figure::samples(study).iter();
        let lines = samples
            .filter(|s| s["program"] == program)
            .filter_map(|sample| {
                // Other samples are those of starts.
                let added = sample["added_mib"].as_array()?;
                let mut points = vec![(0.0, 0.0)];
                for mib in added {
                    let (vms, sum) = points.last().copied()?;
                    points.push((vms + 1.0, sum + number(mib)));
                }
                let in_place = sample["segment"] == true;
                let from = if in_place { "a segment" } else { "disks" };
                Some(Series {
                    name: format!("from {from}"),
                    points,
                    dashed: !in_place,
                })
            });
        let title = format!("Memory of VMs with a program ({program})");
        let (x, y) = (
            Axis::Linear("VMs"),
            Axis::Linear("MiB that the program adds, all VMs"),
        );
        let name = format!("desktops-{program}");
        figure::drawn(&name, &title, x, y, &lines.collect::<Vec<_>>())
    };
    PROGRAMS.into_iter().filter_map(drawn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chart_of_the_desktop_benchmark_shows_memory_with_and_without_a_segment() {
        let sample = |segment, added: [f64; 2]| json!({ "program": "office", "segment": segment, "added_mib": added });
        let drawn = figures(
            &json!({ "samples": [sample(false, [250.0, 240.0]), sample(true, [180.0, 120.0])] }),
        );
        assert_eq!(drawn.len(), 1);
        assert!(drawn[0].0 == "desktops-office" && drawn[0].1.contains("from a segment"));
        assert!(figures(&json!({ "samples": [] })).is_empty());
    }
}
