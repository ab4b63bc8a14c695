//! Tokens that stand for file paths in QEMU's command line, so that a description does not depend
//! on where the files are.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::qemu_line::escape;

/// Returns the token for file `number`. Numbers have leading zeroes, so that no token is a prefix
/// of another.
pub(super) fn token(kind: &str, number: usize) -> String {
    format!("{kind}{number:03}")
}

/// Replaces the tokens of one kind in a word by file paths.
pub(super) fn put_in(kind: &str, word: &str, files: &[PathBuf]) -> OsString {
    let mut words = word.to_owned();
    for (number, file) in files.iter().enumerate() {
        let token = token(kind, number);
        if words == token {
            return file.clone().into();
        }
        let is_json = words.starts_with('{');
        let file = if is_json {
            file.as_os_str().to_owned()
        } else {
            escape(file.as_os_str())
        };
        words = words.replace(&token, &String::from_utf8_lossy(file.as_bytes()));
    }
    words.into()
}
