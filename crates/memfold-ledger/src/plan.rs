//! Predicts how much memory more VMs like those that run would take, and how many fit on the host.
//! The prediction uses the ledger's figures (`memfold plan`).
//!
//! ```text
//!   used(N) = used now + sum over kinds: (N - n) x own            own:  memory that only this VM takes (mean of the n that run)
//!                                                                 shared memory exists once already, however many VMs come
//!   owed(N) = owed now + sum over kinds: (N - n) x owed           memory that the brake wants to be available (see `debt`)
//!
//!   N fits:  used(N) + its error bar <= memory - reserve,   and   cover x owed(N) <= memory - reserve - used(N)
//! ```
//! To plan for a later time, the model assumes that each VM keeps growing as fast as the VMs of its
//! kind grew lately, until it uses all of its RAM. It assumes that no VM shrinks.
//!
//! The model assumes that one more VM is like those that run: it shares the pages that they share
//! with each other. A VM that runs alone in its trust domain shares nothing yet, so the model
//! assumes that more such VMs share nothing either. `memfold estimate` tells what they would have
//! in common. The field `most_bytes` is the memory that a VM takes if it uses all of its RAM.

use std::collections::{BTreeMap, BTreeSet};

use memfold_fold::{EngineStats, VmStats};
use memfold_units::{ByteSize, PageCount};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::account::{Report, VmAccount};
use super::debt::DebtReport;
use super::estimate::statistics::whole;

/// Reason why no plan can be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No VM runs, so no memory was measured.
    #[error("no VM runs, and a plan is computed from running VMs; start one VM of each kind first")]
    NoVms,
    /// A kind lists this VM, but no VM of this name runs.
    #[error("no VM named '{0}' runs; 'memfold vm list' shows all VMs")]
    NoSuchVm(String),
    /// Two kinds list this VM.
    #[error("VM '{0}' is named in two kinds of VMs (--kind); leave the VM out of one kind")]
    Twice(String),
    /// The plan has no kind of the requested name. The second text lists the kinds that the plan
    /// has.
    #[error("no kind of VMs is named '{0}'; the kinds are {1}")]
    NoSuchKind(String, String),
    /// The daemon's report has no debt, because the daemon has another version than this program.
    #[error(
        "the daemon's report lacks the figures of shared memory; use a daemon and a client of the same version"
    )]
    NoDebt,
}

/// VMs that are alike, and the memory that one of them takes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Kind {
    /// Name of the kind: chosen by the operator, or the trust domain of its VMs.
    pub name: String,
    /// Names of the running VMs of this kind, whose memory was measured.
    pub vms: Vec<String>,
    /// Bytes that one more VM of this kind would take: its QEMU's anonymous memory, memory files
    /// and page tables, without pages that exist already because other VMs share them.
    pub own_bytes: u64,
    /// Part of `own_bytes`: page cache in the guest that is not shared, according to the guest's
    /// agent.
    pub page_cache_bytes: u64,
    /// Error bar (95 %) of `own_bytes`, from the differences between the measured VMs; null: only
    /// one VM was measured.
    pub plus_minus_bytes: Option<u64>,
    /// Bytes that a VM of this kind shares, on average: folded, mapped from a snapshot's image, or
    /// merged by KSM.
    pub shared_bytes: u64,
    /// Bytes that a VM of this kind could claim by writing to shared pages, on average.
    pub owed_bytes: u64,
    /// Bytes that a VM of this kind would take if it used all of its RAM and shared nothing.
    pub most_bytes: u64,
    /// Mean recent growth of a VM of this kind, in bytes per hour; null: the history has too few
    /// samples.
    pub grows_bytes_per_hour: Option<i64>,
    /// Bytes by which each VM of this kind is assumed to grow until the planned time.
    pub grown_bytes: u64,
    /// Number of VMs of this kind that fit beside the running VMs, within the host's memory and the
    /// brake's limit.
    pub more_fit: u64,
    /// Number of VMs of this kind that fit beside the running VMs if no guest ever writes to shared
    /// memory: the brake's limit is ignored.
    pub more_fit_by_memory: u64,
    /// Number of VMs of this kind for which the plan predicts the memory use, including the running
    /// VMs.
    pub wanted: u64,
    /// Standard deviation of `own_bytes` of the measured VMs, from which error bars of sums are
    /// computed.
    #[serde(skip)]
    pub deviation: f64,
}

/// Prediction of a host's memory use for wanted numbers of VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// Memory of the host that the plan is for, in bytes.
    pub memory_bytes: u64,
    /// Bytes of memory that the host keeps for itself, and that VMs must not use up.
    pub reserve_bytes: u64,
    /// Percent of `predicted_owed_bytes` for which the host must have memory available.
    pub cover_percent: f64,
    /// Bytes of host memory in use now (`MemTotal` - `MemAvailable`).
    pub used_bytes: u64,
    /// Bytes that guests could claim now by writing to shared pages.
    pub owed_bytes: u64,
    /// The kinds of VMs in the plan.
    pub kinds: Vec<Kind>,
    /// Predicted memory in use when the wanted VMs run, in bytes.
    pub predicted_bytes: u64,
    /// Error bar (95 %) of `predicted_bytes`; null: only one VM was measured of a kind whose number
    /// changes.
    pub plus_minus_bytes: Option<u64>,
    /// Predicted bytes that guests could claim by writing to shared pages when the wanted VMs run.
    pub predicted_owed_bytes: u64,
    /// Hours from now to the time that the plan is for.
    pub ahead_hours: f64,
    /// Part of `predicted_bytes`: growth of the wanted VMs until the planned time.
    pub grown_bytes: u64,
    /// Whether the wanted VMs fit into `memory_bytes` less the reserve, and within the brake's
    /// limit.
    pub fits: bool,
}

/// Returns the kinds of a plan whose request names none: one for each trust domain. A VM without a
/// domain is a kind of its own.
fn kinds_by_domain(report: &Report) -> Vec<(String, Vec<String>)> {
    let mut kinds: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for vm in &report.vms {
        let name = vm.domain.as_ref().unwrap_or(&vm.name);
        kinds.entry(name.clone()).or_default().push(vm.name.clone());
    }
    kinds.into_iter().collect()
}

/// Recent growth of each VM's unshared memory in bytes per hour, by the VM's name.
pub type Growths = BTreeMap<String, i64>;

/// An operator's request for a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Order {
    /// Kinds of VMs: for each, its name and the names of its VMs. If empty, each trust domain is a
    /// kind, and each VM without a domain.
    pub kinds: Vec<(String, Vec<String>)>,
    /// Wanted numbers of VMs, by kind. A kind that is not listed keeps the number of VMs that run.
    pub vms: Vec<(String, u64)>,
    /// Memory of the host to plan for, in bytes; `None`: `MemTotal` of this host.
    pub memory_bytes: Option<u64>,
    /// Hours from now to the time to plan for; 0: now.
    pub ahead_hours: f64,
}

impl Order {
    /// Computes the plan from the measured memory of the running VMs, the fold engine's figures and
    /// the VMs' growth.
    ///
    /// # Errors
    ///
    /// A [`PlanError`] if no VM runs, or if a name is unknown.
    pub fn plan(
        &self,
        report: &Report,
        stats: &EngineStats,
        growths: &Growths,
    ) -> Result<Plan, PlanError> {
        if report.vms.is_empty() {
            return Err(PlanError::NoVms);
        }
        let debt = report.debt.as_ref().ok_or(PlanError::NoDebt)?;
        let mut kinds = self.kinds.clone();
        if kinds.is_empty() {
            kinds = kinds_by_domain(report);
        }
        let mut seen = BTreeSet::new();
        for vm in kinds.iter().flat_map(|(_, vms)| vms) {
            if !seen.insert(vm) {
                return Err(PlanError::Twice(vm.clone()));
            }
        }
        // A control group may leave the VMs less than the host has.
        let host = &report.host;
        let is_limited = (1..host.mem_total_bytes.0).contains(&debt.mem_total_bytes);
        let (total, available) = if is_limited {
            (debt.mem_total_bytes, debt.mem_available_bytes)
        } else {
            (host.mem_total_bytes.0, host.mem_available_bytes.0)
        };
        let mut plan = Plan {
            memory_bytes: self.memory_bytes.unwrap_or(total),
            ahead_hours: self.ahead_hours,
            reserve_bytes: debt.reserve_bytes,
            cover_percent: debt.cover_percent,
            used_bytes: total.saturating_sub(available),
            owed_bytes: debt.debt_bytes,
            ..Plan::default()
        };
        for (name, vms) in &kinds {
            let mut kind = Kind::measure(report, debt, stats, name, vms)?;
            kind.grow(growths, self.ahead_hours);
            plan.kinds.push(kind);
        }
        // Further VMs come beside the running VMs, which grow as well.
        let sum = |of: &dyn Fn(&Kind) -> f64| plan.kinds.iter().map(of).sum::<f64>();
        let grown_now = sum(&|k| k.vms.len() as f64 * k.grown_bytes as f64);
        let more_fit = |kind: &Kind, cover| plan.more(kind, grown_now, cover);
        let fit: Vec<(u64, u64)> = plan
            .kinds
            .iter()
            .map(|kind| (more_fit(kind, true), more_fit(kind, false)))
            .collect();
        for (kind, fit) in plan.kinds.iter_mut().zip(fit) {
            (kind.more_fit, kind.more_fit_by_memory) = fit;
        }
        for (name, number) in &self.vms {
            let names: Vec<String> = plan.kinds.iter().map(|k| format!("'{}'", k.name)).collect();
            let found = plan.kinds.iter_mut().find(|kind| kind.name == *name);
            let missing = || PlanError::NoSuchKind(name.clone(), names.join(", "));
            found.ok_or_else(missing)?.wanted = *number;
        }
        let sum = |of: &dyn Fn(&Kind) -> f64| plan.kinds.iter().map(of).sum::<f64>();
        let grown = sum(&|k| k.wanted as f64 * k.grown_bytes as f64);
        let used = plan.used_bytes as f64 + sum(&|k| k.more(k.wanted) * k.own_bytes as f64) + grown;
        let owed = plan.owed_bytes as f64 + sum(&|k| k.more(k.wanted) * k.owed_bytes as f64);
        let errors: Option<Vec<f64>> = plan
            .kinds
            .iter()
            .map(|k| k.plus_minus(k.more(k.wanted)))
            .collect();
        // The kinds' errors are independent.
        let error = errors.map(|all| all.iter().map(|e| e.powi(2)).sum::<f64>().sqrt());
        plan.fits = plan.holds(used, error.unwrap_or(0.0), owed);
        plan.predicted_bytes = whole(used);
        plan.grown_bytes = whole(grown);
        plan.plus_minus_bytes = error.map(whole);
        plan.predicted_owed_bytes = whole(owed);
        Ok(plan)
    }
}

/// Parses a kind of VMs as operators write it: `KIND=VM,VM`, its name and the names of its VMs.
///
/// # Errors
///
/// A message that describes the right form.
pub fn parse_kind(text: &str) -> Result<(String, Vec<String>), String> {
    let (name, vms) = text.split_once('=').unwrap_or((text, ""));
    let vms: Vec<String> = vms.split(',').map(str::to_owned).collect();
    if name.is_empty() || vms.iter().any(String::is_empty) {
        return Err(format!(
            "'{text}' is not a kind; give a name and its VMs: web=web1,web2"
        ));
    }
    Ok((name.to_owned(), vms))
}

/// Parses the wanted number of VMs of a kind as operators write it: `KIND=NUMBER`.
///
/// # Errors
///
/// A message that describes the right form.
pub fn parse_number(text: &str) -> Result<(String, u64), String> {
    let parts = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let parts = parts.and_then(|(name, number)| Some((name, number.parse::<u32>().ok()?)));
    let (name, number) =
        parts.ok_or_else(|| format!("'{text}' is not a kind and a number; give both: web=20"))?;
    Ok((name.to_owned(), u64::from(number)))
}

/// Parses the number of hours to plan ahead, from 0 to 8760 (a year).
///
/// # Errors
///
/// A message with the allowed range.
pub fn parse_hours(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(hours) if (0.0..=8760.0).contains(&hours) => Ok(hours),
        _ => Err(format!("'{text}' is not a number of hours; give 0 to 8760")),
    }
}

/// Two-sided 95 % points of Student's t distribution for 1, 2, ... degrees of freedom. For more
/// degrees, the value of the normal distribution is used.
const T: [f64; 10] = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23];

fn t(degrees: usize) -> f64 {
    let at = degrees.checked_sub(1).unwrap_or(usize::MAX);
    T.get(at).copied().unwrap_or(1.96)
}

/// Returns the part of a VM's anonymous memory that is its share of pages merged by KSM. These
/// pages already exist for a further VM.
fn ksm_share(report: &Report, vm: &VmAccount) -> u64 {
    let Some(ksm) = report.host.ksm else { return 0 };
    let all = ksm.pages_shared + ksm.pages_sharing;
    let merged = vm.ksm_merged_bytes.unwrap_or_default().0;
    if all == 0 {
        return 0;
    }
    let share = u128::from(merged) * u128::from(ksm.pages_shared) / u128::from(all);
    u64::try_from(share).unwrap_or(merged)
}

/// Returns the bytes that only this VM takes. The VM's shares of an image or a segment in memory
/// are not counted, because these pages already exist.
fn own(report: &Report, vm: &VmAccount) -> u64 {
    let files = vm.pss_shmem_bytes - vm.store_pss_bytes - vm.segment_shmem_bytes;
    let image = if report.host.images_bytes.0 > 0 {
        vm.file_pss_bytes.min(files)
    } else {
        ByteSize(0)
    };
    let anonymous = vm.pss_anon_bytes - ByteSize(ksm_share(report, vm));
    (anonymous + (files - image) + vm.page_table_bytes).0
}

impl Kind {
    fn measure(
        report: &Report,
        debt: &DebtReport,
        stats: &EngineStats,
        name: &str,
        names: &[String],
    ) -> Result<Self, PlanError> {
        let find = |vm: &String| {
            let found = report.vms.iter().find(|v| v.name == *vm);
            found.ok_or_else(|| PlanError::NoSuchVm(vm.clone()))
        };
        let vms: Vec<&VmAccount> = names.iter().map(find).collect::<Result<_, _>>()?;
        let number = vms.len() as f64;
        let mean = |of: &dyn Fn(&VmAccount) -> u64| {
            vms.iter().map(|vm| of(vm) as f64).sum::<f64>() / number.max(1.0)
        };
        let own_mean = mean(&|vm| own(report, vm));
        let squares = vms
            .iter()
            .map(|vm| (own(report, vm) as f64 - own_mean).powi(2));
        let deviation = if vms.len() > 1 {
            (squares.sum::<f64>() / (number - 1.0)).sqrt()
        } else {
            0.0
        };
        let owed = |vm: &VmAccount| {
            let of_debt = debt.vms.iter().find(|d| d.name == vm.name);
            of_debt.map_or(0, super::VmDebt::total_bytes)
                + vm.ksm_merged_bytes.unwrap_or_default().0
        };
        let cache = |vm: &VmAccount| {
            let known = stats.vms.iter().find(|known| known.name == vm.name);
            let own = |known: &VmStats| {
                known
                    .cached_pages
                    .saturating_sub(known.matched_folded_pages)
            };
            PageCount(known.map_or(0, own)).bytes().0
        };
        let shared = |vm: &VmAccount| {
            (vm.folded_bytes + vm.file_resident_bytes + vm.ksm_merged_bytes.unwrap_or_default()).0
        };
        Ok(Self {
            name: name.to_owned(),
            vms: names.to_vec(),
            own_bytes: whole(own_mean),
            page_cache_bytes: whole(mean(&cache)),
            plus_minus_bytes: (vms.len() > 1)
                .then(|| whole(t(vms.len() - 1) * deviation * (1.0 + 1.0 / number).sqrt())),
            shared_bytes: whole(mean(&shared)),
            owed_bytes: whole(mean(&owed)),
            most_bytes: whole(mean(&|vm| (vm.ram_bytes + vm.overhead_bytes()).0)),
            wanted: vms.len() as u64,
            deviation,
            ..Self::default()
        })
    }

    /// Assumes that each VM of the kind grows by the mean of the VMs whose growth is known.
    #[allow(clippy::cast_possible_truncation)] // as much as its terms
    fn grow(&mut self, growths: &Growths, ahead_hours: f64) {
        let known: Vec<f64> = self
            .vms
            .iter()
            .filter_map(|vm| growths.get(vm))
            .map(|&bytes| bytes as f64)
            .collect();
        if known.is_empty() {
            return;
        }
        let mean = known.iter().sum::<f64>() / known.len() as f64;
        self.grows_bytes_per_hour = Some(mean.round() as i64);
        let most = self.most_bytes.saturating_sub(self.own_bytes);
        self.grown_bytes = whole(mean * ahead_hours).min(most);
    }

    /// Returns the number of VMs beyond the measured ones; negative if fewer are wanted.
    fn more(&self, wanted: u64) -> f64 {
        wanted as f64 - self.vms.len() as f64
    }

    /// Returns the variance of the memory of `more` VMs together: each VM differs, and the measured
    /// mean is uncertain.
    fn variance(&self, more: f64) -> f64 {
        let number = self.vms.len() as f64;
        self.deviation.powi(2) * (more.abs() + more.powi(2) / number)
    }

    /// Returns the error bar of the memory of `more` VMs; `None`: unknown.
    fn plus_minus(&self, more: f64) -> Option<f64> {
        if more == 0.0 {
            return Some(0.0);
        }
        (self.vms.len() > 1).then(|| t(self.vms.len() - 1) * self.variance(more).sqrt())
    }
}

impl Plan {
    /// Returns whether a plan fits: the used bytes with their error bar, and beside them the part
    /// of the owed bytes that must be available.
    fn holds(&self, used: f64, error: f64, owed: f64) -> bool {
        let room = self.memory_bytes.saturating_sub(self.reserve_bytes) as f64;
        used + error <= room && owed * self.cover_percent / 100.0 <= (room - used).max(0.0)
    }

    /// Returns the number of further VMs of a kind that fit beside the running VMs, which grow by
    /// `grown_now` bytes.
    fn more(&self, kind: &Kind, grown_now: f64, cover: bool) -> u64 {
        let each = (kind.own_bytes + kind.grown_bytes) as f64;
        let fits = |more: u64| {
            let more = more as f64;
            let used = self.used_bytes as f64 + grown_now + more * each;
            let owed = self.owed_bytes as f64 + more * kind.owed_bytes as f64;
            let error = kind.plus_minus(more).unwrap_or(0.0);
            self.holds(used, error, if cover { owed } else { 0.0 })
        };
        // Each VM takes some memory, so the search ends. The upper bound is for kinds whose
        // measured memory is zero.
        let (mut low, mut high) = (0_u64, 1_u64 << 20);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if fits(middle) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VmDebt;
    use crate::account::KsmAccount;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memfold_plan_parses_kinds_and_numbers_of_vms_and_refuses_malformed_values() {
        let web = ("web".to_owned(), vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(parse_kind("web=a,b"), Ok(web));
        assert_eq!(parse_number("web=20"), Ok(("web".to_owned(), 20)));
        for wrong in ["", "web", "web=", "=a", "web=a,"] {
            assert!(parse_kind(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "web", "web=", "=3", "web=-1", "web=x"] {
            assert!(parse_number(wrong).is_err(), "{wrong}");
        }
    }

    fn vm(name: &str, own: u64) -> VmAccount {
        VmAccount {
            name: name.into(),
            domain: Some("web".into()),
            ram_bytes: ByteSize::mib(512),
            pss_anon_bytes: ByteSize::mib(own - 2),
            page_table_bytes: ByteSize::mib(2),
            folded_bytes: ByteSize::mib(100),
            // Half of the 100 MiB in the page store.
            pss_shmem_bytes: ByteSize::mib(50),
            store_pss_bytes: ByteSize::mib(50),
            ..VmAccount::default()
        }
    }

    /// Makes a host with 10,000 MiB, of which 2,000 are used, and a reserve of 500. Its two VMs
    /// take 150 and 170 MiB alone, and share 100.
    fn report() -> Report {
        let mut report = Report {
            vms: vec![vm("a", 150), vm("b", 170)],
            ..Report::default()
        };
        report.host.mem_total_bytes = ByteSize::mib(10_000);
        report.host.mem_available_bytes = ByteSize::mib(8_000);
        report.debt = Some(DebtReport {
            reserve_bytes: 500 * MIB,
            cover_percent: 50.0,
            debt_bytes: 200 * MIB,
            vms: ["a", "b"]
                .map(|name| VmDebt {
                    name: name.into(),
                    folded_bytes: 100 * MIB,
                    ..VmDebt::default()
                })
                .into(),
            ..DebtReport::default()
        });
        report
    }

    fn planned(report: &Report, wanted: &[(String, u64)]) -> Plan {
        let order = Order {
            vms: wanted.to_vec(),
            ..Order::default()
        };
        let stats = EngineStats::default();
        order.plan(report, &stats, &Growths::new()).unwrap()
    }

    #[test]
    fn a_plan_for_a_later_time_adds_the_recent_memory_growth_of_vms_up_to_their_ram_size() {
        let growths = |bytes| Growths::from([("a".to_owned(), bytes)]);
        let of = |bytes: i64, hours| {
            let order = Order {
                vms: vec![("web".into(), 4)],
                ahead_hours: hours,
                ..Order::default()
            };
            let stats = EngineStats::default();
            order.plan(&report(), &stats, &growths(bytes)).unwrap()
        };
        let mib = |mib: i64| mib << 20;
        let now = of(mib(10), 0.0);
        assert_eq!(now.kinds[0].grows_bytes_per_hour, Some(mib(10)));
        assert_eq!((now.grown_bytes, now.kinds[0].grown_bytes), (0, 0));
        let later = of(mib(10), 3.0);
        assert_eq!(later.kinds[0].grown_bytes, 30 * MIB);
        assert_eq!(later.grown_bytes, 4 * 30 * MIB);
        assert_eq!(
            later.predicted_bytes,
            now.predicted_bytes + later.grown_bytes
        );
        assert!(later.kinds[0].more_fit < now.kinds[0].more_fit);
        // The most that a VM takes: its 512 MiB of RAM, and the memory of its QEMU.
        let kind = of(mib(10), 1e6).kinds.remove(0);
        assert_eq!(kind.own_bytes + kind.grown_bytes, kind.most_bytes);
        assert_eq!(of(mib(-10), 3.0).grown_bytes, 0);
        assert_eq!(planned(&report(), &[]).kinds[0].grows_bytes_per_hour, None);
    }

    #[test]
    fn a_plan_counts_only_the_private_memory_of_an_additional_vm() {
        let now = planned(&report(), &[]);
        assert_eq!(now.predicted_bytes, 2_000 * MIB);
        assert_eq!(now.plus_minus_bytes, Some(0));
        let kind = &now.kinds[0];
        assert_eq!((kind.own_bytes, kind.shared_bytes), (160 * MIB, 100 * MIB));
        assert_eq!((kind.owed_bytes, kind.wanted), (100 * MIB, 2));
        let five = planned(&report(), &[("web".into(), 5)]);
        assert_eq!(five.predicted_bytes, (2_000 + 3 * 160) * MIB);
        assert_eq!(five.predicted_owed_bytes, 500 * MIB);
        assert!(five.fits);
        // A plan may also have fewer VMs than run now.
        let one = planned(&report(), &[("web".into(), 1)]);
        assert_eq!(one.predicted_bytes, (2_000 - 160) * MIB);
    }

    #[test]
    fn the_number_of_vms_a_plan_allows_is_limited_by_memory_and_debt_and_the_error_bar() {
        let mut exact = report();
        exact.vms[1] = vm("b", 150);
        let kind = planned(&exact, &[]).kinds.remove(0);
        assert_eq!(kind.plus_minus_bytes, Some(0));
        // There is room for 9,500 - 2,000 MiB. Each VM takes 150, and half of its debt of 100 must
        // be available, also for the debt of 200 that exists now.
        assert_eq!(kind.more_fit_by_memory, 7_500 / 150);
        assert_eq!(kind.more_fit, (7_500 - 100) / 200);
        let fits = |number| planned(&exact, &[("web".into(), number)]).fits;
        assert!(fits(2 + kind.more_fit) && !fits(3 + kind.more_fit));
        // A control group leaves the VMs 4,000 MiB, of which 3,000 are available.
        let mut limited = exact.clone();
        let debt = limited.debt.as_mut().unwrap();
        (debt.mem_total_bytes, debt.mem_available_bytes) = (4_000 * MIB, 3_000 * MIB);
        let plan = planned(&limited, &[]);
        assert_eq!(
            (plan.memory_bytes, plan.used_bytes),
            (4_000 * MIB, 1_000 * MIB)
        );
        assert_eq!(plan.kinds[0].more_fit_by_memory, 2_500 / 150);
        // With the same mean but two VMs that differ, fewer are sure to fit.
        let mut vague = report();
        vague.vms = vec![vm("a", 140), vm("b", 160)];
        let vague = planned(&vague, &[]).kinds.remove(0);
        assert_eq!(vague.own_bytes, 150 * MIB);
        assert!(vague.plus_minus_bytes.unwrap() > 100 * MIB);
        assert!(vague.more_fit_by_memory < 50, "{vague:?}");
    }

    #[test]
    fn a_plan_from_a_single_vm_has_no_error_bar() {
        let mut report = report();
        report.vms.truncate(1);
        let plan = planned(&report, &[("web".into(), 3)]);
        assert_eq!(plan.plus_minus_bytes, None);
        assert_eq!(plan.kinds[0].plus_minus_bytes, None);
        assert_eq!(plan.predicted_bytes, (2_000 + 2 * 150) * MIB);
    }

    #[test]
    fn memory_merged_by_ksm_is_counted_once_in_the_plan_for_additional_vms() {
        let mut report = report();
        for vm in &mut report.vms {
            vm.ksm_merged_bytes = Some(ByteSize::mib(60));
        }
        report.host.ksm = Some(KsmAccount {
            pages_shared: 1000,
            pages_sharing: 2000,
            ..KsmAccount::default()
        });
        let kind = planned(&report, &[]).kinds.remove(0);
        // The VM's share of its 60 MiB of merged memory is a third.
        assert_eq!(kind.own_bytes, 140 * MIB);
        assert_eq!(kind.owed_bytes, 160 * MIB);
    }

    #[test]
    fn a_plan_with_an_unknown_vm_or_kind_is_refused() {
        let report = report();
        let kind = |vms: &[&str]| {
            let vms = vms.iter().map(|&vm| vm.to_owned()).collect();
            vec![("k".to_owned(), vms)]
        };
        let try_plan = |kinds: &[(String, Vec<String>)], wanted: &[(String, u64)]| {
            let order = Order {
                kinds: kinds.to_vec(),
                vms: wanted.to_vec(),
                ..Order::default()
            };
            let stats = EngineStats::default();
            order.plan(&report, &stats, &Growths::new()).unwrap_err()
        };
        assert_eq!(
            try_plan(&kind(&["x"]), &[]),
            PlanError::NoSuchVm("x".into())
        );
        assert_eq!(
            try_plan(&kind(&["a", "a"]), &[]),
            PlanError::Twice("a".into())
        );
        let error = try_plan(&kind(&["a"]), &[("other".into(), 1)]).to_string();
        assert!(
            error.contains("named 'other'; the kinds are 'k'"),
            "{error}"
        );
        let empty = Report::default();
        let nothing = Order::default().plan(&empty, &EngineStats::default(), &Growths::new());
        assert_eq!(nothing, Err(PlanError::NoVms));
    }
}
