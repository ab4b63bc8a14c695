//! Lists the files in `/sys/kernel/mm/ksm`, with the meaning, the unit and the first kernel version
//! of each. `memfold ksm status` and the metrics use this list.
//!
//! Source: `Documentation/admin-guide/mm/ksm.rst`, `mm/ksm.c`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::controls::{CONTROLS, Controls};
use super::error::KsmError;
use super::status::COUNTERS;

/// Role of a file in `/sys/kernel/mm/ksm`: a setting or a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FileRole {
    /// A setting of KSM, which can be written.
    Control,
    /// A counter of KSM, which the kernel updates.
    Counter,
}

/// Contents of a file in `/sys/kernel/mm/ksm`. Most are numbers; a profit may be negative.
/// `advisor_mode` is a word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Value {
    /// Contents of a file that holds one number.
    Number(i64),
    /// Contents of a file that holds anything else, as the kernel writes it.
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

/// One file in `/sys/kernel/mm/ksm` (a setting or counter of KSM), with its present contents and
/// meaning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Entry {
    /// Name of the file in `/sys/kernel/mm/ksm`.
    pub name: String,
    /// Whether the file holds a setting or a counter of KSM.
    pub role: FileRole,
    /// Present contents of the file; null if this kernel lacks the file.
    pub value: Option<Value>,
    /// Unit of the file's value; `?` for a file that this memfold does not know.
    pub unit: String,
    /// Meaning of the file's value, in one line.
    pub meaning: String,
    /// First Linux version that has the file; `?` for a file that this memfold does not know.
    pub since: String,
}

/// Returns all settings and counters with their present values, in the order of ksm.rst. Files that
/// this memfold does not know come last.
pub fn entries(controls: &Controls) -> Result<Vec<Entry>, KsmError> {
    let read = |name: &str| -> Result<Option<Value>, KsmError> {
        let text = controls.text(name)?;
        Ok(text.map(|text| text.parse().map_or(Value::Text(text), Value::Number)))
    };
    let controlled = CONTROLS.iter().map(|file| (FileRole::Control, file));
    let counted = COUNTERS.iter().map(|file| (FileRole::Counter, file));
    let mut found = Vec::new();
    for (role, &[name, unit, since, meaning]) in controlled.chain(counted) {
        found.push(Entry {
            name: name.to_owned(),
            role,
            value: read(name)?,
            unit: unit.to_owned(),
            meaning: meaning.to_owned(),
            since: since.to_owned(),
        });
    }
    for name in controls.names() {
        if found.iter().all(|file| file.name != name) {
            found.push(Entry {
                value: read(&name).unwrap_or(None),
                name,
                role: FileRole::Counter,
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
    fn a_ksm_file_that_the_kernel_lacks_has_no_value_and_an_unknown_ksm_file_is_listed() {
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
    fn memfold_knows_every_ksm_file_of_the_running_kernel() {
        let Ok(entries) = entries(&Controls::default()) else {
            memfold_testkit::skip!("no KSM here");
        };
        let unknown: Vec<_> = entries.iter().filter(|e| e.unit == "?").collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}
