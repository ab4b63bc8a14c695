//! Sends events as they happen, as server-sent events with numbers: API path `/v1/events/stream`. A
//! client that reconnects with the number of the last event that it got misses none.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use memfold_api::{ErrorBody, EventGap};
use memfold_daemon::Daemon;
use memfold_ledger::history::Event;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::Instant;

use super::access::{Access, Visitor};
use super::answer::{Failure, Served, blocking, refusal, refusal_with_hint};
use super::live::{MOST_EVENTS, STILL_HERE, STREAM_LIFE};

/// Time after which a client reconnects to the stream.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Header with the number of the last event that the client got.
const LAST_EVENT_ID: &str = "last-event-id";

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Begin {
    /// Number of earlier events that are sent first, if the client has no last event.
    count: Option<i64>,
}

/// Sends events as server-sent events `event`, each with its number as `id`. With the header
/// `last-event-id`, the stream begins after that event; otherwise with the last `count` events, 0
/// by default, at most 1,000. If events between were dropped, because only the last 5,000 are kept,
/// an event `gap` comes first. A stream that begins anew names the number before its first event in
/// a message without data. The stream ends after ten minutes; a client then reconnects.
#[utoipa::path(get, path = "/v1/events/stream", params(("count" = Option<i64>, Query), ("last-event-id" = Option<i64>, Header)), responses((status = 200, content_type = "text/event-stream", body = Event), (status = 404, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub(super) async fn event_stream(
    State(daemon): Served,
    Extension(access): Extension<Arc<Access>>,
    Extension(visitor): Extension<Visitor>,
    Query(begin): Query<Begin>,
    headers: HeaderMap,
) -> Response {
    let last = headers.get(LAST_EVENT_ID).map(|value| {
        let number = value
            .to_str()
            .ok()
            .and_then(|text| text.parse::<i64>().ok());
        number.filter(|number| *number >= 0)
    });
    if last == Some(None) {
        let why = "the header 'last-event-id' is no number of an event";
        return refusal(StatusCode::BAD_REQUEST, why);
    }
    let Some(place) = access.stream_of(visitor.role) else {
        return refusal_with_hint(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many dashboards and streams of events are open",
            "close one",
        );
    };
    let newest = blocking(State(daemon.clone()), |d| d.sampling().last_event()).await;
    let newest = match newest {
        Ok(Json(newest)) => newest,
        Err(failure) => return failure.into_response(),
    };
    let count = begin.count.unwrap_or(0).clamp(0, MOST_EVENTS);
    let mut samples = daemon.sampling().samples();
    samples.mark_changed();
    let source = Source {
        after: last.flatten().unwrap_or((newest - count).max(0)),
        is_new: true,
        is_resumed: last.is_some(),
        newest,
        daemon,
        samples,
        ending: access.ending.clone(),
        until: Instant::now() + STREAM_LIFE,
        waiting: Vec::new(),
        _place: place,
    };
    let messages = stream::unfold(source, |mut source| async move {
        let message = source.next().await?;
        Some((Ok::<_, Infallible>(message), source))
    });
    Sse::new(messages)
        .keep_alive(KeepAlive::new().interval(STILL_HERE))
        .into_response()
}

/// What one client's stream is made from.
struct Source {
    daemon: Arc<Daemon>,
    /// Number of the last event that was sent.
    after: i64,
    /// Whether nothing was sent yet.
    is_new: bool,
    /// Whether the client named its last event, and no event was sent yet.
    is_resumed: bool,
    /// Number of the newest event when the stream began.
    newest: i64,
    samples: watch::Receiver<Arc<str>>,
    ending: watch::Receiver<bool>,
    until: Instant,
    /// Events that are sent next, the first one last.
    waiting: Vec<(i64, Event)>,
    _place: Vec<OwnedSemaphorePermit>,
}

impl Source {
    /// Returns the next message; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Message> {
        if std::mem::take(&mut self.is_new) && !self.is_resumed {
            // Without data, this is no event. A client whose stream ends before the first event
            // goes on from here.
            return Some(Message::default().id(self.after.to_string()));
        }
        loop {
            if std::mem::take(&mut self.is_resumed) {
                if let Some(gap) = self.gap().await? {
                    return Some(gap);
                }
            }
            if let Some((number, event)) = self.waiting.pop() {
                self.after = number;
                return message("event", &event).map(|message| message.id(number.to_string()));
            }
            tokio::select! {
                // Events are recorded before the sample that they belong to is published.
                changed = self.samples.changed() => changed.ok()?,
                _ = self.ending.wait_for(|ends| *ends) => return None,
                () = tokio::time::sleep_until(self.until) => return None,
            }
            self.samples.mark_unchanged();
            self.read().await.ok()?;
        }
    }

    async fn read(&mut self) -> Result<(), Failure> {
        let after = self.after;
        let daemon = State(self.daemon.clone());
        let read = blocking(daemon, move |d| {
            d.sampling().events_after(after, MOST_EVENTS)
        });
        let Json(mut events) = read.await?;
        if i64::try_from(events.len()) == Ok(MOST_EVENTS) {
            self.samples.mark_changed();
        }
        events.reverse();
        self.waiting = events;
        Ok(())
    }

    /// Returns a message if events that the client has not got were dropped, or if its last event
    /// is of another history. `None`: the stream ends.
    async fn gap(&mut self) -> Option<Option<Message>> {
        let missed = if self.after > self.newest {
            self.after = 0;
            None
        } else {
            self.read().await.ok()?;
            let first = self
                .waiting
                .last()
                .map_or(self.newest, |(number, _)| number - 1);
            let missed = u64::try_from(first - self.after).unwrap_or(0);
            if missed == 0 {
                return Some(None);
            }
            Some(missed)
        };
        Some(Some(message("gap", &EventGap { missed })?))
    }
}

fn message(kind: &str, data: &impl serde::Serialize) -> Option<Message> {
    let message = Message::default().event(kind).retry(ASK_AGAIN);
    message.json_data(data).ok()
}
