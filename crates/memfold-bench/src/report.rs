//! The report of the self-test (`memfold self-test --report FILE`): measures on the user's own
//! hardware what emulation keeps this project from knowing, each figure beside its target.
//!
//! ```text
//!   this process                          a child for each part (parts.rs)
//!     time, memory and disk left? --------> runs a study in small doses, in an own directory
//!     waits; ends the part (SIGTERM) at  <--- results.json
//!     its limit, or if memory runs short
//!     figures and targets (figures.rs), without private words (private.rs)
//!     file and text (document.rs)
//! ```
//!
//! Beside other VMs, a part begins only if its memory is free above a reserve ([`room`]). Its
//! processes have low priority, and are the first ones that the kernel ends if memory is short.

mod compare;
mod document;
mod figures;
mod huge_pages;
mod parts;
mod private;
mod room;
mod two_guests;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use memfold_api::DEFAULT_STATE;
use memfold_host::{HostFacts, guest_images};
use memfold_ksm as ksm;
use memfold_lab::undo_at_interrupt;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, Value, json};

use self::compare::compare_files;
use self::document::{ClaimLine, Document, EMULATED, PartEnd, PartLine, SCHEMA, SCHEMA_VERSION};
use self::figures::of_part;
use self::parts::{Dose, Part};
use self::private::Private;
use self::room::FreeRoom;
use crate::host::check_host;
use crate::images;
use crate::output::{Output, check_writable};
use crate::record;
use crate::selftest::GUESTS;

/// Time that a part has to end its VMs and remove its files.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Time that is kept for the end of the last part and the report, in seconds.
const KEPT_S: u64 = 15;

/// Niceness of all processes of a part.
const NICE: i32 = 10;

/// Adjustment of the kernel's choice which process to end if memory is short
/// (`proc_pid_oom_score_adj(5)`).
const OOM_SCORE: &str = "500";

/// Options of the self-test's report.
#[derive(Args, Debug)]
pub struct Arguments {
    /// Also measure, and write the report to FILE
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// End after this many minutes; parts that do not fit are left out
    #[arg(long, value_name = "MINUTES", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=240))]
    limit: u64,
    /// Guest image that all guests boot, by its name in memfold's cache (default: trixie-a and
    /// trixie-b)
    #[arg(long, value_name = "NAME")]
    image: Option<String>,
    /// Measure only this part (may be given several times)
    #[arg(long = "part", value_name = "PART")]
    parts: Vec<Part>,
    /// Compare two reports
    #[arg(long, num_args = 2, value_name = "FILE")]
    pub compare: Vec<PathBuf>,
    /// Run one part in this process, and write its results to this file
    #[arg(long, hide = true, requires = "dose", value_name = "FILE")]
    pub results: Option<PathBuf>,
    #[arg(long, hide = true)]
    dose: Option<Dose>,
}

impl Arguments {
    fn images(&self) -> [String; 2] {
        match &self.image {
            Some(image) => [image.clone(), image.clone()],
            None => GUESTS.map(|(_, image)| image.to_owned()),
        }
    }
}

/// Prints the comparison of two reports.
pub fn print_comparison(arguments: &Arguments, output: &Output) -> anyhow::Result<bool> {
    let comparison = compare_files(&arguments.compare)?;
    output.print(&comparison, compare::Comparison::markdown)?;
    Ok(true)
}

/// Runs the part of the command line in this process, a child of the self-test.
pub fn run_part(arguments: &Arguments, file: &Path) -> anyhow::Result<bool> {
    // Without its parent, nobody reads the results.
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
    rustix::process::nice(NICE)?;
    std::fs::write("/proc/self/oom_score_adj", OOM_SCORE)?;
    let (part, dose) = (arguments.parts.first(), arguments.dose);
    let (part, dose) = part.zip(dose).context("no part or no dose is given")?;
    let images = arguments.images().map(|image| &*image.leak());
    let outcome = match part.run(dose, images) {
        Ok(results) => json!({ "results": results }),
        Err(error) => json!({ "error": format!("{error:#}") }),
    };
    std::fs::write(file, serde_json::to_vec(&outcome)?)?;
    Ok(true)
}

/// Measures all parts, writes the report to `file`, and prints it. Returns whether the self-test
/// passed and every part ended well.
pub fn run(arguments: &Arguments, file: &Path, output: &Output) -> anyhow::Result<bool> {
    check_host(output)?;
    let images = arguments.images();
    if arguments.image.is_none() {
        images::build_missing(&GUESTS.map(|(_, image)| image))?;
    }
    let known = guest_images().unwrap_or_default();
    ensure!(
        images.iter().all(|image| known.contains_key(image)),
        "there is no guest image '{}'; the images here: {}",
        images[0],
        known.keys().cloned().collect::<Vec<_>>().join(", ")
    );
    let kvm = HostFacts::probe(DEFAULT_STATE.as_ref()).kvm.is_usable();
    check_writable(file)?;
    let session = Session::new(arguments, if kvm { Dose::Full } else { Dose::Small })?;
    let kernels = images.iter().filter_map(|image| known.get(image));
    let kernels: Vec<String> = kernels.map(|image| image.kernel_version.clone()).collect();
    let machine = machine(&kernels);
    let settings = ksm::Controls::default().settings().ok();

    let mut parts = Vec::new();
    for part in Part::ALL {
        parts.push((part, session.measure(part)));
    }
    let mut claims = claims(&parts);
    claims.extend(session.left_behind(&parts, settings.as_ref()));
    let mut document = session.document(machine, kvm, parts, claims);
    document.remove_private(&Private::of_this_host());
    let mut json = serde_json::to_vec_pretty(&document)?;
    json.push(b'\n');
    std::fs::write(file, json).with_context(|| format!("cannot write {}", file.display()))?;
    output.print(&document, Document::markdown)?;
    let is_empty = document.parts.iter().all(|part| part.end != PartEnd::Done);
    ensure!(
        !is_empty,
        "no part of the self-test could be measured; the lines above say why"
    );
    memfold_host::say!(
        "\nThe report is in {}. Please attach it to an issue of memfold; it names neither this host nor its users.",
        file.display()
    );
    Ok(document.passed && document.is_whole())
}

/// Facts about the host, without names and addresses.
fn machine(guest_kernels: &[String]) -> Map<String, Value> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let mut facts = record::host().as_object().cloned().unwrap_or_default();
    facts.remove("accelerator");
    let mut kernels = guest_kernels.to_vec();
    kernels.dedup();
    facts.insert("guest_kernels".into(), kernels.into());
    let flags = read("/proc/cpuinfo");
    let is_virtual = flags.lines().any(|line| {
        line.starts_with("flags")
            && line
                .split_ascii_whitespace()
                .any(|flag| flag == "hypervisor")
    });
    facts.insert("is_virtual_machine".into(), is_virtual.into());
    let tables = ["kvm_intel/parameters/ept", "kvm_amd/parameters/npt"];
    let tables = tables.map(|name| read(&format!("/sys/module/{name}")));
    let nested = tables.iter().find(|text| !text.is_empty());
    facts.insert(
        "nested_page_tables".into(),
        nested.map(|on| on.trim()).into(),
    );
    let defrag = read("/sys/kernel/mm/transparent_hugepage/defrag");
    let defrag = defrag.split(['[', ']']).nth(1).map(str::to_owned);
    facts.insert("huge_page_defrag".into(), defrag.into());
    let load = read("/proc/loadavg");
    let load = load
        .split(' ')
        .next()
        .and_then(|load| load.parse::<f64>().ok());
    facts.insert("load_before".into(), load.into());
    facts.insert("other_qemus".into(), qemus().into());
    facts
}

/// Returns the number of QEMU processes of this host.
fn qemus() -> usize {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let names =
        processes.filter_map(|entry| std::fs::read_to_string(entry.path().join("comm")).ok());
    names
        .filter(|name| name.starts_with("qemu-system") || name.starts_with("qemu-kvm"))
        .count()
}

/// How a part ended, and its results.
struct Ended {
    end: PartEnd,
    why: Option<String>,
    results: Value,
    took: Duration,
}

impl Ended {
    fn without(end: PartEnd, why: impl Into<String>) -> Self {
        Self {
            end,
            why: Some(why.into()),
            results: Value::Null,
            took: Duration::ZERO,
        }
    }
}

/// Claims of the part `proof`; none if it did not run.
fn claims(parts: &[(Part, Ended)]) -> Vec<ClaimLine> {
    let proof = parts.iter().find(|(part, _)| *part == Part::Proof);
    let claims = proof.map(|(_, ended)| ended.results["claims"].clone());
    serde_json::from_value(claims.unwrap_or_default()).unwrap_or_default()
}

type Running = Arc<Mutex<Option<Child>>>;

fn lock(running: &Running) -> MutexGuard<'_, Option<Child>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the child to end, and waits until it has removed its VMs and files. Returns whether it has.
fn end(running: &Running) -> bool {
    let Some(mut child) = lock(running).take() else {
        return true;
    };
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
    let began = Instant::now();
    while began.elapsed() < END_LIMIT {
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = child.kill();
    let _ = child.wait();
    false
}

/// One run of the self-test with a report.
struct Session<'a> {
    arguments: &'a Arguments,
    dose: Dose,
    began: Instant,
    /// Directory for the temporary files of all parts.
    place: tempfile::TempDir,
    running: Running,
}

impl<'a> Session<'a> {
    fn new(arguments: &'a Arguments, dose: Dose) -> anyhow::Result<Self> {
        // /tmp is often in memory, which the VMs need.
        let parent = std::env::var_os("TMPDIR").unwrap_or_else(|| "/var/tmp".into());
        let place = tempfile::Builder::new()
            .prefix("memfold-report.")
            .tempdir_in(parent);
        let place = place.context("cannot create a directory for the self-test's files")?;
        let running = Running::default();
        let (child, files) = (running.clone(), place.path().to_owned());
        undo_at_interrupt(move || {
            end(&child);
            let _ = std::fs::remove_dir_all(files);
        });
        Ok(Self {
            arguments,
            dose,
            began: Instant::now(),
            place,
            running,
        })
    }

    const fn limit_s(&self) -> u64 {
        self.arguments.limit * 60
    }

    fn left_s(&self) -> u64 {
        let took_s = self.began.elapsed().as_secs() + KEPT_S;
        self.limit_s().saturating_sub(took_s)
    }

    /// Measures a part, if it is wanted, and if there is time, memory and disk for it.
    fn measure(&self, part: Part) -> Ended {
        let wanted = &self.arguments.parts;
        if !wanted.is_empty() && !wanted.contains(&part) {
            return Ended::without(PartEnd::NotAsked, "another part was asked for");
        }
        let (needs, left_s) = (part.needs(self.dose), self.left_s());
        let room = FreeRoom::read(self.place.path());
        let lacks = match &room {
            Ok(room) => room.lacks(&needs),
            Err(error) => Some(format!("free memory and disk cannot be read: {error:#}")),
        };
        let late = || {
            format!(
                "{left_s} s of --limit are left, and the part takes about {} s",
                needs.usual_s
            )
        };
        let why = (left_s < needs.usual_s).then(late).or(lacks);
        if let Some(why) = why {
            memfold_host::say!("{}: left out: {why}", part.name());
            return Ended::without(PartEnd::LeftOut, why);
        }
        let limit_s = needs.limit_s.min(left_s);
        memfold_host::say!(
            "{:5.0} s  {} ({} s at most)",
            self.began.elapsed().as_secs_f64(),
            part.name(),
            limit_s
        );
        let began = Instant::now();
        let mut ended = self
            .run(part, Duration::from_secs(limit_s))
            .unwrap_or_else(|error| Ended::without(PartEnd::Failed, format!("{error:#}")));
        ended.took = began.elapsed();
        // What cannot be removed is reported at the end.
        let _ = std::fs::remove_dir_all(self.place.path().join(part.name()));
        if let Some(why) = &ended.why {
            memfold_host::say!("{}: {why}", part.name());
        }
        ended
    }

    fn run(&self, part: Part, limit: Duration) -> anyhow::Result<Ended> {
        let place = self.place.path().join(part.name());
        std::fs::create_dir(&place)?;
        let results = place.join("results.json");
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["self-test", "--part", part.name(), "--results"]);
        command.arg(&results).arg("--dose");
        command.arg(match self.dose {
            Dose::Full => "full",
            Dose::Small => "small",
        });
        if let Some(image) = &self.arguments.image {
            command.arg("--image").arg(image);
        }
        command
            .env("TMPDIR", &place)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let child = command.spawn().context("cannot start the part")?;
        *lock(&self.running) = Some(child);
        let end = Instant::now() + limit;
        let status = loop {
            let done = match lock(&self.running).as_mut() {
                Some(child) => child.try_wait()?,
                // An interrupt is ending it, and then this process.
                None => None,
            };
            if let Some(status) = done {
                lock(&self.running).take();
                break status;
            }
            let is_short = FreeRoom::read(&place).is_ok_and(FreeRoom::is_short);
            if Instant::now() >= end || is_short {
                let why = if is_short {
                    "the host's free memory fell below half of the reserve".into()
                } else {
                    format!("it was not done after {} s", limit.as_secs())
                };
                return Ok(Ended::without(PartEnd::Ended, self.end_early(why)));
            }
            std::thread::sleep(Duration::from_millis(200));
        };
        let text = std::fs::read_to_string(&results);
        let text = text.with_context(|| format!("the part ended without results ({status})"))?;
        let mut outcome: Value = serde_json::from_str(&text)?;
        if let Some(error) = outcome["error"].as_str() {
            return Ok(Ended::without(PartEnd::Failed, error));
        }
        Ok(Ended {
            end: PartEnd::Done,
            why: None,
            results: outcome["results"].take(),
            took: Duration::ZERO,
        })
    }

    fn end_early(&self, why: String) -> String {
        if end(&self.running) {
            return why;
        }
        format!(
            "{why}, and it did not end by itself: VMs of it may still run (ps -C qemu-system-x86_64)"
        )
    }

    /// Checks that no part has left anything: files, QEMUs, and settings of KSM, if KSM was
    /// measured. `settings`: those before the first part.
    fn left_behind(
        &self,
        parts: &[(Part, Ended)],
        settings: Option<&ksm::Settings>,
    ) -> Vec<ClaimLine> {
        let files = std::fs::read_dir(self.place.path()).map_or(0, Iterator::count);
        let place = self.place.path().to_string_lossy().into_owned();
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let lines = processes.filter_map(|of| std::fs::read(of.path().join("cmdline")).ok());
        let ours = lines
            .filter(|line| String::from_utf8_lossy(line).contains(&place))
            .count();
        let mut claims = vec![ClaimLine {
            claim: "the self-test leaves no process and no file behind".into(),
            holds: files == 0 && ours == 0,
            seen: format!("{ours} processes, {files} directories of parts"),
        }];
        // A part that had to be killed may have left settings of KSM. An error means that another
        // process of memfold uses KSM now, and changes the settings.
        let is_used_by_others = ksm::restore_leftover(ksm::NOTES.as_ref()).is_err();
        let mut all = parts.iter();
        if all.any(|(_, ended)| ended.results["ksm_us_per_merged_page"].is_number()) {
            let is_same = ksm::Controls::default().settings().ok().as_ref() == settings;
            let seen = match (is_same, is_used_by_others) {
                (true, _) => "all",
                (false, true) => "another process of memfold uses KSM now",
                (false, false) => "changed, by this or another program",
            };
            claims.push(ClaimLine {
                claim: "KSM's settings are as before".into(),
                holds: is_same || is_used_by_others,
                seen: seen.into(),
            });
        }
        claims
    }

    fn document(
        &self,
        machine: Map<String, Value>,
        kvm: bool,
        parts: Vec<(Part, Ended)>,
        claims: Vec<ClaimLine>,
    ) -> Document {
        let figures = parts.iter().flat_map(|(part, ended)| {
            let results = ended.why.as_deref().map_or(Ok(&ended.results), Err);
            of_part(*part, self.dose, results)
        });
        let figures = figures.collect();
        let parts = parts.into_iter().map(|(part, ended)| PartLine {
            name: part.name().into(),
            end: ended.end,
            why: ended.why,
            took_s: ended.took.as_secs_f64(),
            results: ended.results,
        });
        Document {
            schema: SCHEMA.into(),
            schema_version: SCHEMA_VERSION,
            memfold_version: env!("CARGO_PKG_VERSION").into(),
            commit: memfold_host::commit().into(),
            machine,
            accelerator: if kvm { "kvm" } else { "tcg" }.into(),
            note: (!kvm).then(|| EMULATED.into()),
            dose: self.dose,
            limit_s: self.limit_s(),
            took_s: self.began.elapsed().as_secs_f64(),
            passed: claims.iter().all(|claim| claim.holds),
            claims,
            figures,
            parts: parts.collect(),
        }
    }
}
