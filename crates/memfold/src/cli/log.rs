//! Writes the log of `memfold`'s commands and of its daemon to standard error: as text, as one JSON
//! object in each line, or as text with systemd's level prefixes.

use std::fmt;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use memfold_daemon::chain;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// Text for people; in systemd's journal, without time and with the journal's level
    #[default]
    Text,
    /// One JSON object in each line: time, level, message, and the event's fields
    Json,
}

/// Parses a log filter. A target in the filter is the name of a module below `memfold`, whatever
/// crate contains the module (`info,memfold::fold=debug`).
pub(super) fn filter(text: &str) -> Result<EnvFilter, ParseError> {
    let directives: Vec<String> = text.split(',').map(of_its_crate).collect();
    EnvFilter::try_new(directives.join(","))
}

/// Returns a directive of a log filter with the name of the crate that contains the directive's
/// module.
fn of_its_crate(directive: &str) -> String {
    let Some(place) = directive.trim().strip_prefix("memfold::") else {
        return directive.to_owned();
    };
    let room = place.split([':', '=']).next().unwrap_or_default();
    match room {
        "cli" => directive.to_owned(),
        "history" | "estimate" => format!("memfold_ledger::{place}"),
        "api" => format!("memfold_server{}", &place[room.len()..]),
        _ => format!("memfold_{place}"),
    }
}

/// Sets up logging. `filter`: from the variable `MEMFOLD_LOG` or the option `--log`.
pub(super) fn begin(filter: EnvFilter, format: LogFormat) {
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        // Otherwise the subscriber would print its own errors with `eprintln!`, which panics if
        // standard error is full.
        .log_internal_errors(false);
    let plain = Log { is_journal: false };
    match format {
        LogFormat::Json => log.with_writer(plain).event_format(JsonLines).init(),
        LogFormat::Text if in_journal() => log
            .with_writer(Log { is_journal: true })
            .with_ansi(false)
            .without_time()
            .with_level(false)
            .init(),
        LogFormat::Text => log
            .with_writer(plain)
            .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
            .init(),
    }
}

/// Returns whether standard error is systemd's journal (`systemd.exec(5)`, `$JOURNAL_STREAM`).
fn in_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    let stderr = std::fs::metadata("/proc/self/fd/2");
    stderr.is_ok_and(|stderr| stream == format!("{}:{}", stderr.dev(), stderr.ino()))
}

/// Writer to standard error that never blocks for long.
struct Log {
    /// Whether each line begins with a level prefix, as in `sd-daemon(3)`.
    is_journal: bool,
}

/// Writer of one event's text. The bytes are the prefix of each line.
struct Line(&'static [u8]);

/// Number of events that were lost since the last successful write.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Longest wait for the reader of the log, as long as no event was lost. After a lost event,
/// writing does not wait.
const PATIENCE: Duration = Duration::from_secs(1);

/// Number of bytes that a pipe with free space accepts at once (`pipe(7)`, `PIPE_BUF`).
const PIECE: usize = 4096;

/// Writes an event to the log. If the log cannot be written, or its reader has stopped, the event
/// is lost and counted.
fn put(text: &[u8]) {
    let mut stderr = io::stderr().lock();
    let lost = LOST.load(Ordering::Relaxed);
    let mut put = |text: &[u8]| {
        text.chunks(PIECE)
            .all(|piece| takes_more(stderr.as_fd(), lost == 0) && stderr.write_all(piece).is_ok())
    };
    let told =
        lost == 0 || put(format!("{lost} events before this one could not be logged\n").as_bytes());
    if told && put(text) {
        LOST.fetch_sub(lost, Ordering::Relaxed);
    } else {
        LOST.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns whether a write to the log would not block.
fn takes_more(log: BorrowedFd<'_>, is_patient: bool) -> bool {
    let limit = if is_patient { PATIENCE } else { Duration::ZERO };
    let limit = Timespec::try_from(limit).ok();
    let mut fds = [PollFd::from_borrowed_fd(log, PollFlags::OUT)];
    // If polling fails, the write is tried.
    !matches!(poll(&mut fds, limit.as_ref()), Ok(0))
}

impl Log {
    const fn line(&self, level: Level) -> Line {
        Line(match level {
            _ if !self.is_journal => b"",
            Level::ERROR => b"<3>",
            Level::WARN => b"<4>",
            Level::INFO => b"<6>",
            _ => b"<7>",
        })
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        self.line(Level::INFO)
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line {
        self.line(*metadata.level())
    }
}

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        // The whole event, which may have several lines, is written at once.
        let mut marked = Vec::with_capacity(text.len() + 8);
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            marked.extend(self.0);
            marked.extend(line);
        }
        put(&marked);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formatter that writes one JSON object in each line.
struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = Fields(Map::new());
        event.record(&mut fields);
        let mut line = Map::new();
        line.insert("time".into(), time.into());
        let level = event.metadata().level().as_str().to_lowercase();
        line.insert("level".into(), level.into());
        line.extend(fields.0);
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// Fields of an event as JSON. The text of an error includes its causes.
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0
            .insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.0.insert(field.name().to_owned(), chain(value).into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_modules_in_the_log_filter_are_replaced_by_names_of_crates() {
        for (written, meant) in [
            ("info", "info"),
            ("info,memfold::fold=debug", "memfold_fold=debug,info"),
            ("memfold::vm::qmp=trace", "memfold_vm::qmp=trace"),
            ("memfold::api=debug", "memfold_server=debug"),
            ("memfold::history=debug", "memfold_ledger::history=debug"),
            ("memfold::cli=trace", "memfold::cli=trace"),
        ] {
            assert_eq!(filter(written).unwrap().to_string(), meant);
        }
        assert!(filter("memfold::fold=loud").is_err());
    }

    #[test]
    fn log_levels_are_mapped_to_journal_priorities() {
        // syslog(3): 3 error, 4 warning, 6 informational, 7 debug.
        let all = [
            Level::ERROR,
            Level::WARN,
            Level::INFO,
            Level::DEBUG,
            Level::TRACE,
        ];
        let log = Log { is_journal: true };
        let prefixes = all.map(|level| std::str::from_utf8(log.line(level).0).unwrap());
        assert_eq!(prefixes, ["<3>", "<4>", "<6>", "<7>", "<7>"]);
    }
}
