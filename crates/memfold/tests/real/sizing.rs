//! Helpers of the tests of right-sizing: what the daemon and QEMU say about the size of a VM, and
//! scripts that use the memory of a guest.

use std::path::Path;
use std::time::Duration;

use memfold_api::{RightsizeEvent, VmRightsize};
use memfold_lab::Lab;
use memfold_rightsize::Policy;
use memfold_testkit::wait_until;
use memfold_units::ByteSize;

use crate::support;

/// Longest time for anything that right-sizing or a guest does.
pub const LONG: Duration = Duration::from_secs(300);

/// Prints the checksum of what [`hold`] has written, and the number of processes that were killed.
pub const CHECK: &str = "cd /run/held; md5sum * | md5sum; grep ^oom_kill /proc/vmstat";

/// Prints `right` if the file of [`fill`] has its bytes.
pub const CHECK_FILL: &str = "md5sum --quiet -c /run/sums && echo right";

/// Takes memory at once and prints how long that took in ms. Writes all of it, keeps it for a
/// while, and prints how many pages were swapped in and out and how many processes were killed
/// meanwhile, and whether each byte is still there.
const SPIKE: &str = r#"python3 - <<'END'
import mmap
import time
MIB = 1 << 20
def counts():
    fields = dict(line.split() for line in open("/proc/vmstat"))
    return [int(fields["pswpin"]) + int(fields["pswpout"]), int(fields["oom_kill"])]
def block(number):
    return bytes([number % 255 + 1]) * MIB
before, began = counts(), time.monotonic()
held = mmap.mmap(-1, SIZE * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.madvise(23)  # MADV_POPULATE_WRITE
took = time.monotonic() - began
for number in range(SIZE):
    held[number * MIB:(number + 1) * MIB] = block(number)
time.sleep(SECONDS)
right = all(held[number * MIB:(number + 1) * MIB] == block(number) for number in range(SIZE))
swapped, killed = (now - then for then, now in zip(before, counts()))
print(int(took * 1000), swapped, killed, "right" if right else "wrong")
END"#;

/// Keeps `MIB` MiB in memory, in steps of 16 MiB a second, and writes their checksums.
const HOLD: &str = "set -e; mkdir -p /run/held; mount -t tmpfs -o size=2G held /run/held
for part in $(seq $((MIB / 16))); do
    yes \"part $part of what this guest holds\" | head -c 16M > /run/held/$part; sleep 1
done
cd /run/held; md5sum * | md5sum";

/// Returns the script that fills the page cache with a file that nobody reads again, and keeps a
/// checksum of it.
pub fn fill(bytes: u64) -> String {
    format!(
        "yes 'a page that nobody misses' | head -c {bytes} > /var/tmp/cold && sync \
         && md5sum /var/tmp/cold > /run/sums && cat /var/tmp/cold > /dev/null"
    )
}

/// Returns the script that takes so many MiB of memory in steps, keeps them, and prints their
/// checksum.
pub fn hold(mib: u64) -> String {
    HOLD.replace("MIB", &mib.to_string())
}

/// What a guest says about memory that it took at once.
#[derive(Clone, Copy, Debug)]
pub struct Spike {
    /// Time until the guest had the memory.
    pub took: Duration,
    /// Pages that were swapped in or out meanwhile.
    pub swapped: u64,
    /// Processes that were killed meanwhile.
    pub killed: u64,
}

/// Makes a guest take so many MiB of memory at once, and keep them for a while. Each byte must
/// still be there then.
pub fn spike(lab: &Lab, vm: &str, mib: u64, keep: Duration) -> anyhow::Result<Spike> {
    let script = SPIKE
        .replace("SIZE", &mib.to_string())
        .replace("SECONDS", &keep.as_secs().to_string());
    let said = lab.exec(vm, &script, LONG)?;
    let words: Vec<&str> = said.split_whitespace().collect();
    let [ms, swapped, killed, "right"] = words[..] else {
        anyhow::bail!("VM '{vm}' said {said:?}");
    };
    Ok(Spike {
        took: Duration::from_millis(ms.parse()?),
        swapped: swapped.parse()?,
        killed: killed.parse()?,
    })
}

/// Returns what right-sizing says about a VM.
pub fn now(lab: &Lab, vm: &str) -> VmRightsize {
    let report = lab.daemon().rightsizing().report(0);
    let found = report.vms.into_iter().find(|found| found.vm == vm);
    found.unwrap_or_default()
}

/// Waits until the reason of a VM's size contains these words.
pub fn wait_reason(lab: &Lab, vm: &str, words: &str) {
    wait_until(&format!("the reason has the words '{words}'"), LONG, || {
        now(lab, vm).reason.contains(words)
    });
}

/// Waits until right-sizing believes the reports of a guest.
pub fn wait_known(lab: &Lab, vm: &str) {
    wait_until("the guest is believed", LONG, || {
        !["", "unknown"].contains(&&*now(lab, vm).basis)
    });
}

/// Returns the orders that a VM got and whose texts begin with `kind`, oldest first.
pub fn orders(lab: &Lab, vm: &str, kind: &str) -> Vec<RightsizeEvent> {
    let events = lab.daemon().rightsizing().report(1000).events.into_iter();
    let is_one = |event: &RightsizeEvent| event.vm == vm && event.order.starts_with(kind);
    events.filter(is_one).collect()
}

/// Makes right-sizing estimate all guests anew, as guests that have booted long ago.
pub fn estimate_anew(lab: &Lab) {
    lab.daemon().rightsizing().set_policy(Policy {
        young: Duration::ZERO,
        ..Policy::default()
    });
}

/// Returns a figure of a guest's `/proc/meminfo`, in bytes.
pub fn meminfo(lab: &Lab, vm: &str, name: &str) -> u64 {
    let script = format!("grep ^{name}: /proc/meminfo");
    let text = lab.exec(vm, &script, LONG).unwrap();
    let kib = text.split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// Returns the size that the balloon of a VM of the lab leaves to the guest.
pub fn size(lab: &Lab, vm: &str) -> ByteSize {
    lab.daemon().vms().balloon_size(vm).unwrap()
}

/// The same for a VM of a daemon with the state directory `state`.
pub fn size_in(state: &Path, vm: &str) -> ByteSize {
    let answer = support::qmp(state, vm).query("query-balloon").unwrap();
    ByteSize(answer["actual"].as_u64().unwrap())
}

/// Checks that the kernel of a guest has killed no process for lack of memory.
pub fn check_none_killed(lab: &Lab, vm: &str) {
    let killed = lab.exec(vm, "grep ^oom_kill /proc/vmstat", LONG).unwrap();
    assert_eq!(killed.trim(), "oom_kill 0");
}
