//! Parses and runs the agent's options `--segment-...`.
//!
//! Each option prints a report to standard output, as one line of JSON. A failure is also reported
//! there, as `{"error": ..., "hint": ...}`, and on standard error as text.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::ExitCode;

use super::error::{Error, Result};
use super::json::Object;
use super::state::Places;
use super::{device, lay, list, manifest, parse_reference, settle, take_off};
use crate::consent::Consent;

/// Part of the text of `--help`: the agent's options for segments.
pub const HELP: &str = "\
Segments (read-only images of /dev/pmemN, shared with other VMs); each prints a line of JSON:
  --segment-list                list segments, where they are laid, and what was written since
  --segment-lay NAME@GENERATION [--content] [--only DIR]... [--max-differing PERCENT]
                                mount it and lay its directories over the guest's own. Files that differ stay the guest's own;
                                --content also compares bytes, not only sizes and times; refused if more than PERCENT (25) differ
  --segment-take-off NAME       take it off, merge back what was written meanwhile, and unmount it
  --segment-settle              at boot: merge back what was left, then lay what was laid; always exits 0
  --segment-shutdown            before shutdown: take all segments off, to be laid again at the next boot
";

/// Runs the option for segments that `arguments` begin with; `None` if the first argument is no
/// such option. Exit codes: 0 done, 1 failed or refused, 2 wrong usage.
pub fn run(arguments: &[OsString]) -> Option<ExitCode> {
    let (first, rest) = arguments.split_first()?;
    let places = Places::default();
    let result = match first.to_str()? {
        "--segment-list" => none(rest).and_then(|()| {
            device::load_modules(&places);
            list::list(&places)
        }),
        "--segment-lay" => request(rest).and_then(|request| {
            device::load_modules(&places);
            lay::lay(&places, &request)
        }),
        "--segment-take-off" => name(rest).and_then(|name| take_off::take_off(&places, &name)),
        "--segment-shutdown" => none(rest).and_then(|()| take_off::take_off_all(&places)),
        "--segment-settle" => none(rest).map(|()| {
            let command_line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
            let settled = settle::settle(&places, &command_line, &Consent::read());
            for problem in &settled.problems {
                say!("memfold-agent: {problem}");
            }
            if settled.merged > 0 {
                settle::tell_systemd(&command_line);
            }
            settled.report()
        }),
        _ => return None,
    };
    Some(match result {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            say!("memfold-agent: {error}");
            let report = match &error {
                Error::Refused { why, hint } => Object::new().text("error", why).text("hint", hint),
                other => Object::new()
                    .text("error", other.to_string())
                    .raw("hint", "null"),
            };
            println!("{}", report.end());
            ExitCode::from(error.exit_code())
        }
    })
}

fn none(rest: &[OsString]) -> Result<()> {
    match rest.first() {
        None => Ok(()),
        Some(word) => Err(unexpected(word)),
    }
}

fn unexpected(word: &OsString) -> Error {
    Error::Usage(format!(
        "unexpected: {}",
        super::json::escaped(word.as_bytes())
    ))
}

fn name(rest: &[OsString]) -> Result<String> {
    match rest {
        [name] => manifest::check_name(name.as_bytes()).map_err(|e| usage(&e)),
        _ => Err(Error::Usage("--segment-take-off takes one NAME".into())),
    }
}

fn usage(error: &Error) -> Error {
    Error::Usage(error.to_string())
}

fn request(rest: &[OsString]) -> Result<lay::Request> {
    let mut words = rest.iter();
    let reference = words.next().and_then(|w| w.to_str());
    let reference =
        reference.ok_or_else(|| Error::Usage("--segment-lay takes NAME@GENERATION".into()))?;
    let (name, generation) = parse_reference(reference).map_err(|e| usage(&e))?;
    let mut request = lay::Request::new(name, generation);
    while let Some(word) = words.next() {
        let mut value = || {
            words
                .next()
                .ok_or_else(|| Error::Usage("the last option takes a value".into()))
        };
        match word.to_str() {
            Some("--content") => request.content = true,
            Some("--only") => {
                let directory = value()?.clone().into_vec();
                manifest::check_directory(&directory).map_err(|e| usage(&e))?;
                request.only.push(directory);
            }
            Some("--max-differing") => {
                let text = value()?.to_str().unwrap_or_default();
                let percent = text.parse().ok().filter(|p| *p <= 100);
                request.max_differing =
                    percent.ok_or_else(|| Error::Usage(format!("{text:?} is not a percentage")))?;
            }
            _ => return Err(unexpected(word)),
        }
    }
    manifest::check_apart(&request.only).map_err(|e| usage(&e))?;
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<lay::Request> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        request(&words)
    }

    #[test]
    fn a_request_to_mount_a_segment_is_parsed_from_the_command_line() {
        let words = [
            "web@3",
            "--content",
            "--only",
            "/usr",
            "--max-differing",
            "7",
            "--only",
            "/opt",
        ];
        let request = parsed(&words).unwrap();
        assert_eq!((&*request.name, request.generation), ("web", 3));
        assert!(request.content);
        assert_eq!(request.only, [b"/usr".to_vec(), b"/opt".to_vec()]);
        assert_eq!(request.max_differing, 7);
    }

    #[test]
    fn wrong_arguments_of_the_agents_segment_command_end_it_with_exit_code_2() {
        for words in [
            &[][..],
            &["web"],
            &["web@"],
            &["web@x"],
            &["web@+1"],
            &["../web@1"],
            &["web@1", "--only"],
            &["web@1", "--only", "/var"],
            &["web@1", "--max-differing", "101"],
            &["web@1", "x"],
            &["web@1", "--only", "/usr", "--only", "/usr/lib"],
        ] {
            assert_eq!(parsed(words).unwrap_err().exit_code(), 2, "{words:?}");
        }
    }
}
