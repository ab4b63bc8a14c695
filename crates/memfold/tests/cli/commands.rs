//! Tests of what all commands have in common: help texts, options, wrong arguments, and the error
//! if no daemon runs.

use super::support::{code, err, out, refused, run};

/// For every command: its words, texts that its help must contain, and whether it needs a daemon
/// (when called with valid arguments).
pub const COMMANDS: [(&[&str], &[&str], bool); 79] = [
    (&["doctor"], &["works on this host", "--self-test"], false),
    (&["demo"], &["real VMs", "KSM", "--memory"], false),
    (
        &["self-test"],
        &["loses no byte", "--report", "--limit", "--compare"],
        false,
    ),
    (
        &["serve"],
        &[
            "daemon",
            "--state",
            "--cpu",
            "--store-cap",
            "--listen",
            "--user",
        ],
        false,
    ),
    (&["dashboard"], &["logs a browser in", "--role"], true),
    (
        &["vm", "run"],
        &["Start a VM", "--file", "--domain", "--disk"],
        false,
    ),
    (
        &["vm", "define"],
        &["place of an older one", "autostart", "'order'"],
        false,
    ),
    (&["vm", "show"], &["was not started"], false),
    (&["vm", "edit"], &["$VISUAL or $EDITOR"], false),
    (&["vm", "undefine"], &["keeps running"], false),
    (&["vm", "start"], &["defined VM", "--despite-brake"], false),
    (
        &["vm", "autostart"],
        &["each boot of the host", "--disable"],
        false,
    ),
    (
        &["vm", "set"],
        &["FIELD=VALUE", "--next-start", "going on after a full disk"],
        false,
    ),
    (&["vm", "list"], &["List VMs"], true),
    (&["vm", "stop"], &["Shut a VM down", "--timeout"], false),
    (&["vm", "pause"], &["memfold vm resume"], false),
    (&["vm", "resume"], &["stands still"], false),
    (
        &["vm", "reboot"],
        &["--from-boot-snapshot", "--timeout"],
        false,
    ),
    (&["vm", "attach"], &["QMP socket", "--domain"], false),
    (&["vm", "console"], &["serial console", "Ctrl-]"], false),
    (&["vm", "logs"], &["newest output"], false),
    (
        &["libvirt", "enable"],
        &["start with memfold", "<emulator>", "--domain"],
        false,
    ),
    (&["libvirt", "disable"], &["original XML"], false),
    (&["libvirt", "status"], &["trust domain"], false),
    (&["libvirt", "attach"], &["running domain"], false),
    (
        &["pve", "enable"],
        &["start with memfold", "--domain"],
        false,
    ),
    (&["pve", "disable"], &["without memfold again"], false),
    (&["pve", "status"], &["trust domain"], false),
    (
        &["vm", "exec"],
        &[
            "in a guest",
            "exit with the command's code",
            "exit code is 124",
            "--interactive",
            "--tty",
        ],
        false,
    ),
    (
        &["vm", "cp"],
        &["between this host and a guest", "whole or not"],
        false,
    ),
    (&["events"], &["as they happen", "--follow"], true),
    (&["report"], &["ledger", "--vm"], true),
    (&["top"], &["ledger live"], true),
    (
        &["estimate"],
        &[
            "without changing anything",
            "--cpu",
            "--seconds",
            "--domain-of",
            "--one-domain",
            "--program",
        ],
        false,
    ),
    (&["debt"], &["shared memory", "--reserve", "--cover"], true),
    (
        &["rightsize", "status"],
        &["how much memory each VM should have", "--events"],
        true,
    ),
    (
        &["advise"],
        &["what memory each VM should be given", "--days"],
        true,
    ),
    (&["rightsize", "on"], &["trim page caches"], true),
    (&["rightsize", "watch"], &["do nothing"], true),
    (&["rightsize", "off"], &["alone"], true),
    (
        &["rightsize", "set"],
        &["limits of a VM's size", "Name of the VM", "--min", "--pin"],
        false,
    ),
    (&["fold", "status"], &["folding has done"], true),
    (&["fold", "pause"], &["Pause folding"], true),
    (&["fold", "resume"], &["Resume folding"], true),
    (&["fold", "budget"], &["--cpu", "--pages-per-second"], true),
    (
        &["ksm", "status"],
        &["control and counter", "without a daemon"],
        false,
    ),
    (
        &["ksm", "start"],
        &["trust domain", "--cpu", "--target", "--advisor"],
        true,
    ),
    (
        &["ksm", "stop"],
        &["settings are restored", "--unmerge"],
        true,
    ),
    (&["ksm", "explain"], &["merges or not"], false),
    (
        &["snapshot", "save"],
        &["memory, devices and disks", "--keep"],
        false,
    ),
    (
        &["snapshot", "restore"],
        &["from a snapshot", "--as"],
        false,
    ),
    (
        &["snapshot", "push"],
        &["object store", "credentials", "Sign"],
        false,
    ),
    (
        &["snapshot", "pull"],
        &["object store", "Trust domain", "interrupted"],
        false,
    ),
    (&["snapshot", "list"], &["List all snapshots"], true),
    (&["snapshot", "inspect"], &["manifest"], false),
    (&["snapshot", "verify"], &["checksums"], false),
    (&["snapshot", "compact"], &["layer complete"], false),
    (
        &["snapshot", "rekey"],
        &["key of encrypted snapshots", "--key"],
        false,
    ),
    (
        &["snapshot", "remove"],
        &["no VM runs from", "--merge"],
        false,
    ),
    (&["clone"], &["from one snapshot", "--number"], false),
    (&["fork"], &["continue a running VM", "--number"], false),
    (
        &["lend"],
        &[
            "spare RAM",
            "--max",
            "--listen",
            "--ports",
            "--transport",
            "--cleartext",
            "--stop",
        ],
        true,
    ),
    (
        &["borrow"],
        &["another host lends", "--durability", "--lvm"],
        false,
    ),
    (&["return"], &["back to this host's disk", "--lvm"], false),
    (&["leases"], &["if a lender dies"], true),
    (
        &["host", "add"],
        &["print a token", "becomes invalid"],
        false,
    ),
    (&["host", "list"], &["have a token"], true),
    (&["host", "remove"], &["Revoke a host's token"], false),
    (
        &["plan"],
        &["how many VMs fit", "--kind", "--vms", "--memory", "--place"],
        true,
    ),
    (&["bench"], &["studies", "memfold-bench"], false),
    (
        &["segment", "build"],
        &["read-only image", "--from", "--domain", "--top-files"],
        false,
    ),
    (&["segment", "rank"], &["Rank files", "--for-vms"], true),
    (
        &["segment", "attach"],
        &["running VM", "--content", "--no-lay"],
        false,
    ),
    (&["segment", "detach"], &["from a guest's files"], false),
    (&["segment", "list"], &["List all segments"], true),
    (&["segment", "inspect"], &["manifest"], false),
    (&["segment", "verify"], &["compare its checksum"], false),
    (&["segment", "remove"], &["Remove segments"], false),
    (&["config", "check"], &["each wrong field"], false),
];

#[test]
fn every_command_has_a_help_text_and_a_json_option() {
    let whole = out(&run(&["--help"]));
    assert!(whole.contains("Exit codes: 0 done"), "{whole}");
    for (command, words, _) in COMMANDS {
        assert!(whole.contains(command[0]), "{}: {whole}", command[0]);
        // Everything after 'bench' is passed to another program.
        let arguments = if command == ["bench"] {
            vec!["help", "bench"]
        } else {
            [command, &["--help"]].concat()
        };
        let output = run(&arguments);
        let help = out(&output);
        assert_eq!(code(&output), 0, "{command:?}");
        for word in words.iter().chain(&[
            "--json",
            "--socket",
            "Usage: memfold",
            "Examples:\n  memfold",
        ]) {
            assert!(help.contains(word), "{command:?}: no '{word}' in: {help}");
        }
    }
}

#[test]
fn the_list_of_commands_in_the_tests_has_every_command_of_memfold() {
    let listed = |arguments: &[&str]| -> Vec<String> {
        out(&run(arguments))
            .lines()
            .skip_while(|l| *l != "Commands:")
            .skip(1)
            .take_while(|l| !l.is_empty())
            .filter(|l| l.starts_with("  ") && !l.starts_with("   "))
            .filter_map(|l| l.split_whitespace().next().map(str::to_owned))
            .filter(|name| name != "help")
            .collect()
    };
    let names = listed(&["--help"]);
    let (mut tested, mut found) = (COMMANDS.map(|(c, ..)| c[0]).to_vec(), names.clone());
    tested.sort_unstable();
    tested.dedup();
    found.sort_unstable();
    assert_eq!(found, tested);
    for name in names {
        let below = listed(&["help", &name]);
        let known = |word: &str| COMMANDS.iter().any(|(c, ..)| c.contains(&word));
        assert!(known(&name), "'memfold {name}' is not tested");
        assert!(below.iter().all(|b| known(b)), "of {name}: {below:?}");
    }
}

#[test]
fn wrong_arguments_of_memfold_end_it_with_exit_code_2() {
    for arguments in [
        &["no-such-command"][..],
        &[],
        &["vm", "run"],
        &["vm", "run", "--name", "a", "--memory", "many"],
        &["vm", "exec", "a"],
        &["serve", "--store-cap", "-1"],
        &["estimate", "--cpu", "0"],
        &["estimate", "--seconds", "0.5"],
        &["estimate", "--domain-of", "web"],
        &["estimate", "--program", "init", "--one-domain"],
        &["estimate", "--fingerprint", "f"],
        &["estimate", "--key", "k"],
        &["plan", "--ahead", "-1"],
        &["plan", "--place", "one"],
        &["plan", "--place", "one", "two", "--leave", "100"],
    ] {
        let output = run(arguments);
        assert_eq!(code(&output), 2, "{arguments:?}: {}", err(&output));
    }
    refused(
        &run(&["vm", "run", "--name", "a", "--memory", "many"]),
        2,
        &["--memory", "many"],
    );
}

#[test]
fn if_no_daemon_runs_the_error_of_each_command_names_memfold_serve() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    for (command, _, asks) in COMMANDS {
        if asks {
            let arguments = [&["--socket", socket.to_str().unwrap()], command].concat();
            refused(
                &run(&arguments),
                1,
                &["memfold serve", socket.to_str().unwrap()],
            );
        }
    }
}
