//! Changes the XML of a libvirt domain to enable or disable memfold for the domain. Only the
//! changed elements are edited in the text; every other byte stays as it was.
//!
//! ```text
//!   <metadata> <memfold:vm domain="shop" by="tag" emulator="/usr/bin/qemu-system-x86_64" channel="added" controllers="virtio-serial:0"/> </metadata>
//!   <devices>  <emulator>/usr/bin/memfold-qemu-system-x86_64</emulator>
//!              <channel type='unix'> <target type='virtio' name='org.memfold.agent.0'/> </channel>
//! ```
//! The mark in the metadata records the previous settings and the added elements, so that the
//! change can be undone.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memfold_wire::agent::PORT_NAME;
use roxmltree::{Document, Node};
use serde::{Deserialize, Serialize};

use super::wrapper;

/// XML name space of memfold's mark in the metadata of a domain's XML.
pub const NAMESPACE: &str = "urn:memfold:libvirt:1";

/// Error of reading or changing a domain's XML.
#[derive(Debug, thiserror::Error)]
pub enum XmlError {
    /// The text is not valid XML.
    #[error("cannot parse libvirt's XML of the domain: {0}")]
    Syntax(#[from] roxmltree::Error),
    /// The domain's XML lacks the element with this name.
    #[error("the domain's XML has no element <{0}>")]
    Lacks(&'static str),
    /// The domain has this type, which QEMU does not run.
    #[error("the domain's type is '{0}'; memfold supports QEMU's types 'kvm' and 'qemu'")]
    Type(String),
    /// The guest has this processor architecture, which memfold does not support.
    #[error("the guest's architecture is {0}; memfold supports x86_64")]
    Architecture(String),
    /// The agent's channel in the domain's XML has this type, which the daemon cannot reach.
    #[error(
        "the channel {PORT_NAME} has type '{0}'; make it <channel type='unix'>, or remove the channel"
    )]
    Channel(String),
}

/// memfold's element in the metadata of a libvirt domain's XML. It marks the domain as enabled, and
/// records what is needed to undo memfold's changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Trust domain of the libvirt domain; `None`: its VM shares memory with no other VM.
    pub domain: Option<String>,
    /// Whether memfold was enabled because of the tag in the XML ([`super::Tag`]); false: it was
    /// enabled by hand.
    pub by_tag: bool,
    /// Path of the QEMU program that was the domain's `<emulator>` before memfold was enabled.
    pub emulator: PathBuf,
    /// Whether memfold added the agent's channel to the domain's XML; false: the channel was there.
    pub channel: bool,
    /// Controllers that libvirt added for the agent's channel (`TYPE:INDEX`), and PCI slots that
    /// libvirt made multifunction for these controllers (`multifunction:DOMAIN:BUS:SLOT`).
    pub controllers: BTreeSet<String>,
    /// Controllers and slots before the change, until it is known which ones libvirt has added.
    #[serde(skip)]
    before: Option<BTreeSet<String>>,
}

impl Mark {
    /// Reads memfold's mark from a domain's XML; returns `None` if memfold is not enabled for the
    /// domain.
    pub fn read(xml: &str) -> Result<Option<Self>, XmlError> {
        Ok(Self::of(&Document::parse(xml)?))
    }

    pub(super) fn of(document: &Document<'_>) -> Option<Self> {
        let node = mark_node(document)?;
        let list = |name| {
            let list = node.attribute(name)?.split_whitespace();
            Some(list.map(str::to_owned).collect())
        };
        Some(Self {
            domain: node.attribute("domain").map(str::to_owned),
            by_tag: node.attribute("by") == Some("tag"),
            emulator: node.attribute("emulator")?.into(),
            channel: node.attribute("channel") == Some("added"),
            controllers: list("controllers").unwrap_or_default(),
            before: list("before"),
        })
    }

    /// Adds the controllers that libvirt has added since the change, unless they were recorded
    /// before.
    fn noted(mut self, document: &Document<'_>) -> Self {
        if let Some(before) = self.before.take() {
            self.controllers.extend(&additions(document) - &before);
        }
        self
    }

    fn write(&self) -> String {
        let joined = |list: &BTreeSet<String>| {
            let list: Vec<&str> = list.iter().map(String::as_str).collect();
            list.join(" ")
        };
        let controllers = Some(joined(&self.controllers));
        let emulator = self.emulator.to_string_lossy().into_owned();
        let attributes = [
            ("domain", self.domain.clone()),
            ("by", self.by_tag.then(|| "tag".to_owned())),
            ("emulator", Some(emulator)),
            ("channel", self.channel.then(|| "added".to_owned())),
            ("controllers", controllers.filter(|list| !list.is_empty())),
            ("before", self.before.as_ref().map(joined)),
        ];
        let mut text = format!("<memfold:vm xmlns:memfold=\"{NAMESPACE}\"");
        for (name, value) in attributes {
            if let Some(value) = value {
                let value = escape(&value).replace('"', "&quot;");
                // XML turns these into spaces in the value of an attribute.
                let value = value.replace('\n', "&#10;").replace('\t', "&#9;");
                let value = value.replace('\r', "&#13;");
                text.extend([" ", name, "=\"", &value, "\""]);
            }
        }
        text + "/>"
    }
}

/// Returns the path of the QEMU program of a domain. If the XML names memfold's wrapper script,
/// this is the QEMU that the script starts.
pub fn own_emulator(xml: &str) -> Result<PathBuf, XmlError> {
    let document = Document::parse(xml)?;
    let (_, path) = emulator(&document)?;
    Ok(wrapper::emulator(path).unwrap_or_else(|| path.to_owned()))
}

/// Returns the domain's XML with memfold enabled: `wrapper` as emulator, a channel for the agent,
/// and the trust domain in memfold's mark. `by_tag`: whether the domain's tag names this trust
/// domain.
pub fn enable(
    xml: &str,
    trust_domain: Option<&str>,
    by_tag: bool,
    wrapper: &Path,
) -> Result<String, XmlError> {
    let document = Document::parse(xml)?;
    let root = document.root_element();
    match root.attribute("type") {
        Some("kvm" | "qemu") => {}
        kind => return Err(XmlError::Type(kind.unwrap_or_default().to_owned())),
    }
    let os = child(root, "os").and_then(|os| child(os, "type"));
    match os.and_then(|kind| kind.attribute("arch")) {
        Some("x86_64") => {}
        other => return Err(XmlError::Architecture(other.unwrap_or("?").to_owned())),
    }
    let mut changes = Changes::default();
    let devices = devices(&document).ok_or(XmlError::Lacks("devices"))?;
    let (emulator, now) = emulator(&document)?;
    let mut mark = Mark::of(&document).map_or_else(Mark::default, |mark| mark.noted(&document));
    mark.domain = trust_domain.map(str::to_owned);
    mark.by_tag = by_tag;
    mark.emulator = wrapper::emulator(now).unwrap_or_else(|| now.to_owned());
    if now != wrapper {
        changes.set_emulator(emulator, wrapper);
    }
    match channel(devices).map(|channel| channel.attribute("type").unwrap_or_default()) {
        Some("unix") => {}
        Some(kind) => return Err(XmlError::Channel(kind.to_owned())),
        None => {
            mark.channel = true;
            mark.before = Some(additions(&document));
            let text = format!(
                "\n    <channel type='unix'>\n      <target type='virtio' name='{PORT_NAME}'/>\n    </channel>"
            );
            changes.insert(end_of_content(xml, devices), text);
        }
    }
    put_mark(xml, &document, &mark, &mut changes);
    Ok(changes.apply(xml))
}

/// Returns the domain's XML with a list, in memfold's mark, of the controllers that libvirt added
/// for the agent's channel.
pub fn note_controllers(xml: &str) -> Result<String, XmlError> {
    let document = Document::parse(xml)?;
    let mut changes = Changes::default();
    if let Some(mark) = Mark::of(&document) {
        put_mark(xml, &document, &mark.noted(&document), &mut changes);
    }
    Ok(changes.apply(xml))
}

/// Returns the domain's XML without memfold's changes. Changes that the domain's owner made after
/// memfold was enabled remain.
pub fn disable(xml: &str) -> Result<String, XmlError> {
    let document = Document::parse(xml)?;
    let (emulator, now) = emulator(&document)?;
    let mark = Mark::of(&document).map(|mark| mark.noted(&document));
    let mut changes = Changes::default();
    if let Some(own) = wrapper::emulator(now) {
        let own = mark.as_ref().map_or(own, |mark| mark.emulator.clone());
        changes.set_emulator(emulator, &own);
    }
    if let Some(mark) = mark {
        let devices = devices(&document).ok_or(XmlError::Lacks("devices"))?;
        let mut gone: Vec<Node<'_, '_>> = Vec::new();
        gone.extend(channel(devices).filter(|_| mark.channel));
        // A controller is removed when no device uses it any more. Then the controller to which it
        // was connected may be removed, too.
        loop {
            let unused = controllers(&document).find(|(name, node)| {
                mark.controllers.contains(name)
                    && !gone.contains(node)
                    && !is_used(devices, *node, &gone)
            });
            let Some((_, node)) = unused else { break };
            gone.push(node);
        }
        // What is inside a device that is removed goes with it.
        let stay = functions(&document)
            .filter(|address| !address.ancestors().any(|node| gone.contains(&node)));
        for address in stay {
            let is_ours = mark.controllers.contains(&slot_name(address));
            let attribute = address.attribute_node("multifunction").filter(|_| is_ours);
            if let Some(attribute) = attribute.filter(|_| !shares_slot(devices, address, &gone)) {
                changes.remove(xml, attribute.range());
            }
        }
        for node in gone {
            changes.remove(xml, node.range());
        }
    }
    if let Some(node) = mark_node(&document) {
        let metadata = node.parent_element().unwrap_or(node);
        let alone = metadata.children().filter(Node::is_element).count() == 1;
        changes.remove(xml, if alone { metadata } else { node }.range());
    }
    Ok(changes.apply(xml))
}

pub(super) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|n| n.has_tag_name(name))
}

fn mark_node<'a, 'i>(document: &'a Document<'i>) -> Option<Node<'a, 'i>> {
    let mut children = child(document.root_element(), "metadata")?.children();
    children.find(|n| n.has_tag_name((NAMESPACE, "vm")))
}

fn devices<'a, 'i>(document: &'a Document<'i>) -> Option<Node<'a, 'i>> {
    child(document.root_element(), "devices")
}

/// Returns the element with the emulator, and the path in it.
fn emulator<'a>(document: &'a Document<'_>) -> Result<(Node<'a, 'a>, &'a Path), XmlError> {
    let node = devices(document).and_then(|devices| child(devices, "emulator"));
    let node = node.ok_or(XmlError::Lacks("emulator"))?;
    Ok((node, Path::new(node.text().unwrap_or_default().trim())))
}

/// Returns the path of the Unix socket that libvirt created for the agent's channel; `None` if the
/// XML, which is that of a running domain, has no such socket.
pub fn agent_socket(xml: &str) -> Result<Option<PathBuf>, XmlError> {
    let document = Document::parse(xml)?;
    let source = devices(&document)
        .and_then(channel)
        .and_then(|c| child(c, "source"));
    Ok(source.and_then(|s| s.attribute("path")).map(PathBuf::from))
}

/// Returns the agent's channel; `None` if there is none.
fn channel<'a, 'i>(devices: Node<'a, 'i>) -> Option<Node<'a, 'i>> {
    devices.children().find(|n| {
        let target = n.has_tag_name("channel").then(|| child(*n, "target"));
        target.flatten().and_then(|t| t.attribute("name")) == Some(PORT_NAME)
    })
}

/// Returns all controllers with their names, `TYPE:INDEX`.
fn controllers<'a, 'i>(document: &'a Document<'i>) -> impl Iterator<Item = (String, Node<'a, 'i>)> {
    let nodes = devices(document).into_iter().flat_map(|d| d.children());
    nodes.filter_map(|node| {
        let (kind, index) = (node.attribute("type")?, node.attribute("index")?);
        node.has_tag_name("controller")
            .then(|| (format!("{kind}:{index}"), node))
    })
}

/// Returns the names of everything that libvirt may add for a new device: controllers, and
/// multifunction slots.
fn additions(document: &Document<'_>) -> BTreeSet<String> {
    let controllers = controllers(document).map(|(name, _)| name);
    controllers
        .chain(functions(document).map(slot_name))
        .collect()
}

/// Returns the addresses of devices in multifunction PCI slots.
fn functions<'a, 'i>(document: &'a Document<'i>) -> impl Iterator<Item = Node<'a, 'i>> {
    let nodes = devices(document).into_iter().flat_map(|d| d.descendants());
    nodes.filter(|node| is_pci_address(*node) && node.attribute("multifunction") == Some("on"))
}

fn is_pci_address(node: Node<'_, '_>) -> bool {
    node.has_tag_name("address") && node.attribute("type") == Some("pci")
}

fn slot(address: Node<'_, '_>) -> [Option<u32>; 3] {
    ["domain", "bus", "slot"].map(|name| address.attribute(name).and_then(number))
}

fn slot_name(address: Node<'_, '_>) -> String {
    let [domain, bus, slot] = slot(address).map(Option::unwrap_or_default);
    format!("multifunction:{domain}:{bus}:{slot}")
}

/// Returns whether another device, which stays, is in the PCI slot of an address. `gone`: devices
/// that are removed.
fn shares_slot(devices: Node<'_, '_>, address: Node<'_, '_>, gone: &[Node<'_, '_>]) -> bool {
    addresses(devices, gone)
        .any(|other| other != address && is_pci_address(other) && slot(other) == slot(address))
}

/// Returns the addresses of devices that stay. `gone`: devices that are removed.
fn addresses<'a, 'i>(
    devices: Node<'a, 'i>,
    gone: &[Node<'a, 'i>],
) -> impl Iterator<Item = Node<'a, 'i>> {
    let stay = devices.children().filter(|n| !gone.contains(n));
    let inside = stay.flat_map(|device| device.descendants());
    inside.filter(|node| node.has_tag_name("address"))
}

/// Returns whether a device that stays is connected to a controller. `gone`: devices that are
/// removed.
fn is_used(devices: Node<'_, '_>, controller: Node<'_, '_>, gone: &[Node<'_, '_>]) -> bool {
    let kind = controller.attribute("type").unwrap_or_default();
    // In a PCI address, the field `bus` names the controller; in other addresses, `controller` does
    // (libvirt's formatdomain, "Device Addresses").
    let field = if kind == "pci" { "bus" } else { "controller" };
    let index = controller.attribute("index").and_then(number);
    addresses(devices, gone).any(|address| {
        // Disks on a SCSI controller have addresses of type 'drive'. Other kinds of controllers
        // are not added for a channel.
        let on =
            address.attribute("type") == Some(kind) || !matches!(kind, "pci" | "virtio-serial");
        let is_own = address.parent_element() == Some(controller);
        on && !is_own && address.attribute(field).and_then(number) == index
    })
}

/// Parses a number as libvirt writes it: `5` or `0x05`.
fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn put_mark(xml: &str, document: &Document<'_>, mark: &Mark, changes: &mut Changes) {
    let root = document.root_element();
    match (mark_node(document), child(root, "metadata")) {
        (Some(_), _) if Mark::of(document).as_ref() == Some(mark) => {}
        (Some(node), _) => changes.replace(node.range(), mark.write()),
        // The new element is placed right after the existing ones: text in between would remain
        // when this element is removed.
        (None, Some(metadata)) if metadata.first_element_child().is_some() => {
            let at = end_of_content(xml, metadata);
            changes.insert(at, format!("\n    {}", mark.write()));
        }
        (None, Some(empty)) => changes.replace(empty.range(), metadata_with(mark)),
        (None, None) => {
            let first = root.first_element_child();
            let at = first.map_or(root.range().start, |first| first.range().start);
            changes.insert(at, format!("{}\n  ", metadata_with(mark)));
        }
    }
}

fn metadata_with(mark: &Mark) -> String {
    format!("<metadata>\n    {}\n  </metadata>", mark.write())
}

/// Returns the position after the last child element of `node`.
fn end_of_content(xml: &str, node: Node<'_, '_>) -> usize {
    match node.last_element_child() {
        Some(last) => last.range().end,
        None => xml[node.range()]
            .find('>')
            .map_or(node.range().end, |at| node.range().start + at + 1),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Ranges of the XML text that are replaced, each with its new text.
#[derive(Default)]
struct Changes(Vec<(Range<usize>, String)>);

impl Changes {
    fn replace(&mut self, range: Range<usize>, text: String) {
        self.0.push((range, text));
    }

    fn set_emulator(&mut self, node: Node<'_, '_>, path: &Path) {
        let path = escape(&path.to_string_lossy());
        self.replace(node.range(), format!("<emulator>{path}</emulator>"));
    }

    fn insert(&mut self, at: usize, text: String) {
        self.replace(at..at, text);
    }

    /// Removes a range, and the space before it, which was added together with it.
    fn remove(&mut self, xml: &str, range: Range<usize>) {
        let start = xml[..range.start].trim_end().len();
        self.replace(start..range.end, String::new());
    }

    fn apply(mut self, xml: &str) -> String {
        self.0.sort_by_key(|(range, _)| range.start);
        let mut text = xml.to_owned();
        for (range, with) in self.0.iter().rev() {
            text.replace_range(range.clone(), with);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = r"<domain type='kvm'>
  <name>web1</name>
  <os>
    <type arch='x86_64' machine='pc-q35-9.2'>hvm</type>
  </os>
  <devices>
    <emulator>/opt/qemu/bin/qemu-system-x86_64</emulator>
    <controller type='pci' index='0' model='pcie-root'/>
    <memballoon model='virtio'>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
    </memballoon>
  </devices>
</domain>
";
    const WRAPPER: &str = "/opt/qemu/bin/memfold-qemu-system-x86_64";

    fn enabled(xml: &str, domain: Option<&str>) -> String {
        enable(xml, domain, false, Path::new(WRAPPER)).unwrap()
    }

    /// Adds controllers as libvirt does on q35: one for the agent's channel, on a PCI port that is
    /// also new.
    fn with_controllers(xml: &str) -> String {
        xml.replace(
            "    <memballoon",
            "    <controller type='pci' index='5' model='pcie-root-port'>\n      <address type='pci' domain='0x0000' bus='0x00' slot='0x02'/>\n    </controller>\n    <controller type='virtio-serial' index='0'>\n      <address type='pci' domain='0x0000' bus='0x05' slot='0x00'/>\n    </controller>\n    <memballoon",
        )
        .replace(
            "name='org.memfold.agent.0'/>",
            "name='org.memfold.agent.0'/>\n      <address type='virtio-serial' controller='0' bus='0' port='1'/>",
        )
    }

    #[test]
    fn libvirt_disable_restores_the_domain_xml_byte_for_byte() {
        for before in [
            PLAIN.to_owned(),
            PLAIN.replace("  <os>", "  <metadata>\n    <a:b xmlns:a=\"u\" c='d'>  x\n</a:b>\n  </metadata>\n  <os>"),
            // The channel uses a port of the owner's, which stays.
            PLAIN.replace("  </devices>", &format!("    <channel type='unix'><target type='virtio' name='{PORT_NAME}'/></channel>\n  </devices>")),
            PLAIN.replace("/opt/qemu/bin/", "/opt/q &amp; a/"),
        ] {
            let own = own_emulator(&before).unwrap();
            let wrapper = wrapper::of(&own);
            let on = enable(&before, Some("shop"), false, &wrapper).unwrap();
            assert_ne!(on, before);
            assert_eq!(own_emulator(&on).unwrap(), own);
            let noted = note_controllers(&on).unwrap();
            assert_eq!(enable(&on, Some("shop"), false, &wrapper).unwrap(), noted);
            assert_eq!(enable(&noted, Some("shop"), false, &wrapper).unwrap(), noted);
            assert_eq!(disable(&noted).unwrap(), before);
            let mark = Mark::read(&on).unwrap().unwrap();
            assert_eq!(mark.domain.as_deref(), Some("shop"));
            assert_eq!(mark.emulator, own);
            assert_eq!(disable(&on).unwrap(), before);
            assert_eq!(disable(&before).unwrap(), before);
            let alone = enable(&on, None, false, &wrapper).unwrap();
            assert_eq!(Mark::read(&alone).unwrap().unwrap().domain, None);
            assert_eq!(disable(&alone).unwrap(), before);
        }
        assert_eq!(Mark::read(PLAIN).unwrap(), None);
    }

    #[test]
    fn disable_keeps_the_tag_of_the_owner_and_removing_the_tag_keeps_the_mark() {
        let tag = format!(
            "<a:vm xmlns:a=\"{}\" domain='shop'/>",
            super::super::tag::NAMESPACE
        );
        let metadata = format!("<metadata>\n    {tag}\n  </metadata>\n  ");
        let before = PLAIN.replace("<os>", &format!("{metadata}<os>"));
        let on = enable(&before, Some("shop"), true, Path::new(WRAPPER)).unwrap();
        assert!(on.contains(&tag));
        let mark = Mark::read(&on).unwrap().unwrap();
        assert_eq!((mark.domain.as_deref(), mark.by_tag), (Some("shop"), true));
        assert_eq!(disable(&on).unwrap(), before);
        // The owner changes and removes the tag.
        let other = on.replace("'shop'", "'other'");
        let other = enable(&other, Some("other"), true, Path::new(WRAPPER)).unwrap();
        let mark = Mark::read(&other).unwrap().unwrap();
        assert_eq!((mark.domain.as_deref(), mark.by_tag), (Some("other"), true));
        let untagged = on.replace(&format!("{tag}\n    "), "");
        assert_ne!(untagged, on);
        assert_eq!(Mark::read(&untagged).unwrap(), Mark::read(&on).unwrap());
        assert_eq!(disable(&untagged).unwrap(), PLAIN);
    }

    #[test]
    fn the_agent_socket_path_is_read_from_the_xml_of_a_running_domain() {
        let on = enabled(PLAIN, None);
        assert_eq!(agent_socket(&on).unwrap(), None);
        let target = format!("<target type='virtio' name='{PORT_NAME}'");
        let path = "/run/libvirt/qemu/channel/1-web/agent";
        let live = on.replace(
            &target,
            &format!("<source mode='bind' path='{path}'/>\n      {target}"),
        );
        assert_ne!(live, on);
        assert_eq!(agent_socket(&live).unwrap(), Some(PathBuf::from(path)));
        assert_eq!(agent_socket(PLAIN).unwrap(), None);
    }

    #[test]
    fn libvirt_disable_removes_added_controllers_unless_another_device_uses_them() {
        let after = with_controllers(&enabled(PLAIN, None));
        let noted = note_controllers(&after).unwrap();
        // The daemon that was to record the controllers died before; the next one records them.
        assert_eq!(enabled(&after, None), noted);
        assert_eq!(disable(&after).unwrap(), PLAIN);
        let mark = Mark::read(&noted).unwrap().unwrap();
        let list: Vec<&str> = mark.controllers.iter().map(String::as_str).collect();
        assert_eq!(list, ["pci:5", "virtio-serial:0"]);
        assert_eq!(disable(&noted).unwrap(), PLAIN);
        // When the domain is enabled again, a controller that the owner has added since is not
        // taken for one of libvirt's.
        let more = noted.replace(
            "  </devices>",
            "    <controller type='scsi' index='0'/>\n  </devices>",
        );
        assert_eq!(note_controllers(&enabled(&more, None)).unwrap(), more);
        assert!(disable(&more).unwrap().contains("type='scsi'"));
        // A channel of another program uses the controller, which uses the PCI port.
        let guest_agent = "    <channel type='unix'>\n      <target type='virtio' name='org.qemu.guest_agent.0'/>\n      <address type='virtio-serial' controller='0' bus='0' port='2'/>\n    </channel>\n  </devices>";
        let used = disable(&noted.replace("  </devices>", guest_agent)).unwrap();
        assert!(used.contains("'virtio-serial' index='0'") && used.contains("index='5'"));
        assert!(!used.contains("memfold"), "{used}");
        let on_port = "    <rng><address type='pci' bus='0x05' slot='0x01'/></rng>\n  </devices>";
        let used = disable(&noted.replace("  </devices>", on_port)).unwrap();
        assert!(
            used.contains("index='5'") && !used.contains("virtio-serial"),
            "{used}"
        );
    }

    #[test]
    fn libvirt_disable_makes_a_pci_slot_single_function_again_if_libvirt_changed_it() {
        let port = |index: u32, function: u32, more: &str| {
            format!(
                "    <controller type='pci' index='{index}' model='pcie-root-port'>\n      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x{function}'{more}/>\n    </controller>\n"
            )
        };
        // The only existing port is used.
        let before = PLAIN.replace("    <memballoon", &(port(1, 0, "") + "    <memballoon"));
        let on = with_controllers(&enabled(&before, None))
            .replace(
                "function='0x0'/>\n    </controller>",
                "function='0x0' multifunction='on'/>\n    </controller>",
            )
            .replace(
                "bus='0x00' slot='0x02'/>",
                "bus='0x00' slot='0x02' function='0x1'/>",
            );
        assert!(on.contains("multifunction='on'") && on.contains("function='0x1'"));
        let noted = note_controllers(&on).unwrap();
        assert_eq!(disable(&on).unwrap(), before);
        assert_eq!(disable(&noted).unwrap(), before);
        // Since then, the owner has added another function to the slot.
        let more = noted.replace("  </devices>", &(port(9, 4, "") + "  </devices>"));
        let off = disable(&more).unwrap();
        assert!(
            off.contains("multifunction='on'") && !off.contains("function='0x1'"),
            "{off}"
        );
        // A slot that was multifunction before stays so.
        let before = before.replace(
            "function='0x0'/>\n    </controller>",
            "function='0x0' multifunction='on'/>\n    </controller>",
        );
        let noted = note_controllers(&with_controllers(&enabled(&before, None))).unwrap();
        assert_eq!(disable(&noted).unwrap(), before);
    }

    #[test]
    fn libvirt_disable_removes_an_added_controller_whose_own_slot_is_multifunction() {
        let on = with_controllers(&enabled(PLAIN, None)).replace(
            "bus='0x00' slot='0x02'/>",
            "bus='0x00' slot='0x02' multifunction='on'/>",
        );
        assert!(on.contains("multifunction='on'"));
        assert_eq!(disable(&on).unwrap(), PLAIN);
    }

    #[test]
    fn libvirt_disable_keeps_an_emulator_that_the_owner_set_after_libvirt_enable() {
        let on = enabled(PLAIN, Some("shop"));
        let other = on.replace(WRAPPER, "/usr/bin/qemu-system-x86_64");
        let off = disable(&other).unwrap();
        assert_eq!(off, PLAIN.replace("/opt/qemu/bin/", "/usr/bin/"));
        // Without the mark, the emulator's name reveals that the domain is enabled.
        let bare = PLAIN.replace("qemu-system", "memfold-qemu-system");
        assert_eq!(disable(&bare).unwrap(), PLAIN);
    }

    #[test]
    fn libvirt_domains_with_an_unsupported_type_architecture_or_xml_are_refused() {
        let refused = |from: &str, to: &str| {
            let xml = PLAIN.replace(from, to);
            enable(&xml, None, false, Path::new(WRAPPER))
                .unwrap_err()
                .to_string()
        };
        assert!(refused("'kvm'", "'lxc'").contains("'lxc'"));
        assert!(refused("x86_64'", "aarch64'").contains("aarch64"));
        assert!(refused("emulator>", "emulated>").contains("<emulator>"));
        assert!(refused("</domain>", "").contains("cannot parse"));
        let tcp = format!(
            "<channel type='tcp'><target type='virtio' name='{PORT_NAME}'/></channel>\n  </devices>"
        );
        assert!(refused("</devices>", &tcp).contains("'tcp'"));
    }
}
