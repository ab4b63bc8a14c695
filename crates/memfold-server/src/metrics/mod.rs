//! `GET /metrics`: the daemon's figures for Prometheus and compatible programs.
//!
//! ```text
//!   Reports::figures (cached) --> families (host, vms, mechanisms) --> OpenMetrics 1.0 --> Prometheus text 0.0.4, for older clients
//! ```
//! A scrape costs little, because figures are taken at most every ten seconds. Their age is a
//! metric. Labels are names that the operator chose (VMs, trust domains), words of this program, or
//! run states that QEMU documents. No other text of a guest or of QEMU becomes a label.

mod families;
mod host;
mod mechanisms;
mod process;
mod rightsize;
mod text;
mod vms;

use std::fmt;
use std::sync::Arc;

use axum::extract::Extension;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use families::{Family, Scrape};
use memfold_daemon::DaemonError;
use process::Process;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::access::Access;
use super::answer::{Failure, Served, blocking};
use super::exec_stream::StreamCounts;

/// Content type of `OpenMetrics` 1.0.
const OPEN_METRICS: &str = "application/openmetrics-text";

/// Returns all metric families, in the order of `docs/metrics.md`.
fn all() -> impl Iterator<Item = &'static Family> {
    host::FAMILIES
        .iter()
        .chain(vms::FAMILIES)
        .chain(mechanisms::FAMILIES)
        .chain(rightsize::FAMILIES)
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        all().try_for_each(|family| family.encode(self, &mut encoder))
    }
}

impl Scrape {
    /// Returns the scrape as text in `OpenMetrics` 1.0.
    fn text(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// Returns the daemon's figures in `OpenMetrics`, or in Prometheus' text format if the client does
/// not ask for `OpenMetrics`.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn metrics(
    daemon: Served,
    Extension(access): Extension<Arc<Access>>,
    Extension(streams): Extension<Arc<StreamCounts>>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let accepts = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok());
    let open = accepts.is_some_and(|accepts| accepts.contains(OPEN_METRICS));
    let refused = access.refused();
    let text = blocking(daemon, move |daemon| {
        let scrape = Scrape {
            figures: daemon.reports().figures()?,
            process: Process::now(),
            refused,
            streams,
        };
        scrape
            .text()
            .map_err(|_| DaemonError::Internal("cannot write a metric"))
    });
    let text = text.await?.0;
    let (content_type, body) = if open {
        (
            format!("{OPEN_METRICS}; version=1.0.0; charset=utf-8"),
            text,
        )
    } else {
        let content_type = "text/plain; version=0.0.4; charset=utf-8".to_owned();
        (content_type, text::prometheus(&text))
    };
    Ok(([(header::CONTENT_TYPE, content_type)], body).into_response())
}

#[cfg(test)]
mod tests;
