//! Reads `/.memfold-segment`, the manifest of a segment's image. The manifest says over which
//! directories of the guest the image is mounted. The agent does not trust it, because the image
//! comes from outside the guest.
//!
//! ```text
//!   format 1
//!   name web
//!   generation 3
//!   lay /usr          a guest directory to mount over; up to 64 such lines
//! ```

use super::error::{Error, Result, shown};

/// Name of the manifest's file in the root directory of a segment's image.
pub const FILE: &str = ".memfold-segment";
/// Maximum length of a segment's manifest, in bytes.
pub const MAX_BYTES: usize = 64 << 10;
/// Most directories that a manifest may name.
const MAX_LAY: usize = 64;
/// Longest path of a directory in a manifest, in bytes. Its escaped form, at most three times as
/// long, must fit into a file name.
const MAX_DIRECTORY: usize = 85;
/// Directories on and below which no segment is mounted: they belong to the kernel, hold changing
/// state, or hold memfold's own files.
const NEVER: [&[u8]; 7] = [
    b"/proc", b"/sys", b"/dev", b"/run", b"/tmp", b"/boot", b"/var",
];

/// Content of a segment's manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Name of the segment, as in its manifest.
    pub name: String,
    /// Number of the segment's generation (build).
    pub generation: u64,
    /// Paths of the guest directories over which the segment is to be mounted.
    pub lay: Vec<Vec<u8>>,
}

impl Manifest {
    /// Parses the text of a manifest. Unknown keys are an error, because a newer memfold may use
    /// them for conditions.
    pub fn parse(text: &[u8]) -> Result<Self> {
        if text.len() > MAX_BYTES {
            return Err(bad("the file is longer than 64 KiB"));
        }
        let (mut format, mut name, mut generation, mut lay) = (None, None, None, Vec::new());
        for line in text.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
            let space = line.iter().position(|b| *b == b' ');
            let (key, value) = line.split_at(space.ok_or_else(|| bad("a line without a value"))?);
            let value = &value[1..];
            match key {
                b"format" => once(&mut format, number(value)?)?,
                b"generation" => once(&mut generation, number(value)?)?,
                b"name" => once(&mut name, check_name(value)?)?,
                b"lay" => {
                    check_directory(value)?;
                    if lay.len() == MAX_LAY {
                        return Err(bad("more than 64 directories to lay"));
                    }
                    lay.push(value.to_vec());
                }
                _ => return Err(bad(&format!("unknown key {}", shown(key)))),
            }
        }
        if format != Some(1) {
            return Err(bad("the format is not 1"));
        }
        check_apart(&lay)?;
        Ok(Self {
            name: name.ok_or_else(|| bad("the name is missing"))?,
            generation: generation.ok_or_else(|| bad("the generation is missing"))?,
            lay,
        })
    }
}

/// Checks a segment name: 1 to 64 characters of `a-z 0-9 . _ -`, beginning with a letter or digit.
pub fn check_name(name: &[u8]) -> Result<String> {
    let allowed = |b: &u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
    let starts = name.first().is_some_and(u8::is_ascii_alphanumeric);
    if !starts || name.len() > 64 || !name.iter().all(allowed) {
        return Err(Error::refused(
            format!("{:?} is not a segment name", shown(name)),
            "1 to 64 of a-z 0-9 . _ -, beginning with a letter or digit",
        ));
    }
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Checks the path of a directory over which a segment is to be mounted. The path must be absolute
/// and normalised, be outside of the forbidden directories (such as `/var`), and have no characters
/// that separate overlayfs' options.
pub fn check_directory(path: &[u8]) -> Result<()> {
    let refuse = |why: &str, hint: &str| {
        let why = format!("cannot lay {:?}: {why}", shown(path));
        Err(Error::refused(why, hint))
    };
    let Some(inner) = path.strip_prefix(b"/") else {
        return refuse("the path is not absolute", "begin the path with /");
    };
    if path.len() > MAX_DIRECTORY {
        return refuse("longer than 85 bytes", "lay a directory above it");
    }
    let parts = || inner.split(|b| *b == b'/');
    if parts().any(|p| matches!(p, b"" | b"." | b"..")) {
        return refuse("not normalised", "no empty parts, no . and no ..");
    }
    if path
        .iter()
        .any(|b| matches!(b, b':' | b',' | b'\\' | b'"' | 0..=b' ' | 0x7f))
    {
        return refuse(
            "overlayfs takes no such name as a layer",
            "lay a directory above it, whose name has no : , \\ \" or blank",
        );
    }
    if NEVER.iter().any(|never| is_in(path, never)) {
        return refuse(
            "the directory belongs to the kernel or holds changing state",
            "lay /usr, /opt or the like",
        );
    }
    Ok(())
}

/// Returns an error if one of the directories is inside another, because a segment would be mounted
/// over the inner one twice.
pub fn check_apart(lay: &[Vec<u8>]) -> Result<()> {
    for (i, a) in lay.iter().enumerate() {
        if let Some(b) = lay.iter().skip(i + 1).find(|b| overlap(a, b)) {
            return Err(Error::refused(
                format!("{} and {} overlap", shown(a), shown(b)),
                "lay only the upper directory",
            ));
        }
    }
    Ok(())
}

/// Returns whether two directories are the same one, or one is below the other.
pub fn overlap(a: &[u8], b: &[u8]) -> bool {
    is_in(a, b) || is_in(b, a)
}

/// Returns whether `path` is the directory `top` or is below it.
pub fn is_in(path: &[u8], top: &[u8]) -> bool {
    path.strip_prefix(top)
        .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

fn once<T>(slot: &mut Option<T>, value: T) -> Result<()> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(bad("a key that may occur once occurs twice")),
    }
}

/// Parses a number that consists of digits only; `u64::from_str` would accept a sign.
fn number(text: &[u8]) -> Result<u64> {
    std::str::from_utf8(text)
        .ok()
        .filter(|t| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|t| t.parse().ok())
        .ok_or_else(|| bad(&format!("{:?} is not a number", shown(text))))
}

fn bad(why: &str) -> Error {
    Error::refused(
        format!("cannot parse /.memfold-segment: {why}"),
        "build the segment again with a memfold of this agent's version",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_name_the_generation_and_the_directories_are_parsed_from_a_segment_manifest() {
        let text = b"format 1\nname web\ngeneration 3\nlay /usr\nlay /opt/x-1\n";
        let manifest = Manifest::parse(text).unwrap();
        assert_eq!(manifest.name, "web");
        assert_eq!(manifest.generation, 3);
        assert_eq!(manifest.lay, [b"/usr".to_vec(), b"/opt/x-1".to_vec()]);
    }

    #[test]
    fn a_segment_manifest_with_dangerous_directories_or_duplicate_keys_is_refused() {
        let base = "format 1\nname web\ngeneration 3\n";
        let many = "lay /usr/".to_string() + &"x".repeat(200);
        let refused = |text: &str, why: &str| {
            let error = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{text:?}: {error}");
        };
        for (line, why) in [
            ("lay /", "not normalised"),
            ("lay /proc", "belongs to the kernel"),
            ("lay /var/lib", "changing state"),
            ("lay /usr/../etc", "not normalised"),
            ("lay usr", "not absolute"),
            ("lay /usr/", "not normalised"),
            ("lay //usr", "not normalised"),
            ("lay /a:b", "overlayfs takes no such name"),
            ("lay /a,b", "overlayfs takes no such name"),
            ("lay /a\\b", "overlayfs takes no such name"),
            ("lay /a b", "overlayfs takes no such name"),
            ("lay /run", "changing state"),
            ("lay /usr\nlay /usr/lib", "overlap"),
            ("name x", "occurs twice"),
            ("format 1", "occurs twice"),
            ("shell x", "unknown key shell"),
            ("lay", "a line without a value"),
            ("\u{0}", "a line without a value"),
            ("generation -1", "is not a number"),
            (&many, "longer than 85 bytes"),
        ] {
            refused(&format!("{base}{line}\n"), why);
        }
        for (text, why) in [
            ("", "the format is not 1"),
            ("name web\ngeneration 3\n", "the format is not 1"),
            ("format 1\nname web\n", "the generation is missing"),
            ("format 1\ngeneration 3\n", "the name is missing"),
            ("format 2\nname web\ngeneration 3\n", "the format is not 1"),
            (
                "format 1\nname ../x\ngeneration 3\n",
                "is not a segment name",
            ),
            ("format 1\nname .x\ngeneration 3\n", "is not a segment name"),
            ("format 1\nname \ngeneration 3\n", "is not a segment name"),
            (
                "format 1\nname web\ngeneration 99999999999999999999\n",
                "is not a number",
            ),
            ("format 1\nname web\ngeneration +1\n", "is not a number"),
            (
                "format 1\nname Web\ngeneration 1\n",
                "is not a segment name",
            ),
            (
                "format 1\r\nname web\r\ngeneration 1\r\n",
                "is not a number",
            ),
        ] {
            refused(text, why);
        }
        refused(
            &format!("{base}{}", "\n".repeat(MAX_BYTES)),
            "longer than 64 KiB",
        );
        let many: Vec<String> = (0..65).map(|i| format!("lay /opt/{i}\n")).collect();
        refused(
            &format!("{base}{}", many.concat()),
            "more than 64 directories",
        );
        assert!(Manifest::parse(format!("{base}lay /usr\nlay /usrx\n").as_bytes()).is_ok());
    }

    proptest! {
        #[test]
        fn parsing_an_arbitrary_segment_manifest_never_causes_a_panic(text in "((format|name|generation|lay) ?[/a-z0-9.: ]{0,12}\n?){0,6}") {
            let _ = Manifest::parse(text.as_bytes());
        }

        #[test]
        fn a_segment_directory_is_accepted_only_if_its_path_is_absolute_and_normalised(path in "(/?[a.]{0,3}){0,4}") {
            let parts: Vec<_> = path.strip_prefix('/').into_iter().flat_map(|p| p.split('/')).collect();
            let stays = !parts.is_empty() && !parts.iter().any(|p| ["", ".", ".."].contains(p));
            prop_assert_eq!(check_directory(path.as_bytes()).is_ok(), stays);
        }
    }
}
