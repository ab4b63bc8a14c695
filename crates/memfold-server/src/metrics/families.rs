//! What a metric family is, and how it is written.

use std::fmt;

use memfold_units::PAGE_SIZE;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::scrape::Scrape;

/// Labels of a sample: names, and values of this program or the operator.
pub(super) type Labels<'a> = &'a [(&'a str, &'a str)];

/// The unit that a family's name ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum In {
    Bytes,
    Seconds,
    /// 0 to 1.
    Ratio,
    /// A count, or 1 for yes and 0 for no.
    Numbers,
}

/// What kind of figure it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Gauge,
    /// Only grows, from the daemon's start on, or since it took a VM on.
    Counter,
    /// Always 1; its labels are what it says.
    Info,
}

/// One metric.
pub(super) struct Family {
    /// Without unit and `_total`.
    pub name: &'static str,
    pub unit: In,
    pub kind: Kind,
    pub help: &'static str,
    /// Writes its samples; none where there is no such figure on this host.
    pub samples: fn(&Scrape, &mut Samples<'_>) -> fmt::Result,
}

/// A table of families, one a line: kind, unit, name, help, and where its samples come from: a
/// function, and what it is to take there.
macro_rules! families {
    ($($kind:ident $unit:ident $name:literal $help:literal $from:ident $figure:expr;)*) => {
        &[$($crate::metrics::families::Family {
            name: $name,
            unit: $crate::metrics::families::In::$unit,
            kind: $crate::metrics::families::Kind::$kind,
            help: $help,
            samples: |scrape, out| $from(scrape, out, $figure),
        },)*]
    };
}
pub(super) use families;

/// Its only sample.
pub(super) fn one(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&Scrape) -> f64,
) -> fmt::Result {
    out.one(figure(scrape))
}

/// Its only sample, if there is one.
pub(super) fn maybe(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&Scrape) -> Option<f64>,
) -> fmt::Result {
    out.maybe(figure(scrape))
}

/// Samples with labels of their own.
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
        let kind = match self.kind {
            Kind::Gauge => MetricType::Gauge,
            Kind::Counter => MetricType::Counter,
            Kind::Info => MetricType::Info,
        };
        let metric = encoder.encode_descriptor(self.name, self.help, unit.as_ref(), kind)?;
        let mut samples = Samples {
            kind: self.kind,
            metric,
        };
        (self.samples)(scrape, &mut samples)
    }
}

/// Where a family's samples are written.
pub(super) struct Samples<'e> {
    kind: Kind,
    metric: MetricEncoder<'e>,
}

impl Samples<'_> {
    /// The only sample of its family.
    pub(super) fn one(&mut self, value: f64) -> fmt::Result {
        write(self.kind, &mut self.metric, &[], value)
    }

    /// As [`Samples::one`], if there is such a figure.
    pub(super) fn maybe(&mut self, value: Option<f64>) -> fmt::Result {
        value.map_or(Ok(()), |value| self.one(value))
    }

    /// A sample among several. Values of labels are not escaped: they are words of this program, or
    /// names that [`memfold_vm::check_name`] let pass.
    pub(super) fn with(&mut self, labels: Labels<'_>, value: f64) -> fmt::Result {
        if self.kind == Kind::Info {
            return write(self.kind, &mut self.metric, labels, value);
        }
        let mut metric = self.metric.encode_family(&labels)?;
        write(self.kind, &mut metric, &[], value)
    }
}

fn write(
    kind: Kind,
    metric: &mut MetricEncoder<'_>,
    labels: Labels<'_>,
    value: f64,
) -> fmt::Result {
    match kind {
        Kind::Gauge => metric.encode_gauge(&value),
        Kind::Counter => metric.encode_counter::<NoLabelSet, f64, f64>(&value, None),
        Kind::Info => metric.encode_info(&labels),
    }
}

/// Bytes of so many pages.
pub(super) fn bytes(pages: u64) -> f64 {
    (pages * PAGE_SIZE) as f64
}

/// 1 for yes, 0 for no.
pub(super) fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}
