//! Trims a guest's page cache: makes the agent reclaim clean pages of files.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use memfold_wire::agent::ToAgent;
use memfold_wire::memory::{self, TrimOrder, TrimResult};

use crate::agent_facts::AgentFacts;
use crate::agent_link::AgentLink;
use crate::agent_task::AgentError;

/// What the agent shall reclaim of the guest's page cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trim {
    /// Most bytes to reclaim.
    pub bytes: u64,
    /// Share of time, from 0 to 1, for which the guest's tasks may wait for memory (PSI `some`)
    /// between two steps. Above that, the trim ends.
    pub max_pressure: f64,
    /// Longest time that the trim may take.
    pub limit: Duration,
    /// Whether anonymous memory must stay out of the guest's swap.
    pub spare_swap: bool,
}

/// Time in which the agent must answer after the limit of a trim: its last step may take long.
const TRIM_PATIENCE: Duration = Duration::from_secs(10);

impl AgentLink {
    /// Makes the agent reclaim clean page cache of the guest, and waits for the result. A trim that
    /// runs already is ended, and returns what it has reclaimed.
    ///
    /// # Errors
    ///
    /// [`AgentError::TooOld`] if the agent does not know such an order.
    pub fn trim(&self, trim: &Trim) -> Result<TrimResult, AgentError> {
        let (sender, receiver) = sync_channel(1);
        let (order, session) = {
            let mut state = self.shared.lock_in_session()?;
            let facts = state.facts()?;
            if !facts.reports_memory() {
                let version = facts.agent.clone();
                let what = "trim the guest's page cache";
                return Err(AgentError::TooOld { version, what });
            }
            let order = state.next_trim;
            state.next_trim = order.wrapping_add(1);
            state.trims.insert(order, sender);
            (order, state.number)
        };
        let message = ToAgent::Trim(TrimOrder {
            order,
            bytes: trim.bytes,
            max_some: hundredths(trim.max_pressure),
            deadline_ms: u32::try_from(trim.limit.as_millis()).unwrap_or(u32::MAX),
            spare_swap: trim.spare_swap,
        });
        let outcome = self.shared.send_in(session, &message).and_then(|()| {
            match receiver.recv_timeout(trim.limit.saturating_add(TRIM_PATIENCE)) {
                Ok(result) => Ok(result),
                Err(RecvTimeoutError::Timeout) => Err(AgentError::TrimTimeout {
                    seconds: trim.limit.as_secs_f64(),
                }),
                Err(RecvTimeoutError::Disconnected) => Err(AgentError::Lost),
            }
        });
        self.shared.lock().trims.remove(&order);
        outcome
    }
}

/// Converts a share of time from 0 to 1 to hundredths of a percent.
fn hundredths(share: f64) -> u16 {
    // The value is between 0 and 10,000; not a number becomes 0.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let hundredths = (share.clamp(0.0, 1.0) * 1e4).round() as u16;
    hundredths
}

impl AgentFacts {
    /// Returns whether the agent knows messages about the guest's memory: figures and trims.
    #[must_use]
    pub fn reports_memory(&self) -> bool {
        memory::has_feature(&self.agent, memory::FEATURE)
    }
}
