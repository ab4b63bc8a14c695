//! Computes totals, with error bars, from the random sample of pages that an estimate of possible
//! savings has read.

use memfold_units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Number of standard deviations on each side that enclose 95 % of a normal distribution.
const CONFIDENCE: f64 = 1.96;

/// An estimated sum over a population, of which only some members were drawn, each with a known
/// probability (Horvitz and Thompson 1952).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sum {
    total: f64,
    variance: f64,
}

impl Sum {
    /// Adds a drawn member with value `x`. The probability of drawing it was `p = 1 / weight`. The
    /// member's part of the variance is estimated as `x^2 (1 - p) / p^2`.
    pub fn add(&mut self, x: f64, weight: f64) {
        self.total += x * weight;
        self.variance += x * x * weight * (weight - 1.0);
    }

    /// Adds another sum whose error is independent of this one's.
    pub fn join(&mut self, other: Self) {
        self.total += other.total;
        self.variance += other.variance;
    }

    /// Estimates how many of the `population` members have a property, if `found` of `looked`
    /// members drawn at random have it. Without drawn members, the estimate is 0.
    #[must_use]
    pub fn of_share(found: u64, looked: u64, population: u64) -> Self {
        if looked == 0 {
            return Self::default();
        }
        let (found, looked, population) = (found as f64, looked as f64, population as f64);
        // One more member of each kind is assumed: a kind that was not found in a small sample may
        // still exist.
        let likely = (found + 1.0) / (looked + 2.0);
        let rest = (1.0 - looked / population).max(0.0);
        Self {
            total: population * found / looked,
            variance: population * population * likely * (1.0 - likely) / looked * rest,
        }
    }

    /// Multiplies the sum and its error bar by a number that is known exactly.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            total: self.total * factor,
            variance: self.variance * factor * factor,
        }
    }

    /// Returns the sum, in the unit of the added values.
    #[must_use]
    pub const fn total(&self) -> f64 {
        self.total
    }

    /// Returns the error bar: half the width of the 95 % confidence interval.
    #[must_use]
    pub fn plus_minus(&self) -> f64 {
        CONFIDENCE * self.variance.sqrt()
    }

    /// Converts a sum in pages of 4,096 bytes to bytes.
    #[must_use]
    pub fn bytes(&self) -> Estimate {
        Estimate {
            bytes: whole(self.total) * PAGE_SIZE,
            plus_minus_bytes: whole(self.plus_minus().ceil()) * PAGE_SIZE,
        }
    }
}

/// Rounds to the nearest whole number; negative numbers become 0.
// The cast saturates, and the number of a host's pages is far below 2^52.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
#[must_use]
pub fn whole(x: f64) -> u64 {
    x.round().max(0.0) as u64
}

/// An amount of memory with its error bar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Estimate {
    /// Estimated amount of memory, in bytes.
    pub bytes: u64,
    /// Error bar of `bytes`: half of the 95 % confidence interval, in bytes; 0 if the amount is
    /// exact.
    pub plus_minus_bytes: u64,
}

impl Estimate {
    /// Makes an estimate without an error bar.
    #[must_use]
    pub const fn exactly(bytes: u64) -> Self {
        Self {
            bytes,
            plus_minus_bytes: 0,
        }
    }
}

impl std::iter::Sum for Sum {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum.join(one);
            sum
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_that_counted_everything_has_no_error_bar() {
        let mut sum = Sum::default();
        sum.add(5.0, 1.0);
        sum.join(Sum::of_share(3, 10, 10));
        assert_eq!((sum.total(), sum.plus_minus()), (8.0, 0.0));
        let bytes = sum.times(2.0).bytes();
        assert_eq!((bytes.bytes, bytes.plus_minus_bytes), (16 * 4096, 0));
    }

    #[test]
    fn an_estimate_of_zero_from_a_sample_still_has_an_error_bar() {
        let sum = Sum::of_share(0, 100, 10_000);
        assert_eq!(sum.bytes().bytes, 0);
        // A kind that has 3 of 100 members would be missed with a chance of 1 in 20.
        assert!((100.0..400.0).contains(&sum.plus_minus()), "{sum:?}");
        assert_eq!(Sum::of_share(0, 0, 10_000), Sum::default());
    }
}
