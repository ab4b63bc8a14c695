//! The log: on standard error, as text or a JSON object a line, and by systemd's journal with its
//! own levels.

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

/// How lines of the log look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// For people; in systemd's journal without time and with the journal's level
    #[default]
    Text,
    /// One JSON object a line: time, level, message, and the event's fields
    Json,
}

/// A filter as users write it: rooms are those of `memfold`, whichever crate they lie in
/// (`info,memfold::fold=debug`).
pub(super) fn filter(text: &str) -> Result<EnvFilter, ParseError> {
    let directives: Vec<String> = text.split(',').map(of_its_crate).collect();
    EnvFilter::try_new(directives.join(","))
}

/// One part of a filter, with the crate that the room lies in.
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

/// Begins to log. `filter`: as in `MEMFOLD_LOG`.
pub(super) fn begin(filter: EnvFilter, format: LogFormat) {
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        // They go to standard error by `eprintln!`, which panics if that is full.
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

/// Whether standard error is systemd's journal (`systemd.exec(5)`, `$JOURNAL_STREAM`).
fn in_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    let stderr = std::fs::metadata("/proc/self/fd/2");
    stderr.is_ok_and(|stderr| stream == format!("{}:{}", stderr.dev(), stderr.ino()))
}

/// Standard error, as far as it takes what is logged.
struct Log {
    /// The level is put before each line, as `sd-daemon(3)` has it.
    is_journal: bool,
}

/// What an event's text goes to.
struct Line(&'static [u8]);

/// Events that the log did not take since it took the last one.
static LOST: AtomicU64 = AtomicU64::new(0);

/// How long a log that took everything so far is waited for. One that has stopped taking anything
/// is not waited for again.
const PATIENCE: Duration = Duration::from_secs(1);

/// So much goes into a pipe at once that has room (`pipe(7)`, `PIPE_BUF`).
const PIECE: usize = 4096;

/// Writes an event. A log that cannot be written, or whose reader stands still, costs events and
/// nothing else.
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

/// Whether a write would not wait.
fn takes_more(log: BorrowedFd<'_>, is_patient: bool) -> bool {
    let limit = if is_patient { PATIENCE } else { Duration::ZERO };
    let limit = Timespec::try_from(limit).ok();
    let mut fds = [PollFd::from_borrowed_fd(log, PollFlags::OUT)];
    // What can't be asked is tried.
    !matches!(poll(&mut fds, limit.as_ref()), Ok(0))
}

const fn prefix(level: Level) -> &'static [u8] {
    match level {
        Level::ERROR => b"<3>",
        Level::WARN => b"<4>",
        Level::INFO => b"<6>",
        _ => b"<7>",
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(if self.is_journal {
            prefix(Level::INFO)
        } else {
            b""
        })
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line {
        Line(if self.is_journal {
            prefix(*metadata.level())
        } else {
            b""
        })
    }
}

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        // An event is written at once. It may hold several lines.
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

/// One JSON object a line.
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

/// The fields of an event, with the causes of errors.
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
    fn a_filter_names_rooms_of_memfold_whichever_crate_they_lie_in() {
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
    fn levels_are_those_of_the_journal() {
        // syslog(3): 3 error, 4 warning, 6 informational, 7 debug.
        let all = [
            Level::ERROR,
            Level::WARN,
            Level::INFO,
            Level::DEBUG,
            Level::TRACE,
        ];
        let prefixes = all.map(|level| std::str::from_utf8(prefix(level)).unwrap());
        assert_eq!(prefixes, ["<3>", "<4>", "<6>", "<7>", "<7>"]);
    }
}
