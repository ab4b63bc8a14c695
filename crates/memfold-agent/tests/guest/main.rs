//! Tests of the agent in a real guest: the agent's reports are compared with the guest's memory and
//! disk.
//!
//! Needs the guest images (`images.json` in memfold's cache directory), QEMU, debugfs, and the
//! static agent at `MEMFOLD_AGENT`; if one of them is missing, the test says so and does nothing.
//! `MEMFOLD_IMAGE` chooses the image, by default `trixie-a`.

mod harness;

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use harness::{Guest, image};
use memfold_testkit::patience;
use memfold_wire::Decoder;
use memfold_wire::agent::{FromAgent, ToAgent};
use memfold_wire::order::{GuestOrder, NewAddresses, NewIdentities, NewNames, PathList};

/// Lock that lets one guest run at a time, because guests are slow.
static ONE_GUEST: Mutex<()> = Mutex::new(());

/// Receives messages until `ready` returns true or three minutes have passed.
fn hear_until(guest: &mut Guest, ready: impl Fn(&Guest) -> bool) {
    // Messages that come late may change the state again.
    guest.listen(2);
    let end = Instant::now() + patience(Duration::from_secs(180));
    while Instant::now() < end && !ready(guest) {
        guest.listen(1);
    }
}

#[test]
fn at_least_99_percent_of_the_hints_of_a_real_guest_are_correct() {
    let (Some(image), Ok(agent)) = (image(), std::env::var("MEMFOLD_AGENT")) else {
        memfold_testkit::skip!("needs guest images and MEMFOLD_AGENT (the static agent)");
    };
    let _one = ONE_GUEST.lock();
    let mut guest = Guest::boot(&image, &agent, &[]);
    guest.hello();
    let (right, all) = guest.check(&image.disk);
    println!("inventory: {right} of {all} pages of /usr right");
    assert!(all > 5000 && right * 100 >= all * 99);

    let (right, all) = guest.check_extents(&image.disk);
    println!("places on the disk: {right} of {all} pages right");
    assert!(all > 5000 && right == all);

    guest.read_much("new files");
    let (right, all) = guest.check(&image.disk);
    println!("after reading: {right} of {all} pages right");
    assert!(right * 100 >= all * 99);
    assert!(guest.counters.rss_bytes <= 16 << 20);

    let ticks = "cut -d' ' -f 14,15 /proc/$(pidof memfold-agent)/stat; uname -r";
    println!(
        "agent's user and system ticks, kernel: {}",
        guest.run(ticks, 20).replace('\n', " ")
    );
    if let Ok(directory) = std::env::var("MEMFOLD_FIXTURES") {
        guest.record_fixtures(Path::new(&directory));
    }

    assert_eq!(guest.run("nice", 20).trim(), "0");

    // The file becomes dirty, then clean, with its final name.
    guest.run(
        "dd if=/dev/urandom of=/root/new bs=4096 count=300 2>/dev/null; mv /root/new /root/final",
        60,
    );
    let number = |g: &Guest, path: &[u8]| g.files.iter().find(|(_, f)| f.0 == path).map(|f| *f.0);
    let new = |g: &Guest| number(g, b"/root/new").or(number(g, b"/root/final"));
    let dirty = |g: &Guest| g.ever_dirty.iter().filter(|d| Some(d.0) == new(g)).count();
    hear_until(&mut guest, |g| dirty(g) >= 300);
    let written = new(&guest).expect("the new file");
    let dirty = guest.ever_dirty.iter().filter(|d| d.0 == written).count();
    guest.run("sync", 60);
    hear_until(&mut guest, |g| {
        let has_its_name = g.files[&written].0 == b"/root/final";
        has_its_name && !g.dirty.iter().any(|d| d.0 == written)
    });
    let left = guest.dirty.iter().filter(|d| d.0 == written).count();
    println!(
        "written file: {dirty} dirty pages, {left} after sync, now {:?}",
        String::from_utf8_lossy(&guest.files[&written].0)
    );
    assert_eq!((dirty, left), (300, 0));
    assert_eq!(guest.files[&written], (b"/root/final".to_vec(), 300 * 4096));

    // An emulated guest counts time in which its host did something else. The agent may use less
    // than 1 %.
    let is_idle = (0..3).any(|_| {
        let before = guest.ping();
        guest.listen(10);
        guest.say(&ToAgent::Ping);
        guest.until(5, |m| matches!(m, FromAgent::Counters(_)));
        let used = Duration::from_micros(guest.counters.cpu_us - before.cpu_us);
        println!("idle 10 s: agent CPU {used:?}");
        used < Duration::from_millis(100)
    });
    assert!(is_idle);

    let cached = guest.frames.len();
    guest.run("echo 3 > /proc/sys/vm/drop_caches", 60);
    hear_until(&mut guest, |g| g.frames.len() * 2 < cached);
    println!(
        "drop_caches: {cached} -> {} hinted frames",
        guest.frames.len()
    );
    assert!(guest.frames.len() * 2 < cached);

    guest.read_much("known files");

    // This simulates another daemon.
    let socket = guest.directory.path().join("agent.sock");
    for (quick, mute) in [(false, false), (true, false), (true, true)] {
        let _ = guest.stream.shutdown(std::net::Shutdown::Both);
        if !quick {
            std::thread::sleep(Duration::from_secs(2));
        }
        guest.stream = UnixStream::connect(&socket).unwrap();
        guest
            .stream
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        guest.decoder = Decoder::new();
        (guest.files, guest.frames) = (HashMap::new(), HashMap::new());
        if mute {
            // As if QEMU had dropped two Hellos together with a daemon's connection.
            guest.is_mute = true;
            let is_hello = |m: &FromAgent| matches!(m, FromAgent::Hello { .. });
            guest.expect(10, "Hello", is_hello);
            guest.expect(20, "second Hello", is_hello);
            guest.is_mute = false;
        }
        guest.hello();
        let (right, all) = guest.check_each(8, &image.disk);
        println!("new connection: {right} of {all} pages right");
        assert!(all > 1000 && right * 100 >= all * 99);
    }
    let last = guest.ping();
    println!("in the end: {last:?}");
}

#[test]
fn hints_name_the_right_files_on_xfs_btrfs_erofs_and_overlay_mounts() {
    let (Some(image), Ok(agent)) = (image(), std::env::var("MEMFOLD_AGENT")) else {
        memfold_testkit::skip!("needs guest images and MEMFOLD_AGENT (the static agent)");
    };
    let _one = ONE_GUEST.lock();
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("tree");
    fs::create_dir_all(tree.join("a directory")).unwrap();
    let content: Vec<u8> = (0..300_000_u32)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    fs::write(tree.join("a directory/the file"), &content).unwrap();
    let disk = |name: &str| {
        let path = directory.path().join(name);
        File::create(&path).unwrap().set_len(400 << 20).unwrap();
        path
    };
    let (xfs, btrfs, erofs) = (disk("xfs"), disk("btrfs"), disk("erofs"));
    let made =
        |command: &mut Command| assert!(command.output().unwrap().status.success(), "{command:?}");
    made(Command::new("mkfs.xfs").arg("-q").arg(&xfs));
    made(Command::new("mkfs.btrfs").arg("-q").arg(&btrfs));
    made(Command::new("mkfs.erofs").arg(&erofs).arg(&tree));
    let mut guest = Guest::boot(&image, &agent, &[xfs, btrfs, erofs.clone(), erofs]);
    guest.hello();
    println!("{}", guest.run("set -e; mkdir -p /m/xfs /m/btrfs /m/erofs /m/hidden /m/overlay; mount /dev/vdc /m/xfs; mount /dev/vdd /m/btrfs; mount -t erofs /dev/vde /m/erofs; \
        mount -t erofs /dev/vdf /m/hidden; mkdir /run/u /run/w; mount -t overlay -o lowerdir=/m/hidden,upperdir=/run/u,workdir=/run/w o /m/overlay; umount -l /m/hidden; \
        for d in xfs btrfs; do mkdir '/m/'$d'/a directory'; cp '/m/erofs/a directory/the file' '/m/'$d'/a directory/'; done; sync; echo 3 > /proc/sys/vm/drop_caches", 60));
    guest.listen(3);
    for kind in ["xfs", "btrfs", "erofs", "overlay"] {
        guest.run(
            &format!("cat '/m/{kind}/a directory/the file' > /dev/null"),
            30,
        );
    }
    println!(
        "{}",
        guest.run("grep /m/ /proc/self/mountinfo; ls -li /m/*/*", 10)
    );
    for pass in ["events", "inventory"] {
        if pass == "inventory" {
            guest.say(&ToAgent::Inventory);
            guest.expect(60, "InventoryEnd", |m| {
                matches!(m, FromAgent::InventoryEnd { .. })
            });
        }
        for kind in ["xfs", "btrfs", "erofs", "overlay"] {
            let path = format!("/m/{kind}/a directory/the file");
            // On some file systems, paths come later than pages.
            let end = Instant::now() + patience(Duration::from_secs(60));
            let found = loop {
                guest.listen(2);
                let found = guest.pages_of(path.as_bytes(), content.len());
                if found.len() >= 290 || Instant::now() > end {
                    break found;
                }
            };
            let right = guest.equal_pages(&found, &content);
            println!("{pass}: {kind}: {right} of {} pages right", found.len());
            if found.len() < 290 {
                guest.print_files(b"/m/");
            }
            assert!(right >= 290 && right == found.len() as u64);
        }
    }
}

#[test]
fn with_the_packages_permissions_the_agent_reports_pages_carries_out_orders_and_runs_no_command() {
    let (Some(image), Ok(agent)) = (image(), std::env::var("MEMFOLD_AGENT")) else {
        memfold_testkit::skip!("needs guest images and MEMFOLD_AGENT (the static agent)");
    };
    let _one = ONE_GUEST.lock();
    let packaged = include_str!("../../../../packaging/agent/agent.toml");
    let mut guest = Guest::boot_with(&image, &agent, &[], packaged);
    guest.hello();
    // Page frame numbers and file handles need what the agent has kept of root's capabilities.
    let (right, all) = guest.check(&image.disk);
    assert!(all > 5000 && right * 100 >= all * 99, "{right} of {all}");
    let refused = guest.order(
        GuestOrder::SendFile {
            path: "/etc/shadow".into(),
        },
        60,
    );
    assert_eq!(refused, (String::new(), None));
    assert_eq!(guest.run("id -u", 60), "");
    let (paths, _) = PathList::new([&b"/usr/bin/bash"[..]]);
    let minute_ago = GuestOrder::StepClock {
        behind_ns: -60_000_000_000,
        now_s: 0,
    };
    for order in [
        GuestOrder::BootId,
        GuestOrder::ListFreePages,
        GuestOrder::ListExtents(paths.clone()),
        GuestOrder::ReadClock,
        GuestOrder::SetRtc,
        minute_ago,
        GuestOrder::Sync,
        GuestOrder::DropCaches {
            files: paths,
            limit_ms: 60_000,
        },
        GuestOrder::DropClean,
    ] {
        let what = format!("{order:?}");
        let (said, code) = guest.order(order, 120);
        assert_eq!(code, Some(0), "{what}: {said}");
    }
    let identities = GuestOrder::Renew(NewIdentities {
        seed: "5a".repeat(32),
        network: Some(NewAddresses { mac: 1, cards: 0 }),
        names: Some(NewNames {
            host_name: "renewed".into(),
            machine_id: "0a".repeat(16),
        }),
    });
    let (said, code) = guest.order(identities, 300);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("done random numbers") && !said.contains("left "),
        "{said}"
    );
    // The page cache is seen again, by events and not only by an inventory.
    guest.type_line("cat /usr/bin/* > /dev/null");
    let known = guest.frames.len();
    hear_until(&mut guest, |g| g.frames.len() > known + 1000);
    assert!(guest.frames.len() > known + 1000);
    let order = GuestOrder::PowerOff;
    guest.say(&ToAgent::Order { command: 2, order });
    memfold_testkit::wait_until("the guest is off", Duration::from_secs(60), || {
        guest.is_off()
    });
}
