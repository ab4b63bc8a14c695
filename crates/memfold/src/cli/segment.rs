//! `memfold segment`: builds, attaches, detaches, lists, verifies and removes segments, and ranks
//! files by the memory that a segment with them would save.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Subcommand};

use memfold_api::{AttachSegmentRequest, AttachedSegment, BuildRequest, BuildResult, RankRequest};
use memfold_ledger::table::signed;
use memfold_segment::{Ranked, Reference, SegmentInfo, rank};
use memfold_units::ByteSize;

use super::context::Context;
use super::failure;
use super::table::table;
use super::vm_info::segment as name_of_vm;
use super::watch::watched;

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Build a segment, or its next generation: a read-only image of files that VMs map in place
    Build(BuildArguments),
    /// Rank files by the memory that they would save in a segment, from what running VMs cache
    Rank(RankArguments),
    /// Attach a segment to a running VM, and mount it over the guest's files
    Attach {
        /// VM to attach the segment to; needs a free slot (vm run --segment-slots)
        vm: String,
        /// NAME for the newest generation, or NAME@GENERATION
        segment: String,
        /// Only attach the device; the guest does not mount it over its files
        #[arg(long)]
        no_lay: bool,
        /// First compare all bytes with the guest's own files, not only sizes, times, owners and
        /// modes
        #[arg(long)]
        content: bool,
        /// Let only this VM map the segment, to write files that 'segment build --from vm:VM' turns
        /// into the next generation
        #[arg(long, conflicts_with = "no_lay")]
        writer: bool,
    },
    /// Remove a segment from a guest's files; files that the guest has written there stay
    Detach {
        /// VM to detach the segment from
        vm: String,
        /// NAME or NAME@GENERATION
        segment: String,
    },
    /// List all segments, the VMs that map them, and their cost
    List,
    /// Show a segment's manifest
    Inspect {
        /// NAME or NAME@GENERATION
        segment: String,
    },
    /// Read a whole segment and compare its checksum
    Verify {
        /// NAME or NAME@GENERATION
        segment: String,
    },
    /// Remove segments, all generations or one, that no VM and no snapshot needs
    Remove {
        /// NAME or NAME@GENERATION
        #[arg(required = true)]
        segments: Vec<String>,
    },
}

#[derive(Args, Debug)]
pub(super) struct BuildArguments {
    /// Name of the segment
    name: String,
    /// Trust domain: only its VMs may map the segment
    #[arg(long)]
    domain: String,
    /// Source of the files: a directory that stands for the guests' root, a disk image with an ext4
    /// or EROFS file system, .deb files, package:NAME, or vm:NAME for the files that a running VM
    /// sees
    #[arg(long, required = true, num_args = 1.., value_name = "SOURCE")]
    from: Vec<String>,
    /// Include only paths that match; several allowed ('/usr/**' and '/opt/**' by default)
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Exclude paths that match, even if --include matches
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Include only the files that save most, up to this size, according to the page caches of the
    /// domain's running VMs
    #[arg(long, value_name = "BUDGET")]
    top_files: Option<ByteSize>,
    /// Number of VMs to choose files for; by default the VMs that run
    #[arg(long, value_name = "NUMBER", requires = "top_files")]
    for_vms: Option<u64>,
    /// Build a root file system that VMs boot from (vm run --root-segment)
    #[arg(long)]
    root: bool,
    /// Keep the segment in memory while VMs use it: the host cannot reclaim it, and reads no disk
    #[arg(long)]
    pinned: bool,
}

#[derive(Args, Debug)]
pub(super) struct RankArguments {
    /// VMs whose files are ranked; all by default
    #[arg(long = "vm", value_name = "VM")]
    vms: Vec<String>,
    /// Only consider VMs of this trust domain
    #[arg(long)]
    domain: Option<String>,
    /// Number of VMs that will map the segment; by default as many as cache a file now
    #[arg(long, value_name = "NUMBER")]
    for_vms: Option<u64>,
    /// Rank only paths that match ('/usr/**' and '/opt/**' by default)
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Number of lines to show
    #[arg(short = 'n', long, default_value_t = 25)]
    lines: usize,
}

pub(super) fn run(context: &Context, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    match arguments {
        Arguments::Build(arguments) => build(context, arguments),
        Arguments::Rank(arguments) => {
            let lines = arguments.lines;
            let request = RankRequest {
                vms: arguments.vms,
                domain: arguments.domain,
                for_vms: arguments.for_vms,
                include: arguments.include,
            };
            let ranked: Vec<Ranked> = client.post("/v1/segments/rank", &request)?;
            context.print(&ranked, |ranked| ranking(ranked, lines))
        }
        Arguments::Attach {
            vm,
            segment,
            no_lay,
            content,
            writer,
        } => {
            let request = AttachSegmentRequest {
                segment,
                no_lay,
                content,
                writer,
            };
            let place = format!("/v1/vms/{}/segments", name_of_vm(&vm)?);
            let done: AttachedSegment = client.post(&place, &request)?;
            context.print(&done, |done| describe("attached", &vm, done))
        }
        Arguments::Detach { vm, segment } => {
            let place = format!(
                "/v1/vms/{}/segments/{}",
                name_of_vm(&vm)?,
                Reference::parse(&segment)?
            );
            let done: AttachedSegment = client.delete(&place)?;
            context.print(&done, |done| describe("taken off", &vm, done))
        }
        Arguments::List => {
            let list: Vec<SegmentInfo> = client.get("/v1/segments")?;
            context.print(&list, |list| segments(list))
        }
        Arguments::Inspect { segment } => {
            let reference = Reference::parse(&segment)?;
            let list: Vec<SegmentInfo> = client.get("/v1/segments")?;
            let is_it = |info: &&SegmentInfo| {
                info.segment.name == reference.name
                    && reference
                        .generation
                        .is_none_or(|g| g == info.segment.generation)
            };
            // Generations are sorted, so the last match is the newest generation.
            let info = list.iter().rfind(is_it).with_context(|| {
                format!("no segment named '{segment}'; 'memfold segment list' shows all segments")
            })?;
            context.print(info, |info| {
                serde_json::to_string_pretty(info).unwrap_or_default()
            })
        }
        Arguments::Verify { segment } => {
            let place = format!("/v1/segments/{}/verify", Reference::parse(&segment)?);
            let problem: Option<String> = client.post(&place, &())?;
            let is_right = problem.is_none();
            let said = serde_json::json!({ "segment": segment, "problem": problem });
            context.print(&said, |_| {
                problem.unwrap_or_else(|| format!("{segment}: unchanged since its build"))
            })?;
            Ok(ExitCode::from(u8::from(!is_right)))
        }
        Arguments::Remove { segments } => {
            let one = |segment: &String| -> anyhow::Result<Vec<String>> {
                let place = format!("/v1/segments/{}", Reference::parse(segment)?);
                let gone = client.delete(&place);
                gone.with_context(|| format!("cannot remove segment '{segment}'"))
            };
            let (removed, errors) = failure::separate(segments.iter().map(one));
            let removed = removed.concat();
            let said = serde_json::json!({ "removed": removed });
            failure::print_done(context, (&said, removed.is_empty()), &errors, |_| {
                format!("removed {}", removed.join(", "))
            })
        }
    }
}

fn build(context: &Context, arguments: BuildArguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    let from = arguments.from.into_iter().map(absolute);
    let request = BuildRequest {
        name: arguments.name,
        domain: arguments.domain,
        from: from.collect::<Result<_, _>>()?,
        include: arguments.include,
        exclude: arguments.exclude,
        top_files_bytes: arguments.top_files.map(|size| size.0),
        for_vms: arguments.for_vms,
        root: arguments.root,
        pinned: arguments.pinned,
    };
    let place = format!("/v1/segments/{}/progress", Reference::parse(&request.name)?);
    let build = || Ok(client.post("/v1/segments", &request)?);
    let result: BuildResult = watched(context, place, build)?;
    context.print(&result, |result| {
        let segment = &result.segment;
        if !result.is_new {
            return format!("{} holds the same files already", segment.reference());
        }
        format!(
            "built {}: {} files, {} in an image of {}; its page descriptors take {} of each guest's RAM",
            segment.reference(),
            segment.files,
            ByteSize(segment.content_bytes),
            ByteSize(segment.image_bytes),
            segment.struct_page_bytes()
        )
    })
}

/// Returns a source with an absolute path, because the daemon has another working directory.
fn absolute(source: String) -> std::io::Result<String> {
    if source.starts_with("package:") || source.starts_with("vm:") {
        return Ok(source);
    }
    let path = std::path::absolute(PathBuf::from(&source))?;
    // JSON cannot carry a path that is not UTF-8. The daemon then reports that the file does not
    // exist.
    Ok(path.to_str().map_or(source, str::to_owned))
}

fn describe(what: &str, vm: &str, done: &AttachedSegment) -> String {
    let mut parts = vec![format!("{what}: {} ({vm})", done.segment.segment)];
    let count = |key: &str| {
        let dirs = done.report.as_ref()?.get("dirs")?.as_array()?;
        let counts = dirs.iter().filter_map(|dir| dir.get(key)?.as_u64());
        Some(counts.sum::<u64>())
    };
    if let (Some(same), Some(differing)) = (count("same"), count("differing")) {
        parts.push(format!("{same} files equal to the guest's own"));
        if differing > 0 {
            parts.push(format!("{differing} differ and stay the guest's"));
        }
    }
    parts.join("; ")
}

fn ranking(ranked: &[Ranked], lines: usize) -> String {
    if ranked.is_empty() {
        return "nothing to rank: no VM with memfold's agent caches files".into();
    }
    let rows = ranked.iter().take(lines).map(|file| {
        [
            signed(file.net_bytes),
            ByteSize(file.file_bytes).to_string(),
            ByteSize(file.touched_bytes).to_string(),
            file.vms.to_string(),
            file.path.clone(),
        ]
    });
    let (bytes, net) = rank::sums(ranked);
    let gaining = ranked.iter().filter(|file| file.net_bytes > 0).count();
    format!(
        "{}\n\n{gaining} of {} files would save memory: {} in all, in an image of {bytes}",
        table(">SAVES  >SIZE  >TOUCHED  >VMS  FILE", rows),
        ranked.len(),
        ByteSize(net.unsigned_abs())
    )
}

fn segments(list: &[SegmentInfo]) -> String {
    if list.is_empty() {
        return "no segments; 'memfold segment build' makes one".into();
    }
    let rows = list.iter().map(|info| {
        let segment = &info.segment;
        let users = info.users.iter().map(|user| match &info.writer {
            Some(writer) if writer == user => format!("{user} (writes)"),
            _ => user.clone(),
        });
        [
            segment.reference(),
            segment.domain.clone(),
            ByteSize(segment.image_bytes).to_string(),
            ByteSize(info.resident_bytes).to_string(),
            ByteSize(info.struct_page_bytes).to_string(),
            segment.files.to_string(),
            info.protection.clone(),
            users.collect::<Vec<_>>().join(", "),
            info.problem.clone().unwrap_or_default(),
        ]
    });
    let headings =
        "SEGMENT  DOMAIN  >IMAGE  >IN MEMORY  >COST/VM  >FILES  PROTECTED  MAPPED BY  PROBLEM";
    table(headings, rows)
}
