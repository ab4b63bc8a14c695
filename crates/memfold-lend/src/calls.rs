//! Requests to the lease registry of another daemon. Each method of [`Registry`] becomes a request
//! and its answer, which any transport can carry.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::endpoint::Endpoint;
use super::lease::{Lease, LeaseId, LenderId, MAX_TTL, Picture, ms};
use super::registry::{Offer, Registry, Want};
use super::registry_error::{RegistryError, Result};

/// A request to a registry: one method of [`Registry`] with its arguments. Times are in
/// milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[allow(missing_docs)] // the methods' documentation explains the variants
pub enum Call {
    Offer {
        offer: Offer,
        ttl_ms: u64,
    },
    Withdraw {
        lender: LenderId,
    },
    Take {
        want: Want,
        ttl_ms: u64,
    },
    Publish {
        id: LeaseId,
        lender: LenderId,
        endpoint: Endpoint,
    },
    Endpoint {
        id: LeaseId,
        borrower: String,
    },
    Renew {
        id: LeaseId,
        borrower: String,
        ttl_ms: u64,
    },
    SoleCopy {
        id: LeaseId,
        borrower: String,
    },
    Recall {
        id: LeaseId,
        lender: LenderId,
        within_ms: u64,
    },
    Release {
        id: LeaseId,
        borrower: String,
    },
    Ended {
        id: LeaseId,
        lender: LenderId,
    },
    Picture {},
}

impl Call {
    /// Returns the name of the host that may make the request; `None` if any host may make it.
    #[must_use]
    pub fn speaks_for(&self) -> Option<&str> {
        match self {
            Self::Offer { offer, .. } => Some(&offer.lender.host),
            Self::Take { want, .. } => Some(&want.borrower),
            Self::Withdraw { lender }
            | Self::Publish { lender, .. }
            | Self::Recall { lender, .. }
            | Self::Ended { lender, .. } => Some(&lender.host),
            Self::Endpoint { borrower, .. }
            | Self::Renew { borrower, .. }
            | Self::SoleCopy { borrower, .. }
            | Self::Release { borrower, .. } => Some(borrower),
            Self::Picture {} => None,
        }
    }
}

/// Answer of a registry to a request ([`Call`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the methods' documentation explains the variants
pub enum Answer {
    Done,
    Lease(Lease),
    Endpoint(Option<Endpoint>),
    Picture(Picture),
    Refused(RegistryError),
}

/// Calls the method of `registry` that the request names, and returns the result as an answer.
pub fn answer(registry: &dyn Registry, call: &Call) -> Answer {
    // The registry refuses times that are too long, so here they are only kept small enough to add.
    let time = |ms: &u64| Duration::from_millis(*ms).min(MAX_TTL + Duration::from_secs(1));
    let done = match call {
        Call::Offer { offer, ttl_ms } => registry.offer(offer, time(ttl_ms)).map(done),
        Call::Withdraw { lender } => registry.withdraw(lender).map(done),
        Call::Take { want, ttl_ms } => registry.take(want, time(ttl_ms)).map(Answer::Lease),
        Call::Publish {
            id,
            lender,
            endpoint,
        } => registry.publish(*id, lender, endpoint).map(done),
        Call::Endpoint { id, borrower } => registry.endpoint(*id, borrower).map(Answer::Endpoint),
        Call::Renew {
            id,
            borrower,
            ttl_ms,
        } => registry
            .renew(*id, borrower, time(ttl_ms))
            .map(Answer::Lease),
        Call::SoleCopy { id, borrower } => registry.sole_copy(*id, borrower).map(Answer::Lease),
        Call::Recall {
            id,
            lender,
            within_ms,
        } => registry.recall(*id, lender, time(within_ms)).map(done),
        Call::Release { id, borrower } => registry.release(*id, borrower).map(done),
        Call::Ended { id, lender } => registry.ended(*id, lender).map(done),
        Call::Picture {} => registry.picture().map(Answer::Picture),
    };
    done.unwrap_or_else(Answer::Refused)
}

fn done((): ()) -> Answer {
    Answer::Done
}

/// A registry in another process. The transport `T` sends a request to that process and returns the
/// answer.
#[derive(Debug)]
pub struct CallRegistry<T> {
    place: String,
    transport: T,
}

impl<T: Fn(&Call) -> Result<Answer, String>> CallRegistry<T> {
    /// Creates a registry that is reached by `transport`. Error messages call this registry
    /// `place`.
    pub const fn new(place: String, transport: T) -> Self {
        Self { place, transport }
    }

    /// Makes a call. `read` takes the result out of the kind of answer that belongs to the call.
    fn call<R>(&self, call: &Call, read: impl FnOnce(Answer) -> Option<R>) -> Result<R> {
        let other = "its answer does not match the request; use daemons of the same version";
        let answer = (self.transport)(call);
        if let Ok(Answer::Refused(error)) = answer {
            return Err(error);
        }
        let result = answer.and_then(|answer| read(answer).ok_or_else(|| other.to_owned()));
        result.map_err(|why| RegistryError::Unusable {
            place: self.place.clone(),
            why,
        })
    }

    fn done(&self, call: &Call) -> Result<()> {
        self.call(call, |answer| (answer == Answer::Done).then_some(()))
    }

    fn lease(&self, call: &Call) -> Result<Lease> {
        self.call(call, |answer| match answer {
            Answer::Lease(lease) => Some(lease),
            _ => None,
        })
    }
}

impl<T: Fn(&Call) -> Result<Answer, String> + Send + Sync> Registry for CallRegistry<T> {
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<()> {
        let (offer, ttl_ms) = (offer.clone(), ms(ttl));
        self.done(&Call::Offer { offer, ttl_ms })
    }

    fn withdraw(&self, lender: &LenderId) -> Result<()> {
        let lender = lender.clone();
        self.done(&Call::Withdraw { lender })
    }

    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease> {
        let (want, ttl_ms) = (want.clone(), ms(ttl));
        self.lease(&Call::Take { want, ttl_ms })
    }

    fn publish(&self, id: LeaseId, lender: &LenderId, endpoint: &Endpoint) -> Result<()> {
        self.done(&Call::Publish {
            id,
            lender: lender.clone(),
            endpoint: endpoint.clone(),
        })
    }

    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>> {
        let borrower = borrower.to_owned();
        let endpoint = self.call(&Call::Endpoint { id, borrower }, |answer| match answer {
            Answer::Endpoint(endpoint) => Some(endpoint),
            _ => None,
        })?;
        endpoint.iter().try_for_each(Endpoint::check)?;
        Ok(endpoint)
    }

    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease> {
        self.lease(&Call::Renew {
            id,
            borrower: borrower.to_owned(),
            ttl_ms: ms(ttl),
        })
    }

    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease> {
        let borrower = borrower.to_owned();
        self.lease(&Call::SoleCopy { id, borrower })
    }

    fn recall(&self, id: LeaseId, lender: &LenderId, within: Duration) -> Result<()> {
        self.done(&Call::Recall {
            id,
            lender: lender.clone(),
            within_ms: ms(within),
        })
    }

    fn release(&self, id: LeaseId, borrower: &str) -> Result<()> {
        let borrower = borrower.to_owned();
        self.done(&Call::Release { id, borrower })
    }

    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<()> {
        let lender = lender.clone();
        self.done(&Call::Ended { id, lender })
    }

    fn picture(&self) -> Result<Picture> {
        self.call(&Call::Picture {}, |answer| match answer {
            Answer::Picture(picture) => Some(picture),
            _ => None,
        })
    }
}
