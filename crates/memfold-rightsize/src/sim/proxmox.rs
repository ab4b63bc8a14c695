//! Proxmox VE's rule for balloons, written anew from its description, to be compared with.
//!
//! Every ten seconds, `pvestatd` computes a goal: 80 % of the host's memory, less what is used. It
//! changes each balloon by at most 100 MiB. VMs share what is beyond their minimum by their shares.
//! Memory goes first to VMs whose free memory is at most a quarter of their minimum, and is taken
//! first from the others. Nothing else of a guest is looked at: no pressure, no refaults. Sources:
//! `PVE/AutoBalloon.pm` and `PVE/Service/pvestatd.pm` of `proxmox/pve-manager`.

/// Time between two runs of the rule, in seconds.
pub(crate) const INTERVAL: f64 = 10.0;

/// Part of the host's memory that the rule wants to be used.
pub(crate) const GOAL: f64 = 0.8;

/// Largest change of one balloon at once, in bytes.
pub(crate) const LARGEST_CHANGE: f64 = 100.0 * 1024.0 * 1024.0;

/// Goals within this, in bytes, change nothing.
const SMALLEST_GOAL: f64 = 10.0 * 1024.0 * 1024.0;

/// A VM as the rule sees it. All amounts are bytes.
#[derive(Clone, Copy, Debug)]
pub struct BalloonedVm {
    /// Memory that the balloon leaves to the guest.
    pub balloon: f64,
    /// Least memory that the operator allows.
    pub min: f64,
    /// Most memory.
    pub max: f64,
    /// Weight when memory beyond the minimum is divided.
    pub shares: f64,
    /// `MemFree` of the guest.
    pub free: f64,
}

/// Applies the rule once. Returns each VM's new memory.
#[must_use]
pub fn autoballoon(vms: &[BalloonedVm], goal: f64, largest_change: f64) -> Vec<f64> {
    let mut new: Vec<f64> = vms.iter().map(|vm| vm.balloon).collect();
    let all: Vec<usize> = (0..vms.len()).collect();
    let (roomy, pressed): (Vec<usize>, Vec<usize>) = all.iter().partition(|&&index| {
        let vm = &vms[index];
        vm.free > vm.min * 0.25 && vm.balloon >= vm.min
    });
    let mut divide = |members: &[usize], goal| divide(vms, &mut new, members, goal, largest_change);
    if goal > SMALLEST_GOAL {
        let rest = divide(&pressed, goal);
        if rest >= goal {
            divide(&all, rest);
        }
    } else if goal < -SMALLEST_GOAL {
        let rest = divide(&roomy, goal);
        if rest <= goal {
            divide(&all, rest);
        }
    }
    new
}

/// Divides `goal` bytes among `members` until nothing changes, and returns what is left of it.
fn divide(
    vms: &[BalloonedVm],
    new: &mut [f64],
    members: &[usize],
    goal: f64,
    largest_change: f64,
) -> f64 {
    let mut rest = goal;
    let mut open: Vec<usize> = members.to_vec();
    loop {
        let shares: f64 = open.iter().map(|&index| vms[index].shares).sum();
        let beyond: f64 = open.iter().map(|&index| new[index] - vms[index].min).sum();
        if rest == 0.0 || open.is_empty() {
            return rest;
        }
        let divided = beyond + rest;
        let mut changes = 0.0;
        open.retain(|&index| {
            let vm = &vms[index];
            let fair = vm.min + (divided / shares * vm.shares).trunc();
            let wanted = fair.min(vm.max).max(vm.min);
            let bounded = if goal > 0.0 && wanted > vm.balloon {
                wanted.min(vm.balloon + largest_change)
            } else if wanted < vm.balloon {
                wanted.max(vm.balloon - largest_change)
            } else {
                return false;
            };
            changes += bounded - new[index];
            new[index] = bounded;
            true
        });
        if changes == 0.0 {
            return rest;
        }
        rest -= changes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = 1024.0 * 1024.0;

    fn vm(balloon: f64, free: f64, shares: f64) -> BalloonedVm {
        BalloonedVm {
            balloon: balloon * MIB,
            min: 1000.0 * MIB,
            max: 2000.0 * MIB,
            shares,
            free: free * MIB,
        }
    }

    fn mib(vms: &[BalloonedVm], goal: f64) -> Vec<f64> {
        autoballoon(vms, goal * MIB, 100.0 * MIB)
            .into_iter()
            .map(|bytes| (bytes / MIB).round())
            .collect()
    }

    #[test]
    fn small_goals_change_nothing() {
        let vms = [vm(1000.0, 0.0, 1.0), vm(1500.0, 800.0, 1.0)];
        assert_eq!(mib(&vms, 9.0), [1000.0, 1500.0]);
        assert_eq!(mib(&vms, -9.0), [1000.0, 1500.0]);
    }

    #[test]
    fn growth_is_divided_by_shares_up_to_the_largest_change() {
        let vms = [vm(1000.0, 0.0, 2.0), vm(1000.0, 0.0, 1.0)];
        assert_eq!(mib(&vms, 90.0), [1060.0, 1030.0]);
        // The first VM would get 180 MiB and gets 100; the second gets what that leaves.
        assert_eq!(mib(&vms, 270.0), [1100.0, 1100.0 - 10.0]);
        assert_eq!(mib(&vms, 900.0), [1100.0, 1100.0]);
    }

    #[test]
    fn growth_goes_to_vms_with_little_free_memory_only() {
        let vms = [vm(1000.0, 0.0, 1.0), vm(1000.0, 600.0, 1.0)];
        assert_eq!(mib(&vms, 80.0), [1080.0, 1000.0]);
    }

    #[test]
    fn memory_is_taken_from_vms_with_free_memory_first() {
        let vms = [vm(1300.0, 0.0, 1.0), vm(1300.0, 600.0, 1.0)];
        assert_eq!(mib(&vms, -80.0), [1300.0, 1220.0]);
        // Nobody has free memory: both lose, whatever they need.
        let vms = [vm(1300.0, 0.0, 1.0), vm(1300.0, 0.0, 1.0)];
        assert_eq!(mib(&vms, -80.0), [1260.0, 1260.0]);
    }
}
