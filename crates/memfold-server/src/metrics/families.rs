//! Helpers for the daemon's metrics. A metric family is all samples with one name. This module
//! describes families, and writes their samples.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use memfold_daemon::Figures;
use memfold_units::PAGE_SIZE;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
pub(super) use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::process::Process;
use crate::access::RefusedCounts;
use crate::exec_stream::StreamCounts;

/// Data of one metrics scrape, from which all samples are written.
#[derive(Debug)]
pub(super) struct Scrape {
    pub figures: Arc<Figures>,
    pub process: Process,
    pub refused: RefusedCounts,
    pub streams: Arc<StreamCounts>,
}

/// Labels of a sample: names and values. A value is a word of this program, a run state of QEMU, or
/// a name given by the operator.
pub(super) type Labels<'a> = &'a [(&'a str, &'a str)];

/// Unit at the end of a metric family's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum In {
    Bytes,
    Seconds,
    /// A ratio from 0 to 1.
    Ratio,
    /// A count. If the metric asks a question, 1 for yes and 0 for no.
    Numbers,
}

/// Description of one metric family.
pub(super) struct Family {
    /// Name of the metric family, without its unit and without `_total`.
    pub name: &'static str,
    pub unit: In,
    /// Type of the metric family. A counter only grows, from the daemon's start or the VM's
    /// adoption on. An info is always 1; its labels carry the information.
    pub kind: MetricType,
    pub help: &'static str,
    /// Function that writes the family's samples. It writes none if the figure does not exist on
    /// this host.
    pub samples: fn(&Scrape, &mut Samples<'_>) -> fmt::Result,
}

/// Makes a table of families, one a line: kind, unit, name, help, then a function that writes the
/// samples, and the function that it calls to read the figure.
macro_rules! families {
    ($($kind:ident $unit:ident $name:literal $help:literal $from:ident $figure:expr;)*) => {
        &[$($crate::metrics::families::Family {
            name: $name,
            unit: $crate::metrics::families::In::$unit,
            kind: $crate::metrics::families::MetricType::$kind,
            help: $help,
            samples: |scrape, out| $from(scrape, out, $figure),
        },)*]
    };
}
pub(super) use families;

/// Writes the only sample of a metric family.
pub(super) fn one(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&Scrape) -> f64,
) -> fmt::Result {
    out.one(figure(scrape))
}

/// Writes the only sample of a metric family, unless `figure` returns `None`.
pub(super) fn maybe(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&Scrape) -> Option<f64>,
) -> fmt::Result {
    out.maybe(figure(scrape))
}

/// Writes the samples of a metric family by calling `write`.
pub(super) fn any(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    write: fn(&Scrape, &mut Samples<'_>) -> fmt::Result,
) -> fmt::Result {
    write(scrape, out)
}

impl Family {
    pub(super) fn encode(
        &self,
        scrape: &Scrape,
        encoder: &mut DescriptorEncoder<'_>,
    ) -> fmt::Result {
        let unit = match self.unit {
            In::Bytes => Some(Unit::Bytes),
            In::Seconds => Some(Unit::Seconds),
            In::Ratio => Some(Unit::Other("ratio".to_owned())),
            In::Numbers => None,
        };
        let kind = self.kind;
        let metric = encoder.encode_descriptor(self.name, self.help, unit.as_ref(), kind)?;
        (self.samples)(scrape, &mut Samples { kind, metric })
    }
}

/// Writer of a metric family's samples.
pub(super) struct Samples<'e> {
    kind: MetricType,
    metric: MetricEncoder<'e>,
}

impl Samples<'_> {
    /// Writes the only sample of the family.
    pub(super) fn one(&mut self, value: f64) -> fmt::Result {
        write(self.kind, &mut self.metric, value)
    }

    /// Writes the only sample of the family, unless there is no figure.
    pub(super) fn maybe(&mut self, value: Option<f64>) -> fmt::Result {
        value.map_or(Ok(()), |value| self.one(value))
    }

    /// Writes one of several samples. Values of labels are escaped, because `prometheus-client`
    /// writes them as they are: a quote or a line feed would begin a sample of another name.
    pub(super) fn with(&mut self, labels: Labels<'_>, value: f64) -> fmt::Result {
        let labels = labels.iter().map(|&(name, text)| (name, escaped(text)));
        let labels: Vec<(&str, Cow<'_, str>)> = labels.collect();
        if matches!(self.kind, MetricType::Info) {
            return self.metric.encode_info(&labels);
        }
        let mut metric = self.metric.encode_family(&labels)?;
        write(self.kind, &mut metric, value)
    }
}

/// Escapes the value of a label, as both formats ask: backslash, double quote and line feed.
fn escaped(value: &str) -> Cow<'_, str> {
    if !value.contains(['\\', '"', '\n']) {
        return Cow::Borrowed(value);
    }
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    Cow::Owned(value.replace('\n', "\\n"))
}

fn write(kind: MetricType, metric: &mut MetricEncoder<'_>, value: f64) -> fmt::Result {
    match kind {
        MetricType::Counter => metric.encode_counter::<NoLabelSet, f64, f64>(&value, None),
        MetricType::Info => {
            let none: Labels<'_> = &[];
            metric.encode_info(&none)
        }
        _ => metric.encode_gauge(&value),
    }
}

/// Returns the size of `pages` pages in bytes.
pub(super) fn bytes(pages: u64) -> f64 {
    (pages * PAGE_SIZE) as f64
}

/// Returns 1 for `true`, 0 for `false`.
pub(super) fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}
