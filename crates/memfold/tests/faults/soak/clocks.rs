//! The clocks of a lender's host and of a borrower's are set while memory is lent.

use std::time::{Duration, Instant};

use memfold_testkit::{patience, wait_until};

use super::lending::{access, borrow, borrower, disk_place, give_back, lender, socket, start_vm};
use crate::clock::{HOUR, JUMPS};
use crate::daemon::LIMIT;

#[test]
fn lent_memory_stays_lent_although_the_clocks_of_both_hosts_are_set_and_can_be_returned() {
    let Some(mut lender) = lender() else { return };
    let mut borrower = borrower(&socket(&lender));
    start_vm(&borrower);
    access(&borrower, "write -P 1 0 4M");
    assert!(borrow(&borrower).status.success());
    for jump in JUMPS {
        lender.injector().set_clock(jump);
        borrower.injector().set_clock(-jump);
        let until = Instant::now() + Duration::from_millis(2500);
        while Instant::now() < until {
            assert_eq!(disk_place(&borrower), "lent", "{jump} s");
            std::thread::sleep(Duration::from_millis(250));
        }
        access(&borrower, "read -P 1 0 4M");
    }
    // The next daemons know the loan, although their clocks are wrong.
    borrower.injector().set_clock(-20 * HOUR);
    borrower.replace();
    wait_until("the loan is known", LIMIT, || {
        disk_place(&borrower) == "lent"
    });
    give_back(&borrower, &lender);
    // A lender that starts again in the past lends again.
    lender.injector().set_clock(-30 * HOUR);
    lender.replace();
    let end = Instant::now() + patience(Duration::from_secs(120));
    while lender.succeeds(&["lend"])["offer_bytes"] == 0 {
        let status = lender.succeeds(&["lend"]);
        assert!(Instant::now() < end, "the lender offers nothing: {status}");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(borrow(&borrower).status.success());
    access(&borrower, "read -P 1 0 4M");
    give_back(&borrower, &lender);
    println!("clock jumps while memory is lent: {}", 2 * JUMPS.len() + 2);
}
