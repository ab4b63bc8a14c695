//! The VMs of the fold engine by number. The map remembers which VMs may have changed, so that the
//! engine computes only for these VMs anew when they are due ([`super::schedule`]).

use std::collections::{BTreeMap, btree_map};
use std::ops::Index;

use super::guest::VmId;

/// Number of notes about changed VMs, beyond two for each VM, after which repeated notes are
/// removed.
const SPARE_NOTES: usize = 64;

/// VMs by number. Every way to change a VM notes its number.
pub(super) struct VmMap<V> {
    vms: BTreeMap<VmId, V>,
    /// VMs that were added, removed or borrowed mutably. Numbers may repeat.
    changed: Vec<VmId>,
}

impl<V> Default for VmMap<V> {
    fn default() -> Self {
        Self {
            vms: BTreeMap::new(),
            changed: Vec::new(),
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the functions have the signatures of `BTreeMap`
impl<V> VmMap<V> {
    /// Returns the numbers of the VMs that may have changed since the last call, including removed
    /// VMs. Numbers may repeat.
    pub fn take_changed(&mut self) -> Vec<VmId> {
        std::mem::take(&mut self.changed)
    }

    fn note(&mut self, id: VmId) {
        // Most often, the engine changes one VM several times in a row.
        if self.changed.last() == Some(&id) {
            return;
        }
        self.changed.push(id);
        if self.changed.len() > self.vms.len() * 2 + SPARE_NOTES {
            self.changed.sort_unstable();
            self.changed.dedup();
        }
    }

    pub fn get(&self, id: &VmId) -> Option<&V> {
        self.vms.get(id)
    }

    pub fn get_mut(&mut self, id: &VmId) -> Option<&mut V> {
        if self.vms.contains_key(id) {
            self.note(*id);
        }
        self.vms.get_mut(id)
    }

    pub fn insert(&mut self, id: VmId, vm: V) {
        self.vms.insert(id, vm);
        self.note(id);
    }

    pub fn remove(&mut self, id: &VmId) -> Option<V> {
        self.note(*id);
        self.vms.remove(id)
    }

    pub fn iter(&self) -> btree_map::Iter<'_, VmId, V> {
        self.vms.iter()
    }

    pub fn keys(&self) -> btree_map::Keys<'_, VmId, V> {
        self.vms.keys()
    }

    pub fn values(&self) -> btree_map::Values<'_, VmId, V> {
        self.vms.values()
    }

    /// Returns all VMs, to change them. All count as changed.
    pub fn values_mut(&mut self) -> btree_map::ValuesMut<'_, VmId, V> {
        self.changed = self.vms.keys().copied().collect();
        self.vms.values_mut()
    }

    pub fn len(&self) -> usize {
        self.vms.len()
    }

    #[cfg(test)]
    pub fn contains_key(&self, id: &VmId) -> bool {
        self.vms.contains_key(id)
    }
}

impl<V> Index<&VmId> for VmMap<V> {
    type Output = V;

    fn index(&self, id: &VmId) -> &V {
        &self.vms[id]
    }
}

impl<'a, V> IntoIterator for &'a VmMap<V> {
    type Item = (&'a VmId, &'a V);
    type IntoIter = btree_map::Iter<'a, VmId, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
