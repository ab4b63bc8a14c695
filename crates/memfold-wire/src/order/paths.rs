//! Lists of paths in orders for the guest agent, as text that a shell script can contain.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::frame::FrameError;

/// Maximum length of a list in bytes. An agent accepts scripts of 64 KiB; the rest is for the
/// commands around the list.
const MAX_LIST: usize = 63 << 10;

/// Last line of the script that contains a list; a list has no such line.
pub(super) const END: &str = "END\n";

/// Absolute paths of files in the guest, one on each line. Unusual bytes are written as `\ooo`
/// (octal). An empty line names no file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathList(String);

impl PathList {
    /// Makes a list of the first `paths`, as many as fit, and returns their number, too. A path
    /// that is not absolute becomes an empty line.
    #[must_use]
    pub fn new<'a>(paths: impl IntoIterator<Item = &'a [u8]>) -> (Self, usize) {
        let mut list = String::new();
        let mut count = 0;
        for path in paths {
            let before = list.len();
            for &byte in path.iter().filter(|_| path.first() == Some(&b'/')) {
                if is_plain(byte) {
                    list.push(char::from(byte));
                } else {
                    // Writing to a String cannot fail.
                    let _ = write!(list, "\\{byte:03o}");
                }
            }
            list.push('\n');
            if list.len() > MAX_LIST {
                list.truncate(before);
                break;
            }
            count += 1;
        }
        (Self(list), count)
    }

    /// Returns the lines of the list.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Checks that no line can end the list, and that the list is not too long.
    pub(super) fn validate(&self) -> Result<(), FrameError> {
        if self.0.len() > MAX_LIST {
            return Err(FrameError::Limit("a list of paths of more than 63 KiB"));
        }
        let is_line = |line: &str| {
            let is_path = line.is_empty() || line.starts_with('/');
            is_path && line.bytes().all(|b| is_plain(b) || b == b'\\')
        };
        let is_whole = self.0.is_empty() || self.0.ends_with('\n');
        if is_whole && self.0.split('\n').all(is_line) {
            Ok(())
        } else {
            Err(FrameError::Limit("a list with other lines than paths"))
        }
    }
}

const fn is_plain(byte: u8) -> bool {
    matches!(byte, b' '..=b'~') && byte != b'\\'
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::MAX_TEXT;
    use crate::order::GuestOrder;

    #[test]
    fn in_a_list_for_the_guest_paths_are_escaped_and_added_up_to_the_size_limit() {
        let (list, count) = PathList::new([&b"/usr/bin/a b"[..], b"/x\n\\\xff'$(y)", b"END", b""]);
        assert_eq!(list.0, "/usr/bin/a b\n/x\\012\\134\\377'$(y)\n\n\n");
        assert_eq!(count, 4);
        list.validate().unwrap();
        let long = [b"/".as_slice(), &[b'\n'; 4000]].concat();
        let (list, count) = PathList::new(std::iter::repeat_n(long.as_slice(), 100));
        assert_eq!((count, list.0.lines().count()), (4, 4));
        list.validate().unwrap();
        let orders = [
            GuestOrder::ListExtents(list.clone()),
            GuestOrder::DropCaches {
                files: list,
                limit_ms: u32::MAX,
            },
        ];
        for order in orders {
            assert!(
                order.script().len() <= MAX_TEXT,
                "an agent takes the script"
            );
        }
    }

    #[test]
    fn a_path_with_special_characters_in_a_list_arrives_unchanged_through_the_shell() {
        let names: Vec<String> = (0..1000)
            .map(|n| format!("/usr/lib/'a' \"b\" $HOME `ls` {n}"))
            .collect();
        let (list, count) = PathList::new(names.iter().map(String::as_bytes));
        assert_eq!(count, 1000);
        let script = GuestOrder::ListExtents(list).script();
        let script = script.replace("/proc/$PPID/exe --extents", "cat");
        let shell = std::process::Command::new("/bin/sh")
            .arg("-c")
            .arg(script)
            .output();
        let lines = String::from_utf8(shell.unwrap().stdout).unwrap();
        assert_eq!(lines.lines().collect::<Vec<_>>(), names);
    }

    #[test]
    fn a_list_that_could_end_the_text_of_its_script_is_refused() {
        for bad in [
            "END\nreboot\n",
            "/a\nEND\n",
            "/a",
            "/a\n\tb\n",
            "relative\n",
            "/\u{e4}\n",
        ] {
            assert!(PathList(bad.into()).validate().is_err(), "{bad:?}");
        }
        PathList(String::new()).validate().unwrap();
        let long = format!("/{}\n", "a".repeat(MAX_TEXT));
        assert!(PathList(long).validate().is_err());
    }
}
