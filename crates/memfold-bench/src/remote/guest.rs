//! The VM of the study `remote` that swaps to another host's RAM, and the programs in its guest.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use memfold_api::{BorrowRequest, SwapPlace};
use memfold_lab::{DiskMode, Lab};
use memfold_lend::{Durability, Transport};
use memfold_units::ByteSize;
use serde::Deserialize;
use serde_json::{Value, json};

use memfold_vm::swap::{self, DEVICE};
use memfold_vm::{GuestOrder, Qmp, VmDirectory};

use super::lender::{Lender, wait};
use crate::host::numbers_said;
use crate::record::spread;

/// Source of the program that reads and writes the array.
const ARRAY: &str = include_str!("array.c");

pub const VM: &str = "swaps";

const LIMIT: Duration = Duration::from_secs(1800);

/// Shell script that sorts rows in a `PostgreSQL` whose processes have a limited amount of memory
/// and swap the rest. `ROWS` and `MEMORY` are replaced.
const SORT: &str = r#"set -e
cd /
version=$(ls /etc/postgresql)
unit=postgresql@$version-main.service
systemctl stop "$unit"
systemctl set-property --runtime "$unit" MemoryMax=MEMORY
echo "shared_buffers = 16MB" > /etc/postgresql/$version/main/conf.d/small.conf
systemctl start "$unit"
until runuser -u postgres -- psql -qAtc 'select 1' > /run/sort.ready; do sleep 0.2; done
began=$(date +%s%N)
rows=$(runuser -u postgres -- psql -qAt -c "set work_mem = '1GB'; set max_parallel_workers_per_gather = 0" \
    -c 'select count(*) from (select md5(i::text) from generate_series(1, ROWS) i order by 1 offset 0) t')
took=$(( ($(date +%s%N) - began) / 1000000 ))
peak=$(cat /sys/fs/cgroup/system.slice/system-postgresql.slice/$unit/memory.swap.peak || echo 0)
systemctl stop "$unit"
[ "$rows" = ROWS ]
echo "$took $peak""#;

/// An arm of the study: where the VM's swap disk is, and how QEMU limits its speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// The swap disk is a file on this host's disk, accessed through the page cache.
    Disk,
    /// The swap disk is a file on this host's disk; QEMU limits it to [`IOPS`] and [`BANDWIDTH`],
    /// like a hard disk.
    HardDisk,
    /// The swap disk is a file on this host's disk; QEMU limits it to [`BANDWIDTH`] only, like a
    /// hard disk without seeks.
    HardDiskStream,
    /// The swap disk is lent RAM, with a copy on this host's disk.
    Lent,
    /// The swap disk is lent RAM without a copy (`--durability none`), as in the original study.
    LentAlone,
    /// The swap disk is lent RAM without a copy, reached by iSCSI without encryption, as in the
    /// original study.
    Iscsi,
}

/// Requests a second to which QEMU limits the swap disk, like those of a hard disk.
pub const IOPS: u64 = 150;
/// Bytes a second to which QEMU limits the swap disk, like those of a hard disk.
pub const BANDWIDTH: u64 = 120_000_000;

impl Arm {
    /// Returns the name of the arm in the study's results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::HardDisk => "hdd",
            Self::HardDiskStream => "hdd_stream",
            Self::Lent => "lent",
            Self::LentAlone => "lent_alone",
            Self::Iscsi => "lent_alone_iscsi",
        }
    }

    /// Returns the transport by which the arm reaches lent RAM; `None` if the swap disk is not on
    /// lent RAM.
    pub const fn transport(self) -> Option<Transport> {
        match self {
            Self::Disk | Self::HardDisk | Self::HardDiskStream => None,
            Self::Lent | Self::LentAlone => Some(Transport::Nbd),
            Self::Iscsi => Some(Transport::Iscsi),
        }
    }
}

/// What the program in the guest has measured: number, bytes and times of its accesses to the
/// array.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Done {
    pub accesses: u64,
    pub bytes: u64,
    pub us: u64,
    pub wrong_words: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub longest_ns: u64,
}

impl Done {
    /// Parses the numbers that the program prints, in the order of the fields.
    fn read(line: &str) -> anyhow::Result<Self> {
        let numbers: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
        serde_json::from_value(json!(numbers)).with_context(|| {
            format!("cannot parse the output of the program in the guest: '{line}'")
        })
    }

    /// Returns the throughput of the accesses in MB/s (1 MB/s is 1 byte a microsecond).
    pub fn mb_per_s(&self) -> f64 {
        self.bytes as f64 / self.us.max(1) as f64
    }

    pub fn json(&self) -> Value {
        json!({
            "accesses": self.accesses, "mb_per_s": self.mb_per_s(),
            "p50_us": self.p50_ns as f64 / 1e3, "p99_us": self.p99_ns as f64 / 1e3, "longest_us": self.longest_ns as f64 / 1e3,
        })
    }
}

/// Measurements of moving the swap disk back from lent RAM.
#[derive(Clone, Copy, Debug)]
pub struct GivenBack {
    /// Bytes of the lent memory that were in use before the move.
    pub used: ByteSize,
    pub took_ms: u64,
    /// Accesses of the program in the guest during the move.
    pub mixed: Done,
}

/// A VM with a swap disk, and the host that lends memory to it.
#[derive(Debug)]
pub struct Guest<'a> {
    pub lab: &'a Lab,
    pub lender: &'a Lender,
    /// Guest image that the VM boots. It must contain gcc.
    pub image: &'a str,
    pub swap: ByteSize,
}

impl Guest<'_> {
    /// Boots the VM with `ram` bytes of RAM, and compiles the study's program in its guest.
    pub fn boot(&self, ram: ByteSize) -> anyhow::Result<()> {
        let mut spec = Lab::spec(VM, self.image, ram, DiskMode::Buffered)?;
        spec.swap = Some(self.swap);
        self.lab.boot(vec![spec], Duration::from_secs(300))?;
        wait("the guest uses its swap disk", || {
            let swaps = self.exec("cat /proc/swaps");
            swaps.is_ok_and(|swaps| swaps.contains("/dev/vd"))
        })?;
        let build = format!(
            "cat > /opt/array.c <<'END'\n{ARRAY}\nEND\ngcc -O2 -o /opt/array /opt/array.c && mkfifo /run/array"
        );
        self.exec(&build).map(drop)
    }

    pub fn exec(&self, script: &str) -> anyhow::Result<String> {
        self.lab.exec(VM, script, LIMIT)
    }

    /// Starts the program in the guest with an array of this size, and waits until the program has
    /// filled the array.
    pub fn fill(&self, array: ByteSize) -> anyhow::Result<()> {
        let mib = array.0 >> 20;
        self.exec(&format!(
            "systemd-run -q --unit=array -p OOMScoreAdjust=-500 -p LimitMEMLOCK=infinity /opt/array {mib} /run/array /run/array.out"
        ))?;
        self.order("seqread 4096 0.1").map(drop)
    }

    /// Sends an order to the program in the guest, and waits for its answer.
    pub fn order(&self, order: &str) -> anyhow::Result<Done> {
        self.begin(order)?;
        self.answer()
    }

    /// Sends an order to the program in the guest, without waiting for its answer.
    pub fn begin(&self, order: &str) -> anyhow::Result<()> {
        self.exec(&format!(
            "rm -f /run/array.out; systemctl is-active -q array; echo '{order}' > /run/array"
        ))
        .map(drop)
    }

    /// Waits for the answer of the program in the guest to its last order.
    pub fn answer(&self) -> anyhow::Result<Done> {
        let said = self.exec(
            "while [ ! -e /run/array.out ]; do systemctl is-active -q array; sleep 0.05; done; cat /run/array.out",
        )?;
        Done::read(said.trim())
    }

    /// Ends the program in the guest, which frees the program's memory.
    pub fn end(&self) -> anyhow::Result<()> {
        let script =
            "echo end > /run/array; while systemctl is-active -q array; do sleep 0.1; done";
        self.exec(script).map(drop)
    }

    /// Sorts `rows` rows with `PostgreSQL` in the guest, in `memory` bytes. Returns the
    /// milliseconds of the sort, and the most bytes that were swapped out during the sort.
    pub fn sort(&self, rows: u64, memory: ByteSize) -> anyhow::Result<(f64, f64)> {
        let script = SORT
            .replace("ROWS", &rows.to_string())
            .replace("MEMORY", &memory.0.to_string());
        let said = self.exec(&script)?;
        let [took_ms, peak] = numbers_said(&said)?;
        Ok((took_ms, peak))
    }

    /// Moves the VM's swap disk to its place in an arm of the study. Returns the milliseconds that
    /// the move took.
    pub fn switch(&self, arm: Arm) -> anyhow::Result<u64> {
        let (iops, bandwidth) = match arm {
            Arm::HardDisk => (IOPS, BANDWIDTH),
            Arm::HardDiskStream => (0, BANDWIDTH),
            _ => (0, 0),
        };
        self.throttle(iops, bandwidth)?;
        let Some(transport) = arm.transport() else {
            return Ok(0);
        };
        let durability = match arm {
            Arm::Lent => Durability::Disk,
            _ => Durability::None,
        };
        self.lender.lend(transport)?;
        self.lender.wait_free(self.swap)?;
        let request = BorrowRequest {
            bytes: None,
            durability,
            stripes: Some(1),
        };
        let done = self.lab.daemon().swap_disks().borrow_memory(VM, &request)?;
        ensure!(done.place == SwapPlace::Lent, "it is {:?}", done.place);
        Ok(done.took_ms)
    }

    /// Moves the VM's swap disk back to this host's disk. Returns the milliseconds that the move
    /// took.
    pub fn back(&self) -> anyhow::Result<u64> {
        self.throttle(0, 0)?;
        if self.place()? == SwapPlace::OnDisk {
            return Ok(0);
        }
        Ok(self.lab.daemon().swap_disks().return_memory(VM)?.took_ms)
    }

    pub fn place(&self) -> anyhow::Result<SwapPlace> {
        let borrowed = self.lab.daemon().reports().leases()?.borrowed;
        let found = borrowed.into_iter().find(|b| b.vm == VM);
        Ok(found.map_or(SwapPlace::OnDisk, |b| b.place))
    }

    /// Sets QEMU's limits for the swap disk: requests a second and bytes a second; 0: no limit.
    fn throttle(&self, iops: u64, bytes_per_second: u64) -> anyhow::Result<()> {
        let socket = VmDirectory::of(self.lab.directory(), VM).qmp();
        let limits = json!({
            "id": format!("/machine/peripheral/{DEVICE}/virtio-backend"), "bps": bytes_per_second, "bps_rd": 0, "bps_wr": 0, "iops": iops, "iops_rd": 0, "iops_wr": 0,
        });
        Qmp::connect(&socket, Duration::from_secs(30))?.execute("block_set_io_throttle", limits)?;
        Ok(())
    }

    /// Moves the swap disk back from lent RAM while the program in the guest reads and writes its
    /// array. Returns the measurements of the move.
    pub fn give_back(&self, arm: Arm) -> anyhow::Result<GivenBack> {
        self.switch(arm)?;
        self.begin_mixed()?;
        // The program is running now, and the guest reads and writes its swap disk.
        std::thread::sleep(Duration::from_secs(1));
        let line = self.exec(&GuestOrder::SwapUse.script())?;
        let used = swap::parse_used(line.as_bytes());
        let used = used.with_context(|| format!("the guest reported no swap use: '{line}'"))?;
        Ok(GivenBack {
            used: ByteSize(used),
            took_ms: self.back()?,
            mixed: self.end_mixed()?,
        })
    }

    /// Makes the program read and write the array until [`Guest::end_mixed`].
    fn begin_mixed(&self) -> anyhow::Result<()> {
        self.exec("touch /run/mixed")?;
        self.begin("mixed /run/mixed")
    }

    fn end_mixed(&self) -> anyhow::Result<Done> {
        self.exec("rm /run/mixed")?;
        self.answer()
    }

    /// Kills lenders at random instants, `kills` times, while the program in the guest reads and
    /// writes its array.
    pub fn kills(&self, kills: usize) -> anyhow::Result<Value> {
        self.begin_mixed()?;
        let (mut alone_ms, mut switched_ms) = (Vec::new(), Vec::new());
        for kill in 1..=kills {
            switched_ms.push(self.switch(Arm::Lent)? as f64);
            let after = 200 + memfold_vm::overlay::unique() / 1000 % 2300;
            std::thread::sleep(Duration::from_millis(after));
            self.lender.kill_export()?;
            let began = Instant::now();
            let is_on_copy = || self.place().is_ok_and(|place| place == SwapPlace::OnCopy);
            wait("the VM goes on, on its copy", is_on_copy)?;
            alone_ms.push(began.elapsed().as_secs_f64() * 1e3);
            if kill % 10 == 0 {
                eprintln!("{kill} lenders killed");
            }
        }
        let mixed = self.end_mixed()?;
        self.back()?;
        let all = self.order("check")?;
        let faults = self.exec(
            "dmesg | awk '/I\\/O error|[Ww]rite-error|[Rr]ead-error/ { n++ } END { print n + 0 }'",
        )?;
        Ok(json!({
            "kills": kills,
            "bytes_lost_on_lender_kill": (mixed.wrong_words + all.wrong_words) * 8,
            "errors_that_the_guest_saw": faults.trim().parse::<u64>()?,
            "pages_accessed_meanwhile": mixed.accesses,
            "longest_stall_s": mixed.longest_ns as f64 / 1e9,
            "on_the_copy_after_ms": spread(&alone_ms),
            "switch_ms": spread(&switched_ms),
        }))
    }
}
