//! How often somebody was refused, for `GET /metrics`.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::StatusCode;

/// Why somebody was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// No TLS, or a certificate that the other end does not trust.
    Tls,
    /// No token or session, or a wrong one.
    Credentials,
    /// Known, and not allowed to.
    Rights,
    /// By a wrong name, too much at once, or else.
    Other,
}

impl Why {
    /// By the answer's status.
    pub(super) fn of(status: StatusCode) -> Self {
        match status {
            StatusCode::UNAUTHORIZED => Self::Credentials,
            StatusCode::FORBIDDEN => Self::Rights,
            _ => Self::Other,
        }
    }
}

/// Counts, by why.
#[derive(Debug, Default)]
pub(super) struct Refused([AtomicU64; 4]);

/// The same, at one instant: word and number.
pub(crate) type RefusedCounts = [(&'static str, u64); 4];

impl Refused {
    pub(super) fn add(&self, why: Why) {
        self.0[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> RefusedCounts {
        let of = |why: Why| self.0[why as usize].load(Ordering::Relaxed);
        [
            ("tls", of(Why::Tls)),
            ("credentials", of(Why::Credentials)),
            ("rights", of(Why::Rights)),
            ("other", of(Why::Other)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_is_counted_under_its_cause() {
        let refused = Refused::default();
        for why in [Why::Tls, Why::of(StatusCode::FORBIDDEN), Why::Tls] {
            refused.add(why);
        }
        refused.add(Why::of(StatusCode::MISDIRECTED_REQUEST));
        let counts = [("tls", 2), ("credentials", 0), ("rights", 1), ("other", 1)];
        assert_eq!(refused.counts(), counts);
    }
}
