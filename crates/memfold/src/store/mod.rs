//! The page store: immutable pages that many VMs map.
