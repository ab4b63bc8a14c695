//! Parses and writes the value of a QEMU option: `kind,key=value,...` (a comma in a value is
//! doubled), or JSON.

use serde_json::{Map, Value as Json};

use crate::qemu_line::on_or_off;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Value {
    /// Key of the first word, which is written without a key.
    implied: &'static str,
    is_json: bool,
    pairs: Map<String, Json>,
}

impl Value {
    /// Parses a value; `None` if the text is in neither syntax.
    pub(super) fn parse(implied: &'static str, text: &str) -> Option<Self> {
        if text.starts_with('{') {
            let Json::Object(pairs) = serde_json::from_str(text).ok()? else {
                return None;
            };
            return Some(Self {
                implied,
                is_json: true,
                pairs,
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
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        match self.pairs.get(key)? {
            Json::Array(words) if !self.is_json => words.last()?.as_str(),
            other => other.as_str(),
        }
    }

    /// Returns all values of a key that may occur several times. In JSON, they are a list of
    /// strings or of `{"str": STRING}`.
    pub(super) fn all(&self, key: &str) -> Vec<String> {
        let word = |value: &Json| Some(value.as_str().or(value["str"].as_str())?.to_owned());
        match self.pairs.get(key) {
            Some(Json::Array(words)) => words.iter().filter_map(word).collect(),
            Some(other) => word(other).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Returns the value of the implied key.
    pub(super) fn kind(&self) -> &str {
        self.get(self.implied).unwrap_or_default()
    }

    /// Returns a key's value as text, whether it is a string or a number.
    pub(super) fn text(&self, key: &str) -> String {
        match (self.get(key), self.pairs.get(key)) {
            (Some(word), _) => word.to_owned(),
            (None, Some(other)) => other.to_string(),
            (None, None) => String::new(),
        }
    }

    pub(super) fn set(&mut self, key: &str, value: &str) {
        self.pairs.insert(key.to_owned(), value.into());
    }

    /// Sets a flag. In JSON, QEMU does not accept strings for flags and numbers.
    pub(super) fn set_flag(&mut self, key: &str, is_on: bool) {
        let value = if self.is_json {
            is_on.into()
        } else {
            on_or_off(is_on).into()
        };
        self.pairs.insert(key.to_owned(), value);
    }

    /// Sets a number; see [`set_flag`](Self::set_flag).
    pub(super) fn set_number(&mut self, key: &str, number: u64) {
        let value = if self.is_json {
            number.into()
        } else {
            number.to_string().into()
        };
        self.pairs.insert(key.to_owned(), value);
    }

    /// Adds a value to a key that may occur several times.
    pub(super) fn push(&mut self, key: &str, value: &str) {
        if !self.is_json {
            add(&mut self.pairs, key.to_owned(), value.to_owned());
            return;
        }
        let words = self
            .pairs
            .entry(key)
            .or_insert_with(|| Json::Array(Vec::new()));
        if let Json::Array(words) = words {
            words.push(serde_json::json!({ "str": value }));
        }
    }

    /// Removes the keys for which `unwanted` returns true.
    pub(super) fn drop_keys(&mut self, unwanted: impl Fn(&str) -> bool) {
        self.pairs.retain(|key, _| !unwanted(key));
    }

    /// Returns whether a key's value is true (`on`, `yes`, `true` or `y`).
    pub(super) fn is_on(&self, key: &str) -> bool {
        match self.pairs.get(key) {
            Some(Json::Bool(is_on)) => *is_on,
            _ => matches!(self.get(key), Some("on" | "yes" | "true" | "y")),
        }
    }

    /// Returns every string in the value with its key; for nested values, with the innermost key.
    pub(super) fn strings(&self) -> Vec<(&str, &str)> {
        let mut found = Vec::new();
        for (key, value) in &self.pairs {
            collect(key, value, &mut found);
        }
        found
    }

    /// Replaces every string for which `change` (of key and string) returns a new one.
    pub(super) fn change_strings(&mut self, change: &impl Fn(&str, &str) -> Option<String>) {
        for (key, value) in &mut self.pairs {
            change_one(key, value, change);
        }
    }

    /// Writes the value in QEMU's syntax.
    pub(super) fn render(&self) -> String {
        if self.is_json {
            return Json::Object(self.pairs.clone()).to_string();
        }
        let text = |value: &Json| {
            let word = value.as_str().map_or_else(|| value.to_string(), Into::into);
            word.replace(',', ",,")
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

fn collect<'a>(key: &'a str, value: &'a Json, found: &mut Vec<(&'a str, &'a str)>) {
    match value {
        Json::String(word) => found.push((key.rsplit('.').next().unwrap_or(key), word)),
        Json::Object(pairs) => pairs
            .iter()
            .for_each(|(key, value)| collect(key, value, found)),
        Json::Array(list) => list.iter().for_each(|value| collect(key, value, found)),
        _ => {}
    }
}

fn change_one(key: &str, value: &mut Json, change: &impl Fn(&str, &str) -> Option<String>) {
    match value {
        Json::String(word) => {
            if let Some(other) = change(key.rsplit('.').next().unwrap_or(key), word) {
                *word = other;
            }
        }
        Json::Object(pairs) => {
            for (key, value) in pairs {
                change_one(key, value, change);
            }
        }
        Json::Array(list) => {
            for value in list {
                change_one(key, value, change);
            }
        }
        _ => {}
    }
}

pub(super) fn parse(implied: &'static str, text: &str) -> Result<Value, String> {
    Value::parse(implied, text)
        .ok_or_else(|| format!("cannot parse '{text}' on QEMU's command line"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_values_are_parsed_and_printed_like_qemu_does() {
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
        let words = json.strings();
        assert!(words.contains(&("filename", "/a")) && words.contains(&("file", "b")));
        assert_eq!(Value::parse("type", "{no"), None);
        let twice = read("user,id=a,hostfwd=x,hostfwd=y,id=b");
        assert_eq!((twice.get("id"), twice.text("id")), (Some("b"), "b".into()));
        assert_eq!(twice.all("hostfwd"), ["x", "y"]);
        assert_eq!(read(&twice.render()), twice);
    }

    #[test]
    fn options_are_set_with_the_type_that_qemu_wants_in_json() {
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
            value.set_flag("restrict", true);
            value.set_number("queues", 2);
            value.push("hostfwd", "x");
            value.push("hostfwd", "y");
            assert_eq!(value.render(), wanted);
        }
    }

    #[test]
    fn strings_are_replaced_at_any_depth_of_a_json_option_value() {
        let mut value = Value::parse("driver", r#"{"file":{"filename":"x"}}"#).unwrap();
        value.change_strings(&|key, word| (key == "filename").then(|| format!("/at/{word}")));
        assert_eq!(value.strings(), [("filename", "/at/x")]);
    }
}
