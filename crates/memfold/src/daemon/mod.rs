//! The running whole: VMs, engine and ledger together.
