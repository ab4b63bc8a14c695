//! Tests of borrowing while a lender in the registry cannot serve what it offers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_testkit::patience;
use serde_json::{Value, json};

use crate::lending::{Swapping, lender, wait_free};
use crate::support::Daemon;

#[test]
fn if_the_lender_with_the_most_memory_cannot_serve_a_vm_borrows_from_another_one() {
    // The borrower's daemon serves the registry.
    let borrower = Daemon::start_with(&["--host", "b"]);
    let socket = borrower.socket();
    let registry = ["--registry", socket.to_str().unwrap()];
    let Some(able) = lender("c", &registry, &[]) else {
        return;
    };
    let ask = |call: &Value| -> Value {
        let (status, said) = borrower.http("POST", "/v1/registry", call.to_string().as_bytes());
        assert_eq!(status, 200, "{said}");
        serde_json::from_str(&said).unwrap()
    };
    let unable = json!({ "host": "a", "incarnation": 1 });
    let offer = json!({ "lender": unable, "bytes": 1_u64 << 30 });
    ask(&json!({ "offer": { "offer": offer, "ttl_ms": 600_000 } }));
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    let (done, refusals) = (AtomicBool::new(false), AtomicBool::new(false));
    let end = Instant::now() + patience(Duration::from_secs(300));
    let lent = std::thread::scope(|scope| {
        // Lender 'a' ends each of its leases, as if it could not export any.
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) && Instant::now() < end {
                let picture = ask(&json!({ "picture": {} }));
                for lease in picture["picture"]["leases"].as_array().unwrap() {
                    if lease["lender"] == unable {
                        ask(&json!({ "ended": { "id": lease["id"], "lender": unable } }));
                        refusals.store(true, Ordering::Release);
                    }
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let lent = vm.borrow(&[]);
        done.store(true, Ordering::Release);
        lent
    });
    assert_eq!(lent["lenders"], json!(["c"]));
    assert!(refusals.load(Ordering::Acquire), "'a' was not asked");
    // Nothing of the failed attempt is left.
    assert_eq!(vm.nodes().len(), 4);
    assert_eq!(vm.files().len(), 1);
    vm.read(1, 0);
    vm.give_back();
    wait_free(&able);
}
