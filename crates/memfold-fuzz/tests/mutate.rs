//! Runs every fuzz target on changed valid inputs, for `MEMFOLD_FUZZ_SECONDS` (default 1) each. If
//! a parser panics, its input is printed in hexadecimal. `MEMFOLD_FUZZ_SEEDS` names a directory to
//! write the valid inputs to, for cargo-fuzz.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use memfold_fuzz::{SUBJECTS, Subject, mutate, subject};

/// Time of each function in the first ring.
const RING: Duration = Duration::from_millis(300);

const LEAST_INPUTS: u64 = 20;

fn fuzz(subject: Subject) {
    let time = std::env::var("MEMFOLD_FUZZ_SECONDS").map_or(RING, |text| {
        Duration::from_secs(text.parse().expect("MEMFOLD_FUZZ_SECONDS is a number"))
    });
    let mut last = Vec::new();
    // Another seed each day finds other inputs; it is printed, and a failure's input is printed
    // whole.
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(1, |d| d.as_secs() / 86_400);
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut note = |input: &[u8]| {
            last.clear();
            last.extend_from_slice(input);
        };
        let done = mutate::fuzz(subject, time, seed, &mut note);
        // The machine may have had no time for this test.
        if done.inputs > LEAST_INPUTS {
            return done;
        }
        mutate::fuzz(subject, 20 * time, seed, &mut note)
    }));
    let name = subject.name;
    let Ok(done) = result else {
        panic!("{name} panicked on {last:02x?}");
    };
    println!(
        "{name}: {} inputs, {} sorts of results, seed {seed}",
        done.inputs, done.results
    );
    assert!(
        done.inputs > LEAST_INPUTS && done.results > 1,
        "{name}: {done:?}"
    );
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test] fn $name() { fuzz(subject(stringify!($name))); })*

        #[test]
        fn every_fuzzed_function_has_a_mutation_test_and_a_fuzz_target() {
            let tested = [$(stringify!($name)),*];
            let targets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fuzz_targets");
            for subject in SUBJECTS {
                assert!(tested.contains(&subject.name), "{}", subject.name);
                assert!(targets.join(format!("{}.rs", subject.name)).is_file(), "{}", subject.name);
            }
        }
    };
}

tests! {
    from_agent to_agent order reply ring format mountinfo memory glob layout monitor command_line free_pages extents nbd disk_client description chunk first_pages manifest table sealed segment_manifest guest_report qcow2 partitions source debugfs domain configuration vm_description request name fingerprint mapping figures call etcd_response lvm_report exec_frames copy_archive sent_events
}

#[test]
fn fuzz_seeds_are_valid_and_are_written_to_the_given_directory() {
    let directory = std::env::var_os("MEMFOLD_FUZZ_SEEDS");
    for subject in SUBJECTS {
        let seeds = (subject.seeds)();
        assert!(seeds.len() > 1, "{}", subject.name);
        // None of them is refused altogether.
        assert!(
            seeds.iter().all(|s| (subject.run)(s) > 0),
            "{}",
            subject.name
        );
        if let Some(directory) = &directory {
            let directory = Path::new(directory).join(subject.name);
            std::fs::create_dir_all(&directory).unwrap();
            for (at, seed) in seeds.iter().enumerate() {
                std::fs::write(directory.join(format!("seed-{at}")), seed).unwrap();
            }
        }
    }
}
