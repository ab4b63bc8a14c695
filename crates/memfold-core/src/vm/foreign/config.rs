//! Files of options (`-readconfig`), and the words that they stand for.
//!
//! ```text
//!   [device "ehci"]               -device id=ehci,driver=ich9-usb-ehci1,addr=1d.7
//!     driver = "ich9-usb-ehci1"
//!     addr = "1d.7"
//! ```
//! `qemu_config_parse` (`util/qemu-config.c`) reads them so; Proxmox VE has its devices of q35 there.

use std::io;
use std::path::Path;

/// The command line with words in the place of such files. `read` gives what one holds, with no more rights than its QEMU has.
pub(super) fn expand(
    line: &[String],
    place: &Path,
    read: impl Fn(&Path) -> io::Result<String>,
) -> Result<Vec<String>, String> {
    let mut expanded = Vec::new();
    let mut words = line.iter();
    while let Some(word) = words.next() {
        if !["-readconfig", "--readconfig"].contains(&word.as_str()) {
            expanded.push(word.clone());
            continue;
        }
        let path = words
            .next()
            .ok_or_else(|| format!("'{word}' on its command line names no file"))?;
        let text = read(&place.join(path));
        let text = text.map_err(|error| format!("'-readconfig {path}': {error}"))?;
        let options = options(&text)
            .map_err(|line| format!("'-readconfig {path}': '{line}' in it can't be read"))?;
        for (name, value) in options {
            expanded.extend([format!("-{name}"), value]);
        }
    }
    Ok(expanded)
}

/// Options and their values; an error is the line that is neither.
fn options(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut options: Vec<(String, Vec<String>)> = Vec::new();
    for line in text.lines().map(str::trim) {
        let bad = || line.to_owned();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(head) = line.strip_prefix('[') {
            let head = head.strip_suffix(']').ok_or_else(bad)?.trim();
            let (name, id) = match head.split_once(char::is_whitespace) {
                None => (head, None),
                Some((name, id)) => (name, Some(quoted(id).ok_or_else(bad)?)),
            };
            let id = id.map(|id| pair("id", id));
            options.push((name.to_owned(), id.into_iter().collect()));
            continue;
        }
        let (key, value) = line.split_once('=').ok_or_else(bad)?;
        let value = quoted(value).ok_or_else(bad)?;
        let (_, pairs) = options.last_mut().ok_or_else(bad)?;
        pairs.push(pair(key.trim(), value));
    }
    let joined = options.into_iter();
    Ok(joined
        .map(|(name, pairs)| (name, pairs.join(",")))
        .collect())
}

fn quoted(text: &str) -> Option<&str> {
    let text = text.trim().strip_prefix('"')?;
    text.strip_suffix('"').filter(|text| !text.contains('"'))
}

fn pair(key: &str, value: &str) -> String {
    format!("{key}={}", value.replace(',', ",,"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        # Of Proxmox' kind.
        [device "ehci"]
          driver = "ich9-usb-ehci1"
          addr = "1d.7"

        [smbios]
          type = "1"
          serial = "a,b"
    "#;

    #[test]
    fn files_of_options_are_the_words_that_they_stand_for() {
        let line = ["qemu", "-m", "512", "-readconfig", "q35.cfg", "-S"].map(str::to_owned);
        let read = |path: &Path| {
            assert_eq!(path, Path::new("/there/q35.cfg"));
            Ok(FILE.to_owned())
        };
        let words = expand(&line, Path::new("/there"), read).unwrap();
        let wanted = [
            "qemu",
            "-m",
            "512",
            "-device",
            "id=ehci,driver=ich9-usb-ehci1,addr=1d.7",
            "-smbios",
            "type=1,serial=a,,b",
            "-S",
        ];
        assert_eq!(words, wanted);
    }

    #[test]
    fn files_that_are_none_are_named() {
        let line = ["qemu", "-readconfig", "/x"].map(str::to_owned);
        for text in [
            "driver = \"a\"",
            "[device \"a]",
            "[device]\ndriver = a",
            "[device]\nword",
            "[",
        ] {
            let why = expand(&line, Path::new("/"), |_| Ok(text.to_owned())).unwrap_err();
            let last = text.lines().last().unwrap();
            assert!(why.contains("/x") && why.contains(last), "{why}");
        }
        let away = |_: &Path| Err(io::ErrorKind::NotFound.into());
        let why = expand(&line, Path::new("/"), away).unwrap_err();
        assert!(why.contains("-readconfig /x"), "{why}");
    }
}
