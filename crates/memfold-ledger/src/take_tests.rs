use super::*;

const STORE: StoreIdentity = StoreIdentity { dev: 1, ino: 7 };

fn smap(start: u64, end: u64, pss_kib: u64) -> Smap {
    Smap {
        vma: Vma {
            start: Hva(start),
            end: Hva(end),
            write: true,
            ..Vma::default()
        },
        rss_bytes: ByteSize::kib(pss_kib),
        pss_bytes: ByteSize::kib(pss_kib),
        ..Smap::default()
    }
}

#[test]
fn the_pss_of_qemu_is_split_into_guest_ram_and_other_memory() {
    let mut folded = smap(0x20_0000, 0x30_0000, 300);
    folded.vma.file = Some(STORE);
    folded.anonymous_bytes = ByteSize::kib(200);
    let mut code = smap(0x60_0000, 0x70_0000, 50);
    code.vma.execute = true;
    // A mapping that the kernel extended over the end of RAM: a quarter of its pages is RAM.
    let joined = smap(0x30_0000, 0x70_0000, 400);
    // Another process shares half of the image's pages with this one.
    let mut image = smap(0x10_0000, 0x18_0000, 90);
    image.vma.file = Some(StoreIdentity { dev: 1, ino: 8 });
    image.rss_bytes = ByteSize::kib(110);
    image.is_image = true;
    image.anonymous_bytes = ByteSize::kib(50);
    let window = Smap {
        vma: Vma {
            file: Some(STORE),
            ..smap(0x80_0000, 0x90_0000, 0).vma
        },
        pss_bytes: ByteSize::kib(7),
        ..Smap::default()
    };
    let sum = shares(
        &[folded, joined, image, code, window],
        &[
            (Hva(0x10_0000), Hva(0x18_0000)),
            (Hva(0x20_0000), Hva(0x40_0000)),
        ],
        &[STORE],
        |start, end| (end.0 - start.0) / 0x1000,
    );
    assert_eq!(sum.ram_pss_bytes, ByteSize::kib(300 + 100 + 90));
    assert_eq!(sum.file_pss_bytes, ByteSize::kib(40));
    assert_eq!(sum.image_shmem_bytes, ByteSize::kib(40));
    assert_eq!(sum.qemu_pss_bytes, ByteSize::kib(300 + 50 + 7));
    assert_eq!(sum.tcg_pss_bytes, ByteSize::kib(50));
    assert_eq!(sum.store_pss_bytes, ByteSize::kib(100 + 7));
}

#[test]
fn the_ledger_of_the_host_counts_a_page_of_a_page_store_or_an_image_once_even_if_several_vms_map_it()
 {
    let tree = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(tree.path().join("sys/vm")).unwrap();
    std::fs::write(tree.path().join("sys/vm/max_map_count"), "65530\n").unwrap();
    std::fs::write(
        tree.path().join("meminfo"),
        "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\nPageTables: 100 kB\n",
    )
    .unwrap();
    std::fs::write(tree.path().join("zoneinfo"), "").unwrap();
    let vm = VmAccount {
        pss_bytes: ByteSize::mib(125),
        pss_anon_bytes: ByteSize::mib(90),
        pss_shmem_bytes: ByteSize::mib(25),
        store_pss_bytes: ByteSize::mib(25),
        folded_bytes: ByteSize::mib(50),
        file_resident_bytes: ByteSize::mib(8),
        file_pss_bytes: ByteSize::mib(5),
        ..VmAccount::default()
    };
    // An image of 20 MiB of which the two VMs map 3 MiB, in part together.
    let image = |ino, mib| ImageAccount {
        identity: StoreIdentity { dev: 1, ino },
        allocated_bytes: ByteSize::mib(mib),
    };
    let vm = VmAccount {
        image_shmem_bytes: ByteSize::kib(1536),
        images: vec![image(8, 20)],
        ..vm
    };
    let store = StoreAccount {
        domain: "d".into(),
        identity: STORE,
        allocated_bytes: ByteSize::mib(50),
    };
    let own = OwnCost {
        pss_bytes: ByteSize::mib(10),
        ..OwnCost::default()
    };
    let host = host_from(
        &Proc::new(tree.path()),
        None,
        ByteSize(0),
        &Parts {
            vms: &[vm.clone(), vm],
            stores: &[store],
            own,
            images: &[image(8, 20), image(9, 1)],
            zero_dropped_bytes: ByteSize::mib(3),
            ..Parts::default()
        },
    )
    .unwrap();
    // Two VMs of 100 MiB beside the page store, the page store, memfold, and the parts of images
    // that no VM maps.
    assert_eq!(host.physical_bytes, ByteSize::mib(2 * 100 + 50 + 10 + 18));
    assert_eq!(host.unreclaimable_bytes, ByteSize::mib(2 * 90 + 50 + 18));
    assert_eq!(host.images_bytes, ByteSize::mib(21));
    assert_eq!(host.saved_by_folding_bytes, 50 << 20);
    assert_eq!(host.saved_by_clones_bytes, (6 - 18) << 20);
    assert_eq!(host.saved_net_bytes, (50 + 6 - 18 + 3 - 10) << 20);
    assert_eq!(host.kernel_bytes, ByteSize::kib(100));
}

#[test]
fn ksm_pages_of_ended_processes_are_not_counted_as_saved() {
    let mut ksm = KsmAccount {
        general_profit_bytes: 50 << 20,
        merging_pages: Some(0),
        ..KsmAccount::default()
    };
    assert_eq!(ksm.saved_bytes(), 0);
    // Zero pages that KSM mapped are saved too, and are part of no other count.
    ksm.zero_pages = Some(2 << 8);
    assert_eq!(ksm.saved_bytes(), 2 << 20);
    ksm.merging_pages = Some(20_000);
    assert_eq!(ksm.saved_bytes(), 50 << 20);
    ksm.merging_pages = None;
    assert_eq!(ksm.saved_bytes(), 50 << 20);
    ksm.general_profit_bytes = -640;
    assert_eq!(ksm.saved_bytes(), -640);
}

#[test]
fn the_daemons_shares_of_page_stores_are_read_only_if_it_maps_a_page_store() {
    let tree = tempfile::tempdir().unwrap();
    let proc = Proc::new(tree.path());
    let directory = tree.path().join("5");
    std::fs::create_dir(&directory).unwrap();
    let put = |file: &str, text: &str| std::fs::write(directory.join(file), text).unwrap();
    let mapping = "7f3aa0000000-7f3aa0100000 rw-s 00200000 00:01 1044 /memfd:store a (deleted)\n";
    put("maps", mapping);
    let store = |ino| StoreIdentity {
        dev: rustix::fs::makedev(0, 1),
        ino,
    };
    // Without the file `smaps`, reading it is an error.
    assert_eq!(store_pss(&proc, 5, &[]).unwrap(), ByteSize(0));
    assert_eq!(store_pss(&proc, 5, &[store(7)]).unwrap(), ByteSize(0));
    assert!(store_pss(&proc, 5, &[store(7), store(1044)]).is_err());
    put(
        "smaps",
        &format!("{mapping}Pss: 640 kB\nAnonymous: 512 kB\n"),
    );
    let found = store_pss(&proc, 5, &[store(1044)]).unwrap();
    assert_eq!(found, ByteSize::kib(128));
}

#[test]
fn the_account_of_a_vm_takes_one_read_of_each_kernel_file() {
    let memory = vec![1_u8; 64 << 12];
    let first = (memory.as_ptr() as u64).next_multiple_of(1 << 12);
    let layout = RamLayout::one_block(Hva(first), 60);
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let proc = Proc::default();
    let account = vm_from(&proc, (own, "self", None), &layout, &[], &[]).unwrap();
    assert_eq!(account.ram_bytes, ByteSize::kib(240));
    assert!(account.mappings > 0 && account.pss_bytes > ByteSize(0));
    let read = proc.files_read();
    let files = ["smaps", "maps", "smaps_rollup", "status"];
    assert_eq!(read, files.map(|file| format!("{own}/{file}")));
    drop(memory);
}

#[test]
fn memory_of_other_processes_is_read_once_for_each_and_not_for_vms_and_relays() {
    let tree = tempfile::tempdir().unwrap();
    let proc = Proc::new(tree.path());
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let rollup = "00-ff ---p 00000000 00:00 0 [rollup]\nPss: 9 kB\nPss_Anon: 8 kB\n";
    // No process has a number as large as these (`PID_MAX_LIMIT` of the kernel).
    let first = 1 << 23;
    for pid in (first..first + 6).chain([own]) {
        let directory = tree.path().join(pid.to_string());
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("smaps_rollup"), rollup).unwrap();
    }
    let vm = |pid| VmAccount {
        pid,
        ..VmAccount::default()
    };
    let parts = Parts {
        vms: &[vm(first), vm(first + 1)],
        relays: &[first + 2],
        ..Parts::default()
    };
    assert_eq!(others(&proc, &parts).unwrap(), ByteSize::kib(3 * 8));
    let mut read = proc.files_read();
    read.sort_unstable();
    let files = [3, 4, 5].map(|number| format!("{}/smaps_rollup", first + number));
    assert_eq!(read, files);
}
