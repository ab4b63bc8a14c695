//! Test of a host that lends nearly all of its spare RAM. Then one of its own VMs takes the RAM: it
//! must come back before the host runs out of memory.

use std::sync::atomic::Ordering;
use std::time::Instant;

use memfold_api::{Client, VmInfo};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_lend::judge::Judge;
use memfold_units::ByteSize;

use crate::beside::lend::{swapping, wait};
use crate::beside::lend_short::{
    FREE, HOST, SmallHost, borrow, borrower_goes_on, lend, lender_status, stays_lent, taken,
};
use crate::served::{Served, exec};
use crate::support;

const OWN: &str = "own";

/// Bytes that the lender's VM allocates at once.
const GROWTH: u64 = 2 << 30;
/// Bytes that the borrower's VM uses, which runs on the same host here.
const BORROWER: u64 = 300 << 20;
/// Bytes that the VM's allocation would lack if no memory was returned.
const MISSING: u64 = 256 << 20;

/// Speeds at which the VM takes memory, in MiB a second. First a quarter of the reserve: half of
/// the reserve is then gone in two seconds, less time than a lender needs to get memory back. Then
/// as fast as it can (0): the kernel takes and zeroes the memory in one call.
const PACES: [u64; 2] = [128, 0];

/// Program that takes memory, keeps it, and prints how long that took.
const GROW: &str = r#"cat > /opt/grow.py <<'END'
import mmap
import sys
import time
tile = bytes(range(1, 256)) * 4112
began = time.monotonic()
held = []
bytes_wanted, pace = int(sys.argv[1]) << 20, int(sys.argv[2])
if pace == 0:
    held.append(mmap.mmap(-1, bytes_wanted))
    held[0].madvise(23)  # MADV_POPULATE_WRITE
for number in range(bytes_wanted // len(tile) if pace else 0):
    held.append(bytearray(tile))
    time.sleep(max(0.0, began + number / pace - time.monotonic()))
open("/run/grown", "w").write(f"{time.monotonic() - began:.1f}")
time.sleep(3600)
END
systemd-run -q --unit=grow python3 /opt/grow.py"#;

#[test]
fn if_a_local_vm_grows_lent_memory_is_recalled_before_the_host_runs_out_of_memory() {
    let Some(_turn) = support::turn_ahead() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path();
    let host = SmallHost::start(state);
    let mut served = Served::new(state, &[OWN]).inside(host.holder.id());
    served.start();
    let client = served.answers();
    let memory = ByteSize(GROWTH + (512 << 20));
    served.run_warm(&Lab::spec(OWN, "trixie-a", memory, DiskMode::Buffered).unwrap());
    wait("its agent answers", || {
        vm(&client).is_some_and(|vm| vm.agent.is_some())
    });
    wait("it has booted", || {
        let jobs = exec(&client, OWN, "systemctl list-jobs").stdout;
        jobs.contains("No jobs")
    });
    // After lending, less memory is left than the VM will take.
    let lent = FREE - taken() - BORROWER - GROWTH + MISSING;
    let lent = ByteSize(lent >> 26 << 26);
    lend(&client, lent);
    let status = || lender_status(&client);
    wait("it has so much to spare", || status().offer_bytes >= lent.0);
    let lab = Lab::with_registry(EngineSettings::default(), &state.join("s")).unwrap();
    swapping(&lab, lent);
    let took_ms = borrow(&lab);
    println!(
        "{lent} lent in {} ms; {} available, reserve {}",
        took_ms,
        ByteSize(FREE.saturating_sub(taken())),
        ByteSize(Judge::reserve(HOST))
    );
    // As long as there is enough memory, no lease is recalled.
    stays_lent(&client, lent);
    let borrow_again = || {
        wait("it has so much to spare again", || {
            status().offer_bytes >= lent.0
        });
        borrow(&lab);
    };
    for pace in PACES {
        if status().lent_bytes == 0 {
            borrow_again();
        }
        host.least.store(u64::MAX, Ordering::Relaxed);
        grow(&client, pace);
        wait("nothing is lent any more", || status().lent_bytes == 0);
        let least = host.least.load(Ordering::Relaxed);
        println!("least available {}", ByteSize(least));
        assert!(least > 0, "the host would have had to swap");
        // The borrower continues with its copy.
        borrower_goes_on(&lab);
        exec(&client, OWN, "systemctl stop grow; rm -f /run/grown");
    }
    lab.stop("v").unwrap();
}

fn vm(client: &Client) -> Option<VmInfo> {
    let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    vms.into_iter().find(|vm| vm.name == OWN)
}

/// Makes the VM take its memory.
fn grow(client: &Client, pace: u64) {
    let began = Instant::now();
    exec(client, OWN, &format!("{GROW} {} {pace}", GROWTH >> 20));
    wait("it has grown", || {
        let said = exec(client, OWN, "test ! -e /run/grown || cat /run/grown").stdout;
        let is_done = !said.trim().is_empty();
        if is_done {
            let size = ByteSize(GROWTH);
            println!("{size} taken in {said} s, seen after {:?}", began.elapsed());
        }
        is_done
    });
}
