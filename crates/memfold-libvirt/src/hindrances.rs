//! Finds the settings in a libvirt domain's XML that prevent folding of the domain's memory. The
//! operator learns of them when memfold is enabled for the domain, before the domain's next start.
//!
//! For a running VM, the daemon asks QEMU and the kernel instead ([`memfold_vm::conditions`]),
//! because the XML may not show hot-plugged devices, and an option of QEMU can be written in
//! several ways. Source for the elements: <https://libvirt.org/formatdomain.html>.

use memfold_vm::conditions;
use roxmltree::{Document, Node};

use super::xml::XmlError;

/// Name space of QEMU's own arguments in the XML
/// (<https://libvirt.org/kbase/qemu-passthrough-security.html>).
const QEMU: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Settings in a libvirt domain's XML that matter to memfold and are known before the domain
/// starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Foretold {
    /// Settings in the domain's XML that prevent folding of its memory, each as a text with the XML
    /// element; empty: the memory can be folded.
    pub not_folded: Vec<String>,
    /// Settings in the domain's XML that cost the host resources other than memory, such as CPUs
    /// that the guest never yields.
    pub costs: Vec<String>,
}

/// Finds the settings in a domain's XML that prevent folding or that cost the host resources.
pub fn read(xml: &str) -> Result<Foretold, XmlError> {
    let document = Document::parse(xml)?;
    let mut not_folded: Vec<String> = document.descendants().filter_map(hindrance).collect();
    let nodes = document.descendants();
    let nodes = nodes.filter(|node| node.has_tag_name((QEMU, "arg")));
    let arguments: Vec<&str> = nodes.filter_map(|node| node.attribute("value")).collect();
    if arguments.contains(&"-overcommit")
        && arguments.iter().any(|word| word.contains("mem-lock=on"))
    {
        not_folded.push("the VM's RAM is locked (<qemu:arg value='mem-lock=on'>)".into());
    }
    not_folded.sort();
    not_folded.dedup();
    let is_kvm = document.root_element().attribute("type") == Some("kvm");
    let keeps_cpus = is_kvm && conditions::says_cpu_pm(arguments.into_iter());
    let costs = keeps_cpus.then(|| conditions::KEEPS_CPUS.to_owned());
    Ok(Foretold {
        not_folded,
        costs: costs.into_iter().collect(),
    })
}

fn hindrance(node: Node<'_, '_>) -> Option<String> {
    let kind = |key: &str| node.attribute(key).unwrap_or_default();
    let parent = node.parent_element();
    let parent = parent.map_or("", |parent| parent.tag_name().name());
    let name = node.tag_name().name();
    let with = |what: &str, key: &str| format!("{what} (<{name} {key}='{}'>)", kind(key));
    let shared = "the VM's RAM is shared memory";
    let pinned = "a device of the host pins the VM's RAM";
    let accessed = "another process accesses the VM's RAM";
    Some(match (parent, name, kind("type")) {
        ("memoryBacking", "hugepages", _) => "the VM's RAM is in huge pages (<hugepages>)".into(),
        ("memoryBacking", "locked", _) => "the VM's RAM is locked (<locked>)".into(),
        ("memoryBacking", "access", _) if kind("mode") == "shared" => with(shared, "mode"),
        ("memoryBacking", "source", "file" | "memfd") => with("the VM's RAM is a file", "type"),
        ("numa", "cell", _) if kind("memAccess") == "shared" => with(shared, "memAccess"),
        ("domain", "launchSecurity", _) => with("the VM's RAM is encrypted", "type"),
        ("devices", "hostdev", "pci" | "mdev")
        | ("devices", "interface" | "disk", "hostdev" | "vdpa" | "vhostvdpa" | "nvme") => {
            with(pinned, "type")
        }
        ("devices", _, "vhostuser") => with(accessed, "type"),
        ("filesystem", "driver", "virtiofs") => format!("{accessed} (<filesystem>, virtiofs)"),
        ("video", "driver", _) if kind("name") == "vhostuser" => {
            format!("{accessed} (<video>, vhostuser)")
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(inside: &str) -> Vec<String> {
        let found = read(&format!("<domain type='kvm'>{inside}</domain>")).unwrap();
        assert_eq!(found.costs, Vec::<String>::new());
        found.not_folded
    }

    #[test]
    fn in_the_xml_of_a_libvirt_domain_the_qemu_arguments_cpu_pm_and_mem_lock_are_recognised() {
        let with = |kind: &str, value: &str| {
            let xml = format!(
                "<domain type='{kind}' xmlns:qemu='{QEMU}'><qemu:commandline><qemu:arg value='-overcommit'/><qemu:arg value='{value}'/></qemu:commandline></domain>"
            );
            read(&xml).unwrap()
        };
        let found = with("kvm", "cpu-pm=on");
        assert!(found.costs[0].contains("cpu-pm=on"), "{found:?}");
        assert_eq!(found.not_folded, Vec::<String>::new());
        // Under TCG, this option has no effect.
        assert_eq!(with("qemu", "cpu-pm=on"), Foretold::default());
        assert_eq!(with("kvm", "cpu-pm=off,mem-lock=off"), Foretold::default());
        let found = with("kvm", "mem-lock=on");
        assert!(found.not_folded[0].contains("mem-lock=on"), "{found:?}");
    }

    #[test]
    fn an_ordinary_libvirt_domain_has_no_obstacle_to_folding() {
        let found = of(
            "<memoryBacking><source type='anonymous'/><access mode='private'/></memoryBacking>\
             <devices><interface type='network'/><disk type='file'/><hostdev mode='subsystem' type='usb'/>\
             <filesystem type='mount'><driver type='path'/></filesystem></devices>",
        );
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn each_obstacle_to_folding_is_named_with_its_xml_element() {
        for (inside, word) in [
            ("<memoryBacking><hugepages/></memoryBacking>", "<hugepages>"),
            ("<memoryBacking><locked/></memoryBacking>", "<locked>"),
            (
                "<memoryBacking><access mode='shared'/></memoryBacking>",
                "mode='shared'",
            ),
            (
                "<memoryBacking><source type='memfd'/></memoryBacking>",
                "type='memfd'",
            ),
            (
                "<cpu><numa><cell id='0' memAccess='shared'/></numa></cpu>",
                "memAccess",
            ),
            ("<launchSecurity type='sev'/>", "'sev'"),
            ("<launchSecurity type='sev-snp'/>", "'sev-snp'"),
            ("<launchSecurity type='tdx'/>", "'tdx'"),
            (
                "<devices><hostdev mode='subsystem' type='pci'/></devices>",
                "<hostdev type='pci'>",
            ),
            (
                "<devices><hostdev mode='subsystem' type='mdev'/></devices>",
                "'mdev'",
            ),
            (
                "<devices><interface type='hostdev'/></devices>",
                "<interface type='hostdev'>",
            ),
            (
                "<devices><interface type='vhostuser'/></devices>",
                "<interface type='vhostuser'>",
            ),
            ("<devices><interface type='vdpa'/></devices>", "'vdpa'"),
            (
                "<devices><disk type='vhostuser'/></devices>",
                "<disk type='vhostuser'>",
            ),
            ("<devices><disk type='nvme'/></devices>", "'nvme'"),
            (
                "<devices><filesystem type='mount'><driver type='virtiofs'/></filesystem></devices>",
                "virtiofs",
            ),
            (
                "<devices><video><driver name='vhostuser'/></video></devices>",
                "<video>",
            ),
        ] {
            let found = of(inside);
            assert_eq!(found.len(), 1, "{inside}: {found:?}");
            assert!(found[0].contains(word), "{inside}: {found:?}");
        }
        let twice = "<devices><hostdev type='pci'/><hostdev type='pci'/></devices>";
        assert_eq!(of(twice).len(), 1);
    }
}
