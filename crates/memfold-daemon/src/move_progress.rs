//! Tells users how far the move of a swap disk or an LVM volume to lent RAM or back has come, while
//! the move runs.

use std::collections::BTreeMap;

use memfold_host::progress::Step;
use memfold_lend::graph::Copying;
use parking_lot::Mutex;

/// Swap disks or volumes that are being moved, by the name of the VM or the volume.
pub(crate) type Moves = Mutex<BTreeMap<String, Step>>;

/// The progress of one move, which users see until this value is dropped.
pub(crate) struct MoveProgress<'a> {
    moves: &'a Moves,
    name: &'a str,
}

impl<'a> MoveProgress<'a> {
    /// Begins to show a move of the swap disk of the VM `name`, or of the volume `name`, with the
    /// name of its first step.
    pub fn begin(moves: &'a Moves, name: &'a str, step: &str) -> Self {
        let progress = Self { moves, name };
        progress.show(step, &Copying::default());
        progress
    }

    /// Shows the present step of the move, and how far its copy has come.
    pub fn show(&self, step: &str, copying: &Copying) {
        let step = Step {
            step: step.to_owned(),
            done_bytes: copying.done_bytes,
            total_bytes: copying.total_bytes,
        };
        self.moves.lock().insert(self.name.to_owned(), step);
    }
}

impl Drop for MoveProgress<'_> {
    fn drop(&mut self) {
        self.moves.lock().remove(self.name);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_progress_of_a_move_is_shown_until_the_move_has_ended() {
        let moves = Moves::default();
        let shown = |vm: &str| moves.lock().get(vm).cloned();
        let progress = MoveProgress::begin(&moves, "v", "the lender prepares");
        let first = shown("v").unwrap();
        assert_eq!(
            (&*first.step, first.total_bytes),
            ("the lender prepares", 0)
        );
        let copying = Copying {
            done_bytes: 3,
            total_bytes: 7,
            stalled: Duration::ZERO,
        };
        progress.show("the disk is copied", &copying);
        let now = shown("v").unwrap();
        assert_eq!(
            (&*now.step, now.done_bytes, now.total_bytes),
            ("the disk is copied", 3, 7)
        );
        assert_eq!(shown("w"), None);
        drop(progress);
        assert_eq!(shown("v"), None);
    }
}
