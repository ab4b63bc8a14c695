//! Tests of `memfold libvirt` with a fake libvirt. `real/beside/libvirt.rs` uses a real one.

use super::fake_libvirt::FakeLibvirt;
use super::support::{code, err, out, refused};

const DISK: &str = "    <disk type='block' device='disk'/>\n";

/// Shell script that adds a disk to a domain once, as `virsh attach-disk --config` does.
fn attach_disk_once() -> String {
    format!(
        "if ! [ -e attached ]; then\ntouch attached\nsed -i \"s:^  </devices>:{}&:\" web1.xml\nfi\n",
        DISK.replace('\n', "\\n")
    )
}

#[test]
fn a_change_of_another_program_while_a_libvirt_domain_is_enabled_or_disabled_is_kept() {
    for when in ["after-dumpxml", "before-domcapabilities", "after-define"] {
        let libvirt = FakeLibvirt::new();
        libvirt.define("web1", "");
        let before = libvirt.xml("web1");
        libvirt.meanwhile(when, &attach_disk_once());
        let enabled = libvirt.run(&["enable", "web1", "--domain", "shop"]);
        assert_eq!(code(&enabled), 0, "{when}: {}", err(&enabled));
        assert!(libvirt.path("attached").exists(), "{when}");
        let xml = libvirt.xml("web1");
        assert!(xml.contains(DISK), "{when}: {xml}");
        for word in ["memfold-qemu-system-x86_64", "org.memfold.agent.0", "shop"] {
            assert!(xml.contains(word), "{when}: no {word} in {xml}");
        }
        let disabled = libvirt.run(&["disable", "web1"]);
        assert_eq!(code(&disabled), 0, "{when}: {}", err(&disabled));
        assert_eq!(libvirt.xml("web1").replace(DISK, ""), before, "{when}");
        assert!(libvirt.xml("web1").contains(DISK), "{when}");
    }
    let libvirt = FakeLibvirt::new();
    libvirt.define("web1", "");
    let enabled = libvirt.run(&["enable", "web1"]);
    assert_eq!(code(&enabled), 0, "{}", err(&enabled));
    libvirt.meanwhile("after-dumpxml", &attach_disk_once());
    let disabled = libvirt.run(&["disable", "web1"]);
    assert_eq!(code(&disabled), 0, "{}", err(&disabled));
    let xml = libvirt.xml("web1");
    assert!(xml.contains(DISK) && !xml.contains("memfold"), "{xml}");
}

#[test]
fn libvirt_probes_the_wrapper_before_memfold_reads_the_xml_that_it_replaces() {
    let libvirt = FakeLibvirt::new();
    libvirt.define("web1", "");
    let enabled = libvirt.run(&["enable", "web1"]);
    assert_eq!(code(&enabled), 0, "{}", err(&enabled));
    let calls = std::fs::read_to_string(libvirt.path("calls")).unwrap();
    let calls: Vec<&str> = calls
        .lines()
        .map(|l| l.split(' ').next().unwrap())
        .collect();
    let wanted = ["dominfo", "dumpxml", "domcapabilities", "dumpxml", "define"];
    assert_eq!(calls[..5], wanted, "{calls:?}");
}

#[test]
fn memfold_gives_up_when_the_xml_of_a_libvirt_domain_changes_again_and_again() {
    let libvirt = FakeLibvirt::new();
    libvirt.define("web1", "");
    libvirt.meanwhile("after-dumpxml", "echo '<!-- x -->' >> web1.xml\n");
    let words = ["'web1' was changed by another program", "try again"];
    refused(&libvirt.run(&["enable", "web1"]), 1, &words);
    assert!(!libvirt.xml("web1").contains("memfold-qemu"));
}

#[test]
fn libvirt_enable_changes_all_named_domains_although_one_of_them_does_not_exist() {
    let libvirt = FakeLibvirt::new();
    for name in ["a", "c"] {
        libvirt.define(name, "");
    }
    for (command, word) in [("enable", "enabled"), ("disable", "disabled")] {
        let output = libvirt.run(&[command, "a", "typo", "c"]);
        refused(&output, 1, &[&format!("cannot {command} 'typo'")]);
        assert!(!err(&output).contains("'a'"), "{}", err(&output));
        let lines = out(&output);
        for name in ["a", "c"] {
            assert!(lines.contains(&format!("{name}: {word}")), "{lines}");
            let is_on = libvirt.xml(name).contains("memfold-qemu");
            assert_eq!(is_on, command == "enable", "{name}");
        }
    }
}
