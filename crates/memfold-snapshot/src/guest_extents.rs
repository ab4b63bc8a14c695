//! Asks the agent in a guest where on the guest's disks the contents of given files are
//! (`memfold-agent --extents`). A snapshot can then refer to the disks for pages that cache these
//! files.
//!
//! The request is a shell script with the paths of the files, one per line. Unusual bytes are
//! written as `\ooo` (octal). The answer has one line for each extent, with the number of the path
//! in the request. The guest may lie, so the length of the answer is limited, and memfold compares
//! the bytes on disk with memory later.

use std::fmt::Write;

/// Maximum length of the script in bytes; an agent accepts no longer text
/// ([`memfold_wire::agent::MAX_TEXT`]).
const MAX_SCRIPT: usize = memfold_wire::agent::MAX_TEXT;

/// Maximum number of lines in an answer, which is also the agent's limit.
const MAX_LINES: usize = 1 << 15;

/// Maximum length of the agent's answer in bytes.
pub const MAX_ANSWER: usize = MAX_LINES * 64;

/// Maximum page number on a disk, so that byte offsets do not overflow.
const MAX_BLOCKS: u64 = 1 << 50;

/// Shell commands before and after the list of paths. They run the agent's own program in the
/// guest; the script's shell is a child of the agent.
const BEGIN: &str = "exec /proc/$PPID/exe --extents <<'END'\n";
/// Last line of the request's script, after the list of paths.
pub const END: &str = "END\n";

/// Device number of a disk in the guest: major, minor.
pub type GuestDisk = (u32, u32);

/// Consecutive pages of a guest's file that are consecutive on a disk of the guest, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Index of the file's path in the request.
    pub file: usize,
    /// Index of the extent's first page within the file.
    pub page: u32,
    /// Number of pages in the extent.
    pub pages: u32,
    /// Device number of the guest's disk that contains the extent.
    pub disk: GuestDisk,
    /// Index of the extent's first page on the disk, in pages of 4096 bytes.
    pub block: u64,
}

impl FileExtent {
    /// Returns the index within the file of the page after this extent.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.page as u64 + self.pages as u64
    }
}

/// Returns a script that asks for the extents of the first `paths`, as many as fit, and the number
/// of paths in the script.
#[must_use]
pub fn script<'a>(paths: impl IntoIterator<Item = &'a [u8]>) -> (String, usize) {
    with_paths(BEGIN, paths, END)
}

/// Returns a script that consists of `begin`, the first `paths` (as many as fit), and `end`. The
/// number is that of the paths in the script. A path that is not absolute becomes a line that names
/// no file.
#[must_use]
pub fn with_paths<'a>(
    begin: &str,
    paths: impl IntoIterator<Item = &'a [u8]>,
    end: &str,
) -> (String, usize) {
    let mut script = begin.to_owned();
    let mut asked = 0;
    for path in paths {
        let before = script.len();
        // A text that is not an absolute path might end the list.
        for &byte in path.iter().filter(|_| path.first() == Some(&b'/')) {
            if matches!(byte, b' '..=b'~') && byte != b'\\' {
                script.push(char::from(byte));
            } else {
                // Writing to a String cannot fail.
                let _ = write!(script, "\\{byte:03o}");
            }
        }
        script.push('\n');
        if script.len() + end.len() > MAX_SCRIPT {
            script.truncate(before);
            break;
        }
        asked += 1;
    }
    script.push_str(end);
    (script, asked)
}

/// Parses the agent's answer to a request with `files` paths. The extents are sorted by file and
/// then by page. An error tells why the answer is refused.
pub fn parse(text: &[u8], files: usize) -> Result<Vec<FileExtent>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "the answer is no text".to_owned())?;
    let mut extents: Vec<FileExtent> = Vec::new();
    for line in text.lines() {
        if extents.len() == MAX_LINES {
            return Err(format!("the answer has more than {MAX_LINES} lines"));
        }
        let extent = extent(line).filter(|extent| {
            let follows = extents.last().is_none_or(|last| {
                last.file < extent.file
                    || last.file == extent.file && last.end() <= u64::from(extent.page)
            });
            follows && extent.file < files
        });
        extents.push(extent.ok_or_else(|| {
            let shown: String = line.chars().take(60).collect();
            format!("not a line of the answer: '{shown}'")
        })?);
    }
    Ok(extents)
}

fn extent(line: &str) -> Option<FileExtent> {
    let mut fields = line.split(' ');
    let mut next = || fields.next();
    let (file, page, pages) = (next()?, next()?, next()?);
    let (major, minor) = next()?.split_once(':')?;
    let extent = FileExtent {
        file: file.parse().ok()?,
        page: page.parse().ok()?,
        pages: pages.parse().ok()?,
        disk: (major.parse().ok()?, minor.parse().ok()?),
        block: next()?.parse().ok()?,
    };
    let is_sound = extent.pages > 0
        && extent.end() <= 1 << 32
        && extent.block <= MAX_BLOCKS
        && fields.next().is_none();
    is_sound.then_some(extent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn in_the_script_for_the_guest_paths_are_escaped_and_added_up_to_the_size_limit() {
        let (text, asked) = script([&b"/usr/bin/a b"[..], b"/x\n\\\xff'$(y)", b"END", b""]);
        let wanted = "exec /proc/$PPID/exe --extents <<'END'\n\
            /usr/bin/a b\n/x\\012\\134\\377'$(y)\n\n\nEND\n";
        assert_eq!((text.as_str(), asked), (wanted, 4));
        let long = [b"/".as_slice(), &[b'\n'; 4000]].concat();
        let (text, asked) = script(std::iter::repeat_n(long.as_slice(), 100));
        assert_eq!(asked, 4);
        assert!(text.len() <= MAX_SCRIPT && text.ends_with("\nEND\n"));
        assert_eq!(text.lines().count(), 6);
    }

    #[test]
    fn a_path_with_special_characters_that_is_quoted_for_the_shell_arrives_unchanged() {
        let names: Vec<String> = (0..1000)
            .map(|n| format!("/usr/lib/'a' \"b\" $HOME `ls` {n}"))
            .collect();
        let (text, asked) = script(names.iter().map(String::as_bytes));
        assert_eq!(asked, 1000);
        let text = text.replace("/proc/$PPID/exe --extents", "cat");
        let shell = std::process::Command::new("/bin/sh")
            .arg("-c")
            .arg(text)
            .output();
        let lines = String::from_utf8(shell.unwrap().stdout).unwrap();
        assert_eq!(lines.lines().collect::<Vec<_>>(), names);
    }

    #[test]
    fn file_extents_from_the_guest_are_parsed_and_malformed_answers_are_refused() {
        let answer = b"0 0 16 254:0 4096\n0 16 1 254:0 1\n7 4294967295 1 8:16 0\n";
        let extents = parse(answer, 8).unwrap();
        assert_eq!(extents.len(), 3);
        let extent = FileExtent {
            file: 0,
            page: 16,
            pages: 1,
            disk: (254, 0),
            block: 1,
        };
        assert_eq!(extents[1], extent);
        assert_eq!(parse(b"", 0).unwrap(), []);
        // Each case has an answer, and the line of it that is wrong.
        for (nonsense, line) in [
            ("8 0 1 254:0 1", "8 0 1 254:0 1"),
            ("0 0 0 254:0 1", "0 0 0 254:0 1"),
            ("0 0 1 254:0", "0 0 1 254:0"),
            ("0 0 1 254 1", "0 0 1 254 1"),
            ("0 0 1 254:0 1 ", "0 0 1 254:0 1 "),
            ("0 -1 1 254:0 1", "0 -1 1 254:0 1"),
            ("0 4294967295 2 254:0 1", "0 4294967295 2 254:0 1"),
            ("0 4294967296 1 254:0 1", "0 4294967296 1 254:0 1"),
            ("0 0 1 4294967296:0 1", "0 0 1 4294967296:0 1"),
            (
                "0 0 1 254:0 1125899906842625",
                "0 0 1 254:0 1125899906842625",
            ),
            (
                "0 0 1 254:0 18446744073709551616",
                "0 0 1 254:0 18446744073709551616",
            ),
            ("0 0 4 254:0 1\n0 3 4 254:0 9\n", "0 3 4 254:0 9"),
            ("3 0 4 254:0 1\n2 0 4 254:0 9\n", "2 0 4 254:0 9"),
            ("\n", ""),
        ] {
            let error = parse(nonsense.as_bytes(), 8).unwrap_err();
            assert_eq!(error, format!("not a line of the answer: '{line}'"));
        }
        let many: String = (0..=MAX_LINES).fold(String::new(), |mut text, n| {
            let _ = writeln!(text, "0 {n} 1 254:0 {n}");
            text
        });
        let error = parse(many.as_bytes(), 8).unwrap_err();
        assert_eq!(error, "the answer has more than 32768 lines");
        assert!(many.len() < MAX_ANSWER);
    }

    proptest! {
        #[test]
        fn parsing_an_arbitrary_list_of_file_extents_from_a_guest_never_causes_a_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&text, 8);
        }
    }
}
