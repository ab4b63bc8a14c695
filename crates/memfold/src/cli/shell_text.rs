//! Makes shell text from the words of a command line.

/// Returns the shell command for the words: a single word is shell text; several words are a
/// command and its arguments, each quoted.
pub(super) fn script(words: &[String]) -> String {
    if let [text] = words {
        return text.clone();
    }
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    words.join(" ")
}

/// Quotes a word so that `/bin/sh` reads it unchanged.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@%+,".contains(c);
    // A word with '=' is quoted, because the shell could take it for an assignment.
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memfold_vm_exec_takes_one_argument_as_shell_text_and_passes_several_unchanged() {
        assert_eq!(
            script(&["cd /tmp && ls | wc -l".into()]),
            "cd /tmp && ls | wc -l"
        );
        let words = [
            "printf", r"<%s>\n", "", "a b", "it's", "$HOME", "*", "a=b", "~", "x\ny", "\"\\", "-n",
        ]
        .map(str::to_owned);
        let output = std::process::Command::new("/bin/sh")
            .args(["-c", &script(&words)])
            .output()
            .unwrap();
        let wanted = format!("<{}>\n", words[2..].join(">\n<"));
        assert_eq!(String::from_utf8(output.stdout).unwrap(), wanted);
        assert_eq!(
            script(&["ls".into(), "-l".into(), "/usr".into()]),
            "ls -l /usr"
        );
    }
}
