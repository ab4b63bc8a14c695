//! Long tests, and tests that depend on chance. `make test` leaves them out. scripts/soak.txt has a
//! line for each, and for longer runs of the other tests.

mod chaos;
mod churn;
mod estimate;
mod guide;
mod hosts;
mod iscsi;
mod lvm;
mod migration;
mod nodes;
mod plan;
mod self_test;
