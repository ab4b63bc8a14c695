//! Tests of `memfold libvirt enable` and `disable` on domains of a real libvirtd that are never
//! started: the output, and the restored XML.

use std::path::Path;

use super::libvirt::{Cli, place};
use super::libvirt_host::{self as libvirt, Host};
use crate::support;

/// Returns the XML of a q35 domain with this many disks, and with more elements `inside`.
pub fn domain(place: &Path, name: &str, disks: usize, inside: &str) -> String {
    let disk = |number: usize| {
        let letter = char::from(b'a' + u8::try_from(number).unwrap());
        format!(
            "<disk type='file'><driver name='qemu' type='raw'/><source file='/nowhere/{number}'/><target dev='vd{letter}' bus='virtio'/></disk>"
        )
    };
    format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='q35'>hvm</type></os>{inside}\
         <devices><emulator>{}</emulator>{}</devices></domain>",
        libvirt::emulator(place).display(),
        (0..disks).map(disk).collect::<String>()
    )
}

/// Returns XML from libvirt without the root port that libvirt keeps free; if one port is left, it
/// is not multifunction.
fn without_free_port(xml: &str) -> String {
    let port = "    <controller type='pci' index=";
    let end = "</controller>\n";
    let begin = xml.rfind(port).unwrap();
    let length = xml[begin..].find(end).unwrap() + end.len();
    assert!(
        xml[begin..begin + length].contains("pcie-root-port"),
        "{xml}"
    );
    let xml = format!("{}{}", &xml[..begin], &xml[begin + length..]);
    if xml.matches("model='pcie-root-port'").count() == 1 {
        return xml.replace(" multifunction='on'", "");
    }
    xml
}

/// Defines a domain in libvirt, and returns its XML.
fn define(host: &Host, place: &Path, name: &str, xml: &str) -> String {
    let file = place.join("domain.xml");
    std::fs::write(&file, xml).unwrap();
    host.ask(&["define", file.to_str().unwrap()]);
    host.xml(name)
}

#[test]
fn libvirt_enable_works_without_a_free_pci_port_and_libvirt_disable_restores_the_xml() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    if !libvirt::is_there() {
        return;
    }
    let place = place();
    let place = place.path();
    let host = Host::start(place, "host", 3);
    let cli = Cli {
        host: &host,
        place,
        state: &place.join("state"),
    };
    let (mut adds_port, mut adds_function) = (false, false);
    let few = "<controller type='usb' model='none'/><memballoon model='none'/>";
    for disks in [1, 2, 8] {
        let name = format!("disks{disks}");
        let xml =
            domain(place, &name, disks, "").replace("</devices>", &format!("{few}</devices>"));
        let roomy = define(&host, place, &name, &xml);
        let before = define(&host, place, &name, &without_free_port(&roomy));
        cli.said(&["libvirt", "enable", &name]);
        let enabled = host.xml(&name);
        let has_more = |word: &str| enabled.matches(word).count() > before.matches(word).count();
        adds_port |= has_more("model='pcie-root-port'");
        adds_function |= has_more("multifunction='on'");
        cli.said(&["libvirt", "disable", &name]);
        assert_eq!(host.xml(&name), before, "{disks} disks");
    }
    assert!(adds_port && adds_function, "{adds_port} {adds_function}");

    for (name, inside, words) in [
        (
            "huge",
            "<memoryBacking><hugepages/></memoryBacking>",
            &["the VM's RAM is in huge pages (<hugepages"][..],
        ),
        (
            "shared",
            "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>",
            &["the VM's RAM is a file", "the VM's RAM is shared memory"],
        ),
        (
            "locked",
            "<memtune><hard_limit unit='GiB'>1</hard_limit></memtune><memoryBacking><locked/></memoryBacking>",
            &["the VM's RAM is locked"],
        ),
    ] {
        let before = define(&host, place, name, &domain(place, name, 1, inside));
        let said = cli.said(&["libvirt", "enable", name]);
        for word in words {
            assert!(said.contains(&format!("not folded: {word}")), "{said}");
        }
        cli.said(&["libvirt", "disable", name]);
        assert_eq!(host.xml(name), before, "{name}");
    }
}
