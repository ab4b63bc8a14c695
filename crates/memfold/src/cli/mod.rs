//! The command line of `memfold`. Each command has a module. Commands get their data from the
//! daemon, or examine the host themselves ([`memfold_host`]).

mod advise;
mod bench;
mod config;
mod console;
mod context;
mod cp;
mod dashboard;
mod debt;
mod definitions;
mod demo;
mod doctor;
mod estimate;
mod events;
mod examples;
mod exec;
mod failure;
mod fold;
mod fork;
mod generate;
mod host;
mod iscsi_process;
mod ksm;
mod lend;
mod libvirt;
mod log;
mod number;
mod plan;
mod pve;
mod report;
mod rightsize;
mod segment;
mod self_test;
mod serve;
mod shell_text;
mod snapshot;
mod streamed;
mod systemd;
mod table;
mod top;
mod transfer;
mod user_mode;
mod vm;
mod vm_info;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use memfold_api::DEFAULT_SOCKET;

use context::Context;
use log::LogFormat;

/// One Linux host, more QEMU/KVM virtual machines in the same RAM.
#[derive(Parser, Debug)]
#[command(
    name = "memfold",
    version,
    about,
    max_term_width = 100,
    arg_required_else_help = true,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not possible on this host; 'vm exec' and 'vm stop' have others"
)]
struct Cli {
    /// Socket of the daemon
    #[arg(long, global = true, env = "MEMFOLD_SOCKET", default_value = DEFAULT_SOCKET, value_name = "PATH")]
    socket: PathBuf,
    /// Print JSON instead of text, or write it to FILE beside the text
    #[arg(long, global = true, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    json: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Check what works on this host, and why the rest does not
    Doctor(doctor::Arguments),
    /// Demo: boot real VMs, fold them, and compare the memory saved with KSM's
    Demo(demo::Arguments),
    /// Test on this host that folding loses no byte, and measure what memfold costs and saves here
    SelfTest(self_test::Arguments),
    /// Run the daemon
    Serve(Box<serve::Arguments>),
    /// Print an address that logs a browser in to the dashboard, once
    Dashboard(dashboard::Arguments),
    /// Virtual machines: run, define, list, stop, attach and others
    #[command(subcommand)]
    Vm(vm::Arguments),
    /// Show the ledger: the use of every byte of RAM, and what was saved
    Report(report::Arguments),
    /// Show the ledger live
    Top(top::Arguments),
    /// Show events of this host and its VMs, such as a VM that ended; --follow: as they happen
    Events(events::Arguments),
    /// Estimate what could be saved, without changing anything: zero pages, copies within and
    /// between VMs, by file, by mechanism
    Estimate(estimate::Arguments),
    /// Show the memory that guests could claim by writing to shared memory, the memory available
    /// for it, and the brake
    Debt(debt::Arguments),
    /// Advise what memory each VM should be given, from its recorded history
    Advise(advise::Arguments),
    /// Right-sizing: show and change how much memory VMs have
    #[command(subcommand)]
    Rightsize(rightsize::Arguments),
    /// Folding: state, pause, limits
    #[command(subcommand)]
    Fold(fold::Arguments),
    /// KSM, the kernel's page merging: show, steer, explain
    #[command(subcommand)]
    Ksm(ksm::Arguments),
    /// Snapshots: save a VM, restore it
    #[command(subcommand)]
    Snapshot(snapshot::Arguments),
    /// Start VMs from one snapshot, in milliseconds
    Clone(snapshot::CloneArguments),
    /// Start VMs that continue a running VM from this instant
    Fork(fork::ForkArguments),
    /// Segments: files that VMs execute in place from one copy
    #[command(subcommand)]
    Segment(segment::Arguments),
    /// Lend this host's spare RAM to VMs of other hosts
    Lend(lend::LendArguments),
    /// Move a VM's swap disk to RAM that another host lends, while the VM runs
    Borrow(lend::BorrowArguments),
    /// Move a VM's swap disk back to this host's disk
    Return(lend::ReturnArguments),
    /// Show which host lends to which VM, and which VMs are affected if a lender dies
    Leases(lend::LeasesArguments),
    /// Manage tokens of other hosts that may use this daemon's registry of leases
    #[command(subcommand)]
    Host(host::Arguments),
    /// Domains of libvirt: enable and disable memfold, show the status, adopt
    #[command(subcommand)]
    Libvirt(libvirt::Arguments),
    /// VMs of Proxmox VE: enable and disable memfold, show the status
    #[command(subcommand)]
    Pve(pve::Arguments),
    /// The configuration file of 'memfold serve'
    #[command(subcommand)]
    Config(config::Arguments),
    /// Plan how many VMs fit: predict what more VMs like the running ones would use
    Plan(plan::Arguments),
    /// Run studies with the program memfold-bench
    #[command(disable_help_flag = true)]
    Bench(bench::Arguments),
    /// Relay between a VM and its lenders; started by the daemon
    #[command(hide = true)]
    Relay,
    /// Manual pages and completions, for packages
    #[command(hide = true)]
    Generate(generate::Arguments),
    /// Helper of iSCSI servers and clients; started by the daemon
    #[command(subcommand, hide = true)]
    IscsiProcess(iscsi_process::Arguments),
}

/// Parses the command line, runs the command, and returns the exit code.
pub fn main() -> ExitCode {
    let cli = match config::command_line::<Cli>() {
        Ok(cli) => cli,
        Err(error) => return failure::fail(&error),
    };
    if let Command::Serve(arguments) = &cli.command {
        log::begin(arguments.log_filter(), arguments.log_format);
    } else {
        let filter = std::env::var("MEMFOLD_LOG");
        let filter = filter.ok().and_then(|text| log::filter(&text).ok());
        log::begin(filter.unwrap_or_else(|| "warn".into()), LogFormat::Text);
    }
    let socket = match cli.command {
        Command::Serve(_) => cli.socket,
        _ => user_mode::socket(cli.socket),
    };
    let context = Context::new(socket, cli.json);
    let result = match cli.command {
        Command::Doctor(arguments) => doctor::run(&context, &arguments),
        Command::Demo(arguments) => demo::run(&context, &arguments),
        Command::SelfTest(arguments) => self_test::run(&context, &arguments),
        Command::Serve(arguments) => serve::run(&context, *arguments),
        Command::Dashboard(arguments) => dashboard::run(&context, &arguments),
        Command::Vm(arguments) => vm::run(&context, arguments),
        Command::Report(arguments) => report::run(&context, &arguments),
        Command::Top(arguments) => top::run(&context, &arguments),
        Command::Events(arguments) => events::run(&context, &arguments),
        Command::Estimate(arguments) => estimate::run(&context, &arguments),
        Command::Debt(arguments) => debt::run(&context, &arguments),
        Command::Fold(arguments) => fold::run(&context, &arguments),
        Command::Advise(arguments) => advise::run(&context, &arguments),
        Command::Rightsize(arguments) => rightsize::run(&context, &arguments),
        Command::Ksm(arguments) => ksm::run(&context, arguments),
        Command::Snapshot(arguments) => snapshot::run(&context, arguments),
        Command::Clone(arguments) => snapshot::clone(&context, &arguments),
        Command::Fork(arguments) => fork::run(&context, &arguments),
        Command::Segment(arguments) => segment::run(&context, arguments),
        Command::Lend(arguments) => lend::lend(&context, &arguments),
        Command::Borrow(arguments) => lend::borrow(&context, &arguments),
        Command::Return(arguments) => lend::give_back(&context, &arguments),
        Command::Leases(arguments) => lend::leases(&context, &arguments),
        Command::Host(arguments) => host::run(&context, &arguments),
        Command::Libvirt(arguments) => libvirt::run(&context, arguments),
        Command::Pve(arguments) => pve::run(&context, arguments),
        Command::Config(arguments) => config::run(&context, &arguments),
        Command::Plan(arguments) => plan::run(&context, &arguments),
        Command::Bench(arguments) => bench::run(&context, &arguments),
        Command::Relay => Ok(lend::relay()),
        Command::Generate(arguments) => generate::run(&arguments, examples::add(Cli::command())),
        Command::IscsiProcess(arguments) => iscsi_process::run(&arguments),
    };
    result.unwrap_or_else(|error| failure::fail(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(line: &str) -> Option<String> {
        Cli::try_parse_from(line.split(' ')).unwrap().json
    }

    #[test]
    fn the_command_line_definition_of_memfold_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_json_option_of_a_command_takes_a_file_only_after_an_equals_sign() {
        assert_eq!(json("memfold report"), None);
        for line in [
            "report --json",
            "--json report",
            "vm list --json",
            "--json bench fold",
        ] {
            assert_eq!(
                json(&format!("memfold {line}")).as_deref(),
                Some("-"),
                "{line}"
            );
        }
        assert_eq!(
            json("memfold report --json=f.json").as_deref(),
            Some("f.json")
        );
    }

    #[test]
    fn the_arguments_after_memfold_bench_are_passed_on_unchanged() {
        for words in [
            "fold --json f.json",
            "--quick fold --json",
            "--help",
            "no-such-study -h",
        ] {
            let cli = Cli::try_parse_from(format!("memfold bench {words}").split(' ')).unwrap();
            assert_eq!(cli.json, None, "{words}");
            let Command::Bench(arguments) = cli.command else {
                panic!("'{words}' is another command");
            };
            assert_eq!(arguments.words.join(" ".as_ref()), words);
        }
    }
}
