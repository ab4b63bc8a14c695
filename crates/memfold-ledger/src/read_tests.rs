use memfold_testkit::bound;
use memfold_units::PageCount;

use super::*;

fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Proc) {
    let tree = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = tree.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let proc = Proc::new(tree.path());
    (tree, proc)
}

/// Private mapping of a memfd as Linux 6.18 shows it; half of its pages are copied.
const SMAPS: &str = "\
7f3aa0000000-7f3aa0100000 rw-p 00200000 00:01 1044                       /memfd:store a (deleted)
Size:               1024 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                 768 kB
Pss:                 640 kB
Pss_Dirty:           640 kB
Shared_Clean:          0 kB
Shared_Dirty:        256 kB
Private_Clean:         0 kB
Private_Dirty:       512 kB
Referenced:          768 kB
Anonymous:           512 kB
KSM:                  16 kB
LazyFree:              0 kB
AnonHugePages:         0 kB
Swap:                  8 kB
SwapPss:               8 kB
Locked:                0 kB
THPeligible:           0
VmFlags: rd wr mr mw me ac nh mg 
7f3aa0100000-7f3aa0200000 rwxp 00000000 00:00 0 
Rss:                   4 kB
Pss:                   4 kB
VmFlags: rd wr ex mr mw me 
";

#[test]
fn memory_mappings_and_their_resident_sizes_are_parsed_from_smaps() {
    let (_tree, proc) = tree(&[("5/smaps", SMAPS)]);
    let smaps = proc.smaps(5).unwrap();
    let store = StoreIdentity {
        dev: rustix::fs::makedev(0, 1),
        ino: 1044,
    };
    assert_eq!(
        smaps[0],
        Smap {
            vma: Vma {
                start: Hva(0x7f3a_a000_0000),
                end: Hva(0x7f3a_a010_0000),
                write: true,
                execute: false,
                offset: 0x20_0000,
                file: Some(store),
            },
            rss_bytes: ByteSize::kib(768),
            pss_bytes: ByteSize::kib(640),
            anonymous_bytes: ByteSize::kib(512),
            ksm_bytes: Some(ByteSize::kib(16)),
            is_image: false,
        }
    );
    assert_eq!((smaps[1].vma.file, smaps[1].ksm_bytes), (None, None));
    assert!(smaps[1].vma.execute);
}

#[test]
fn the_ram_image_of_a_snapshot_is_recognized_by_the_name_of_its_memory_file() {
    let is_image = |name: &str| {
        let line = format!("7f3aa0000000-7f3aa0100000 r--p 00000000 00:01 1044 {name}\n");
        let (_tree, proc) = tree(&[("5/smaps", &line)]);
        proc.smaps(5).unwrap()[0].is_image
    };
    assert!(is_image("/memfd:memfold-image:fe00:17 (deleted)"));
    for other in [
        "/memfd:memfold:lab (deleted)",
        "/tmp/memfd:memfold-image:1",
        "",
    ] {
        assert!(!is_image(other), "{other}");
    }
}

#[test]
fn malformed_smaps_text_is_an_error() {
    for text in [
        "Rss: 4 kB\n",
        "7f-zz rw-p 0 00:00 0\n",
        "7f00-8f00 rw-p 00000000 00:01 7 x\nRss: many kB\n",
    ] {
        let (_tree, proc) = tree(&[("5/smaps", text)]);
        let error = proc.smaps(5).unwrap_err();
        assert!(matches!(error, ReadError::Format { .. }), "{text}: {error}");
    }
    let (_tree, proc) = tree(&[]);
    assert!(matches!(proc.smaps(5), Err(ReadError::File { .. })));
}

#[test]
fn smaps_rollup_is_parsed_and_an_empty_one_of_a_kernel_thread_has_no_value() {
    let rollup = "563a07f38000-7ffd66250000 ---p 00000000 00:00 0    [rollup]\nRss:  1764 kB\nPss:  266 kB\nPss_Dirty: 112 kB\nPss_Anon:  112 kB\nPss_File:  154 kB\nPss_Shmem:  0 kB\n";
    let (_tree, proc) = tree(&[("5/smaps_rollup", rollup), ("6/smaps_rollup", "")]);
    let read = proc.rollup(5).unwrap().unwrap();
    assert_eq!(
        (read.pss_bytes, read.pss_anon_bytes, read.pss_shmem_bytes),
        (ByteSize::kib(266), ByteSize::kib(112), ByteSize(0))
    );
    assert_eq!(proc.rollup(6).unwrap(), None);
}

#[test]
fn the_reserves_of_memory_zones_are_computed_with_the_formula_of_the_kernel() {
    // The zone DMA keeps its protection (6091), but at most its managed pages, and so does DMA32.
    // The lists of a CPU have a field `high`, too.
    let zoneinfo = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 48448
  pages free     2816
        boost    0
        min      10
        low      13
        high     16
        spanned  4095
        present  3998
        managed  3840
        protection: (0, 3019, 6091, 6091, 6091)
  pagesets
    cpu: 0
              count:    62
              high:     14
    cpu: 1
              count:    1000
              high:     14
Node 0, zone   Normal
  pages free     216870
        min      8500
        low      10625
        high     12750
        managed  786432
        protection: (0, 0, 0, 0, 0)
";
    let (_tree, proc) = tree(&[("zoneinfo", zoneinfo)]);
    let pages = |n| PageCount(n).bytes();
    assert_eq!(
        proc.zones().unwrap(),
        Zones {
            total_reserve_bytes: pages(3840 + 12750),
            low_bytes: pages(13 + 10625),
            per_cpu_free_bytes: pages(62 + 1000),
        }
    );
}

#[test]
fn an_smaps_file_with_8000_mappings_is_parsed_in_at_most_half_a_second() {
    let text = SMAPS.repeat(4000);
    let (_tree, proc) = tree(&[("5/smaps", &text)]);
    let start = std::time::Instant::now();
    assert_eq!(proc.smaps(5).unwrap().len(), 8000);
    let (took, limit) = (
        start.elapsed(),
        bound(std::time::Duration::from_millis(500)),
    );
    assert!(took < limit, "{took:?} of {limit:?}");
}

#[test]
fn the_proc_files_of_the_running_kernel_are_parsed() {
    let proc = Proc::default();
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let (maps, smaps) = (proc.maps(pid).unwrap(), proc.smaps(pid).unwrap());
    assert!(!maps.is_empty() && smaps.len().abs_diff(maps.len()) < 20);
    assert!(proc.rollup(pid).unwrap().unwrap().pss_bytes > ByteSize(0));
    assert!(proc.page_tables(pid).unwrap() > ByteSize(0));
    assert!(proc.meminfo().unwrap()["MemTotal"] > ByteSize::mib(64));
    assert!(proc.max_map_count().unwrap() > 1000);
    let zones = proc.zones().unwrap();
    assert!(zones.total_reserve_bytes > zones.low_bytes, "{zones:?}");
}
