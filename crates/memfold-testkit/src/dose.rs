//! Doses: how often or how long tests repeat their work.

use std::time::Duration;

/// Returns the number in an environment variable, or `usual`, the dose of `make test`.
/// `scripts/soak.txt` sets larger doses.
///
/// # Panics
///
/// If the variable holds no whole number.
pub fn dose(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |text| {
        let number = text.parse();
        number.unwrap_or_else(|_| panic!("{variable}='{text}' is not a whole number"))
    })
}

/// Returns a [`dose`] in seconds as a time.
///
/// # Panics
///
/// If the variable holds no whole number.
pub fn seconds(variable: &str, usual: u64) -> Duration {
    Duration::from_secs(dose(variable, usual))
}
