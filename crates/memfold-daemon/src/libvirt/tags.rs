//! Enables and disables libvirt domains as the tag in their XML says ([`memfold_libvirt::Tag`]).
//!
//! 1. A round compares the versions of the files in which libvirt stores its domains.
//! 2. A new version is read. It shows whether something is to be done, and whether the tag is
//!    wrong.
//! 3. If something is to be done, libvirt is asked for the XML and gets the changed XML. This
//!    changes the file, so the next round checks the result.
//!
//! Whether it succeeds or not, the same change is repeated only after a pause that grows, so that
//! memfold and another program that undoes the change do not alternate quickly.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use memfold_libvirt::{Change, Due, LibvirtError, Stored, Tag, Version};
use tracing::{debug, info, warn};

use super::attempts::Attempts;

/// What is known about the tags of all persistent libvirt domains, by the domain's name.
#[derive(Debug, Default)]
pub(super) struct Tags(BTreeMap<String, KnownXml>);

/// What is known about the XML of one domain.
#[derive(Debug)]
struct KnownXml {
    /// The version that was read last; `None`: none was.
    version: Option<Version>,
    due: Due,
    attempts: Attempts,
    /// Reason why the tag is wrong, which was logged; `None`: the tag is not wrong.
    problem: Option<String>,
}

impl Default for KnownXml {
    fn default() -> Self {
        Self {
            version: None,
            due: Due::Nothing,
            attempts: Attempts::new(None),
            problem: None,
        }
    }
}

impl Tags {
    /// Looks for changed files in `directory`, and calls `follow` with the name of each domain that
    /// does not follow its tag and whose next attempt is due. `clock` returns the present time.
    pub fn look(
        &mut self,
        directory: &Path,
        clock: impl Fn() -> Instant,
        follow: impl Fn(&str) -> Result<Option<Change>, LibvirtError>,
    ) {
        let stored = Stored::all(directory).unwrap_or_else(|error| {
            debug!(%error, "cannot list the XML files of libvirt's domains");
            Vec::new()
        });
        self.0
            .retain(|domain, _| stored.iter().any(|file| file.domain == *domain));
        for file in &stored {
            let known = self.0.entry(file.domain.clone()).or_default();
            if known.version != Some(file.version) {
                known.read(file, clock());
            }
            if known.attempts.is_due(clock()) {
                let result = follow(&file.domain);
                // If libvirt does not answer, an attempt lasts minutes.
                known.note(&file.domain, clock(), result);
            }
        }
    }
}

impl KnownXml {
    fn read(&mut self, file: &Stored, now: Instant) {
        let libvirt = &file.domain;
        let xml = match file.read() {
            Ok(xml) => xml,
            Err(error) => {
                debug!(libvirt, %error, "cannot read the libvirt domain's file; retrying");
                return;
            }
        };
        let (tag, due) = Due::read(&xml).unwrap_or_else(|error| {
            debug!(libvirt, %error, "cannot parse the libvirt domain's file");
            (None, Due::Nothing)
        });
        self.version = Some(file.version);
        let problem = tag.as_ref().and_then(Tag::problem);
        if let Some(why) = problem.filter(|_| self.problem.as_deref() != problem) {
            warn!(
                libvirt,
                why,
                "tag of the libvirt domain is wrong, so it does not enable the domain; correct the tag (virsh edit)"
            );
        }
        self.problem = problem.map(str::to_owned);
        if due != self.due {
            let is_needed = due != Due::Nothing;
            self.attempts = Attempts::new(is_needed.then_some(now));
            self.due = due;
        }
    }

    fn note(&mut self, libvirt: &str, now: Instant, result: Result<Option<Change>, LibvirtError>) {
        let is_third = self.attempts.failed(now);
        match result {
            Ok(None) => debug!(libvirt, "the libvirt domain follows its tag already"),
            Ok(Some(change)) => {
                if let Some(trust_domain) = change.trust_domain {
                    let not_folded = change.not_folded.join("; ");
                    info!(
                        libvirt,
                        trust_domain,
                        not_folded,
                        "libvirt domain enabled by its tag, from its next start"
                    );
                } else {
                    info!(
                        libvirt,
                        "libvirt domain disabled, from its next start: it has no valid tag any more"
                    );
                }
            }
            Err(error) if is_third => warn!(
                libvirt,
                error = &error as &dyn std::error::Error,
                "cannot enable or disable the libvirt domain as its tag says; the daemon keeps retrying, at intervals of at most 2 minutes"
            ),
            Err(error) => debug!(
                libvirt,
                error = &error as &dyn std::error::Error,
                "cannot enable or disable the libvirt domain as its tag says; retrying"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::time::Duration;

    use memfold_libvirt::tag::NAMESPACE;

    const MARK: &str = "urn:memfold:libvirt:1";

    /// A directory with the file of one domain, and the calls that a look made.
    struct Bed {
        place: tempfile::TempDir,
        tags: Tags,
        calls: RefCell<Vec<String>>,
        now: Instant,
    }

    impl Bed {
        fn new() -> Self {
            Self {
                place: tempfile::tempdir().unwrap(),
                tags: Tags::default(),
                calls: RefCell::default(),
                now: Instant::now(),
            }
        }

        /// Stores a new file, as libvirt does.
        fn define(&self, metadata: &str) {
            let new = self.place.path().join("web.xml.new");
            let xml = format!("<domain><metadata>{metadata}</metadata></domain>");
            std::fs::write(&new, xml).unwrap();
            std::fs::rename(new, self.place.path().join("web.xml")).unwrap();
        }

        /// Looks after `seconds`, and returns how many domains were to be changed. Each change
        /// fails.
        fn look(&mut self, seconds: u64) -> usize {
            self.now += Duration::from_secs(seconds);
            self.calls.borrow_mut().clear();
            let now = self.now;
            self.tags.look(
                self.place.path(),
                || now,
                |domain| {
                    self.calls.borrow_mut().push(domain.to_owned());
                    Err(LibvirtError::Transient(domain.to_owned()))
                },
            );
            let calls = self.calls.borrow();
            assert!(calls.iter().all(|domain| domain == "web"), "{calls:?}");
            calls.len()
        }

        fn problem(&self) -> Option<&str> {
            self.tags.0["web"].problem.as_deref()
        }
    }

    fn tag(attributes: &str) -> String {
        format!("<m:vm xmlns:m='{NAMESPACE}' {attributes}/>")
    }

    #[test]
    fn a_failed_enable_is_retried_after_pauses_that_grow_to_two_minutes() {
        let mut bed = Bed::new();
        assert_eq!(bed.look(2), 0);
        bed.define("");
        assert_eq!(bed.look(2), 0);
        bed.define(&tag("domain='shop'"));
        assert_eq!(bed.look(2), 1);
        for pause in [2, 4, 8, 16, 32, 64, 120, 120] {
            // Another version that wants the same change does not shorten the pause.
            bed.define(&tag("domain='shop' again='1'"));
            assert_eq!(bed.look(pause - 1), 0, "{pause} s");
            assert_eq!(bed.look(1), 1, "{pause} s");
        }
        bed.define(&tag("domain='other'"));
        assert_eq!(bed.look(2), 1);
        assert_eq!(bed.look(2), 1);
        // The domain follows its tag.
        let mark = format!("<a:vm xmlns:a='{MARK}' domain='other' by='tag' emulator='/q'/>");
        bed.define(&(tag("domain='other'") + &mark));
        assert_eq!(bed.look(600), 0);
        // The tag is removed: the domain is to be disabled.
        bed.define(&mark);
        assert_eq!(bed.look(2), 1);
        // The domain is undefined.
        std::fs::remove_file(bed.place.path().join("web.xml")).unwrap();
        assert_eq!(bed.look(600), 0);
        assert_eq!(bed.tags.0.len(), 0);
    }

    #[test]
    fn a_domain_enabled_by_hand_is_left_alone_whatever_its_tag_says() {
        let mut bed = Bed::new();
        let mark = format!("<a:vm xmlns:a='{MARK}' domain='hand' emulator='/q'/>");
        for tag in [String::new(), tag("domain='shop'"), tag("")] {
            bed.define(&(tag + &mark));
            assert_eq!(bed.look(600), 0);
        }
    }

    #[test]
    fn a_wrong_tag_changes_nothing_and_its_problem_is_noted_until_it_is_corrected() {
        let mut bed = Bed::new();
        bed.define(&tag("domain='No Good'"));
        assert_eq!(bed.look(2), 0);
        assert!(bed.problem().unwrap().contains("No Good"));
        bed.define(&tag("domain='No Good' other='1'"));
        assert_eq!(bed.look(2), 0);
        assert!(bed.problem().is_some());
        bed.define(&tag("domain='good'"));
        assert_eq!(bed.look(2), 1);
        assert_eq!(bed.problem(), None);
        // A file that is no XML changes nothing.
        std::fs::write(bed.place.path().join("web.xml"), "<domain><metadata>").unwrap();
        assert_eq!(bed.look(600), 0);
    }
}
