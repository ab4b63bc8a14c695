//! Test of KSM on two NUMA nodes. A guest takes the place of the host, and a process with mergeable
//! memory that of a VM.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use memfold_ksm::{Cause, Explanation};

use super::console_guest::{self, Machine, run};
use crate::support;

const MIB: u64 = 1 << 20;

/// MiB of memory in which each page occurs twice, once on each node.
const ALIKE_MIB: u64 = 32;

/// Program with the name of a QEMU. MBIND: binds memory to a node (`mbind(2)`); ADVISE:
/// `MADV_MERGEABLE`.
const PROCESS: &str = r#"
import ctypes, mmap, struct, time
libc = ctypes.CDLL(None, use_errno=True)
size = 32 << 20
assert libc.prctl(15, b"qemu-system-x86", 0, 0, 0) == 0
libc.mmap.restype = ctypes.c_void_p
held = libc.mmap(None, ctypes.c_size_t(2 * size), 3, 0x22, -1, ctypes.c_size_t(0))
for node in (0, 1):
    half, mask = ctypes.c_void_p(held + node * size), ctypes.c_ulong(1 << node)
    assert libc.syscall(237, half, ctypes.c_size_t(size), 2, ctypes.byref(mask), ctypes.c_ulong(64), 0) == 0, ctypes.get_errno()
assert libc.madvise(ctypes.c_void_p(held), ctypes.c_size_t(2 * size), 15) == 0
assert libc.madvise(ctypes.c_void_p(held), ctypes.c_size_t(2 * size), 12) == 0
bytes = b"".join(b"%015d\n" % page * 256 for page in range(size >> 12))
for node in (0, 1):
    ctypes.memmove(held + node * size, bytes, size)
print("held", flush=True)
time.sleep(3600)
"#;

/// Shell script that runs `memfold ksm explain`, while nodes do not merge with each other, and
/// while they do.
const SCRIPT: &str = r#"
exec 2>&1
cd /sys/kernel/mm/ksm
python3 /mnt/process.py > /run/held &
pid=$!
until grep -q held /run/held; do sleep 0.2; done
echo 20000 > pages_to_scan
[ -e smart_scan ] && echo 0 > smart_scan
for across in 0 1; do
    echo 2 > run
    echo $across > merge_across_nodes
    echo 1 > run
    from=$(cat full_scans)
    until [ $(cat full_scans) -ge $((from + 4)) ]; do sleep 0.2; done
    printf '\nexplained %s\n' "$(/mnt/memfold --json --socket /nowhere ksm explain $pid | tr -d '\n')"
done
printf '\nall %s said\n' is
"#;

/// Boots the guest, on a machine with two nodes.
fn boot(directory: &Path) -> Machine {
    let payload = directory.join("payload");
    std::fs::create_dir(&payload).unwrap();
    let own = env!("CARGO_BIN_EXE_memfold");
    run(Command::new("strip")
        .arg("-o")
        .arg(payload.join("memfold"))
        .arg(own));
    std::fs::write(payload.join("process.py"), PROCESS).unwrap();
    std::fs::write(payload.join("script"), SCRIPT).unwrap();
    let machine = [
        ["-m", "512"],
        ["-object", "memory-backend-ram,id=n0,size=256M"],
        ["-object", "memory-backend-ram,id=n1,size=256M"],
        ["-numa", "node,nodeid=0,cpus=0,memdev=n0"],
        ["-numa", "node,nodeid=1,cpus=1,memdev=n1"],
        ["-machine", "q35,mem-merge=off"],
    ];
    console_guest::boot(&payload, "128M", &machine.concat(), "")
}

#[test]
fn without_ksms_setting_merge_across_nodes_equal_pages_on_two_numa_nodes_are_not_merged() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let mut machine = boot(directory.path());
    let mut keys = machine.child.stdin.take().unwrap();
    writeln!(keys, "mount -o ro /dev/vdb /mnt; sh /mnt/script").unwrap();
    let said = machine.says("all is said");
    let explained: Vec<Explanation> = said
        .lines()
        .filter_map(|line| line.strip_prefix("explained "))
        .map(|json| serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}")))
        .collect();
    let [apart, across] = &explained[..] else {
        panic!("{said}");
    };
    let of = |explained: &Explanation| {
        let found = explained
            .causes
            .iter()
            .find(|f| f.cause == Cause::AcrossNodes);
        found.map(|found| found.bytes)
    };
    println!("apart: {}\nacross: {}", apart.verdict, across.verdict);
    assert!(
        of(apart).is_some_and(|bytes| bytes >= 2 * ALIKE_MIB * MIB),
        "{apart:#?}"
    );
    assert_eq!(apart.merged_bytes, 0, "{apart:#?}");
    assert_eq!(of(across), None, "{across:#?}");
    assert!(
        across.merged_bytes >= 2 * ALIKE_MIB * MIB * 9 / 10,
        "{across:#?}"
    );
}
