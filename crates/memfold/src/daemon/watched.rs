//! What a VM has borrowed, while it is watched: shared by its thread and by who asks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::api::{Borrowed, SwapPlace};
use crate::lend::Durability;
use crate::lend::graph::Borrowing;
use crate::lend::wire::Wire;

/// Watches what a VM has borrowed.
#[derive(Debug)]
pub(super) struct Guard {
    pub vm: String,
    stop: AtomicBool,
    state: Mutex<Watched>,
}

/// What it watches.
#[derive(Debug)]
pub(super) struct Watched {
    pub borrowing: Borrowing,
    /// By the number of the part.
    pub wires: Vec<Option<Wire>>,
}

impl Guard {
    pub fn new(vm: &str, borrowing: Borrowing, wires: Vec<Option<Wire>>) -> Arc<Self> {
        Arc::new(Self {
            vm: vm.to_owned(),
            stop: AtomicBool::new(false),
            state: Mutex::new(Watched { borrowing, wires }),
        })
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub fn state(&self) -> MutexGuard<'_, Watched> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn borrowing(&self) -> Borrowing {
        self.state().borrowing.clone()
    }

    /// Cuts the connection to a part: QEMU goes on without it at once.
    pub fn cut(&self, part: usize) {
        if let Some(Some(wire)) = self.state().wires.get(part) {
            wire.cut();
        }
    }

    /// Parts whose connection has ended.
    pub fn ended(&self) -> Vec<usize> {
        let state = self.state();
        let parts = state.borrowing.reached();
        let has_ended = |part: &usize| state.wires[*part].as_ref().is_none_or(Wire::is_cut);
        parts.map(|(part, _)| part).filter(has_ended).collect()
    }

    pub fn borrowed(&self) -> Borrowed {
        let borrowing = self.borrowing();
        let reached: Vec<String> = borrowing.reached().map(|(_, p)| p.lender.clone()).collect();
        let place = match (reached.len(), borrowing.durability) {
            (0, Durability::Disk) => SwapPlace::OnCopy,
            (0, _) => SwapPlace::Lost,
            (n, _) if n < borrowing.parts.len() || borrowing.copy_failed => SwapPlace::Degraded,
            _ => SwapPlace::Lent,
        };
        Borrowed {
            vm: self.vm.clone(),
            place,
            bytes: borrowing.bytes,
            durability: Some(borrowing.durability),
            lenders: reached,
            changed: false,
            took_ms: 0,
        }
    }
}
