//! Counts connections and requests that the daemon's API refused, by reason, for `GET /metrics`.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::StatusCode;

/// Why a connection or request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// The TLS handshake failed: the client uses no TLS, or does not trust the certificate.
    Tls,
    /// The token or session is missing or wrong.
    Credentials,
    /// The client is known, but its role does not permit the request.
    Rights,
    /// Any other reason, such as a wrong host name or too many requests at once.
    Other,
}

impl Why {
    /// Returns the reason for a refusal with this HTTP status.
    pub(super) fn of(status: StatusCode) -> Self {
        match status {
            StatusCode::UNAUTHORIZED => Self::Credentials,
            StatusCode::FORBIDDEN => Self::Rights,
            _ => Self::Other,
        }
    }
}

/// Numbers of refused connections and requests, by reason.
#[derive(Debug, Default)]
pub(super) struct Refused([AtomicU64; 4]);

/// Numbers of refusals at one instant: the label of each reason, and the number of its refusals.
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
    fn each_refused_http_request_is_counted_under_the_cause_of_the_refusal() {
        let refused = Refused::default();
        for why in [Why::Tls, Why::of(StatusCode::FORBIDDEN), Why::Tls] {
            refused.add(why);
        }
        refused.add(Why::of(StatusCode::MISDIRECTED_REQUEST));
        let counts = [("tls", 2), ("credentials", 0), ("rights", 1), ("other", 1)];
        assert_eq!(refused.counts(), counts);
    }
}
