//! Parses and writes the value of an option on a QEMU command line: `kind,key=value,...` (a comma
//! in a value is doubled), or JSON.

use serde_json::{Map, Value as Json};

use crate::qemu_line::escape_text;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Value {
    /// Key of the first word, which is written without a key.
    implied: &'static str,
    is_json: bool,
    pairs: Map<String, Json>,
}

impl Value {
    /// Parses a value; `None` if the text is in neither syntax.
    pub(crate) fn parse(implied: &'static str, text: &str) -> Option<Self> {
        if text.starts_with('{') {
            return Some(Self {
                implied,
                is_json: true,
                pairs: serde_json::from_str(text).ok()?,
            });
        }
        let mut pairs = Map::new();
        for (number, part) in parts(text).into_iter().enumerate() {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None if number == 0 => (implied.to_owned(), part),
                // Old syntax for a flag: `-chardev socket,server,nowait`.
                None => (part, "on".to_owned()),
            };
            add(&mut pairs, key, value);
        }
        Some(Self {
            implied,
            is_json: false,
            pairs,
        })
    }

    /// Returns a key's value if it is a string. If the key occurs several times, returns the last
    /// value.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        match self.pairs.get(key)? {
            Json::Array(words) if !self.is_json => words.last()?.as_str(),
            other => other.as_str(),
        }
    }

    /// Returns all values of a key that may occur several times. In JSON, they are a list of
    /// strings or of `{"str": STRING}`.
    pub(crate) fn all(&self, key: &str) -> Vec<String> {
        let word = |value: &Json| Some(value.as_str().or(value["str"].as_str())?.to_owned());
        match self.pairs.get(key) {
            Some(Json::Array(words)) => words.iter().filter_map(word).collect(),
            Some(other) => word(other).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Returns the value of the implied key.
    pub(crate) fn kind(&self) -> &str {
        self.get(self.implied).unwrap_or_default()
    }

    /// Returns a key's value as text, whether it is a string or a number.
    pub(crate) fn text(&self, key: &str) -> String {
        match (self.get(key), self.pairs.get(key)) {
            (Some(word), _) => word.to_owned(),
            (None, Some(other)) => other.to_string(),
            (None, None) => String::new(),
        }
    }

    pub(crate) fn set(&mut self, key: &str, value: &str) {
        self.pairs.insert(key.to_owned(), value.into());
    }

    /// Sets a flag or number, which JSON has as such; otherwise it is written as `text`.
    pub(crate) fn set_typed(&mut self, key: &str, value: impl Into<Json>, text: &str) {
        let value = if self.is_json {
            value.into()
        } else {
            text.into()
        };
        self.pairs.insert(key.to_owned(), value);
    }

    /// Adds a value to a key that may occur several times.
    pub(crate) fn push(&mut self, key: &str, value: &str) {
        if !self.is_json {
            add(&mut self.pairs, key.to_owned(), value.to_owned());
            return;
        }
        let empty = || Json::Array(Vec::new());
        if let Json::Array(words) = self.pairs.entry(key).or_insert_with(empty) {
            words.push(serde_json::json!({ "str": value }));
        }
    }

    /// Removes the keys for which `unwanted` returns true.
    pub(crate) fn drop_keys(&mut self, unwanted: impl Fn(&str) -> bool) {
        self.pairs.retain(|key, _| !unwanted(key));
    }

    /// Returns whether a key's value is true (`on`, `yes`, `true` or `y`).
    pub(crate) fn is_on(&self, key: &str) -> bool {
        match self.pairs.get(key) {
            Some(Json::Bool(is_on)) => *is_on,
            _ => matches!(self.get(key), Some("on" | "yes" | "true" | "y")),
        }
    }

    /// Calls `change` with every string in the value and its key (for nested values, the innermost
    /// key), and replaces each string for which `change` returns another one. Returns whether there
    /// was one.
    pub(crate) fn change_strings<E>(
        &mut self,
        mut change: impl FnMut(&str, &str) -> Result<Option<String>, E>,
    ) -> Result<bool, E> {
        let mut is_changed = false;
        for (key, value) in &mut self.pairs {
            is_changed |= change_one(key, value, &mut change)?;
        }
        Ok(is_changed)
    }

    /// Writes the value in QEMU's syntax.
    pub(crate) fn render(&self) -> String {
        if self.is_json {
            return Json::Object(self.pairs.clone()).to_string();
        }
        let text = |value: &Json| {
            let word = value.as_str().map_or_else(|| value.to_string(), Into::into);
            escape_text(&word)
        };
        let first = self.pairs.get(self.implied).map(text);
        let rest = self.pairs.iter().filter(|(key, _)| *key != self.implied);
        let rest = rest.flat_map(|(key, value)| {
            let words = value
                .as_array()
                .map_or(std::slice::from_ref(value), Vec::as_slice);
            words
                .iter()
                .map(move |word| format!("{key}={}", text(word)))
        });
        first.into_iter().chain(rest).collect::<Vec<_>>().join(",")
    }
}

/// Adds a pair. If the key exists, it keeps both values.
fn add(pairs: &mut Map<String, Json>, key: String, value: String) {
    match pairs.get_mut(&key) {
        None => drop(pairs.insert(key, value.into())),
        Some(Json::Array(words)) => words.push(value.into()),
        Some(word) => *word = Json::Array(vec![word.take(), value.into()]),
    }
}

/// Splits at single commas. A doubled comma stands for one comma.
fn parts(text: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            all.push(String::new());
        } else if let Some(last) = all.last_mut() {
            last.push(letter);
        }
    }
    all
}

fn change_one<E>(
    key: &str,
    value: &mut Json,
    change: &mut impl FnMut(&str, &str) -> Result<Option<String>, E>,
) -> Result<bool, E> {
    let mut is_changed = false;
    match value {
        Json::String(word) => {
            if let Some(other) = change(key.rsplit('.').next().unwrap_or(key), word)? {
                (*word, is_changed) = (other, true);
            }
        }
        Json::Object(pairs) => {
            for (key, value) in pairs {
                is_changed |= change_one(key, value, change)?;
            }
        }
        Json::Array(list) => {
            for value in list {
                is_changed |= change_one(key, value, change)?;
            }
        }
        _ => {}
    }
    Ok(is_changed)
}

pub(crate) fn parse(implied: &'static str, text: &str) -> Result<Value, String> {
    Value::parse(implied, text)
        .ok_or_else(|| format!("cannot parse '{text}' on QEMU's command line"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(value: &Value) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let changed = value.clone().change_strings(|key, word| {
            found.push((key.to_owned(), word.to_owned()));
            Ok::<_, ()>(None)
        });
        assert_eq!(changed, Ok(false));
        found
    }

    #[test]
    fn values_of_qemu_options_are_parsed_and_printed_as_qemu_does() {
        let read = |text: &str| Value::parse("type", text).unwrap();
        let value = read("user,id=net0,hostname=a,,b,restrict");
        assert_eq!(value.kind(), "user");
        assert_eq!(value.get("hostname"), Some("a,b"));
        assert!(value.is_on("restrict") && !value.is_on("id"));
        assert_eq!(read(&value.render()), value);
        let named = read("id=x,type=tap");
        assert_eq!(named.render(), "tap,id=x");
        let json = read(r#"{"type":"user","id":"n","file":{"filename":"/a","n":[{"file":"b"}]}}"#);
        assert_eq!(json.kind(), "user");
        assert_eq!(read(&json.render()), json);
        let words = strings(&json);
        let has = |key: &str, word: &str| words.contains(&(key.into(), word.into()));
        assert!(has("filename", "/a") && has("file", "b"));
        assert_eq!(Value::parse("type", "{no"), None);
        let twice = read("user,id=a,hostfwd=x,hostfwd=y,id=b");
        assert_eq!((twice.get("id"), twice.text("id")), (Some("b"), "b".into()));
        assert_eq!(twice.all("hostfwd"), ["x", "y"]);
        assert_eq!(read(&twice.render()), twice);
    }

    #[test]
    fn in_a_json_value_of_a_qemu_option_a_key_is_set_with_the_type_that_qemu_expects() {
        for (text, wanted) in [
            (
                "user,id=n",
                "user,hostfwd=x,hostfwd=y,id=n,queues=2,restrict=on",
            ),
            (
                r#"{"type":"user","id":"n"}"#,
                r#"{"hostfwd":[{"str":"x"},{"str":"y"}],"id":"n","queues":2,"restrict":true,"type":"user"}"#,
            ),
        ] {
            let mut value = Value::parse("type", text).unwrap();
            value.set_typed("restrict", true, "on");
            value.set_typed("queues", 2, "2");
            value.push("hostfwd", "x");
            value.push("hostfwd", "y");
            assert_eq!(value.render(), wanted);
        }
    }

    #[test]
    fn strings_are_replaced_at_any_depth_of_a_json_value_of_a_qemu_option() {
        let mut value = Value::parse("driver", r#"{"file":{"filename":"x"}}"#).unwrap();
        let change = |key: &str, word: &str| (key == "filename").then(|| format!("/at/{word}"));
        assert_eq!(
            value.change_strings(|key, word| Ok::<_, ()>(change(key, word))),
            Ok(true)
        );
        assert_eq!(strings(&value), [("filename".into(), "/at/x".into())]);
    }
}
