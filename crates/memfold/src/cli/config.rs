//! The configuration file of `memfold serve`. The keys of the file are the names of the command's
//! options, so file and command line can express the same settings. Options on the command line and
//! in the environment take precedence.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches as _, Parser};
use serde::Serialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::context::Context;
use super::examples;
use super::serve;
use super::user_mode::UserDirectories;

/// Path of the default configuration file. It is read if it exists and no other file is named.
pub(super) const DEFAULT_FILE: &str = "/etc/memfold/memfold.toml";

/// Size limit of a configuration file, in bytes.
const LARGEST: u64 = 1 << 20;

#[derive(clap::Subcommand, Debug)]
pub(super) enum Arguments {
    /// Check a configuration file of 'memfold serve', and the files and groups that it names;
    /// report each wrong field with its line
    Check(CheckArguments),
}

#[derive(Args, Debug)]
pub(super) struct CheckArguments {
    /// Configuration file to check
    #[arg(env = "MEMFOLD_CONFIG", default_value = DEFAULT_FILE)]
    file: PathBuf,
}

/// A problem that was found in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Problem {
    /// Line number, from 1; `None` if the problem concerns the whole file.
    line: Option<usize>,
    field: Option<String>,
    what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "{line}: ")?;
        }
        if let Some(field) = &self.field {
            write!(f, "{field}: ")?;
        }
        f.write_str(&self.what)
    }
}

/// A field of a configuration file whose name and value are valid.
#[derive(Debug, PartialEq, Eq)]
struct Field {
    name: String,
    /// Number of the field's line, from 1.
    line: usize,
    /// Command line arguments with the same meaning as the field.
    arguments: Vec<String>,
}

/// The fields of a valid configuration file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Config(Vec<Field>);

impl Config {
    /// Returns the problems of fields that name something which this host lacks or cannot do.
    fn unusable(&self) -> Vec<Problem> {
        let all = self.0.iter().flat_map(|field| &field.arguments);
        let serve = serve_command().try_get_matches_from(all);
        let serve = serve.and_then(|given| serve::Arguments::from_arg_matches(&given));
        // Parsing cannot fail here, because the fields are valid.
        let found = serve.map(|serve| serve.unusable()).unwrap_or_default();
        let line_of = |name| self.0.iter().find(|f| f.name == name).map(|f| f.line);
        let problems = found.into_iter().map(|(name, what)| Problem {
            line: line_of(name),
            field: Some(name.to_owned()),
            what,
        });
        let mut problems: Vec<Problem> = problems.collect();
        problems.sort_by_key(|problem| problem.line);
        problems
    }

    /// Returns the arguments for the fields that are not set in `given`, by the command line or the
    /// environment.
    fn arguments(&self, given: &ArgMatches) -> Vec<OsString> {
        let is_given = |field: &str| {
            let source = given.value_source(field);
            source.is_some_and(|source| source != ValueSource::DefaultValue)
        };
        let fields = self.0.iter().filter(|field| !is_given(&field.name));
        fields
            .flat_map(|field| &field.arguments)
            .map(Into::into)
            .collect()
    }
}

/// Parses the text of a configuration file.
///
/// # Errors
///
/// All problems of the file, sorted by line.
fn parse(text: &str) -> Result<Config, Vec<Problem>> {
    let line_of = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut problems: Vec<Problem> = errors
        .iter()
        .map(|error| Problem {
            line: error.span().map(|span| line_of(span.start)),
            field: None,
            what: error.message().to_owned(),
        })
        .collect();
    let serve = serve_command();
    let mut config = Config::default();
    // After an invalid line, the rest may have been misparsed, so the fields are not checked.
    let fields = problems.is_empty().then(|| table.get_ref().iter());
    for (key, value) in fields.into_iter().flatten() {
        let name = key.get_ref().to_string();
        let line = line_of(key.span().start);
        match arguments_of(&serve, &name, value) {
            Ok(arguments) => config.0.push(Field {
                name,
                line,
                arguments,
            }),
            Err(problem) => problems.push(Problem {
                line: Some(line),
                field: Some(name),
                what: problem,
            }),
        }
    }
    if problems.is_empty() {
        let all = config.0.iter().flat_map(|field| &field.arguments);
        if let Err(error) = serve.try_get_matches_from(all) {
            problems.push(Problem {
                line: None,
                field: None,
                what: in_a_line(&error),
            });
        }
    }
    problems.sort_by_key(|problem| problem.line);
    if problems.is_empty() {
        Ok(config)
    } else {
        Err(problems)
    }
}

/// Returns the command `memfold serve`, for parsing arguments without the program's name.
fn serve_command() -> Command {
    serve::Arguments::augment_args(Command::new("serve")).no_binary_name(true)
}

/// Returns whether an option may appear in a file: every option except those that name the file.
fn is_field(argument: &Arg) -> bool {
    argument.get_long().is_some() && !["config", "user"].contains(&argument.get_id().as_str())
}

/// Returns the command line arguments with the meaning of `field = value`.
///
/// # Errors
///
/// The [`Problem`] of the field, if name or value is invalid.
fn arguments_of(
    serve: &Command,
    field: &str,
    value: &Spanned<DeValue<'_>>,
) -> Result<Vec<String>, String> {
    let mut options = serve.get_arguments().filter(|a| is_field(a));
    let Some(option) = options.find(|option| option.get_id() == field) else {
        let known = serve.get_arguments().filter(|a| is_field(a));
        let mut known: Vec<&str> = known.map(|option| option.get_id().as_str()).collect();
        known.sort_unstable();
        return Err(format!(
            "no such field; the fields are {}",
            known.join(", ")
        ));
    };
    let long = option.get_long().unwrap_or_default();
    let arguments = match (option.get_action(), value.get_ref()) {
        (ArgAction::SetTrue, DeValue::Boolean(true)) => vec![format!("--{long}")],
        (ArgAction::SetTrue, DeValue::Boolean(false)) => Vec::new(),
        (ArgAction::SetTrue, _) => return Err("must be true or false".to_owned()),
        (ArgAction::Append, DeValue::Array(values)) => {
            let texts = values.iter().map(|value| text_of(value.get_ref()));
            let texts: Option<Vec<String>> = texts.collect();
            let texts = texts.ok_or("must be a list of strings or numbers")?;
            texts.iter().map(|t| format!("--{long}={t}")).collect()
        }
        (ArgAction::Append, _) => return Err("must be a list: [\"...\", \"...\"]".to_owned()),
        (_, value) => {
            let text = text_of(value).ok_or("must be a string or a number")?;
            vec![format!("--{long}={text}")]
        }
    };
    match serve.clone().try_get_matches_from(&arguments) {
        // An option that this option requires may be in another line.
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => Err(in_a_line(&error)),
        _ => Ok(arguments),
    }
}

fn text_of(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => Some(number.to_string()),
        DeValue::Float(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Returns clap's error message in one line, without its advice on usage.
fn in_a_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = first.split_whitespace().collect();
    let line = words.join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

fn read(file: &Path) -> anyhow::Result<String> {
    use std::io::Read as _;
    let open = || -> std::io::Result<String> {
        let mut text = String::new();
        let file = std::fs::File::open(file)?;
        file.take(LARGEST + 1).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = open().with_context(|| format!("cannot read {}", file.display()))?;
    anyhow::ensure!(
        text.len() as u64 <= LARGEST,
        "{} is longer than {LARGEST} bytes, so it is not a configuration of memfold",
        file.display()
    );
    Ok(text)
}

/// Parses the command line; for `serve`, also adds the options of the configuration file. Wrong
/// usage ends the process, as with clap.
pub(super) fn command_line<Cli: Parser>() -> anyhow::Result<Cli> {
    let typed = examples::add(Cli::command()).get_matches();
    let matches = match typed.subcommand() {
        Some(("serve", serve)) => with_file(&typed, serve, Cli::command())?,
        _ => typed,
    };
    Cli::from_arg_matches(&matches).map_err(|error| error.exit())
}

fn with_file(
    typed: &ArgMatches,
    serve: &ArgMatches,
    program: Command,
) -> anyhow::Result<ArgMatches> {
    let named = serve.get_one::<PathBuf>("config");
    let default = if serve.get_flag("user") {
        UserDirectories::find()?.config_file()
    } else {
        DEFAULT_FILE.into()
    };
    let file = named.unwrap_or(&default).as_path();
    if named.is_none() && !file.exists() {
        return Ok(typed.clone());
    }
    let config = parse(&read(file)?).map_err(|problems| {
        let lines: Vec<String> = problems.iter().map(|p| format!("  {p}")).collect();
        anyhow::anyhow!(
            "cannot use configuration file {} (line: field: problem)\n{}",
            file.display(),
            lines.join("\n")
        )
    })?;
    let more = config.arguments(serve);
    let all = std::env::args_os().chain(more);
    // Each field is valid by itself, but may conflict with the command line.
    program.try_get_matches_from(all).map_err(|error| {
        anyhow::anyhow!(
            "the settings of {} do not fit the command line: {}",
            file.display(),
            in_a_line(&error)
        )
    })
}

#[derive(Serialize)]
struct Checked<'a> {
    file: &'a Path,
    problems: Vec<Problem>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments::Check(CheckArguments { file }) = arguments;
    let problems = match parse(&read(file)?) {
        Ok(config) => config.unusable(),
        Err(problems) => problems,
    };
    let checked = Checked { file, problems };
    context.print(&checked, |checked| {
        let at = checked.file.display();
        if checked.problems.is_empty() {
            return format!("{at}: right");
        }
        let problems = checked.problems.iter();
        let lines: Vec<String> = problems.map(|p| format!("{at}:{p}")).collect();
        lines.join("\n")
    })?;
    let is_right = checked.problems.is_empty();
    Ok(ExitCode::from(u8::from(!is_right)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str) -> Vec<(Option<usize>, String)> {
        let problems = parse(text).unwrap_err();
        let said = |p: Problem| {
            let field = p.field.map(|f| format!("{f}: ")).unwrap_or_default();
            (p.line, field + &p.what)
        };
        problems.into_iter().map(said).collect()
    }

    fn given(arguments: &[&str]) -> ArgMatches {
        serve_command().try_get_matches_from(arguments).unwrap()
    }

    fn added(text: &str, typed: &[&str]) -> Vec<OsString> {
        parse(text).unwrap().arguments(&given(typed))
    }

    const FILE: &str = r#"
# all of it
cpu = 7.5
store_cap = "8G"
paused = true
include = ["/usr/**", "/opt/**"]
pages_per_second = 10_000
"#;

    #[test]
    fn every_field_of_the_configuration_file_is_turned_into_a_command_line_option() {
        let mut all = added(FILE, &[]);
        all.sort();
        assert_eq!(
            all,
            [
                "--cpu=7.5",
                "--include=/opt/**",
                "--include=/usr/**",
                "--pages-per-second=10000",
                "--paused",
                "--store-cap=8G"
            ]
        );
        assert_eq!(added("paused = false", &[]), [""; 0]);
    }

    #[test]
    fn command_line_options_override_the_configuration_file_including_lists() {
        let mut rest = added(FILE, &["--cpu=1", "--include=/srv/**", "--paused"]);
        rest.sort();
        assert_eq!(rest, ["--pages-per-second=10000", "--store-cap=8G"]);
    }

    #[test]
    fn each_invalid_configuration_field_is_named_with_its_line_number() {
        let text = "cpu = 500\n\nstore_cap = \"much\"\ncolour = \"red\"\npaused = \"yes\"\ninclude = \"/usr\"\nsettle = -1\nconfig = \"x\"\ncpu_share = [1]\n";
        let problems = wrong(text);
        let lines: Vec<_> = problems.iter().map(|(line, _)| line.unwrap()).collect();
        assert_eq!(lines, [1, 3, 4, 5, 6, 7, 8, 9]);
        for (number, words) in [
            (0, "cpu: invalid value '500' for '--cpu <PERCENT>'"),
            (1, "store_cap: invalid value 'much'"),
            (
                2,
                "colour: no such field; the fields are allow_host, borrow, cover, cpu, ",
            ),
            (3, "paused: must be true or false"),
            (4, "include: must be a list"),
            (5, "settle: invalid value '-1'"),
            (6, "config: no such field"),
        ] {
            let said = &problems[number].1;
            assert!(said.starts_with(words), "'{said}', not '{words}'");
        }
    }

    #[test]
    fn a_toml_syntax_error_is_reported_with_its_line_number_as_the_only_problem() {
        let problems = wrong("cpu = 5\nstore_cap = = 3\ncolour = 1\n");
        assert!(!problems.is_empty());
        assert!(
            problems.iter().all(|(line, _)| *line == Some(2)),
            "{problems:?}"
        );
        assert_eq!(wrong("cpu = 5\ncpu = 6\n")[0].0, Some(2));
        assert_eq!(wrong("[serve]\ncpu = 5\n")[0].0, Some(1));
    }

    #[test]
    fn the_installed_configuration_file_is_valid_and_lists_every_field() {
        let text = include_str!("../../../../deploy/memfold.toml");
        assert_eq!(parse(text), Ok(Config::default()));
        // Activates all fields: in the file, a `#` stands directly before the name of each field.
        let active: String = text
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if !rest.starts_with([' ', '#']) => format!("{rest}\n"),
                _ => format!("{line}\n"),
            })
            .collect();
        let config = parse(&active).unwrap();
        let mut spoken_of: Vec<&str> = config.0.iter().map(|field| field.name.as_str()).collect();
        let serve = serve_command();
        let fields = serve.get_arguments().filter(|a| is_field(a));
        let mut fields: Vec<&str> = fields.map(|a| a.get_id().as_str()).collect();
        fields.sort_unstable();
        spoken_of.sort_unstable();
        assert_eq!(spoken_of, fields);
    }
}
