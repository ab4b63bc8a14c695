//! Parses numbers on the command line, and checks their range.

use std::ops::RangeBounds;

/// Parses a number. If the number is not in `range`, the error is `fix`, which says what numbers
/// are accepted.
pub(super) fn number(text: &str, range: impl RangeBounds<f64>, fix: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| fix.to_owned())
}
