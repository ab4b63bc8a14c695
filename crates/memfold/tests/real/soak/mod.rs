//! Long tests, and tests that depend on chance. `make test` leaves them out. scripts/soak.txt has a
//! line for each, and for longer runs of the other tests.

mod apparmor;
mod chaos;
mod churn;
mod console_guest;
mod estimate;
mod guide;
mod hosts;
mod idle_cost;
mod iscsi;
mod lender_grows;
mod lvm;
mod migration;
mod nodes;
mod plan;
mod plugged;
mod self_test;
mod sized_faults;
mod sized_migration;
mod sized_unplugs;
mod spikes;
