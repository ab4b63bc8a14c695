//! The brake: stops further sharing when guests could need more memory at once, by writing to
//! shared pages, than the host has available.
//!
//! ```text
//!   needed    = debt x cover                        memory that guests may need at once by writing
//!   available = MemAvailable - reserve              memory that could be used for it; free swap is shown, not counted
//!
//!   needed / available   0 ........ 70 % ..... 80 % ..... 90 % ..... 100 % ......
//!   rising                   ok     |   ok      | warning  | warning   | braked
//!   falling, for 10 s        ok     | warning   | warning  | braked    | braked
//! ```
//! The drawing shows the brake's level (ok, warning, braked) for each ratio of needed to available
//! memory. The level rises immediately. The level falls only after the ratio was lower for [`CALM`]
//! without a break, so that the level does not flap.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Time for which a lower level of the brake must suffice, without a break, before the level falls.
pub const CALM: Duration = Duration::from_secs(10);

/// Strain above which the level is `Warning`: the part of the available memory that guests may need
/// at once. The next constant: the same for `Braked`.
const WARNING: f64 = 0.8;
const BRAKED: f64 = 1.0;

/// The brake leaves a level when the strain is this much below the strain at which the level was
/// reached.
const HYSTERESIS: f64 = 0.1;

/// Level of the brake, which stops sharing when guests could need too much memory at once.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Available memory covers what guests may need at once by writing to shared pages.
    #[default]
    Ok,
    /// Guests may need over 80 % of the available memory at once, or needed as much lately.
    Warning,
    /// Guests may need more memory at once than is available. No more memory is shared, and no VM
    /// is started.
    Braked,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Braked => "BRAKED",
        })
    }
}

/// Memory that a host keeps for itself, and that guests must not use up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reserve {
    /// An absolute number of bytes.
    Bytes(ByteSize),
    /// Percent of the host's RAM (0 to 100).
    Percent(f64),
}

impl Reserve {
    /// Returns the reserve of a host with `total_bytes` of RAM, in bytes.
    #[must_use]
    // The result does not exceed `total_bytes`.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn of(self, total_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.0,
            Self::Percent(percent) => (total_bytes as f64 * percent / 100.0) as u64,
        }
    }
}

impl fmt::Display for Reserve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => bytes.fmt(f),
            Self::Percent(percent) => write!(f, "{percent} %"),
        }
    }
}

impl FromStr for Reserve {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(percent) = text.strip_suffix('%') else {
            return text
                .parse()
                .map(Self::Bytes)
                .map_err(|error| format!("{error}, or a part of this host's RAM, such as 5%"));
        };
        match percent.trim().parse::<f64>() {
            Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Self::Percent(percent)),
            _ => Err(format!(
                "'{text}' is not a part of this host's RAM; give 0% to 100%"
            )),
        }
    }
}

/// Settings of the brake that an operator may change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BrakePolicy {
    /// Memory that the host keeps for itself, and that guests' writes to shared pages must not
    /// need.
    pub reserve: Reserve,
    /// Percent of the copy-on-write debt that available memory must cover, because guests may claim
    /// this part at once (0 to 100; 0 disables the brake).
    pub cover_percent: f64,
}

impl Default for BrakePolicy {
    fn default() -> Self {
        Self {
            // The reserve is one sixteenth, as for lending.
            reserve: Reserve::Percent(6.25),
            cover_percent: 50.0,
        }
    }
}

/// Figures of a host at one moment, which determine the level of the brake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Time at which the figures were read, counted from a fixed instant.
    pub at: Duration,
    /// Copy-on-write debt: bytes that guests could claim by writing to shared pages.
    pub debt_bytes: u64,
    /// `MemTotal` of the host, or the limit of a control group that holds all VMs, in bytes.
    pub total_bytes: u64,
    /// `MemAvailable` of the host, or the memory that the control group's limit leaves, in bytes.
    pub available_bytes: u64,
}

impl BrakePolicy {
    /// Returns the part of the debt that guests are assumed to claim at once, in bytes.
    #[must_use]
    // The result does not exceed `debt_bytes`.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn needed_bytes(&self, debt_bytes: u64) -> u64 {
        (debt_bytes as f64 * self.cover_percent / 100.0) as u64
    }

    /// Returns the bytes that guests can claim without touching the reserve: available memory less
    /// the reserve, at least 0.
    #[must_use]
    pub fn absorbable_bytes(&self, look: &Look) -> u64 {
        look.available_bytes
            .saturating_sub(self.reserve.of(look.total_bytes))
    }

    /// Returns the ratio of the memory that guests may need at once to the memory that is available
    /// for it. The ratio is 0 if guests need none, and infinite if none is available.
    #[must_use]
    pub fn strain(&self, look: &Look) -> f64 {
        let needed = self.needed_bytes(look.debt_bytes);
        if needed == 0 {
            return 0.0;
        }
        needed as f64 / self.absorbable_bytes(look) as f64
    }
}

/// State of the brake: its level, and the time since which a lower level would suffice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Brake {
    level: Level,
    /// Time since which a lower level would suffice, and the highest level that was needed since.
    better: Option<(Duration, Level)>,
}

impl Brake {
    /// Returns the present level of the brake.
    #[must_use]
    pub const fn level(&self) -> Level {
        self.level
    }

    /// Updates the brake's level from new figures of the host, and returns the level. Calls must be
    /// in order of `look.at`.
    pub fn judge(&mut self, policy: &BrakePolicy, look: &Look) -> Level {
        let strain = policy.strain(look);
        let reached = |warning: f64, braked: f64| {
            if strain > braked {
                Level::Braked
            } else if strain > warning {
                Level::Warning
            } else {
                Level::Ok
            }
        };
        let up = reached(WARNING, BRAKED);
        let down = reached(WARNING - HYSTERESIS, BRAKED - HYSTERESIS);
        if up >= self.level {
            self.better = None;
            self.level = up;
        } else if down >= self.level {
            self.better = None;
        } else {
            let (since, highest) = self.better.unwrap_or((look.at, down));
            let highest = highest.max(down);
            self.better = Some((since, highest));
            if look.at.saturating_sub(since) >= CALM {
                self.level = highest;
                self.better = None;
            }
        }
        self.level
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn look(second: u64, debt: u64, available: u64) -> Look {
        Look {
            at: Duration::from_secs(second),
            debt_bytes: debt,
            total_bytes: 16 * GIB,
            available_bytes: available,
        }
    }

    /// Makes a policy with a reserve of 1 GiB and memory available for all of the debt.
    fn whole() -> BrakePolicy {
        BrakePolicy {
            reserve: Reserve::Percent(6.25),
            cover_percent: 100.0,
        }
    }

    #[test]
    fn when_the_debt_rises_the_level_of_the_brake_rises_immediately() {
        let mut brake = Brake::default();
        // 11 GiB are available, ten GiB more than the reserve.
        for (debt, level) in [
            (0, Level::Ok),
            (7 * GIB, Level::Ok),
            (9 * GIB, Level::Warning),
            (10 * GIB, Level::Warning),
            (10 * GIB + 1, Level::Braked),
        ] {
            assert_eq!(brake.judge(&whole(), &look(0, debt, 11 * GIB)), level);
        }
        let mut brake = Brake::default();
        assert_eq!(
            brake.judge(&whole(), &look(0, 11 * GIB, 11 * GIB)),
            Level::Braked
        );
    }

    #[test]
    fn if_only_half_of_the_debt_must_be_covered_the_brake_allows_twice_as_much_debt() {
        let half = BrakePolicy {
            cover_percent: 50.0,
            ..whole()
        };
        let mut brake = Brake::default();
        assert_eq!(brake.judge(&half, &look(0, 15 * GIB, 11 * GIB)), Level::Ok);
        assert_eq!(
            brake.judge(&half, &look(1, 21 * GIB, 11 * GIB)),
            Level::Braked
        );
        let none = BrakePolicy {
            cover_percent: 0.0,
            ..whole()
        };
        assert_eq!(
            Brake::default().judge(&none, &look(0, 99 * GIB, 0)),
            Level::Ok
        );
    }

    #[test]
    fn if_available_memory_is_below_the_reserve_any_debt_activates_the_brake() {
        assert_eq!(
            Brake::default().judge(&whole(), &look(0, 1, GIB)),
            Level::Braked
        );
        assert_eq!(Brake::default().judge(&whole(), &look(0, 0, 0)), Level::Ok);
        assert!(whole().strain(&look(0, 1, 0)).is_infinite());
    }

    #[test]
    fn the_level_of_the_brake_falls_only_after_the_debt_was_lower_for_ten_seconds() {
        let mut brake = Brake::default();
        brake.judge(&whole(), &look(0, 11 * GIB, 11 * GIB));
        // Conditions are better, but not enough better, for however long.
        for second in 1..60 {
            let level = brake.judge(&whole(), &look(second, 9 * GIB + GIB / 2, 11 * GIB));
            assert_eq!(level, Level::Braked);
        }
        for second in 60..70 {
            assert_eq!(
                brake.judge(&whole(), &look(second, GIB, 11 * GIB)),
                Level::Braked
            );
        }
        assert_eq!(brake.judge(&whole(), &look(70, GIB, 11 * GIB)), Level::Ok);
    }

    #[test]
    fn while_the_debt_alternates_every_few_seconds_the_brake_stays_active() {
        let mut brake = Brake::default();
        brake.judge(&whole(), &look(0, 11 * GIB, 11 * GIB));
        let mut changes = 0;
        for second in 1..300 {
            // Conditions are good for eight seconds and bad for two, over and over.
            let debt = if second % 10 < 8 { GIB } else { 11 * GIB };
            let before = brake.level();
            changes += u32::from(brake.judge(&whole(), &look(second, debt, 11 * GIB)) != before);
        }
        assert_eq!((changes, brake.level()), (0, Level::Braked));
    }

    #[test]
    fn the_level_of_the_brake_falls_to_the_highest_level_of_the_last_ten_seconds() {
        let mut brake = Brake::default();
        brake.judge(&whole(), &look(0, 11 * GIB, 11 * GIB));
        for second in 1..=10 {
            let debt = if second == 5 { 8 * GIB } else { GIB };
            assert_eq!(
                brake.judge(&whole(), &look(second, debt, 11 * GIB)),
                Level::Braked
            );
        }
        assert_eq!(
            brake.judge(&whole(), &look(11, GIB, 11 * GIB)),
            Level::Warning
        );
        for second in 12..=21 {
            assert_eq!(
                brake.judge(&whole(), &look(second, GIB, 11 * GIB)),
                Level::Warning
            );
        }
        assert_eq!(brake.judge(&whole(), &look(22, GIB, 11 * GIB)), Level::Ok);
    }

    /// Guests rewrite all pages that they share, as fast as they can. Each rewritten page reduces
    /// the available memory and the debt by one page.
    #[test]
    fn if_guests_rewrite_all_shared_pages_the_brake_activates_before_the_reserve_is_used() {
        let policy = BrakePolicy {
            cover_percent: 50.0,
            ..whole()
        };
        for first in [9, 10, 12, 15] {
            let (mut brake, mut debt, mut available) = (Brake::default(), 16 * GIB, first * GIB);
            let mut at_brake = None;
            for second in 0..160 {
                if brake.judge(&policy, &look(second, debt, available)) == Level::Braked {
                    at_brake.get_or_insert(available);
                }
                debt -= GIB / 10;
                available = available.saturating_sub(GIB / 10);
            }
            let at_brake = at_brake.unwrap();
            assert!(
                at_brake > GIB,
                "{first} GiB available: braked at {at_brake}"
            );
        }
        // With enough memory for the whole debt, the brake never comes on.
        let (mut brake, mut debt, mut available) = (Brake::default(), 8 * GIB, 12 * GIB);
        for second in 0..80 {
            assert!(brake.judge(&whole(), &look(second, debt, available)) < Level::Braked);
            debt -= GIB / 10;
            available -= GIB / 10;
        }
    }

    #[test]
    fn the_option_for_reserved_memory_takes_a_size_or_a_percentage() {
        assert_eq!("2G".parse(), Ok(Reserve::Bytes(ByteSize(2 * GIB))));
        assert_eq!("10%".parse(), Ok(Reserve::Percent(10.0)));
        assert_eq!(Reserve::Percent(10.0).of(50), 5);
        for wrong in ["", "%", "101%", "-1%", "nan%", "many"] {
            let error = wrong.parse::<Reserve>().unwrap_err();
            assert!(error.contains('%'), "{error}");
        }
        assert_eq!(Reserve::Percent(5.0).to_string(), "5 %");
    }
}
