//! Parses the name of a segment as users write it: `NAME` means the segment's newest image,
//! `NAME@GENERATION` the image with that number.

use std::fmt;

use super::error::SegmentError;

/// A reference to a segment, or to one of its generations (numbered images).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Name of the segment.
    pub name: String,
    /// Number of the segment's build whose image is meant, from 1; `None` means the newest one.
    pub generation: Option<u32>,
}

impl Reference {
    /// Parses a reference to a segment, `NAME` or `NAME@GENERATION`.
    pub fn parse(text: &str) -> Result<Self, SegmentError> {
        let (name, generation) = match text.split_once('@') {
            Some((name, number)) => (name, Some(number)),
            None => (text, None),
        };
        memfold_vm::check_name("segment", name)
            .map_err(|error| SegmentError::Name(error.to_string()))?;
        let number = |text: &str| match text.parse() {
            Ok(number) if !text.starts_with(['0', '+']) => Ok(number),
            _ => Err(SegmentError::Name(format!(
                "'{text}' is not a generation of segment '{name}'; generations are 1, 2, ..."
            ))),
        };
        Ok(Self {
            name: name.to_owned(),
            generation: generation.map(number).transpose()?,
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.generation {
            Some(generation) => write!(f, "{}@{generation}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_name_with_a_generation_is_parsed_and_a_malformed_one_is_refused() {
        for text in ["web", "web@1", "a.b-c_d@4294967295"] {
            assert_eq!(Reference::parse(text).unwrap().to_string(), text);
        }
        for bad in ["web@", "web@0", "web@01", "web@+1", "web@x", "web@1@2"] {
            let error = Reference::parse(bad).unwrap_err().to_string();
            assert!(
                error.contains("not a generation of segment 'web'"),
                "{bad}: {error}"
            );
        }
        for bad in ["", "@1", "../x", "a/b@1"] {
            let error = Reference::parse(bad).unwrap_err().to_string();
            assert!(!error.contains("generation"), "{bad}: {error}");
        }
    }
}
