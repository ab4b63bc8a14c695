//! Numbers on the command line.

use std::ops::RangeBounds;

/// Parses a number in `range`; `fix` says which numbers are accepted.
pub(super) fn number(text: &str, range: impl RangeBounds<f64>, fix: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| fix.to_owned())
}
