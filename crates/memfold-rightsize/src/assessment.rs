//! What is known of one VM in one step, and the orders that follow from that alone.

use memfold_units::{ByteSize, PAGE_SIZE};

use crate::decision::{Action, Basis, Order, Reason};
use crate::estimate::Parts;
use crate::input::VmId;
use crate::policy::Policy;

/// Differences of sizes below this are no reason for an order.
pub(crate) const SMALLEST_CHANGE: u64 = 16 << 20;

/// Least memory that a VM under pressure gets, and least that a balloon takes in one step.
pub(crate) const SMALLEST_GIVE: u64 = 256 << 20;
const SMALLEST_BALLOON_STEP: u64 = 128 << 20;

/// What is known of one VM in one step.
// Each flag is one fact of its own; together they make no state.
#[allow(clippy::struct_excessive_bools)]
#[derive(Clone, Debug)]
pub(crate) struct Assessment {
    pub(crate) vm: VmId,
    pub(crate) weight: u64,
    pub(crate) parts: Parts,
    pub(crate) working_set: u64,
    pub(crate) basis: Basis,
    pub(crate) target: u64,
    pub(crate) pressure: Option<f64>,
    pub(crate) pressure_now: f64,
    /// Memory that the VM needs and can be given; 0 if it needs none.
    pub(crate) lacks: u64,
    /// The VM needs memory because tasks wait for it, not only because of its working set.
    pub(crate) is_pressing: bool,
    /// The guest's OOM killer could run soon.
    pub(crate) is_at_risk: bool,
    /// Page cache that trims could take.
    pub(crate) trimmable: u64,
    /// Why the VM gets no order. If the guest is silent or not believed, it may get back what its
    /// balloon holds.
    pub(crate) keeps: Option<Reason>,
    /// No balloon takes from the VM for a while: it was given memory, or the last order had no
    /// effect.
    pub(crate) rests: bool,
    pub(crate) fresh: bool,
    /// Why nothing may be taken now, although the guest is believed.
    pub(crate) unwilling: Option<Reason>,
    /// The working set and its buffer, not limited by the operator's maximum.
    pub(crate) need: u64,
    pub(crate) buffer_percent: u64,
    pub(crate) hot: u64,
    pub(crate) min: u64,
    pub(crate) max: u64,
    pub(crate) held: u64,
    pub(crate) pluggable: u64,
    pub(crate) plugged: u64,
    pub(crate) block: u64,
    /// Memory that the VM needs and that the guest cannot plug without the driver `virtio_mem`.
    pub(crate) needs_driver: u64,
    pub(crate) has_balloon: bool,
    /// The host gets nothing back that the guest frees.
    pub(crate) keeps_freed_ram: bool,
    /// The host has the guest's free memory already.
    pub(crate) reports_free_pages: bool,
    pub(crate) can_balloon: bool,
    pub(crate) trims: bool,
    pub(crate) pgsteal: Option<u64>,
}

/// What should be done with one VM, and why.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) order: Option<Order>,
    pub(crate) reason: Reason,
    /// What the host is expected to gain.
    pub(crate) gain: u64,
    /// What the needed page cache becomes if the order is carried out.
    pub(crate) hot: Option<u64>,
}

impl Call {
    pub(crate) fn none(reason: Reason) -> Self {
        Self {
            order: None,
            reason,
            gain: 0,
            hot: None,
        }
    }

    pub(crate) fn order(action: Action, bytes: u64, reason: Reason) -> Self {
        Self {
            order: Some(Order {
                action,
                bytes: ByteSize(bytes),
            }),
            reason,
            gain: bytes,
            hot: None,
        }
    }
}

/// Returns `percent` of `bytes`.
fn percent_of(bytes: u64, percent: u64) -> u64 {
    let product = u128::from(bytes) * u128::from(percent) / 100;
    u64::try_from(product).unwrap_or(u64::MAX)
}

/// Returns a share (0 to 1) of `bytes`.
// The result does not exceed `bytes`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(crate) fn share_of(bytes: u64, share: f64) -> u64 {
    ((bytes as f64 * share.clamp(0.0, 1.0)) as u64).min(bytes)
}

impl Assessment {
    /// What the host would gain now if the balloon took all that the VM does not need.
    pub(crate) fn balloonable(&self) -> u64 {
        if self.rests { 0 } else { self.dispensable() }
    }

    /// What the host would gain if the balloon took all that the VM does not need, also while the
    /// VM rests.
    pub(crate) fn dispensable(&self) -> u64 {
        if !self.can_balloon || self.keeps.is_some() || self.unwilling.is_some() {
            return 0;
        }
        let takeable = self.parts.size.saturating_sub(self.floor());
        let gain = takeable.saturating_sub(self.returned());
        // Folded files cost the host almost nothing, and they may be among what goes after the free
        // memory.
        let beyond_free = takeable.saturating_sub(self.parts.free);
        let gain = gain.saturating_sub(self.parts.folded.min(beyond_free));
        if gain < SMALLEST_CHANGE { 0 } else { gain }
    }

    /// Free memory of the guest that the host has already, and so does not gain. A guest without
    /// free page reporting keeps it, apart from pages that it has never used.
    pub(crate) fn returned(&self) -> u64 {
        if self.reports_free_pages {
            self.parts.free
        } else {
            0
        }
    }

    /// What the host gains if the guest loses `bytes`: no free memory that the host has already,
    /// and nothing of the folded files among its page cache. The guest gives free memory first. The
    /// kernel chooses pages of the cache by their age, whatever their file.
    pub(crate) fn gain(&self, bytes: u64) -> u64 {
        let Parts {
            free,
            cache,
            folded,
            ..
        } = self.parts;
        let of_cache = u128::from(bytes.saturating_sub(free).min(cache)) * u128::from(folded);
        let lost_folded = of_cache.checked_div(u128::from(cache)).unwrap_or(0);
        let lost = bytes.saturating_sub(self.returned());
        lost.saturating_sub(u64::try_from(lost_folded).unwrap_or(u64::MAX))
    }

    /// How much each byte that is taken hurts: pressure, weighted by priority, for each byte that
    /// the VM does not need.
    pub(crate) fn harm(&self) -> f64 {
        let pressure = self.pressure.unwrap_or(0.0).max(self.pressure_now) + 1e-4;
        pressure * self.weight as f64 / (self.dispensable() as f64 + 1.0)
    }

    /// Sets the working set, and what follows from it, for `hot` bytes of needed page cache.
    pub(crate) fn count_as_needed(&mut self, hot: u64) {
        self.hot = hot;
        self.working_set = self.parts.used_hard.saturating_add(hot);
        let buffer = percent_of(self.working_set, self.buffer_percent);
        self.need = self.working_set.saturating_add(buffer);
        self.target = self.need.clamp(self.min, self.max);
    }

    /// The target, if as much memory is available in the guest as may be.
    pub(crate) fn surely_needs(&self) -> u64 {
        self.least_need().clamp(self.min, self.max)
    }

    /// The working set and its buffer, if as much memory is available in the guest as may be.
    fn least_need(&self) -> u64 {
        let unsure = self.parts.unsure;
        let unsure = unsure.saturating_add(percent_of(unsure, self.buffer_percent));
        self.need.saturating_sub(unsure)
    }

    /// Smallest size that a take may leave.
    pub(crate) fn floor(&self) -> u64 {
        self.need.max(self.min)
    }

    /// Largest take by balloon: free memory, and a part of the rest.
    pub(crate) fn balloon_step(&self, policy: &Policy) -> u64 {
        let step = share_of(self.parts.size, policy.balloon_step).max(SMALLEST_BALLOON_STEP);
        step.saturating_add(self.parts.free)
    }

    /// How much more memory a give may lead to.
    pub(crate) fn room(&self) -> u64 {
        let installable = self.held.saturating_add(self.pluggable);
        installable.min(self.max.saturating_sub(self.parts.size))
    }

    /// Says what the VM needs that only virtio-mem could give it, if the guest has no driver.
    pub(crate) fn lacks_driver(&self) -> Option<Reason> {
        let needs = ByteSize(self.needs_driver);
        let is_short = self.needs_driver > 0 && self.keeps.is_none();
        is_short.then_some(Reason::NoPlugDriver { needs })
    }

    pub(crate) fn idle_reason(&self) -> Reason {
        if let Some(reason) = self.keeps.or(self.unwilling) {
            return reason;
        }
        if self.keeps_freed_ram {
            return Reason::KeepsFreedRam;
        }
        if !self.trims && !self.has_balloon && self.block == 0 {
            return Reason::NoMeans;
        }
        if !self.trims && self.has_balloon && !self.can_balloon {
            return Reason::NoDeflateOnOom;
        }
        Reason::AtTarget
    }

    /// Gives the VM what it lacks, as far as the host has `headroom`.
    pub(crate) fn call_to_give(&self, headroom: u64) -> Call {
        let bytes = self.lacks.min(headroom);
        let exhausted = Call::none(Reason::HostExhausted {
            needs: ByteSize(self.lacks),
            left: ByteSize(headroom),
        });
        let Some((action, bytes)) = self.growth(bytes, headroom) else {
            return exhausted;
        };
        // A few pages help nobody, unless the OOM killer could run without them.
        if bytes < SMALLEST_CHANGE && !self.is_at_risk {
            return exhausted;
        }
        let given = ByteSize(bytes);
        let reason = if self.is_pressing {
            Reason::GivePressure {
                bytes: given,
                pressure: self.pressure_now,
            }
        } else if self.least_need() <= self.parts.size {
            Reason::BelowMinimum { bytes: given }
        } else {
            Reason::GiveNeeded { bytes: given }
        };
        Call::order(action, bytes, reason)
    }

    /// Gives the VM a part of what its balloon holds, because the host has `spare` memory. A guest
    /// that is silent or not believed gets it, too: it cannot ask for it.
    pub(crate) fn call_to_give_back(&self, spare: u64, policy: &Policy) -> Option<Call> {
        let may_grow = matches!(
            self.keeps,
            None | Some(Reason::Silent { .. } | Reason::Distrusted(_))
        );
        if !may_grow || self.held == 0 {
            return None;
        }
        let step = share_of(self.parts.size, policy.balloon_step).max(SMALLEST_BALLOON_STEP);
        let bytes = step.min(self.held).min(self.room()).min(spare);
        if bytes < SMALLEST_CHANGE.min(self.held) || bytes < PAGE_SIZE {
            return None;
        }
        let bytes = bytes / PAGE_SIZE * PAGE_SIZE;
        let target = ByteSize(self.parts.size + bytes);
        let given = ByteSize(bytes);
        let action = Action::Balloon { target };
        Some(Call::order(
            action,
            bytes,
            Reason::GiveBack { bytes: given },
        ))
    }

    /// Chooses how the VM grows by about `bytes`: by its balloon, or by plugging.
    pub(crate) fn growth(&self, bytes: u64, headroom: u64) -> Option<(Action, u64)> {
        let room = self.room();
        let deflated = bytes.min(self.held).min(room) / PAGE_SIZE * PAGE_SIZE;
        let can_plug = self.block > 0 && self.pluggable > 0;
        if deflated >= SMALLEST_CHANGE || (deflated > 0 && !can_plug) {
            let target = ByteSize(self.parts.size.saturating_add(deflated));
            return Some((Action::Balloon { target }, deflated));
        }
        if self.block == 0 || bytes == 0 {
            return None;
        }
        let most = room.min(self.pluggable).min(headroom) / self.block * self.block;
        let blocks = bytes.div_ceil(self.block).saturating_mul(self.block);
        let plugged = blocks.min(most);
        (plugged > 0).then_some((
            Action::Plug {
                bytes: ByteSize(plugged),
            },
            plugged,
        ))
    }
}
