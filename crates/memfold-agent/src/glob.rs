//! Matches paths of the guest's files against shell globs. With globs, the daemon tells the agent
//! which files to report. Paths are compared byte by byte.
//!
//! `?` and `*` match within a path component, `**` across components. `[a-z]` matches one byte of a
//! set, `[!a-z]` one byte outside it. A pattern without a slash is matched with the file name, any
//! other pattern with the whole path.

/// Returns whether `pattern` matches `path`. A pattern without a slash must match the file name,
/// any other pattern the whole path.
pub fn matches(pattern: &[u8], path: &[u8]) -> bool {
    let text = if pattern.contains(&b'/') {
        path
    } else {
        path.rsplit(|b| *b == b'/').next().unwrap_or(path)
    };
    whole(pattern, text)
}

/// Matches without recursion, whose depth a hostile pattern could increase. For each kind of star,
/// one position to return to is kept. The time is at most the product of the lengths (squared if
/// both kinds occur).
fn whole(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Positions to return to after a star: the pattern after the star, and the text where the rest
    // may begin. For a double star also whether it matches whole components only.
    let mut star: Option<(usize, usize)> = None;
    let mut deep: Option<(usize, usize, bool)> = None;
    loop {
        if pattern[p..].starts_with(b"**") {
            p += 2;
            let components = pattern.get(p) == Some(&b'/') && (t == 0 || text[t - 1] == b'/');
            p += usize::from(components);
            deep = Some((p, t, components));
            star = None;
            continue;
        }
        if pattern.get(p) == Some(&b'*') {
            p += 1;
            star = Some((p, t));
            continue;
        }
        if p == pattern.len() && t == text.len() {
            return true;
        }
        if let Some(length) = text.get(t).and_then(|b| one(&pattern[p..], *b)) {
            p += length;
            t += 1;
            continue;
        }
        match (star, deep) {
            (Some((after, from)), _) if from < text.len() && text[from] != b'/' => {
                star = Some((after, from + 1));
                (p, t) = (after, from + 1);
            }
            (_, Some((after, from, components))) if from < text.len() => {
                let step = if components {
                    text[from..].iter().position(|b| *b == b'/')
                } else {
                    Some(0)
                };
                let Some(step) = step else { return false };
                let from = from + step + 1;
                star = None;
                deep = Some((after, from, components));
                (p, t) = (after, from);
            }
            _ => return false,
        }
    }
}

/// Returns the length of the pattern's first element if this element matches `byte`.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match *pattern.first()? {
        b'?' => (byte != b'/').then_some(1),
        b'[' => {
            // A bracket that is never closed is an ordinary character.
            let Some(close) = pattern.iter().skip(2).position(|b| *b == b']') else {
                return (byte == b'[').then_some(1);
            };
            let close = close + 2;
            let (negated, set) = match pattern[1] {
                b'!' | b'^' => (true, &pattern[2..close]),
                _ => (false, &pattern[1..close]),
            };
            (byte != b'/' && in_set(set, byte) != negated).then_some(close + 1)
        }
        b'\\' if pattern.len() > 1 => (pattern[1] == byte).then_some(2),
        plain => (plain == byte).then_some(1),
    }
}

fn in_set(mut set: &[u8], byte: u8) -> bool {
    while let Some((&first, rest)) = set.split_first() {
        if let [b'-', last, rest @ ..] = rest {
            if (first..=*last).contains(&byte) {
                return true;
            }
            set = rest;
        } else {
            if first == byte {
                return true;
            }
            set = rest;
        }
    }
    false
}

/// Glob patterns that decide which files the agent reports to the daemon. The daemon sends them in
/// `Welcome`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    include: Vec<String>,
    exclude: Vec<String>,
}

impl Rules {
    /// Creates rules. An empty `include` allows every path; a path that matches `exclude` is not
    /// allowed in any case.
    pub const fn new(include: Vec<String>, exclude: Vec<String>) -> Self {
        Self { include, exclude }
    }

    /// Returns whether the agent reports a file with this path. A file without a path (`path` is
    /// empty) is reported only if `include` is empty.
    pub fn allow(&self, path: &[u8]) -> bool {
        let any = |list: &[String]| list.iter().any(|p| matches(p.as_bytes(), path));
        if path.is_empty() {
            return self.include.is_empty();
        }
        (self.include.is_empty() || any(&self.include)) && !any(&self.exclude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn m(pattern: &str, path: &str) -> bool {
        matches(pattern.as_bytes(), path.as_bytes())
    }

    #[test]
    fn in_a_glob_a_star_matches_one_path_component_and_a_double_star_matches_several() {
        assert!(m("/usr/lib/*", "/usr/lib/libc.so.6"));
        assert!(!m("/usr/lib/*", "/usr/lib/x/libc.so.6"));
        assert!(m("/usr/lib/**", "/usr/lib/x/libc.so.6"));
        assert!(m("/usr/**/libc.so.?", "/usr/lib/x/libc.so.6"));
        assert!(m("/usr/**/libc.so.?", "/usr/libc.so.6"));
        assert!(m("/**", "/a"));
        assert!(m("/**/*.so*", "/a/b/c.so.1"));
        assert!(!m("/**/*.so", "/a/b/c.so.1"));
        assert!(!m("/usr/**/x", "/usr/lib/yx"));
        assert!(m("**/lib/*a*", "/usr/lib/bab"));
    }

    #[test]
    fn a_glob_without_a_slash_is_matched_against_the_file_name_only() {
        assert!(m("*.o", "/home/u/a.o"));
        assert!(m("[a-c]?[!x]", "/tmp/bzz"));
        assert!(!m("[a-c]?[!x]", "/tmp/bzx"));
        assert!(m("[", "/tmp/["));
        assert!(m("\\*", "/tmp/*"));
        assert!(!m("", "/tmp/x"));
    }

    #[test]
    fn an_exclude_glob_overrides_an_include_glob() {
        let rules = Rules::new(vec!["/usr/**".into()], vec!["*.pyc".into()]);
        assert!(rules.allow(b"/usr/bin/python3"));
        assert!(!rules.allow(b"/usr/lib/x.pyc"));
        assert!(!rules.allow(b"/home/x"));
        assert!(!rules.allow(b""));
        assert!(Rules::default().allow(b""));
    }

    proptest! {
        #[test]
        fn matching_an_arbitrary_glob_never_causes_a_panic(pattern in "[ab/*?\\[\\]!\\\\-]{0,24}", path in "[ab/\\[-]{0,40}") {
            m(&pattern, &path);
        }

        #[test]
        fn every_path_used_as_a_glob_matches_itself(path in "[a-z/]{1,40}") {
            prop_assert!(whole(path.as_bytes(), path.as_bytes()));
        }
    }
}
