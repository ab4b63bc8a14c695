//! The meaning, unit and first kernel version of each file in `/sys/kernel/mm/ksm`.
//!
//! Source: `Documentation/admin-guide/mm/ksm.rst`, `mm/ksm.c`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::controls::Controls;
use super::error::KsmError;

/// Role of a file in `/sys/kernel/mm/ksm`: setting or counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A setting, which can be written.
    Control,
    /// A counter of the kernel.
    Counter,
}

/// Contents of a file in `/sys/kernel/mm/ksm`. Most are numbers; a profit may be negative.
/// `advisor_mode` is a word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Value {
    /// The file holds one number.
    Number(i64),
    /// The file holds anything else, as the kernel writes it.
    Text(String),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}

/// One file in `/sys/kernel/mm/ksm` and its present contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Entry {
    /// The kernel's name of the file.
    pub name: String,
    /// Whether the file is a setting or a counter.
    pub role: Role,
    /// Contents of the file; null if this kernel lacks the file.
    pub value: Option<Value>,
    /// Unit of the value.
    pub unit: String,
    /// Meaning of the value.
    pub meaning: String,
    /// First Linux version that has the file.
    pub since: String,
}

/// Settings of Linux 6.18: name, unit, first Linux version that has the setting, meaning.
#[rustfmt::skip] // this is a table
const CONTROLS: [[&str; 4]; 13] = [
    ["run", "state", "2.6.32", "0: ksmd is stopped, merged pages stay merged; 1: ksmd runs; 2: ksmd is stopped and everything was unmerged"],
    ["pages_to_scan", "pages", "2.6.32", "pages that ksmd scans before it sleeps; set by the advisor while one is on"],
    ["sleep_millisecs", "ms", "2.6.32", "how long ksmd sleeps between two batches"],
    ["merge_across_nodes", "0 or 1", "3.9", "1: pages of different NUMA nodes may merge; can be changed only while nothing is merged"],
    ["use_zero_pages", "0 or 1", "4.11", "1: pages of zeroes are mapped to the kernel's zero page instead of being merged with each other"],
    ["max_page_sharing", "mappings", "4.13", "most mappings that share one merged page; further mappings get a copy; can be changed only while nothing is merged"],
    ["stable_node_chains_prune_millisecs", "ms", "4.13", "how often the copies due to max_page_sharing are searched for stale ones"],
    ["smart_scan", "0 or 1", "6.7", "1: pages that did not merge in several passes are skipped in some later ones"],
    ["advisor_mode", "mode", "6.8", "none, or scan-time: the kernel sets pages_to_scan itself after each full scan"],
    ["advisor_max_cpu", "percent of a CPU", "6.8", "most CPU that the advisor lets ksmd use"],
    ["advisor_target_scan_time", "s", "6.8", "time that the advisor wants a full scan to take"],
    ["advisor_min_pages_to_scan", "pages", "6.8", "lowest pages_to_scan that the advisor sets"],
    ["advisor_max_pages_to_scan", "pages", "6.8", "highest pages_to_scan that the advisor sets"],
];

/// Counters of Linux 6.18: name, unit, first Linux version that has the counter, meaning.
#[rustfmt::skip] // this is a table
const COUNTERS: [[&str; 4]; 11] = [
    ["pages_shared", "pages", "2.6.32", "merged pages in memory"],
    ["pages_sharing", "pages", "2.6.32", "further mappings of merged pages: the pages saved"],
    ["pages_unshared", "pages", "2.6.32", "pages whose content was nowhere else, scanned again in each pass"],
    ["pages_volatile", "pages", "2.6.32", "pages that change too fast to be compared with others"],
    ["pages_scanned", "pages, total", "6.6", "pages that ksmd has scanned"],
    ["pages_skipped", "pages, total", "6.7", "pages that smart_scan has skipped"],
    ["full_scans", "passes, total", "2.6.32", "complete passes over all mergeable memory"],
    ["stable_node_chains", "chains", "4.13", "contents with more than one page, because of max_page_sharing"],
    ["stable_node_dups", "pages", "4.13", "pages in these chains"],
    ["ksm_zero_pages", "pages", "6.6", "pages of zeroes that use_zero_pages has mapped to the kernel's zero page"],
    ["general_profit", "bytes", "6.4", "bytes that merging saves less its metadata; while KSM is stopped, ended processes still count"],
];

/// Returns all settings and counters in the order of ksm.rst. Files that this memfold does not know
/// come last.
pub fn entries(controls: &Controls) -> Result<Vec<Entry>, KsmError> {
    let read = |name: &str| -> Result<Option<Value>, KsmError> {
        let text = controls.text(name)?;
        Ok(text.map(|text| text.parse().map_or(Value::Text(text), Value::Number)))
    };
    let controlled = CONTROLS.iter().map(|file| (Role::Control, file));
    let counted = COUNTERS.iter().map(|file| (Role::Counter, file));
    let mut found = Vec::new();
    for (role, [name, unit, since, meaning]) in controlled.chain(counted) {
        found.push(Entry {
            name: (*name).to_owned(),
            role,
            value: read(name)?,
            unit: (*unit).to_owned(),
            meaning: (*meaning).to_owned(),
            since: (*since).to_owned(),
        });
    }
    for name in controls.names() {
        if found.iter().all(|file| file.name != name) {
            found.push(Entry {
                value: read(&name).unwrap_or(None),
                name,
                role: Role::Counter,
                unit: "?".to_owned(),
                meaning: "not known to this memfold".to_owned(),
                since: "?".to_owned(),
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ksm_files_are_left_out_and_unknown_ksm_files_are_listed() {
        let tree = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("run", "1"),
            ("general_profit", "-640"),
            ("advisor_mode", "[none] scan-time"),
            ("of_the_future", "7"),
        ] {
            std::fs::write(tree.path().join(name), format!("{text}\n")).unwrap();
        }
        let entries = entries(&Controls::new(tree.path())).unwrap();
        let value = |name: &str| {
            let entry = entries.iter().find(|e| e.name == name);
            entry.unwrap_or_else(|| panic!("no {name}")).value.clone()
        };
        assert_eq!(value("run"), Some(Value::Number(1)));
        assert_eq!(value("general_profit"), Some(Value::Number(-640)));
        assert_eq!(
            value("advisor_mode"),
            Some(Value::Text("[none] scan-time".into()))
        );
        assert_eq!(value("smart_scan"), None);
        assert_eq!(value("of_the_future"), Some(Value::Number(7)));
        assert_eq!(entries.len(), CONTROLS.len() + COUNTERS.len() + 1);
        let json = serde_json::to_value(&entries[0]).unwrap();
        assert_eq!(json["value"], 1);
        assert_eq!(json["role"], "control");
    }

    #[test]
    fn every_ksm_file_of_the_running_kernel_is_known() {
        let Ok(entries) = entries(&Controls::default()) else {
            memfold_testkit::skip!("no KSM here");
        };
        let unknown: Vec<_> = entries.iter().filter(|e| e.unit == "?").collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}
