//! Asks the agent in a guest where on the guest's disks the contents of given files are
//! (`memfold-agent --extents`). A snapshot can then refer to the disks for pages that cache these
//! files.
//!
//! The request is an order with the paths of the files
//! ([`ListExtents`](memfold_wire::order::GuestOrder::ListExtents)). The answer has one line for
//! each extent, with the number of the path in the request. The guest may lie, so the length of the
//! answer is limited, and memfold compares the bytes on disk with memory later.

/// Maximum number of lines in an answer, which is also the agent's limit.
const MAX_LINES: usize = 1 << 15;

/// Maximum length of the agent's answer in bytes.
pub const MAX_ANSWER: usize = MAX_LINES * 64;

/// Maximum page number on a disk, so that byte offsets do not overflow.
const MAX_BLOCKS: u64 = 1 << 50;

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
        let many: String = (0..=MAX_LINES).fold(String::new(), |text, n| {
            text + &format!("0 {n} 1 254:0 {n}\n")
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
