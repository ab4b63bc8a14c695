//! Reads where the fields of a trace event are, from `events/SYSTEM/EVENT/format` of tracefs. The
//! agent needs this to decode the kernel's page cache events.
//!
//! The layout is read at run time, because it differs between kernels: page-cache events have a
//! field `order` in Linux 6.18, and none in 6.1.

/// Position and length of one field in the records of a trace event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Offset of the field from the start of the record, in bytes.
    pub offset: usize,
    /// Length of the field in bytes.
    pub size: usize,
}

impl Field {
    /// Returns the field's bytes in `record`; `None` if the record is too short.
    pub fn bytes<'a>(&self, record: &'a [u8]) -> Option<&'a [u8]> {
        record.get(self.offset..self.offset.checked_add(self.size)?)
    }

    /// Returns the field as an unsigned number in native byte order; `None` if the record is too
    /// short or the field does not have 1, 2, 4 or 8 bytes.
    #[inline]
    pub fn number(&self, record: &[u8]) -> Option<u64> {
        let bytes = self.bytes(record)?;
        Some(match *bytes {
            [a] => u64::from(a),
            [a, b] => u16::from_ne_bytes([a, b]).into(),
            [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]).into(),
            _ => u64::from_ne_bytes(bytes.try_into().ok()?),
        })
    }

    /// Returns the field's bytes in `record` up to the first NUL byte; `None` if the record is too
    /// short.
    pub fn text<'a>(&self, record: &'a [u8]) -> Option<&'a [u8]> {
        self.bytes(record)?.split(|b| *b == 0).next()
    }
}

/// Layout of a trace event's records, from the event's `format` file in tracefs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventFormat {
    /// Number of the trace event: the value of the field `common_type` in its records.
    pub id: u16,
    fields: Vec<(String, Field)>,
}

impl EventFormat {
    /// Parses the text of a `format` file; `None` if it has no `ID:` line. Other lines are skipped.
    pub fn parse(text: &str) -> Option<Self> {
        let id = text
            .lines()
            .find_map(|l| l.strip_prefix("ID:"))?
            .trim()
            .parse()
            .ok()?;
        Some(Self {
            id,
            fields: text.lines().filter_map(field).collect(),
        })
    }

    /// Returns position and length of the field `name`; `None` if the event has no such field.
    pub fn field(&self, name: &str) -> Option<Field> {
        self.fields.iter().find(|(n, _)| n == name).map(|(_, f)| *f)
    }
}

/// Parses a line such as `field:char name[32];  offset:8;  size:32;  signed:0;`.
fn field(line: &str) -> Option<(String, Field)> {
    let rest = line.trim().strip_prefix("field:")?;
    let mut parts = rest.split(';').map(str::trim);
    let name = parts
        .next()?
        .split_whitespace()
        .last()?
        .split('[')
        .next()?
        .trim_start_matches('*');
    let mut value = |key: &str| parts.next()?.strip_prefix(key)?.parse().ok();
    let offset = value("offset:")?;
    let size = value("size:")?;
    Some((name.to_owned(), Field { offset, size }))
}

/// Layout of a page of the trace ring buffer, from `events/header_page` in tracefs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFormat {
    /// Position of the page's commit word, which has the number of bytes of data that follow, and
    /// flags.
    pub commit: Field,
    /// Offset of the data in the ring-buffer page, in bytes.
    pub data: usize,
}

impl PageFormat {
    /// Parses the text of `events/header_page`; `None` if it lacks a necessary field.
    pub fn parse(text: &str) -> Option<Self> {
        // The field's type comes first (`field: u64 timestamp`). Except for a space, this is the
        // syntax of other fields.
        let fields: Vec<_> = text.lines().filter_map(field).collect();
        let find = |name: &str| fields.iter().find(|(n, _)| n == name).map(|(_, f)| *f);
        Some(Self {
            commit: find("commit")?,
            data: find("data")?.offset,
        })
    }
}

impl Default for PageFormat {
    /// Returns the layout that every 64-bit kernel so far has.
    fn default() -> Self {
        Self {
            commit: Field { offset: 8, size: 8 },
            data: 16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ADD: &str = "name: mm_filemap_add_to_page_cache\nID: 600\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
        \tfield:unsigned long pfn;\toffset:8;\tsize:8;\tsigned:0;\n\
        \tfield:char name[32];\toffset:40;\tsize:32;\tsigned:0;\n\
        \tfield:dev_t s_dev;\toffset:32;\tsize:4;\tsigned:0;\n\nprint fmt: \"dev %d\", REC->pfn\n";

    #[test]
    fn field_offsets_are_parsed_from_the_format_file_of_a_trace_event() {
        let format = EventFormat::parse(ADD).unwrap();
        assert_eq!(format.id, 600);
        assert_eq!(format.field("pfn"), Some(Field { offset: 8, size: 8 }));
        assert_eq!(format.field("name").map(|f| f.size), Some(32));
        assert_eq!(format.field("order"), None);
    }

    #[test]
    fn the_header_page_file_of_a_64_bit_kernel_parses_to_the_default_ring_buffer_format() {
        let text = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
            \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
            \tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;\n\
            \tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";
        assert_eq!(PageFormat::parse(text), Some(PageFormat::default()));
    }

    #[test]
    fn a_field_beyond_the_end_of_a_trace_record_has_no_value() {
        let field = Field { offset: 4, size: 4 };
        assert_eq!(field.number(&[0; 7]), None);
        assert_eq!(field.number(&[0, 0, 0, 0, 1, 0, 0, 0]), Some(1));
        let far = Field {
            offset: usize::MAX,
            size: 4,
        };
        assert_eq!(far.number(&[0; 7]), None);
    }

    proptest! {
        #[test]
        fn parsing_an_arbitrary_trace_format_file_never_causes_a_panic(text in "(field:|ID:|offset:|size:|[a-z0-9 ;\\[\n\t]){0,60}") {
            let _ = EventFormat::parse(&text);
            let _ = PageFormat::parse(&text);
        }
    }
}
