//! Examples of each command, which its help text and its manual page show.

use clap::Command;

/// Examples of all commands, a line each, in the order of the help texts. What follows two spaces
/// and `#` is a comment.
const EXAMPLES: &str = "\
memfold doctor
memfold doctor --self-test
memfold demo --memory 1G
memfold self-test --report report.json --limit 60
memfold self-test --compare before.json after.json
memfold serve --listen 127.0.0.1:8420
memfold serve --config test.toml --socket test.sock
memfold dashboard --role read
memfold vm run --name web1 --memory 2G --disk web1.qcow2 --domain shop
memfold vm run --file web.toml --name web2 --forward 2222:22
memfold vm define web1.toml
memfold vm show web1
memfold vm edit web1
memfold vm undefine web1
memfold vm start web1
memfold vm set web1 sizing.min=1G fold=false
memfold vm set web1 sizing.min= --now  # the default again, until the VM ends
memfold vm autostart web1
memfold vm autostart web1 --disable
memfold vm list
memfold vm list --json
memfold vm stop web1 db1 --timeout 120
memfold vm stop --all
memfold vm pause web1
memfold vm resume web1
memfold vm reboot web1
memfold vm reboot web1 --from-boot-snapshot
memfold vm console web1
memfold vm logs web1
memfold vm attach /run/qemu/web1.qmp --name web1 --domain shop
memfold vm exec web1 uname -a
memfold vm exec --timeout 60 web1 'cd /srv/job && make'
memfold vm exec -it web1 -- bash
memfold vm cp site web1:/srv/  # the directory becomes /srv/site
memfold vm cp web1:/var/log/nginx logs
memfold report
memfold report --vm web1 --json=report.json
memfold top -n 5
memfold events
memfold events --follow --json
memfold estimate --seconds 60
memfold estimate --one-domain --cpu 50
memfold estimate --fingerprint north.json --key hosts.key
memfold debt
memfold debt --reserve 10% --cover 50
memfold advise --days 30
memfold rightsize status --events 50
memfold rightsize on
memfold rightsize watch
memfold rightsize off
memfold rightsize set web1 --min 1G --max 4G
memfold rightsize set db1 --pin
memfold fold status
memfold fold pause
memfold fold resume
memfold fold budget --cpu 10 --pages-per-second 50000
memfold ksm status
memfold ksm start --domain shop --cpu 10
memfold ksm stop
memfold ksm explain web1
memfold snapshot save web1 warm --live
memfold snapshot save web1 secret --encrypt=backup
memfold snapshot restore warm --as web2
memfold snapshot push warm s3://snapshots/fleet --sign private.pem
memfold snapshot pull warm s3://snapshots/fleet --domain shop --trust public.pem
memfold snapshot list --tree
memfold snapshot list --remote s3://snapshots/fleet
memfold snapshot inspect warm
memfold snapshot verify warm
memfold snapshot compact layer
memfold snapshot rekey warm other --key backup2
memfold snapshot remove warm other
memfold snapshot remove warm --remote s3://snapshots/fleet
memfold clone warm -n 10 --identity
memfold clone warm --from s3://snapshots/fleet --prefix job
memfold fork web1 -n 3
memfold segment build system --domain shop --from root.img
memfold segment build system --domain shop --from vm:web1 --top-files 256M
memfold segment rank --domain shop -n 50
memfold segment attach web1 system
memfold segment detach web1 system
memfold segment list
memfold segment inspect system@2
memfold segment verify system
memfold segment remove system@1
memfold lend  # what is lent now
memfold lend --max 16G --listen 192.0.2.10 --ports 10900-10999
memfold lend --stop
memfold borrow web1
memfold borrow web1 --durability replica
memfold borrow --lvm vg0/swap
memfold return web1
memfold return --lease 7
memfold leases
memfold leases --trust south
memfold host add south
memfold host list
memfold host remove south
memfold libvirt enable web1 web2 --domain shop
memfold libvirt disable web1
memfold libvirt status
memfold libvirt attach web1
memfold pve enable 101 --domain shop
memfold pve disable 101
memfold pve status
memfold config check
memfold config check new.toml
memfold plan
memfold plan --kind web=web1,web2 --vms web=40
memfold plan --place north.json south.json
memfold bench fold --quick
memfold bench --help  # lists the studies
";

/// Adds the examples to the help texts of all commands of the program.
pub(super) fn add(program: Command) -> Command {
    add_below(program, "memfold")
}

/// Adds them to the commands below `command`, whose words are `path`.
fn add_below(command: Command, path: &str) -> Command {
    command.mut_subcommands(|below| {
        let words = format!("{path} {}", below.get_name());
        if below.has_subcommands() {
            return add_below(below, &words);
        }
        let lines: Vec<String> = of(&words).map(|line| format!("\n  {line}")).collect();
        if lines.is_empty() {
            return below;
        }
        below.after_help(format!("Examples:{}", lines.concat()))
    })
}

/// Returns the examples of the command with these words.
fn of(words: &str) -> impl Iterator<Item = &'static str> {
    EXAMPLES.lines().filter(move |line| {
        let rest = line.strip_prefix(words);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    })
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::super::Cli;
    use super::*;

    /// Splits a line as a shell does; of quotes, it has only single ones.
    fn words(line: &str) -> Vec<String> {
        let (line, _) = line.split_once("  #").unwrap_or((line, ""));
        let (mut words, mut is_quoted) = (vec![String::new()], false);
        for c in line.chars() {
            match c {
                '\'' => is_quoted = !is_quoted,
                ' ' if !is_quoted => words.push(String::new()),
                _ => words.last_mut().unwrap().push(c),
            }
        }
        words
    }

    /// Returns the words of all commands below `command` that the help texts show.
    fn commands(command: &Command, path: &str) -> Vec<String> {
        let below = command.get_subcommands();
        let shown = below.filter(|below| !below.is_hide_set());
        let all = shown.flat_map(|below| {
            let words = format!("{path} {}", below.get_name());
            if below.has_subcommands() {
                commands(below, &words)
            } else {
                vec![words]
            }
        });
        all.collect()
    }

    #[test]
    fn each_command_has_examples_and_each_example_is_a_valid_command_line() {
        let program = Cli::command();
        let mut left: Vec<&str> = EXAMPLES.lines().collect();
        for command in commands(&program, "memfold") {
            assert!(of(&command).next().is_some(), "no example of '{command}'");
            left.retain(|line| of(&command).all(|example| example != *line));
        }
        assert!(left.is_empty(), "examples of no command: {left:?}");
        for line in EXAMPLES.lines() {
            let parsed = Cli::try_parse_from(words(line));
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    }
}
