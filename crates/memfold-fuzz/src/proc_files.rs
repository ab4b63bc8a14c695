//! Fuzzes the daemon's parsers of `/proc` and `/sys`: of files whose lines contain names that a
//! process chose (mappings, commands), and of files that only the kernel writes.

use std::time::Duration;

use memfold_ksm::pressure::Pressure;
use memfold_ksm::{ProcessStatus, processes, ranges, status};
use memfold_ledger::read::Proc;
use memfold_lend::pressure::Sample;
use memfold_store::{StoreIdentity, mapped};
use memfold_units::Hva;
use memfold_vm::{endpoints, start_ticks};

use crate::place::Place;
use crate::subject::parts;

const SMAPS: &str = "55d000000000-55d000800000 rw-p 00000000 00:00 0                          [heap]\nSize:  8192 kB\nRss:                4096 kB\nPss:                2048 kB\nAnonymous:          4096 kB\nAnonHugePages:      2048 kB\nSwap:                  4 kB\nKSM:                   8 kB\nVmFlags: rd wr mr mw me ac mg hg\n7f0000004000-7f0000006000 rw-p 00010000 00:01 1043                       /memfd:memfold:web (deleted)\nRss: 8 kB\nVmFlags: rd wr mr mw me ac dc dd nh nr\n7f0000006000-7f0000007000 r--s 00010000 fe:02 1043 /var/lib/a b/ram\n";

pub fn mappings() -> Vec<Vec<u8>> {
    let maps: Vec<&str> = SMAPS.lines().filter(|line| line.contains('-')).collect();
    vec![
        SMAPS.into(),
        maps.join("\n").into(),
        b"7f00-7f10 rw-p 0 0:0 0\nRss: 18446744073709551615 kB\n".to_vec(),
    ]
}

/// Parses `/proc/PID/maps` and `/proc/PID/smaps`.
pub fn mapping(data: &[u8]) -> u64 {
    thread_local! {
        static PLACE: Place = Place::new();
    }
    let text = String::from_utf8_lossy(data);
    let store = StoreIdentity {
        dev: rustix::fs::makedev(0, 1),
        ino: 1043,
    };
    let found = mapped::parse(&text, store);
    assert!(found.total <= text.lines().count());
    assert!(found.store.len() + found.others.len() <= found.total);
    let ksm = ranges::parse(&text);
    let offered = ksm.iter().filter(|mapping| mapping.is_mergeable()).count();
    let advice = endpoints::advice_in(
        text.as_bytes(),
        Hva(0x7f00_0000_4000),
        Hva(0x7f00_0000_7000),
    );
    let (maps, smaps) = PLACE.with(|place| {
        place.write("1/maps", data);
        place.write("1/smaps", data);
        let proc = Proc::new(place.path());
        (proc.maps(1), proc.smaps(1))
    });
    if let Ok(maps) = &maps {
        assert!(maps.len() <= text.lines().count());
    }
    let sizes = found.store.len().min(7) | found.others.len().min(7) << 3 | ksm.len().min(15) << 6;
    let kinds = offered.min(3)
        | maps.map_or(0, |maps| 1 + maps.len().min(6)) << 2
        | smaps.map_or(0, |maps| 1 + maps.len().min(6)) << 5;
    1 | (sizes as u64) << 1 | (kinds as u64) << 12 | u64::from(matches!(advice, Ok(Some(_)))) << 24
}

/// Names of the files that an input of [`figures`] has, divided by NUL bytes.
const FILES: [&str; 10] = [
    "meminfo",
    "zoneinfo",
    "vmstat",
    "pressure/memory",
    "sys/vm/max_map_count",
    "7/status",
    "7/stat",
    "7/comm",
    "7/ksm_stat",
    "7/smaps_rollup",
];

pub fn figure_files() -> Vec<Vec<u8>> {
    let meminfo =
        "MemTotal: 8000000 kB\nMemFree: 100 kB\nMemAvailable: 4000000 kB\nHugePages_Total: 0\n";
    let zoneinfo = "Node 0, zone      DMA\n  per-node stats\n  pages free     3840\n        boost    0\n        min      66\n        low      82\n        high     98\n        managed  3840\n        protection: (0, 2934, 7800)\n  pagesets\n    cpu: 0\n              count:    12\n              high:     378\nNode 0, zone   Normal\n        low      900\n        high     1100\n        managed  1240000\n        protection: (0, 0)\n";
    let vmstat = "workingset_refault_anon 5\nworkingset_refault_file 7\npswpin 3\n";
    let pressure = "some avg10=1.50 avg60=0.25 avg300=0.00 total=12\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=3\n";
    let status = "Name:\tqemu\nVmPTE:\t  100 kB\nRssAnon:\t  2000 kB\nVmLck:\t 0 kB\n";
    let stat = "7 (qemu) x) (y) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 5000 1000 200 18446744073709551615 1 1\n";
    let ksm = "ksm_rmap_items 5\nksm_zero_pages 1\nksm_merging_pages 3\nksm_process_profit -64\nksm_merge_any: no\nksm_mergeable: yes\n";
    let rollup = "55d0-7fff ---p 00000000 00:00 0 [rollup]\nRss: 4000 kB\nPss: 3000 kB\nPss_Anon: 2000 kB\nPss_Shmem: 10 kB\n";
    let files = [
        meminfo,
        zoneinfo,
        vmstat,
        pressure,
        "65530\n",
        status,
        stat,
        "qemu-system-x86\n",
        ksm,
        rollup,
    ];
    vec![
        files.join("\0").into(),
        files.map(|text| text.replace("kB", "")).join("\0").into(),
    ]
}

/// Parses files with figures of the host and of a process.
pub fn figures(data: &[u8]) -> u64 {
    thread_local! {
        static PLACE: Place = Place::new();
    }
    let parts: [&[u8]; FILES.len()] = parts(data);
    PLACE.with(|place| {
        for (name, text) in FILES.iter().zip(parts) {
            place.write(name, text);
        }
        let proc = Proc::new(place.path());
        let mut found = 1;
        let mut add = |is_found: bool| found = found << 1 | u64::from(is_found);
        add(proc.meminfo().is_ok());
        add(proc.zones().is_ok());
        add(proc.max_map_count().is_ok());
        add(proc.page_tables(7).is_ok());
        add(proc.rss_anon(7).is_ok());
        add(matches!(proc.rollup(7), Ok(Some(_))));
        add(proc.rollup(7).is_ok());
        let sample = Sample::read(place.path(), Duration::ZERO);
        add(sample.is_ok());
        add(sample.is_ok_and(|sample| sample.some_avg10.is_some()));
        add(start_ticks(&String::from_utf8_lossy(parts[6])).is_some());
        add(status::stat_field(&String::from_utf8_lossy(parts[6]), 14).is_some());
        let ksm = ProcessStatus::read(place.path(), 7).unwrap_or_default();
        add(ksm.ksm_process_profit.is_some());
        add(ksm.ksm_merging_pages.is_some());
        let process = processes::Process::read(place.path(), 7);
        add(process.as_ref().is_some_and(|process| process.qemu));
        add(process.is_some_and(|process| process.mergeable));
        add(Pressure::read(&place.path().join("pressure")) != Pressure::default());
        add(memfold_ksm::merging_pages(place.path()).is_some());
        found
    })
}
