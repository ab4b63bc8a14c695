//! Writes the JSON of the agent's reports.
//!
//! A JSON string is Unicode, but a path is a sequence of bytes. A byte outside of UTF-8 is written
//! as the four characters `\xNN` (so `\\xNN` in the JSON text). This form is for people only; no
//! program takes a path from a report.

use std::fmt::Write;

/// A JSON object that is being built.
#[derive(Debug)]
pub struct Object(String);

impl Default for Object {
    fn default() -> Self {
        Self("{".into())
    }
}

impl Object {
    /// Creates an empty object.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the member `key`, whose value is the JSON text `value`.
    #[must_use]
    pub fn raw(mut self, key: &str, value: &str) -> Self {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        let _ = write!(self.0, "{}:{value}", string(key.as_bytes()));
        self
    }

    /// Adds the member `key` with a string as value.
    #[must_use]
    pub fn text(self, key: &str, value: impl AsRef<[u8]>) -> Self {
        self.raw(key, &string(value.as_ref()))
    }

    /// Adds the member `key` with a string as value, or null for `None`.
    #[must_use]
    pub fn maybe(self, key: &str, value: Option<impl AsRef<[u8]>>) -> Self {
        match value {
            Some(value) => self.text(key, value),
            None => self.raw(key, "null"),
        }
    }

    /// Adds the member `key` with a number as value.
    #[must_use]
    pub fn number(self, key: &str, value: u64) -> Self {
        self.raw(key, &value.to_string())
    }

    /// Adds the member `key` with true or false as value.
    #[must_use]
    pub fn flag(self, key: &str, value: bool) -> Self {
        self.raw(key, if value { "true" } else { "false" })
    }

    /// Adds the member `key`, whose value is an array of `items`, which are JSON texts.
    #[must_use]
    pub fn list(self, key: &str, items: impl IntoIterator<Item = String>) -> Self {
        let text = array(items);
        self.raw(key, &text)
    }

    /// Returns the JSON text of the object.
    pub fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// Returns a JSON array of `items`, which are JSON texts.
pub fn array(items: impl IntoIterator<Item = String>) -> String {
    let items: Vec<String> = items.into_iter().collect();
    format!("[{}]", items.join(","))
}

/// Returns `bytes` as a JSON string with its quotes; bytes outside of UTF-8 become `\xNN`.
pub fn string(bytes: &[u8]) -> String {
    let mut out = String::from('"');
    for c in escaped(bytes).chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c < ' ' || c == '\u{7f}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Converts bytes to text; bytes outside of UTF-8 become `\xNN`.
pub fn escaped(bytes: &[u8]) -> String {
    let mut out = String::new();
    for chunk in bytes.utf8_chunks() {
        out.push_str(chunk.valid());
        for byte in chunk.invalid() {
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_agent_writes_a_json_object_with_correct_commas_and_escapes() {
        let text = Object::new()
            .text("a", "x\"\\\n")
            .number("b", 7)
            .maybe("c", None::<&str>)
            .list("d", [string(b"\xff"), Object::new().flag("e", true).end()])
            .end();
        assert_eq!(
            text,
            r#"{"a":"x\"\\\u000a","b":7,"c":null,"d":["\\xff",{"e":true}]}"#
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_written_as_a_valid_json_string(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let parsed: String = serde_json::from_str(&string(&bytes)).unwrap();
            prop_assert_eq!(parsed, escaped(&bytes));
        }
    }
}
