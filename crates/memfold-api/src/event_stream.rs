//! Parses server-sent events, the format of `GET /v1/events/stream`
//! (<https://html.spec.whatwg.org/multipage/server-sent-events.html>).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Longest line of a stream that is kept, in bytes. A longer line is dropped.
const MAX_LINE: usize = 1 << 20;

/// Data of a server-sent event `gap`: events that are no longer kept, or that belong to another
/// history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventGap {
    /// Number of missed events; null: unknown, because the daemon has begun a new history.
    pub missed: Option<u64>,
}

/// A server-sent event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SentEvent {
    /// Kind of the event.
    pub kind: String,
    /// Data of the event.
    pub data: String,
    /// Number of the event, with which a stream can be resumed; `None`: the event has no number.
    pub id: Option<String>,
}

/// Collects the bytes of a stream, and returns its events.
#[derive(Debug, Default)]
pub struct EventParser {
    line: Vec<u8>,
    event: SentEvent,
    last_id: Option<String>,
}

impl EventParser {
    /// Returns the number with which the stream can be resumed after what was parsed; `None`: the
    /// stream has named none yet. A message without data names it before the first event.
    #[must_use]
    pub fn last_id(&self) -> Option<&str> {
        self.last_id.as_deref()
    }

    /// Takes the next bytes of the stream. Returns the events that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<SentEvent> {
        let mut events = Vec::new();
        for &byte in bytes {
            if byte != b'\n' {
                if self.line.len() < MAX_LINE {
                    self.line.push(byte);
                }
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches('\r');
            if line.is_empty() {
                let event = std::mem::take(&mut self.event);
                self.last_id = event.id.clone().or(self.last_id.take());
                if !event.data.is_empty() {
                    events.push(event);
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => value.clone_into(&mut self.event.kind),
                "id" => self.event.id = Some(value.to_owned()),
                "data" if self.event.data.len() < MAX_LINE => {
                    if !self.event.data.is_empty() {
                        self.event.data.push('\n');
                    }
                    self.event.data.push_str(value);
                }
                // A comment, which keeps the connection alive, or a field without use here.
                _ => {}
            }
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_sent_events_are_parsed_however_the_stream_is_split() {
        let stream = b": here\n\nevent: event\nretry: 1000\ndata: {\"a\":1}\nid: 7\n\nevent:gap\r\ndata:x\r\ndata: y\r\n\r\ndata: cut";
        let wanted = [
            SentEvent {
                kind: "event".into(),
                data: "{\"a\":1}".into(),
                id: Some("7".into()),
            },
            SentEvent {
                kind: "gap".into(),
                data: "x\ny".into(),
                id: None,
            },
        ];
        for length in [1, 7, stream.len()] {
            let mut parser = EventParser::default();
            let pieces = stream.chunks(length);
            let events: Vec<_> = pieces.flat_map(|piece| parser.push(piece)).collect();
            assert_eq!(events, wanted, "pieces of {length}");
            assert_eq!(parser.last_id(), Some("7"));
        }
        let mut parser = EventParser::default();
        assert_eq!(parser.push(b"id: 3\n"), []);
        assert_eq!(parser.last_id(), None);
        assert_eq!(parser.push(b"\n"), []);
        assert_eq!(parser.last_id(), Some("3"));
    }
}
