//! Makes the page docs/api.md from the API's description (`OpenAPI`).

use std::fmt::Write as _;

use serde_json::{Map, Value};

/// Head of docs/api.md: rules that hold for all paths. `docs/operating/access.md` describes access.
const HEAD: &str = "\
# HTTP API

Made by `memfold generate --api docs/api.md` from what the daemon says of itself at `GET /openapi.json` (OpenAPI 3.1); change the code instead.

The daemon answers on its Unix socket, and over TCP with TLS and a token where that is asked for ([who may ask](operating/access.md)). `GET` is for
everyone with the role *read*, except the audit log and VMs' logs; all else is for *operate*. Bodies are JSON in UTF-8, of up to 1 MiB; an unknown field in a request is refused. Sizes
are bytes, moments are seconds since 1970 unless their name ends otherwise. Answers without content have status 200.

```sh
curl --unix-socket /run/memfold/memfold.sock http://memfold/v1/vms
curl --cacert cert.pem -H \"Authorization: Bearer $(sudo cat /var/lib/memfold/access/read.token)\" https://HOST:8420/v1/report
```

A request that fails is answered with a status of 400 or above and an [`ErrorBody`](#errorbody), which says which condition failed and what fixes it.

| status | meaning |
|---|---|
| 400 | the request is malformed, or asks for something impossible |
| 401, 403 | the client is not known, or lacks the right |
| 404, 405 | no such path, object or method |
| 408, 413, 415 | the body came too slowly, is too large, or is not declared as JSON |
| 409 | refused in the present state; the error says which condition failed |
| 421 | the request names another host than the daemon |
| 500 | the operation failed |
| 501 | this host does not support the operation |
| 503 | try again later: too many requests are under way, or a VM, its guest's agent or the registry does not answer in time |
| 504 | a command in a guest took longer than its time limit and was killed |
";

/// Makes the text of docs/api.md from the API's description (`OpenAPI`, as JSON).
#[must_use]
pub fn reference(description: &Value) -> String {
    let none = Map::new();
    let map = |value: &'_ Value| value.as_object().cloned().unwrap_or_default();
    let mut page = HEAD.to_owned();
    page.push_str("\n## Paths\n\n| | what | takes | answers |\n|---|---|---|---|\n");
    for (path, methods) in description["paths"].as_object().unwrap_or(&none) {
        for (method, operation) in methods.as_object().unwrap_or(&none) {
            let answers = content(&operation["responses"]["200"]);
            let _ = writeln!(
                page,
                "| `{} {path}` | {} | {} | {answers} |",
                method.to_uppercase(),
                cell(&operation["summary"]),
                takes(operation),
            );
        }
    }
    page.push_str("\n## Types\n\nA type with `?` may be absent or null.\n");
    for (name, schema) in map(&description["components"]["schemas"]) {
        let _ = write!(page, "\n### {name}\n\n{}\n\n", cell(&schema["description"]));
        page.push_str(&body(&schema));
    }
    page
}

/// Returns the query parameters and the body of a request, as text.
fn takes(operation: &Value) -> String {
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let mut words: Vec<String> = parameters
        .filter(|parameter| parameter["in"] == "query")
        .map(|parameter| {
            let name = parameter["name"].as_str().unwrap_or_default();
            format!("`?{name}=` {}", kind(&parameter["schema"]))
        })
        .collect();
    let body = content(&operation["requestBody"]);
    if !body.is_empty() {
        words.push(body);
    }
    words.join("<br>")
}

/// Returns the type of a request's or response's content, as text.
fn content(of: &Value) -> String {
    let types = of["content"].as_object().into_iter().flatten();
    let mut words = types.map(|(media, content)| match media.as_str() {
        "application/json" => kind(&content["schema"]),
        "text/event-stream" => format!("stream of {}", kind(&content["schema"])),
        media => format!("`{media}`"),
    });
    words.next().unwrap_or_default()
}

/// Makes a table of a type's fields, or of its values.
fn body(schema: &Value) -> String {
    let mut text = String::new();
    if let Some(parts) = schema["allOf"].as_array() {
        for part in parts {
            match part["$ref"].as_str() {
                Some(_) => {
                    let _ = writeln!(text, "All fields of {}, and:\n", kind(part));
                }
                None => text.push_str(&body(part)),
            }
        }
    } else if let Some(variants) = schema["oneOf"].as_array() {
        text.push_str("| value | meaning |\n|---|---|\n");
        for variant in variants {
            let value = variant["properties"]
                .as_object()
                .and_then(|fields| fields.iter().next())
                .map_or_else(
                    || kind(variant),
                    |(name, of)| format!("`{{\"{name}\": ...}}`, {}", kind(of)),
                );
            let _ = writeln!(text, "| {value} | {} |", cell(&variant["description"]));
        }
    } else if let Some(fields) = schema["properties"].as_object() {
        text.push_str("| field | type | meaning |\n|---|---|---|\n");
        let required = schema["required"].as_array();
        for (name, field) in fields {
            let is_required = required.is_some_and(|all| all.iter().any(|n| n == name.as_str()));
            let kind = kind(field);
            let mark = optional(!is_required && !kind.ends_with('?'));
            let meaning = said(field);
            let _ = writeln!(text, "| `{name}` | {kind}{mark} | {meaning} |");
        }
    } else {
        let _ = writeln!(text, "{}", kind(schema));
    }
    text
}

/// Returns the description of a field, or of the type that the field may have.
fn said(field: &Value) -> String {
    let own = cell(&field["description"]);
    if !own.is_empty() {
        return own;
    }
    let parts = field["oneOf"].as_array().into_iter().flatten();
    parts
        .map(|part| cell(&part["description"]))
        .find(|words| !words.is_empty())
        .unwrap_or_default()
}

/// Describes a type, as text.
fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap_or(name);
        return format!("[`{name}`](#{})", name.to_lowercase());
    }
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        return values.join(", ");
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let is_null = |choice: &&Value| choice["type"] == "null";
        let mark = optional(choices.iter().any(|c| is_null(&c)));
        let others: Vec<String> = choices.iter().filter(|c| !is_null(c)).map(kind).collect();
        return format!("{}{mark}", others.join(" or "));
    }
    let (name, mark) = match &schema["type"] {
        Value::String(name) => (name.as_str(), ""),
        Value::Array(names) => {
            let name = names.iter().find(|name| *name != "null");
            (name.and_then(Value::as_str).unwrap_or("any"), "?")
        }
        _ => ("any", ""),
    };
    match name {
        "array" => format!("list of {}{mark}", kind(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            let values = kind(&schema["additionalProperties"]);
            format!("map of names to {values}{mark}")
        }
        name => format!("{name}{mark}"),
    }
}

/// Returns the mark of a type that may be absent or null.
const fn optional(is: bool) -> &'static str {
    if is { "?" } else { "" }
}

/// Formats text for a cell of a table.
fn cell(words: &Value) -> String {
    let words = words.as_str().unwrap_or_default();
    let line: Vec<&str> = words.split_whitespace().collect();
    line.join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openapi;

    #[test]
    fn docs_api_md_equals_the_reference_generated_from_openapi() {
        let page = include_str!("../../../docs/api.md");
        assert!(
            page == reference(&openapi()),
            "docs/api.md is old: run 'memfold generate --api docs/api.md'"
        );
    }

    #[test]
    fn the_api_reference_contains_every_path_and_field_and_only_valid_links() {
        let (description, page) = (openapi(), reference(&openapi()));
        for (path, methods) in description["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let line = format!("| `{} {path}` | ", method.to_uppercase());
                assert!(page.contains(&line), "{line}");
                assert!(operation["summary"].is_string(), "{line} says nothing");
            }
        }
        let types = description["components"]["schemas"].as_object().unwrap();
        for (name, schema) in types {
            assert!(page.contains(&format!("\n### {name}\n")), "{name}");
            for (field, of) in schema["properties"].as_object().into_iter().flatten() {
                assert!(page.contains(&format!("| `{field}` | ")), "{name}.{field}");
                assert!(!said(of).is_empty(), "{name}.{field} says nothing");
            }
        }
        let links = page.split("](#").skip(1).map(|rest| {
            let (name, _) = rest.split_once(')').unwrap();
            name
        });
        for link in links {
            let known = types.keys().any(|name| name.to_lowercase() == link);
            assert!(known, "#{link}");
        }
    }
}
