//! Flow control of a streamed command in a guest: how much output its agent may still send, and how
//! much input may still be sent to it. The sizes of the windows are in `memfold_wire::agent`.

use memfold_wire::agent::{INPUT_WINDOW, OUTPUT_COST, OUTPUT_WINDOW};

use super::agent_task::{AgentError, StreamEvent};

/// A streamed command that runs in the guest.
pub(super) struct LinkStream {
    sink: Box<dyn Fn(StreamEvent) + Send>,
    /// Cost of the output that the agent may still send.
    output_room: usize,
    /// Number of bytes of input that may still be sent to the agent.
    input_room: usize,
}

impl std::fmt::Debug for LinkStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkStream").finish_non_exhaustive()
    }
}

/// Result of passing an event to a streamed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passed {
    /// More events may follow.
    GoesOn,
    /// It was the last event.
    Ended,
    /// The agent sent more output than it may. The event was dropped.
    TooMuch,
}

impl LinkStream {
    pub(super) fn new(sink: impl Fn(StreamEvent) + Send + 'static) -> Self {
        Self {
            sink: Box::new(sink),
            output_room: OUTPUT_WINDOW,
            input_room: INPUT_WINDOW,
        }
    }

    /// Passes an event of the command to its sink.
    pub(super) fn pass(&mut self, event: StreamEvent) -> Passed {
        let event = match event {
            StreamEvent::Output(_, bytes) if bytes.is_empty() => return Passed::GoesOn,
            StreamEvent::Output(kind, bytes) => {
                let cost = bytes.len() + OUTPUT_COST;
                let Some(left) = self.output_room.checked_sub(cost) else {
                    return Passed::TooMuch;
                };
                self.output_room = left;
                StreamEvent::Output(kind, bytes)
            }
            StreamEvent::InputRoom(bytes) => {
                let bytes = usize::try_from(bytes).unwrap_or(INPUT_WINDOW);
                let more = bytes.min(INPUT_WINDOW - self.input_room);
                if more == 0 {
                    // The sink's queue has no limit, so an agent must not fill it for nothing.
                    return Passed::GoesOn;
                }
                self.input_room += more;
                // The window is far below 2^32.
                StreamEvent::InputRoom(u32::try_from(more).unwrap_or(0))
            }
            end @ (StreamEvent::Exited(_) | StreamEvent::NotAllowed(_)) => {
                (self.sink)(end);
                return Passed::Ended;
            }
        };
        (self.sink)(event);
        Passed::GoesOn
    }

    /// Takes room for `bytes` bytes of input.
    pub(super) fn take_input_room(&mut self, bytes: usize) -> Result<(), AgentError> {
        let left = self.input_room.checked_sub(bytes);
        self.input_room = left.ok_or(AgentError::TooMuchInput)?;
        Ok(())
    }

    /// Allows the agent to send more output.
    pub(super) fn allow_output(&mut self, cost: usize) {
        self.output_room = (self.output_room + cost).min(OUTPUT_WINDOW);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn input_room_beyond_the_window_does_not_reach_the_sink() {
        let events = Arc::new(Mutex::new(Vec::new()));
        let sink = events.clone();
        let mut stream = LinkStream::new(move |event| sink.lock().unwrap().push(event));
        for bytes in [0, 1, u32::MAX, 1 << 17] {
            for _ in 0..25_000 {
                let passed = stream.pass(StreamEvent::InputRoom(bytes));
                assert_eq!(passed, Passed::GoesOn);
            }
        }
        assert!(events.lock().unwrap().is_empty());

        stream.take_input_room(10).unwrap();
        for _ in 0..100 {
            stream.pass(StreamEvent::InputRoom(7));
        }
        let expected = [7, 3].map(StreamEvent::InputRoom);
        assert_eq!(*events.lock().unwrap(), expected);
    }
}
