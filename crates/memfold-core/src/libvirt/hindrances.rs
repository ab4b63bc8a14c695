//! What in a domain's XML keeps its memory from being folded: said when it is enabled, and not only after its next start.
//!
//! The daemon asks QEMU and the kernel for the same of a VM that runs ([`crate::vm::conditions`]); what is said here may leave out what was
//! plugged in or typed otherwise. Elements: <https://libvirt.org/formatdomain.html>.

use roxmltree::{Document, Node};

use super::xml::XmlError;

/// Each with the element that has it; empty if nothing in the XML is in the way.
pub fn read(xml: &str) -> Result<Vec<String>, XmlError> {
    let document = Document::parse(xml)?;
    let mut found: Vec<String> = document.descendants().filter_map(hindrance).collect();
    found.sort();
    found.dedup();
    Ok(found)
}

fn hindrance(node: Node<'_, '_>) -> Option<String> {
    let kind = |name| node.attribute(name).unwrap_or_default();
    let parent = node
        .parent_element()
        .map_or("", |parent| parent.tag_name().name());
    let words = match (parent, node.tag_name().name()) {
        ("memoryBacking", "hugepages") => "its RAM is of huge pages (<hugepages>)".into(),
        ("memoryBacking", "locked") => "its RAM is locked (<locked>)".into(),
        ("memoryBacking", "access") if kind("mode") == "shared" => {
            "its RAM is shared memory (<access mode='shared'>)".into()
        }
        ("memoryBacking", "source") if matches!(kind("type"), "file" | "memfd") => {
            format!("its RAM is a file (<source type='{}'>)", kind("type"))
        }
        ("numa", "cell") if kind("memAccess") == "shared" => {
            "its RAM is shared memory (<cell memAccess='shared'>)".into()
        }
        ("domain", "launchSecurity") => {
            format!(
                "its RAM is encrypted (<launchSecurity type='{}'>)",
                kind("type")
            )
        }
        ("devices", "hostdev") if matches!(kind("type"), "pci" | "mdev") => {
            format!(
                "a device of the host pins its RAM (<hostdev type='{}'>)",
                kind("type")
            )
        }
        ("devices", "interface" | "disk")
            if matches!(kind("type"), "hostdev" | "vdpa" | "vhostvdpa" | "nvme") =>
        {
            let name = node.tag_name().name();
            format!(
                "a device of the host pins its RAM (<{name} type='{}'>)",
                kind("type")
            )
        }
        ("devices", _) if kind("type") == "vhostuser" => {
            let name = node.tag_name().name();
            format!("another process reaches its RAM (<{name} type='vhostuser'>)")
        }
        ("filesystem", "driver") if kind("type") == "virtiofs" => {
            "another process reaches its RAM (<filesystem>, virtiofs)".into()
        }
        ("video", "driver") if kind("name") == "vhostuser" => {
            "another process reaches its RAM (<video>, vhostuser)".into()
        }
        _ => return None,
    };
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(inside: &str) -> Vec<String> {
        read(&format!("<domain type='kvm'>{inside}</domain>")).unwrap()
    }

    #[test]
    fn an_ordinary_domain_has_none() {
        let found = of(
            "<memoryBacking><source type='anonymous'/><access mode='private'/></memoryBacking>\
             <devices><interface type='network'/><disk type='file'/><hostdev mode='subsystem' type='usb'/>\
             <filesystem type='mount'><driver type='path'/></filesystem></devices>",
        );
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn each_kind_of_memory_or_device_is_named_with_its_element() {
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
