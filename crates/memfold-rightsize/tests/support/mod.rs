//! What all tests that simulate whole days share: a row of figures for each arm, and bounds on
//! orders.

use memfold_rightsize::sim::{Arm, Outcome};

pub const DAY: f64 = 86_400.0;
pub const GIB: f64 = 1_073_741_824.0;

/// Most orders that a VM gets within any hour: 45 takes at once, 90 more in the hour, and gives.
const ORDERS_AN_HOUR: usize = 180;

/// Most changes from taking to giving or back, of one VM within any hour.
const TURNS_AN_HOUR: usize = 12;

/// Fails if a VM of `host` got too many orders, or if its size turned too often.
pub fn assert_sizes_are_steady(host: &str, outcome: &Outcome) {
    assert!(
        outcome.orders_an_hour <= ORDERS_AN_HOUR,
        "{host}: a VM got {} orders in an hour",
        outcome.orders_an_hour
    );
    assert!(
        outcome.turns_an_hour <= TURNS_AN_HOUR,
        "{host}: a VM's size turned {} times in an hour",
        outcome.turns_an_hour
    );
}

/// Means over hosts, and sums of kills. Amounts are GiB; `waited` is a share of the time.
#[derive(Debug, Default)]
pub struct Table {
    pub backed: f64,
    pub refaults: f64,
    pub swapped: f64,
    pub waited: f64,
    pub guest_kills: u32,
    pub host_kills: u32,
}

/// Returns what `arm` did and cost on several hosts, and prints it.
pub fn table(arm: Arm, outcomes: &[Outcome]) -> Table {
    let hosts = outcomes.len() as f64;
    let mean = |part: fn(&Outcome) -> f64| outcomes.iter().map(part).sum::<f64>() / hosts;
    let table = Table {
        backed: mean(|outcome| outcome.mean_backed) / GIB,
        refaults: mean(|outcome| outcome.refaults) / GIB,
        swapped: mean(|outcome| outcome.swapped) / GIB,
        waited: mean(|outcome| outcome.waited),
        guest_kills: outcomes
            .iter()
            .flat_map(|outcome| &outcome.guest_kills)
            .sum(),
        host_kills: outcomes.iter().map(|outcome| outcome.host_kills).sum(),
    };
    println!(
        "{arm:?}: {:.2} GiB on average, {:.1} GiB refaults, {:.2} GiB swapped, {:.3} % waited, {} \
         killed by guests, {} VMs killed by hosts",
        table.backed,
        table.refaults,
        table.swapped,
        table.waited * 100.0,
        table.guest_kills,
        table.host_kills
    );
    table
}
