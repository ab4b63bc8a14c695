//! `memfold events`: shows what changed on this host, once or as it happens.

use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use memfold_api::{Client, ClientError, EventGap, EventParser, SentEvent};
use memfold_ledger::history::Event;

use super::context::{Context, JsonLines, write_on};

/// Time between two attempts to reach a daemon that is being restarted.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest time for which the daemon may be away or refuse the stream.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Wait for further events, also while the daemon restarts, until Ctrl-C; with --json or
    /// --json=FILE, the JSON of each event is a line
    #[arg(long, short)]
    follow: bool,
    /// Number of past events to show first, at most 1000
    #[arg(long, default_value_t = 20, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(0..=1000))]
    count: u32,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    if arguments.follow {
        return follow(context, &client, arguments.count);
    }
    let mut events: Vec<Event> = client.get(&format!("/v1/events?count={}", arguments.count))?;
    events.reverse();
    context.print(&events, |events| {
        let lines: Vec<String> = events.iter().map(|event| line(event, now())).collect();
        if lines.is_empty() {
            "no events".into()
        } else {
            lines.join("\n")
        }
    })
}

fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX))
}

/// Returns the line for an event. `now`: the present time in seconds since 1970.
fn line(event: &Event, now: i64) -> String {
    let ago = now.saturating_sub(event.at_unix_s).max(0);
    let ago = match ago {
        0..=59 => format!("{ago} s"),
        60..=3599 => format!("{} min", ago / 60),
        _ => format!("{} h", ago / 3600),
    };
    let mark = if event.warning { "!" } else { " " };
    let vm = event.vm.as_deref().unwrap_or("-");
    // A guest's words are in some texts, and must not control the terminal.
    let text = event.text.replace(char::is_control, " ");
    format!("{ago:>7} ago {mark} {:<9} {vm}: {text}", event.kind)
}

/// Shows events until the reader closes standard output. Reconnects when the stream ends.
fn follow(context: &Context, client: &Client, count: u32) -> anyhow::Result<ExitCode> {
    let path = format!("/v1/events/stream?count={count}");
    let mut file = context.create_lines()?;
    let mut last: Option<String> = None;
    let mut was_connected = false;
    let mut away: Option<Instant> = None;
    loop {
        let ended = match client.stream(&path, last.as_deref()) {
            Ok(mut pieces) => {
                was_connected = true;
                away = None;
                let mut parser = EventParser::default();
                loop {
                    match pieces.next_piece() {
                        Ok(Some(piece)) => {
                            for sent in parser.push(&piece) {
                                if !show(context, file.as_mut(), &sent)? {
                                    return Ok(ExitCode::SUCCESS);
                                }
                            }
                            last = parser.last_id().map(str::to_owned).or(last);
                        }
                        Ok(None) => break None,
                        Err(error) => break Some(error),
                    }
                }
            }
            Err(error) if was_connected && is_passing(&error) => Some(error),
            Err(error) => return Err(error.into()),
        };
        let since = *away.get_or_insert_with(Instant::now);
        if let Some(error) = ended.filter(|_| since.elapsed() > PATIENCE) {
            return Err(error.into());
        }
        std::thread::sleep(AGAIN);
    }
}

/// Returns whether a later attempt may succeed: the daemon is being restarted, or other clients
/// have all streams.
const fn is_passing(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::NoDaemon { .. }
            | ClientError::Http(_)
            | ClientError::Refused { status: 503, .. }
    )
}

/// Prints a sent event, and appends its JSON to the file of `--json=FILE`. Returns `false` if the
/// reader has closed standard output.
fn show(context: &Context, file: Option<&mut JsonLines>, sent: &SentEvent) -> anyhow::Result<bool> {
    if let Some(file) = file {
        file.append(&sent.data)?;
    }
    if context.json {
        return write_on(&sent.data);
    }
    match sent.kind.as_str() {
        "event" => write_on(&line(&serde_json::from_str(&sent.data)?, now())),
        "gap" => {
            let gap: EventGap = serde_json::from_str(&sent.data)?;
            write_on(&match gap.missed {
                Some(missed) => format!("({missed} older events are no longer kept)"),
                None => "(the daemon has begun a new history of events)".into(),
            })
        }
        _ => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_an_event_has_its_age_and_no_control_characters() {
        let event = Event {
            at_unix_s: 1000,
            kind: "vm".into(),
            warning: true,
            vm: Some("web".into()),
            text: "stands\x1b[2J still".into(),
        };
        let shown = line(&event, 1190);
        assert_eq!(shown, "  3 min ago ! vm        web: stands [2J still");
    }
}
