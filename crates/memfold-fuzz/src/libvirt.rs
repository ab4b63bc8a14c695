//! Fuzzes what memfold reads and changes of a libvirt domain's XML, and of Proxmox VE's
//! configurations. Whoever may define domains writes these texts.

use std::path::Path;

use memfold_libvirt::{Due, Mark, hindrances, tag, vm_name, wrapper, xml};
use memfold_pve::Node;

use crate::place::Place;
use crate::subject::parts;

const PLAIN: &str = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n  <name>web1</name>\n  <os>\n    <type arch='x86_64' machine='pc-q35-9.2'>hvm</type>\n  </os>\n  <devices>\n    <emulator>/opt/qemu/bin/qemu-system-x86_64</emulator>\n    <controller type='pci' index='0' model='pcie-root'/>\n    <memballoon model='virtio'>\n      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>\n    </memballoon>\n  </devices>\n</domain>\n";

const WRAPPER: &str = "/opt/qemu/bin/memfold-qemu-system-x86_64";

/// Elements that prevent folding, and arguments that cost the host CPUs.
const HINDERED: &str = "<memoryBacking><hugepages/><locked/><access mode='shared'/><source type='memfd'/></memoryBacking><cpu><numa><cell id='0' memAccess='shared'/></numa></cpu><launchSecurity type='sev'/><devices><emulator>/q</emulator><hostdev mode='subsystem' type='pci'/><interface type='vhostuser'/><filesystem type='mount'><driver type='virtiofs'/></filesystem><video><driver name='vhostuser'/></video></devices><qemu:commandline><qemu:arg value='-overcommit'/><qemu:arg value='mem-lock=on,cpu-pm=on'/></qemu:commandline>";

pub fn domains() -> Vec<Vec<u8>> {
    let enabled = xml::enable(PLAIN, Some("shop"), false, Path::new(WRAPPER)).unwrap_or_default();
    let controllers = enabled
        .replace(
            "    <memballoon",
            "    <controller type='pci' index='5' model='pcie-root-port'>\n      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' multifunction='on'/>\n    </controller>\n    <controller type='virtio-serial' index='0'>\n      <address type='pci' domain='0x0000' bus='0x05' slot='0x00'/>\n    </controller>\n    <memballoon",
        )
        .replace(
            "name='org.memfold.agent.0'/>",
            "name='org.memfold.agent.0'/>\n      <address type='virtio-serial' controller='0' bus='0' port='1'/>",
        );
    let noted = xml::note_controllers(&controllers).unwrap_or_default();
    let tag = format!(
        "<metadata><m:vm xmlns:m='{}' domain='shop'/></metadata>\n  <os>",
        tag::NAMESPACE
    );
    let tagged = PLAIN.replace("<os>", &tag);
    let source = "<channel type='unix'><source mode='bind' path='/run/agent'/><target type='virtio' name='org.memfold.agent.0'/></channel>\n  </devices>";
    let running = PLAIN.replace("</devices>", source);
    let hindered = PLAIN.replace("</domain>", "") + HINDERED + "</domain>";
    [
        PLAIN.to_owned(),
        enabled,
        controllers,
        noted,
        tagged,
        running,
        hindered,
    ]
    .map(String::into_bytes)
    .into()
}

pub fn domain(data: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(data);
    let mut found = 0;
    let own = xml::own_emulator(&text).unwrap_or_default();
    let wrapper = &wrapper::of(&own);
    if let Ok(enabled) = xml::enable(&text, Some("shop"), false, wrapper) {
        let mark = Mark::read(&enabled).expect("the XML is valid");
        let mark = mark.expect("an enabled domain has a mark");
        assert_eq!(mark.domain.as_deref(), Some("shop"));
        let noted = xml::note_controllers(&enabled).expect("the XML is valid");
        // The same again changes nothing but the note of what libvirt has added. (The path of a
        // directory, `/bin/`, becomes `/bin`.)
        let again = xml::enable(&enabled, Some("shop"), false, wrapper);
        let is_file =
            wrapper::emulator(wrapper).is_some_and(|path| path.as_os_str() == own.as_os_str());
        assert!(!is_file || again.is_ok_and(|again| again == noted));
        xml::disable(&noted).expect("what was enabled can be disabled");
        found |= 1 | u64::from(mark.channel) << 1 | (mark.controllers.len().min(7) as u64) << 2;
    }
    if let Ok(disabled) = xml::disable(&text) {
        assert_eq!(Mark::read(&disabled).ok(), Some(None));
        found |= 1 << 5 | u64::from(disabled.len() < text.len()) << 6;
    }
    if let Ok((tag, due)) = Due::read(&text) {
        let domain = tag.as_ref().and_then(tag::Tag::domain);
        domain
            .map_or(Ok(()), |name| memfold_vm::check_name("domain", name))
            .expect("a valid name");
        assert!(!matches!(due, Due::Enable(_)) || domain.is_some());
        found |= match (&tag, due) {
            (None, Due::Nothing) => 1,
            (_, Due::Nothing) => 2,
            (_, Due::Enable(_)) => 3,
            (_, Due::Disable) => 4,
        } << 8;
    }
    found |= u64::from(matches!(xml::agent_socket(&text), Ok(Some(_)))) << 12;
    if let Ok(hindered) = hindrances::read(&text) {
        found |= (hindered.not_folded.len().min(15) as u64) << 13;
        found |= (hindered.costs.len() as u64) << 17;
    }
    found |= u64::from(xml::own_emulator(&text).is_ok()) << 19;
    let name: String = text.chars().take(80).collect();
    memfold_vm::check_name("name", &vm_name(&name)).expect("every domain gets a valid name");
    found + 1
}

pub fn configurations() -> Vec<Vec<u8>> {
    vec![
        b"#note\nname: web\nsmbios1: manufacturer=eA==,uuid=7b10d7af-b932,base64=1\n\n[before]\nsmbios1: uuid=old\n\0domain = 'shop'\nuuid = '7b10d7af-b932'\n\x001\n".to_vec(),
        b"name: web\n[a]\nsmbios1: uuid=x\n\0\0nothing".to_vec(),
    ]
}

/// Reads a VM's configuration, memfold's mark and the number of its process.
pub fn configuration(data: &[u8]) -> u64 {
    thread_local! {
        static PLACE: Place = Place::new();
    }
    let [config, mark, pid] = parts(data);
    PLACE.with(|place| {
        place.write("etc/pve/qemu-server/100.conf", config);
        place.write("etc/memfold/pve/100", mark);
        place.write("run/qemu-server/100.pid", pid);
        let node = Node::at(place.path().to_owned());
        assert_eq!(node.vms().ok(), Some(vec![100]));
        assert_eq!(node.marked().ok(), Some(vec![100]));
        // No process of this host is that VM.
        assert_eq!(node.process(100), None);
        let uuid = node
            .config(100)
            .ok()
            .flatten()
            .and_then(|config| config.uuid);
        let mark = node.mark(100).ok().flatten();
        let fits = mark
            .as_ref()
            .map_or(0, |mark| 1 + u64::from(mark.fits(uuid.as_deref())));
        1 + fits + 4 * u64::from(uuid.is_some())
    })
}
