//! Types for amounts of memory: a number of pages, and a number of bytes.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::PAGE_SIZE;

macro_rules! amount {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }
        /// Subtraction saturates at zero, because amounts are never negative.
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self(0), |a, b| a + b)
            }
        }
    };
}

amount! {
    /// A number of base pages of 4 KiB.
    PageCount
}
amount! {
    /// A number of bytes.
    ByteSize
}

impl PageCount {
    /// Returns the same amount in bytes.
    #[must_use]
    pub const fn bytes(self) -> ByteSize {
        ByteSize(self.0 * PAGE_SIZE)
    }
}

impl ByteSize {
    /// Creates an amount of `n` KiB.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// Creates an amount of `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// Returns the number of whole 4 KiB pages in this amount.
    #[must_use]
    pub const fn pages(self) -> PageCount {
        PageCount(self.0 / PAGE_SIZE)
    }
}

impl fmt::Display for ByteSize {
    /// Writes three significant digits and a binary unit, such as `37.5 MiB`. Width and alignment
    /// of the format string apply.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1000.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let digits = match value {
            _ if unit == 0 => 0,
            v if v < 9.995 => 2,
            v if v < 99.95 => 1,
            _ => 0,
        };
        f.pad(&format!("{value:.digits$} {}", UNITS[unit]))
    }
}

/// Error of parsing a text that is not a size, such as `1.5G`. The error contains the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseByteSizeError(String);

impl fmt::Display for ParseByteSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "'{}' is not a size; write a whole number with K, M, G or T (KiB, MiB, ...), such as 512M",
            self.0
        )
    }
}

impl std::error::Error for ParseByteSizeError {}

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    /// Parses a whole number with an optional unit: `4096` (bytes), `512M`, `2G`, `512MiB`. Units
    /// are powers of 1024.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || ParseByteSizeError(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(trimmed.len());
        let number: u64 = trimmed[..digits].parse().map_err(|_| bad())?;
        let shift = match trimmed[digits..].trim().to_ascii_uppercase().as_str() {
            "" | "B" => 0,
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            _ => return Err(bad()),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_units_are_parsed() {
        assert_eq!("512M".parse(), Ok(ByteSize::mib(512)));
        assert_eq!("2GiB".parse(), Ok(ByteSize(2 << 30)));
        assert_eq!("4096".parse(), Ok(ByteSize(4096)));
        for bad in ["", "M", "-1M", "1.5G", "99999999999T", "12Q"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad} was accepted");
        }
    }

    #[test]
    fn sizes_are_printed_with_three_digits() {
        assert_eq!(ByteSize(0).to_string(), "0 B");
        assert_eq!(ByteSize(37 << 20).to_string(), "37.0 MiB");
        assert_eq!(ByteSize(1023 << 10).to_string(), "1.00 MiB");
        assert_eq!(format!("{:>9}", ByteSize(1536)), " 1.50 KiB");
    }

    #[test]
    fn subtraction_of_page_counts_saturates_at_zero() {
        assert_eq!(PageCount(1) - PageCount(2), PageCount(0));
    }
}
