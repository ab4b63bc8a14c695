//! Tests of encrypted snapshots of real guests.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use memfold_api::{KeepChoice, RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab, SNAPSHOT_KEY};
use memfold_testkit::patience;
use memfold_units::ByteSize;

use super::snapshots::MEMORY;
use crate::support::{self, BOOT};

const LIMIT: Duration = Duration::from_secs(300);

/// Shell script that starts a process with 48 MiB of memory that is in no file and full of a secret
/// word, and prints the word.
const HOLDER: &str = r#"cat > /run/holder.py <<'END'
import hashlib, os, time
word = hashlib.sha256(os.urandom(32)).hexdigest()
held = bytearray((word * (1 << 20)).encode()[:48 << 20])
open("/run/word", "w").write(word)
while True:
    open("/run/sum.new", "w").write(hashlib.sha256(held).hexdigest() + " " + str(time.monotonic()))
    os.rename("/run/sum.new", "/run/sum")
    time.sleep(0.5)
END
systemd-run -q --unit=holder python3 /run/holder.py
while [ ! -s /run/sum ]; do sleep 0.2; done
cat /run/word; echo; cut -d' ' -f1 /run/sum"#;

/// Shell script that waits until the process has read all of its memory again.
const CHECK: &str = r#"set -e
one=$(cat /run/sum); two=$one; left=100
while [ "$one" = "$two" ] && [ $left -gt 0 ]; do sleep 1; two=$(cat /run/sum); left=$((left - 1)); done
[ "$one" != "$two" ] || { echo the process stands still; exit 1; }
cat /run/word; echo; cut -d' ' -f1 /run/sum"#;

fn contains(file: &Path, word: &str) -> bool {
    let bytes = fs::read(file).unwrap();
    let word = word.as_bytes();
    // The first byte is searched quickly.
    bytes
        .windows(word.len())
        .any(|part| part[0] == word[0] && part == word)
}

/// Returns how many bytes of its snapshot's image a VM maps, and how many of these another VM maps,
/// too.
fn image_bytes(lab: &Lab, vm: &str) -> (u64, u64) {
    let (pid, _) = support::ram(lab.directory(), vm);
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut is_image, mut all, mut shared) = (false, 0, 0);
    for line in smaps.lines() {
        let (field, rest) = line.split_once(':').unwrap_or_default();
        let kib = || {
            let number = rest.split_whitespace().next();
            number.unwrap().parse::<u64>().unwrap() << 10
        };
        match field {
            "Rss" if is_image => all += kib(),
            "Shared_Clean" | "Shared_Dirty" if is_image => shared += kib(),
            // The first line of a mapping begins with its addresses.
            _ if field.contains('-') => is_image = line.contains("memfold-image:"),
            _ => {}
        }
    }
    (all, shared)
}

#[test]
fn clones_of_an_encrypted_snapshot_have_the_guests_memory_and_share_it_and_its_files_do_not_show_it()
 {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec("first", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready("first", BOOT).unwrap();
    let told = lab.exec("first", HOLDER, LIMIT).unwrap();
    let word = told.lines().next().unwrap();
    let snapshots = lab.daemon().snapshots();
    let key = lab.directory().join(SNAPSHOT_KEY);
    let mut vms = Vec::new();
    for (name, encrypt) in [("plain", false), ("hidden", true)] {
        let request = SaveRequest {
            keep: KeepChoice::All,
            whole: true,
            encrypt,
            plain_disks: encrypt,
            ..SaveRequest::new("first", name)
        };
        let saved = snapshots.save(&request).unwrap();
        let place = lab.directory().join("snapshots").join(name);
        let mut files = fs::read_dir(place).unwrap().flatten();
        let shows = files.any(|file| contains(&file.path(), word));
        assert_eq!(shows, !encrypt, "{name}");
        if encrypt {
            let right = fs::read(&key).unwrap();
            fs::write(&key, "12".repeat(31) + "34").unwrap();
            let why = snapshots.restore(name, &RestoreRequest::new("wrong"));
            let why = format!("{:#}", anyhow::Error::from(why.unwrap_err()));
            assert!(why.contains("not the one"), "{why}");
            fs::write(&key, right).unwrap();
        }
        for number in 1..=2 {
            let vm = format!("{name}-{number}");
            let began = Instant::now();
            snapshots.restore(name, &RestoreRequest::new(&vm)).unwrap();
            println!(
                "{name}: {} saved in {:.0} ms, VM stopped for {:.0} ms; {vm} restored in {} ms",
                ByteSize(saved.counts.saved_pages * 4096),
                saved.save_ms,
                saved.pause_ms,
                began.elapsed().as_millis()
            );
            if encrypt {
                vms.push(vm);
            } else {
                lab.stop(&vm).unwrap();
            }
        }
    }
    for vm in &vms {
        lab.daemon().vms().wait_agent(vm, patience(BOOT)).unwrap();
        assert_eq!(lab.exec(vm, CHECK, LIMIT).unwrap(), told, "{vm}");
    }
    for vm in &vms {
        let (all, shared) = image_bytes(&lab, vm);
        println!(
            "{vm}: {} of {} of its image are shared",
            ByteSize(shared),
            ByteSize(all)
        );
        // What the process holds, and more.
        assert!(shared > 48 << 20, "{vm} shares {shared} of {all} bytes");
    }
    // The ledger has the whole image once, also what no VM maps.
    let ledger = lab.report().unwrap().ledger;
    let image = ledger.host.images_bytes;
    let of_vms = ledger.vms.iter().filter(|vm| vms.contains(&vm.name));
    let mapped: ByteSize = of_vms.clone().map(|vm| vm.image_shmem_bytes).sum();
    for vm in of_vms {
        let allocated: Vec<ByteSize> = vm.images.iter().map(|of| of.allocated_bytes).collect();
        assert_eq!(allocated, [image], "{}", vm.name);
    }
    assert!(
        mapped > ByteSize::mib(48) && mapped <= image,
        "{mapped} of {image}"
    );
}
