//! The second ring: tests that take long, or luck. `make test` leaves them out; scripts/soak.txt
//! has a line for each, besides larger doses of tests of the first ring.

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
