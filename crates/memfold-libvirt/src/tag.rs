//! The tag that a domain's owner writes into the metadata of the domain's XML, so that the daemon
//! enables the domain by itself.
//!
//! ```text
//!   <metadata> <memfold:vm xmlns:memfold="urn:memfold:libvirt:tag:1" domain="shop"/> </metadata>
//! ```
//! memfold never changes the tag. Its name space differs from that of memfold's mark, because
//! libvirt keeps only one element of each name space in `<metadata>`
//! (<https://libvirt.org/formatdomain.html>, "General metadata").

use roxmltree::{Document, Node};

use super::xml::{self, Mark, XmlError};

/// XML name space of the tag in the metadata of a domain's XML.
pub const NAMESPACE: &str = "urn:memfold:libvirt:tag:1";

/// The owner's wish, in the XML of a libvirt domain, that memfold is enabled for the domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tag {
    /// The domain is to be enabled, in the trust domain with this name.
    Domain(String),
    /// The tag has this error, so it enables nothing.
    Wrong(String),
}

impl Tag {
    /// Reads the tag from a domain's XML; returns `None` if there is none.
    pub fn read(xml: &str) -> Result<Option<Self>, XmlError> {
        Ok(Self::of(&Document::parse(xml)?))
    }

    fn of(document: &Document<'_>) -> Option<Self> {
        let mut children = xml::child(document.root_element(), "metadata")?.children();
        let node = children.find(|node| node.tag_name().namespace() == Some(NAMESPACE))?;
        Some(Self::of_node(node).map_or_else(Self::Wrong, Self::Domain))
    }

    /// Returns the trust domain in a valid tag.
    #[must_use]
    pub fn domain(&self) -> Option<&str> {
        match self {
            Self::Domain(name) => Some(name),
            Self::Wrong(_) => None,
        }
    }

    /// Returns the reason why the tag is wrong; `None` if it is valid.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        match self {
            Self::Domain(_) => None,
            Self::Wrong(why) => Some(why),
        }
    }

    fn of_node(node: Node<'_, '_>) -> Result<String, String> {
        let name = node.tag_name().name();
        if name != "vm" {
            let name: String = name.chars().take(memfold_vm::MAX_NAME).collect();
            return Err(format!("the element is '{name}' and must be 'vm'"));
        }
        let domain = node.attribute("domain");
        let domain = domain.ok_or("it has no attribute 'domain' with the trust domain's name")?;
        memfold_vm::check_name("domain", domain).map_err(|error| error.to_string())?;
        Ok(domain.to_owned())
    }
}

/// What the daemon has to do so that a domain's XML follows its tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing: the XML follows the tag, has none, or the domain was enabled by hand.
    Nothing,
    /// Enable the domain, in the trust domain with this name.
    Enable(String),
    /// Disable the domain.
    Disable,
}

impl Due {
    /// Returns the tag in a domain's XML, and what is to be done about it.
    pub fn read(xml: &str) -> Result<(Option<Tag>, Self), XmlError> {
        let document = Document::parse(xml)?;
        let tag = Tag::of(&document);
        let due = Self::of(tag.as_ref(), Mark::of(&document).as_ref());
        Ok((tag, due))
    }

    fn of(tag: Option<&Tag>, mark: Option<&Mark>) -> Self {
        match (tag, mark) {
            // A domain that was enabled by hand stays as it is.
            (_, Some(mark)) if !mark.by_tag => Self::Nothing,
            (Some(Tag::Domain(name)), Some(mark)) if mark.domain.as_ref() == Some(name) => {
                Self::Nothing
            }
            (Some(Tag::Domain(name)), _) => Self::Enable(name.clone()),
            // A wrong tag names no trust domain, so the domain may not stay in the earlier one.
            (Some(Tag::Wrong(_)) | None, Some(_)) => Self::Disable,
            (Some(Tag::Wrong(_)) | None, None) => Self::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tagged(metadata: &str) -> String {
        format!("<domain type='kvm'><name>web</name><metadata>{metadata}</metadata></domain>")
    }

    fn vm(attributes: &str) -> String {
        tagged(&format!("<m:vm xmlns:m='{NAMESPACE}' {attributes}/>"))
    }

    #[track_caller]
    fn wrong(xml: &str) -> String {
        match Tag::read(xml).unwrap() {
            Some(Tag::Wrong(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_tag_is_read_whatever_its_prefix_and_its_neighbours() {
        let shop = Some(Tag::Domain("shop".into()));
        for xml in [
            vm("domain='shop'"),
            vm("other='1' domain=\"sh&#111;p\""),
            tagged(&format!("<vm xmlns='{NAMESPACE}' domain='shop'>text</vm>")),
            tagged(&format!(
                "<a:vm xmlns:a='urn:memfold:libvirt:1' domain='other'/><m:vm xmlns:m='{NAMESPACE}' domain='shop'/>"
            )),
            // The form in which libvirt stores the XML of a persistent domain.
            format!("<!--\nWARNING: generated\n-->\n\n{}", vm("domain='shop'")),
        ] {
            assert_eq!(Tag::read(&xml).unwrap(), shop, "{xml}");
        }
        for xml in [
            "<domain/>".to_owned(),
            tagged(""),
            tagged("<vm domain='shop'/>"),
            tagged("<a:vm xmlns:a='urn:memfold:libvirt:1' domain='shop' emulator='/q'/>"),
            // An element inside another program's metadata is that program's.
            tagged(&format!(
                "<a:b xmlns:a='urn:a'><m:vm xmlns:m='{NAMESPACE}' domain='shop'/></a:b>"
            )),
            format!("<domain><m:vm xmlns:m='{NAMESPACE}' domain='shop'/></domain>"),
        ] {
            assert_eq!(Tag::read(&xml).unwrap(), None, "{xml}");
        }
    }

    #[test]
    fn a_tag_without_a_valid_trust_domain_is_wrong_and_says_why() {
        assert!(wrong(&vm("")).contains("no attribute 'domain'"));
        assert!(wrong(&vm("domian='shop'")).contains("no attribute 'domain'"));
        for name in ["", "No Good", "a/b", "-a", "&#10;a", "sh\u{f6}p", "$(id)"] {
            let why = wrong(&vm(&format!("domain='{name}'")));
            assert!(why.contains("must be 1 to 64 characters"), "{why}");
        }
        let long = "a".repeat(1 << 20);
        let why = wrong(&vm(&format!("domain='{long}'")));
        assert!(why.len() < 300, "{} bytes", why.len());
        let why = wrong(&tagged(&format!("<{long} xmlns='{NAMESPACE}'/>")));
        assert!(why.contains("must be 'vm'") && why.len() < 300, "{why}");
    }

    #[test]
    fn hostile_xml_gives_an_error_or_no_tag_and_no_panic() {
        for xml in [
            String::new(),
            "<".into(),
            "<domain".into(),
            "\u{0}".into(),
            "<domain><metadata>".into(),
            "<!DOCTYPE d [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;&a;&a;'>]><domain>&b;</domain>"
                .into(),
            "<!DOCTYPE d SYSTEM 'file:///etc/passwd'><domain/>".into(),
            vm("domain='shop' domain='other'"),
            vm("domain='&undefined;'"),
            tagged("<m:vm domain='shop'/>"),
            format!("{}{}", vm("domain='shop'"), vm("domain='shop'")),
            "<a>".repeat(100_000),
        ] {
            assert!(Due::read(&xml).is_err(), "{}", &xml[..xml.len().min(80)]);
        }
        let deep = tagged(&format!(
            "{}{}",
            "<m:a xmlns:m='urn:a'>".repeat(50_000),
            "</m:a>".repeat(50_000)
        ));
        assert_eq!(Due::read(&deep).unwrap(), (None, Due::Nothing));
        let many = tagged(&"<m:a xmlns:m='urn:a'/>".repeat(50_000));
        assert_eq!(Due::read(&many).unwrap(), (None, Due::Nothing));
        let whole = vm("domain='shop'");
        for end in 0..whole.len() {
            assert!(Due::read(&whole[..end]).is_err(), "{end}");
        }
    }

    #[test]
    fn the_tag_decides_unless_the_domain_was_enabled_by_hand() {
        let tag = |name: &str| Some(Tag::Domain(name.into()));
        let wrong = || Some(Tag::Wrong("it is wrong".into()));
        let mark = |by_tag, domain: Option<&str>| {
            let mut mark = Mark::default();
            mark.by_tag = by_tag;
            mark.domain = domain.map(str::to_owned);
            Some(mark)
        };
        let (by_tag, by_hand) = (mark(true, Some("shop")), mark(false, Some("shop")));
        let alone = mark(false, None);
        let enable = |name: &str| Due::Enable(name.into());
        for (tag, mark, due) in [
            (None, None, Due::Nothing),
            (None, by_hand.clone(), Due::Nothing),
            (None, alone.clone(), Due::Nothing),
            (None, by_tag.clone(), Due::Disable),
            (tag("shop"), None, enable("shop")),
            (tag("shop"), by_tag.clone(), Due::Nothing),
            (tag("shop"), mark(true, None), enable("shop")),
            (tag("shop"), by_hand.clone(), Due::Nothing),
            (tag("other"), by_tag.clone(), enable("other")),
            (tag("other"), by_hand.clone(), Due::Nothing),
            (tag("other"), alone, Due::Nothing),
            (wrong(), None, Due::Nothing),
            (wrong(), by_hand, Due::Nothing),
            (wrong(), by_tag, Due::Disable),
        ] {
            assert_eq!(
                Due::of(tag.as_ref(), mark.as_ref()),
                due,
                "{tag:?} {mark:?}"
            );
        }
    }
}
