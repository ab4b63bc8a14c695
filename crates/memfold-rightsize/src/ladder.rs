//! The ladder: what is done, in which order, when the host gets short of memory.
//!
//! ```text
//!   available memory                         rung
//!   reserve + a quarter or more              ample    page cache that is not missed is trimmed slowly
//!   reserve .. reserve + a quarter           trim     the same, in larger steps
//!   below the reserve, trims do not suffice  balloon  VMs that are hurt least get smaller
//!   below that too, or below a half          lent     lent RAM is called back
//!   below a quarter, or nothing is left,     brake    guests may be asked to drop page cache
//!   or lent RAM does not come back
//! ```
//! The brake on copy-on-write debt acts by itself and at once. Here it only leads to larger trims:
//! debt is memory that guests may need, and no shortage yet. Whether balloons move and lent RAM is
//! called back follows from what the host lacks, and from how long it has lacked it.
//!
//! Each rung keeps doing what the lower rungs do. The host climbs one rung at each step, and goes
//! down one rung after [`CALM`] in which a lower rung sufficed.

use std::fmt;
use std::time::Duration;

use memfold_units::ByteSize;

use crate::input::{BrakeLevel, HostState};

/// Time for which a lower rung must suffice, without a break, before the host goes down one rung.
pub(crate) const CALM: Duration = Duration::from_secs(10);

/// Time that trims, or balloons, have to bring the host back above its reserve before the next rung
/// is due, and in which some of the lent RAM that is called back must come back.
const PATIENCE: Duration = Duration::from_secs(20);

/// How short the host is, and what is done about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rung {
    /// The host has room. Guests lose only page cache that they do not miss.
    #[default]
    Ample,
    /// Little more than the reserve is left. Page cache is trimmed in larger steps.
    Trim,
    /// Trims do not suffice. VMs that are larger than their target are made smaller.
    Balloon,
    /// Balloons do not suffice. RAM that is lent to other hosts is called back.
    Lent,
    /// The host is far below its reserve, nothing else can be taken, or lent RAM does not come
    /// back: guests are asked to drop their clean page cache if the brake on copy-on-write debt is
    /// on, too.
    Brake,
}

impl Rung {
    /// All rungs, from the lowest to the highest.
    pub const ALL: [Self; 5] = [
        Self::Ample,
        Self::Trim,
        Self::Balloon,
        Self::Lent,
        Self::Brake,
    ];

    /// Returns the rung's name, in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ample => "ample",
            Self::Trim => "trim",
            Self::Balloon => "balloon",
            Self::Lent => "lent",
            Self::Brake => "brake",
        }
    }

    fn above(self) -> Self {
        match self {
            Self::Ample => Self::Trim,
            Self::Trim => Self::Balloon,
            Self::Balloon => Self::Lent,
            Self::Lent | Self::Brake => Self::Brake,
        }
    }

    fn below(self) -> Self {
        match self {
            Self::Ample | Self::Trim => Self::Ample,
            Self::Balloon => Self::Trim,
            Self::Lent => Self::Balloon,
            Self::Brake => Self::Lent,
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why the host is on its rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RungReason {
    /// More than the reserve is available.
    Room {
        /// `MemAvailable`.
        available: ByteSize,
        /// Memory of the host that must stay available.
        reserve: ByteSize,
    },
    /// Little more than the reserve is available, or trims can bring the rest.
    NearReserve {
        /// `MemAvailable`.
        available: ByteSize,
        /// Memory of the host that must stay available.
        reserve: ByteSize,
    },
    /// Less than the reserve is available, and trims did not suffice.
    TrimsDoNotSuffice {
        /// What is missing.
        shortage: ByteSize,
        /// What VMs can lose by balloon.
        balloonable: ByteSize,
    },
    /// Balloons did not suffice.
    BalloonsDoNotSuffice {
        /// What is missing.
        shortage: ByteSize,
        /// RAM that is lent.
        lent: ByteSize,
    },
    /// Less than a quarter of the reserve is available.
    FarBelowReserve {
        /// `MemAvailable`.
        available: ByteSize,
        /// Memory of the host that must stay available.
        reserve: ByteSize,
    },
    /// Lent RAM was called back, and the borrowers gave back less than an eighth of what is missing
    /// in time.
    LentDoesNotReturn {
        /// What is missing.
        shortage: ByteSize,
        /// RAM that is still lent.
        lent: ByteSize,
    },
    /// Nothing can be trimmed or ballooned now, and no RAM is lent.
    NothingLeft {
        /// What is missing.
        shortage: ByteSize,
    },
    /// The brake on copy-on-write debt is on, although the host is not short: guests could need
    /// more than is available.
    Braked,
    /// A lower rung would suffice; the host goes down soon.
    Recovering {
        /// The rung that would suffice.
        suffices: Rung,
    },
}

impl RungReason {
    /// Says it in one sentence without a full stop. `acts`: orders are carried out, and not only
    /// shown.
    #[must_use]
    pub fn sentence(self, acts: bool) -> String {
        let is = if acts { "is" } else { "would be" };
        match self {
            Self::Room { available, reserve } => format!(
                "{available} are available and {reserve} must stay so, so the host has room"
            ),
            Self::NearReserve { available, reserve } => format!(
                "{available} are available and {reserve} must stay so, so page cache {is} trimmed \
                 in larger steps"
            ),
            Self::TrimsDoNotSuffice {
                shortage,
                balloonable,
            } => {
                let give = if acts { "give" } else { "would give" };
                format!(
                    "{shortage} are missing and trims do not suffice, so VMs {give} up to \
                     {balloonable} by balloon"
                )
            }
            Self::BalloonsDoNotSuffice { shortage, lent } => format!(
                "{shortage} are missing and balloons do not suffice, so lent RAM {is} called back \
                 ({lent} are lent)"
            ),
            Self::FarBelowReserve { available, reserve } => format!(
                "{available} are available, which is less than a quarter of the {reserve} that \
                 must stay so"
            ),
            Self::LentDoesNotReturn { shortage, lent } => {
                format!("{shortage} are missing and lent RAM does not come back ({lent} are lent)")
            }
            Self::NothingLeft { shortage } => {
                format!("{shortage} are missing and nothing else can be taken now")
            }
            Self::Braked => format!(
                "shared memory could need more than is available, so page cache {is} trimmed in \
                 larger steps"
            ),
            Self::Recovering { suffices } => {
                format!("the host recovers, and the rung '{suffices}' would suffice")
            }
        }
    }
}

impl fmt::Display for RungReason {
    /// Writes the [`sentence`](Self::sentence) of a controller whose orders are carried out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence(true))
    }
}

/// The host's place on the ladder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ladder {
    rung: Rung,
    /// When the host came to this rung.
    since: Duration,
    /// When a lower rung began to suffice.
    calm_since: Option<Duration>,
    /// While lent RAM is called back: how much was lent when some of it last came back, and when
    /// that was.
    last_return: Option<(ByteSize, Duration)>,
}

impl Ladder {
    /// Moves the host by at most one rung. `trimmable` and `balloonable` are what these rungs could
    /// still bring.
    pub(crate) fn step(
        &mut self,
        clock: Duration,
        host: &HostState,
        trimmable: u64,
        balloonable: u64,
    ) -> (Rung, RungReason) {
        self.watch_recall(clock, host);
        let (wanted, why) = self.wanted(clock, host, trimmable, balloonable);
        if wanted >= self.rung {
            self.calm_since = None;
            if wanted > self.rung {
                self.rung = self.rung.above();
                self.since = clock;
            }
            return (self.rung, why);
        }
        let calm_since = *self.calm_since.get_or_insert(clock);
        if clock.saturating_sub(calm_since) >= CALM {
            self.rung = self.rung.below();
            self.since = clock;
            self.calm_since = Some(clock);
        }
        if self.rung == wanted {
            (wanted, why)
        } else {
            (self.rung, RungReason::Recovering { suffices: wanted })
        }
    }

    /// Returns how long the host has been on its rung.
    pub(crate) fn time_on_rung(&self, clock: Duration) -> Duration {
        clock.saturating_sub(self.since)
    }

    /// Notes when lent RAM last came back: at least an eighth of what the host lacks, or of what
    /// was lent if that is less. RAM that is lent meanwhile has its own time to come back.
    fn watch_recall(&mut self, clock: Duration, host: &HostState) {
        if self.rung < Rung::Lent || !host.recalls_lent {
            self.last_return = None;
            return;
        }
        let lent = host.lent.0;
        let has_changed = |(before, _): (ByteSize, Duration)| {
            let enough = shortage(host).0.min(before.0) / 8;
            lent > before.0 || lent.saturating_add(enough) <= before.0
        };
        if self.last_return.is_none_or(has_changed) {
            self.last_return = Some((host.lent, clock));
        }
    }

    fn wanted(
        &self,
        clock: Duration,
        host: &HostState,
        trimmable: u64,
        balloonable: u64,
    ) -> (Rung, RungReason) {
        let HostState {
            available, reserve, ..
        } = *host;
        let short = shortage(host);
        if available.0 < reserve.0 / 4 {
            return (
                Rung::Brake,
                RungReason::FarBelowReserve { available, reserve },
            );
        }
        if short.0 == 0 && host.brake == BrakeLevel::Braked {
            return (Rung::Trim, RungReason::Braked);
        }
        if short.0 == 0 {
            return (Rung::Ample, RungReason::Room { available, reserve });
        }
        let near = RungReason::NearReserve { available, reserve };
        let waited = self.time_on_rung(clock) >= PATIENCE;
        let trims_suffice = trimmable >= short.0 && !(self.rung == Rung::Trim && waited);
        if available >= reserve || (self.rung <= Rung::Trim && trims_suffice) {
            return (Rung::Trim, near);
        }
        let balloons = RungReason::TrimsDoNotSuffice {
            shortage: short,
            balloonable: ByteSize(balloonable),
        };
        let lent = RungReason::BalloonsDoNotSuffice {
            shortage: short,
            lent: host.lent,
        };
        let far = available.0 < reserve.0 / 2;
        let waited = self.rung == Rung::Balloon && waited;
        if balloonable > 0 && !far && !waited && self.rung <= Rung::Balloon {
            return (Rung::Balloon, balloons);
        }
        let last_return = self.last_return.map(|(_, at)| at);
        let is_late = last_return.is_some_and(|at| clock.saturating_sub(at) >= PATIENCE);
        if host.lent.0 > 0 && is_late {
            let why = RungReason::LentDoesNotReturn {
                shortage: short,
                lent: host.lent,
            };
            return (Rung::Brake, why);
        }
        if host.lent.0 > 0 {
            return (Rung::Lent, lent);
        }
        if balloonable > 0 || trimmable > 0 {
            return (Rung::Balloon, balloons);
        }
        (Rung::Brake, RungReason::NothingLeft { shortage: short })
    }
}

/// Returns how much the host lacks to have its reserve and a quarter of it more.
pub(crate) fn shortage(host: &HostState) -> ByteSize {
    let goal = host.reserve.0.saturating_add(host.reserve.0 / 4);
    ByteSize(goal.saturating_sub(host.available.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(available_mib: u64, lent_mib: u64) -> HostState {
        HostState {
            available: ByteSize::mib(available_mib),
            reserve: ByteSize::mib(2000),
            lent: ByteSize::mib(lent_mib),
            recalls_lent: true,
            ..HostState::default()
        }
    }

    #[test]
    fn the_host_climbs_one_rung_a_step_and_names_each() {
        let mut ladder = Ladder::default();
        let mut rungs = Vec::new();
        for second in 0..5 {
            let host = host(400, 100);
            rungs.push(ladder.step(Duration::from_secs(second), &host, 0, 0).0);
        }
        assert_eq!(
            rungs,
            [
                Rung::Trim,
                Rung::Balloon,
                Rung::Lent,
                Rung::Brake,
                Rung::Brake
            ]
        );
    }

    #[test]
    fn the_host_goes_down_one_rung_after_ten_calm_seconds() {
        let mut ladder = Ladder::default();
        for second in 0..3 {
            ladder.step(Duration::from_secs(second), &host(900, 100), 0, 0);
        }
        assert_eq!(ladder.rung, Rung::Lent);
        let at = |second: u64, ladder: &mut Ladder| {
            ladder.step(Duration::from_secs(second), &host(4000, 0), 0, 0)
        };
        assert_eq!(at(10, &mut ladder).0, Rung::Lent);
        assert_eq!(
            at(19, &mut ladder).1,
            RungReason::Recovering {
                suffices: Rung::Ample
            }
        );
        assert_eq!(at(20, &mut ladder).0, Rung::Balloon);
        assert_eq!(at(30, &mut ladder).0, Rung::Trim);
        assert_eq!(at(40, &mut ladder).0, Rung::Ample);
    }

    #[test]
    fn a_host_whose_trims_suffice_waits_for_them_before_it_balloons() {
        let mut ladder = Ladder::default();
        let plenty = 4 << 30;
        let mut rung_at = |second| {
            let at = Duration::from_secs(second);
            ladder.step(at, &host(1900, 0), plenty, plenty).0
        };
        assert_eq!(rung_at(0), Rung::Trim);
        assert_eq!(rung_at(15), Rung::Trim);
        assert_eq!(rung_at(25), Rung::Balloon);
    }

    #[test]
    fn the_debt_brake_alone_leads_to_larger_trims_and_leaves_balloons_and_lent_ram_alone() {
        let mut ladder = Ladder::default();
        let mut state = host(9000, 100);
        state.brake = BrakeLevel::Braked;
        for second in 0..100 {
            let at = Duration::from_secs(second);
            let (rung, why) = ladder.step(at, &state, 4 << 30, 4 << 30);
            assert_eq!((rung, why), (Rung::Trim, RungReason::Braked));
        }
    }

    #[test]
    fn a_short_host_that_is_braked_climbs_no_faster_than_one_without_debt() {
        let rungs_of = |brake| {
            let mut ladder = Ladder::default();
            let state = HostState {
                brake,
                ..host(1900, 100)
            };
            let plenty = 4 << 30;
            let at = Duration::from_secs;
            (0..60).map(move |second| ladder.step(at(second), &state, plenty, plenty).0)
        };
        let braked: Vec<Rung> = rungs_of(BrakeLevel::Braked).collect();
        assert!(
            braked
                .iter()
                .eq(&rungs_of(BrakeLevel::Ok).collect::<Vec<_>>())
        );
        assert_eq!(braked[19], Rung::Trim);
        assert_eq!(braked[25], Rung::Balloon);
        assert_eq!(braked[59], Rung::Lent);
    }

    /// Returns a ladder that has reached the rung `lent` by second 3, with so much RAM lent.
    fn on_rung_lent(available_mib: u64, lent_mib: u64) -> Ladder {
        let mut ladder = Ladder::default();
        for second in 0..=3 {
            let state = host(available_mib, lent_mib);
            ladder.step(Duration::from_secs(second), &state, 0, 0);
        }
        assert_eq!(ladder.rung, Rung::Lent);
        ladder
    }

    #[test]
    fn a_short_host_whose_lent_ram_does_not_come_back_reaches_the_last_rung() {
        let mut ladder = on_rung_lent(900, 1000);
        let mut rung_at = |second, lent_mib| {
            let at = Duration::from_secs(second);
            ladder.step(at, &host(900, lent_mib), 0, 0)
        };
        // An eighth of the 1,000 MiB in 20 s is enough to wait for more.
        for (second, lent_mib) in [(20, 900), (22, 870), (41, 800)] {
            assert_eq!(rung_at(second, lent_mib).0, Rung::Lent, "at {second} s");
        }
        let (rung, why) = rung_at(42, 800);
        assert_eq!(rung, Rung::Brake);
        assert_eq!(
            why.to_string(),
            "1.56 GiB are missing and lent RAM does not come back (800 MiB are lent)"
        );
        assert_eq!(rung_at(70, 800).0, Rung::Brake);
        // It comes back after all.
        assert_eq!(rung_at(72, 500).0, Rung::Brake);
        assert_eq!(rung_at(82, 500).0, Rung::Lent);
    }

    #[test]
    fn ram_that_is_lent_while_other_ram_is_called_back_has_its_own_time_to_come_back() {
        let mut ladder = on_rung_lent(900, 100);
        let mut rung_at = |second, lent_mib| {
            let at = Duration::from_secs(second);
            ladder.step(at, &host(900, lent_mib), 0, 0).0
        };
        assert_eq!(rung_at(20, 600), Rung::Lent);
        assert_eq!(rung_at(39, 600), Rung::Lent);
        assert_eq!(rung_at(40, 600), Rung::Brake);
    }

    #[test]
    fn while_decisions_are_only_shown_lent_ram_cannot_be_late() {
        let mut ladder = on_rung_lent(900, 1000);
        let mut shown = host(900, 1000);
        shown.recalls_lent = false;
        for second in 4..100 {
            let at = Duration::from_secs(second);
            assert_eq!(ladder.step(at, &shown, 0, 0).0, Rung::Lent);
        }
        // From now on it is called back.
        let at = Duration::from_secs(100);
        assert_eq!(ladder.step(at, &host(900, 1000), 0, 0).0, Rung::Lent);
    }

    #[test]
    fn a_reason_of_a_host_that_is_only_watched_says_what_would_be_done() {
        let mut ladder = Ladder::default();
        let mut texts = Vec::new();
        for second in 0..3 {
            let at = Duration::from_secs(second);
            let (_, why) = ladder.step(at, &host(900, 100), 0, 0);
            texts.push(why.sentence(false));
        }
        assert!(texts[2].ends_with("so lent RAM would be called back (100 MiB are lent)"));
        // RAM could still be called back, so words do not say that nothing is left.
        let (rung, why) = ladder.step(Duration::from_secs(4), &host(400, 100), 0, 0);
        assert_eq!(rung, Rung::Brake);
        assert_eq!(
            why.to_string(),
            "400 MiB are available, which is less than a quarter of the 1.95 GiB that must stay so"
        );
    }
}
