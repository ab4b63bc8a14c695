//! Tests of segments mounted in a guest: operations fail, the guest crashes, and the guest boots
//! again.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use memfold_agent::consent::Consent;
use memfold_agent::segment::compare::compare;
use memfold_agent::segment::lay::{Request, lay};
use memfold_agent::segment::layers::Layer;
use memfold_agent::segment::mount_table::MountTable;
use memfold_agent::segment::settle::settle;
use memfold_agent::segment::state::Steps;
use memfold_agent::segment::take_off::take_off_all;
use memfold_agent::segment::tree;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::fixture::{Guest, Times, file, picture, private_mounts, set_time};
use crate::usual;

#[test]
fn a_segment_mount_that_fails_at_any_step_is_undone() {
    if !private_mounts() {
        return;
    }
    let mut guest = usual();
    let before = picture(&guest.places.root, Times::All);
    let mounts = guest.mounts();
    for step in 0.. {
        guest.places.steps = Steps::ending_at(step);
        if guest.lay().is_ok() {
            assert!(step > 10);
            break;
        }
        assert_eq!(guest.mounts(), mounts, "step {step}");
        assert!(guest.is_clean(), "step {step}");
        assert_eq!(
            picture(&guest.places.root, Times::All),
            before,
            "step {step}"
        );
    }
}

#[test]
fn after_a_crash_at_any_step_of_a_segment_mount_the_next_boot_removes_all_traces() {
    if !private_mounts() {
        return;
    }
    let mut guest = usual();
    let before = picture(&guest.places.root, Times::All);
    for step in 0.. {
        guest.places.steps = Steps::ending_at(step);
        let layer = Layer::new(&guest.places, "web", b"/opt");
        let own = layer.open_own().unwrap().unwrap();
        let image = tree::open(&guest.image().join("opt")).unwrap();
        let plan = compare(&image, &own, false, &BTreeSet::default()).unwrap();
        let laid = layer
            .prepare(&own, &MountTable::read().unwrap())
            .and_then(|()| layer.build(&plan, &own));
        guest.places.steps = Steps::default();
        let settled = guest.settle("");
        assert!(settled.problems.is_empty(), "{:?}", settled.problems);
        assert_eq!(settled.merged, 0);
        assert!(guest.is_clean(), "step {step}");
        assert_eq!(
            picture(&guest.places.root, Times::All),
            before,
            "step {step}"
        );
        if laid.is_ok() {
            assert!(step > 5);
            break;
        }
    }
}

/// Makes a change of every kind.
fn write_to(opt: &Path) {
    fs::write(opt.join("a"), "rewritten").unwrap();
    fs::remove_file(opt.join("b")).unwrap();
    fs::remove_dir_all(opt.join("d/e")).unwrap();
    fs::create_dir(opt.join("d/e")).unwrap();
    file(&opt.join("d/e/x/y"), "below an opaque directory", 5);
    fs::remove_dir_all(opt.join("f/g")).unwrap();
    fs::write(opt.join("f/g"), "a file where a directory was").unwrap();
    fs::hard_link(opt.join("f/g"), opt.join("f/linked")).unwrap();
    fs::remove_file(opt.join("only-own")).unwrap();
    file(&opt.join("only-own/now"), "a directory where a file was", 6);
    symlink("nowhere", opt.join("link")).unwrap();
    fs::set_permissions(opt.join("d"), fs::Permissions::from_mode(0o700)).unwrap();
    rustix::fs::lremovexattr(opt.join("d"), "trusted.test1").unwrap();
    set_time(&opt.join("d"), 77);
}

#[test]
fn after_a_crash_while_a_segment_is_unmounted_the_next_boot_restores_all_written_files() {
    if !private_mounts() {
        return;
    }
    for step in 0.. {
        let mut guest = usual();
        guest.lay().unwrap();
        write_to(&guest.opt());
        let seen = picture(&guest.opt(), Times::All);
        guest.places.steps = Steps::ending_at(step);
        let done = guest.take_off().is_ok();
        guest.cut_power();
        // The following boots crash as well.
        for again in [1, 4] {
            guest.places.steps = Steps::ending_at(again);
            guest.settle("");
            guest.cut_power();
        }
        guest.places.steps = Steps::default();
        let settled = guest.settle("");
        assert!(
            settled.problems.is_empty(),
            "step {step}: {:?}",
            settled.problems
        );
        assert_eq!(picture(&guest.opt(), Times::All), seen, "step {step}");
        let linked = fs::metadata(guest.opt().join("f/linked")).unwrap();
        assert_eq!(
            linked.ino(),
            fs::metadata(guest.opt().join("f/g")).unwrap().ino()
        );
        assert!(step == 0 || guest.is_clean(), "step {step}");
        if done {
            assert!(step > 30, "{step}");
            break;
        }
    }
}

#[test]
fn after_a_reboot_files_written_over_a_segment_are_kept_and_it_is_mounted_again() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    guest.lay().unwrap();
    write_to(&guest.opt());
    let seen = picture(&guest.opt(), Times::All);
    guest.cut_power();
    assert_ne!(picture(&guest.opt(), Times::All), seen);
    guest.plug_in();
    let settled = guest.settle("quiet");
    assert!(settled.problems.is_empty(), "{:?}", settled.problems);
    assert!(settled.merged > 5 && settled.laid.len() == 1);
    assert!(guest.is_laid());
    assert_eq!(picture(&guest.opt(), Times::All), seen);
    let report: serde_json::Value = serde_json::from_str(&settled.report()).unwrap();
    assert_eq!(report["laid"][0]["name"], "web");
    // On a running system, settling does nothing.
    let settled = guest.settle("quiet");
    assert_eq!((settled.merged, settled.problems.len()), (0, 0));
    assert!(guest.is_laid());

    take_off_all(&guest.places).unwrap();
    assert!(guest.mounts().is_empty());
    assert!(guest.places.record("web").is_some());
    assert_eq!(picture(&guest.opt(), Times::All), seen);
    // The guest also boots without the segment.
    let settled = guest.settle("memfold.lay=*");
    assert!(settled.problems.is_empty() && settled.laid.is_empty());
    guest.take_off().unwrap();
    assert!(guest.is_clean());
}

#[test]
fn a_segment_named_on_the_kernel_command_line_is_mounted_at_boot() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    assert!(guest.settle("memfold.lay=other").laid.is_empty());
    assert!(!guest.is_laid());
    // 2 of 9 files differ.
    let settled = guest.settle("memfold.lay=db,web");
    assert_eq!(
        (settled.laid.len(), settled.problems.len()),
        (1, 0),
        "{:?}",
        settled.problems
    );
    assert!(guest.is_laid());
}

#[test]
fn without_the_owners_permission_a_boot_merges_written_files_and_mounts_no_segment() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    let file = guest.places.root.with_file_name("owner.toml");
    let boot = |text: &str| {
        fs::write(&file, text).unwrap();
        settle(&guest.places, "memfold.lay=*", &Consent::read_from(&file))
    };
    guest.lay().unwrap();
    write_to(&guest.opt());
    let seen = picture(&guest.opt(), Times::All);
    guest.cut_power();
    guest.plug_in();
    let settled = boot("allow = [\"trim\"]");
    assert!(settled.merged > 5 && settled.laid.is_empty());
    assert_eq!(settled.problems.len(), 1, "{:?}", settled.problems);
    let problem = &settled.problems[0];
    assert!(problem.contains("\"segments\""), "{problem}");
    assert!(problem.contains("/etc/memfold/agent.toml"), "{problem}");
    assert!(!guest.is_laid());
    assert_eq!(picture(&guest.opt(), Times::All), seen);
    // A wrong file allows nothing; the reason is reported, too.
    let settled = boot("alow = []");
    assert_eq!((settled.laid.len(), settled.problems.len()), (0, 2));
    assert!(settled.problems[0].contains("owner.toml"));
    // The record was kept, so the segment is mounted as soon as the owner allows it.
    let settled = boot("allow = [\"segments\"]");
    assert_eq!((settled.laid.len(), settled.problems.len()), (1, 0));
    assert!(guest.is_laid());
}

/// Mounts the segment over /opt and is killed before the overlay is checked. The file /opt/a
/// changes between the comparison and the mount.
fn lay_without_a_check(guest: &Guest) {
    let layer = Layer::new(&guest.places, "web", b"/opt");
    let own = layer.open_own().unwrap().unwrap();
    let image = tree::open(&guest.image().join("opt")).unwrap();
    let plan = compare(&image, &own, false, &BTreeSet::default()).unwrap();
    let table = MountTable::read().unwrap();
    layer.prepare(&own, &table).unwrap();
    layer.build(&plan, &own).unwrap();
    fs::write(guest.opt().join("a"), "changed since").unwrap();
    let segment = guest.places.mounted("web", 3);
    layer.mount(&segment, 3, &own).unwrap();
    let seen = fs::read_to_string(guest.opt().join("a")).unwrap();
    assert_eq!(seen, "first a", "the segment's file is shown");
}

#[test]
fn an_overlay_that_was_mounted_but_not_checked_is_taken_off_and_laid_again() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    lay_without_a_check(&guest);
    let report = guest.lay().unwrap();
    assert_eq!(report["already"], serde_json::json!([]));
    let seen = fs::read_to_string(guest.opt().join("a")).unwrap();
    assert_eq!(seen, "changed since");
    let both = [b"/opt".to_vec(), b"/usr".to_vec()];
    assert_eq!(guest.places.record("web").unwrap().lay, both);
    // The run was killed after the check, and before it wrote the record.
    guest.places.remove_record("web").unwrap();
    let report = guest.lay().unwrap();
    assert_eq!(report["already"], serde_json::json!(["/usr", "/opt"]));
    assert_eq!(guest.places.record("web").unwrap().lay, both);
    guest.take_off().unwrap();
    assert!(guest.is_clean());
}

#[test]
fn an_unchecked_overlay_that_cannot_be_taken_off_stays_and_the_error_says_why() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    lay_without_a_check(&guest);
    let below = guest.opt().join("f");
    rustix::mount::mount("none", &below, "tmpfs", MountFlags::empty(), None).unwrap();
    let mounts = guest.mounts();
    let error = guest.lay().unwrap_err().to_string();
    assert!(error.contains("never checked"), "{error}");
    assert!(error.contains("opt/f"), "{error}");
    assert_eq!(guest.mounts(), mounts);
    rustix::mount::unmount(&below, UnmountFlags::empty()).unwrap();
    guest.lay().unwrap();
    let seen = fs::read_to_string(guest.opt().join("a")).unwrap();
    assert_eq!(seen, "changed since");
}

/// Creates a guest with the segments web and db. Web was mounted, /opt/d/b was written, and the
/// merge of /opt was cut off at its beginning.
fn with_an_interrupted_merge() -> Guest {
    let mut guest = usual();
    guest.plug_in_as("db");
    guest.lay().unwrap();
    fs::write(guest.opt().join("d/b"), "older").unwrap();
    // Step 0 removes the record.
    guest.places.steps = Steps::ending_at(1);
    assert!(guest.take_off().is_err());
    guest.places.steps = Steps::default();
    let left = guest.places.layer("web", b"/opt").join("upper/d/b");
    assert_eq!(fs::read_to_string(left).unwrap(), "older");
    guest
}

#[test]
fn files_written_over_one_segment_are_merged_before_another_one_is_mounted_over_them() {
    if !private_mounts() {
        return;
    }
    for directory in ["/opt", "/opt/d"] {
        let guest = with_an_interrupted_merge();
        let file = guest.opt().join("d/b");
        let request = Request {
            max_differing: 100,
            only: vec![directory.into()],
            ..Request::new("db", 3)
        };
        lay(&guest.places, &request).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "older", "{directory}");
        fs::write(&file, "newer").unwrap();
        guest.cut_power();
        let settled = guest.settle("");
        assert!(settled.problems.is_empty(), "{:?}", settled.problems);
        assert_eq!(fs::read_to_string(&file).unwrap(), "newer", "{directory}");
    }
}

#[test]
fn a_boot_mounts_no_segment_over_a_directory_whose_written_files_could_not_be_merged() {
    if !private_mounts() {
        return;
    }
    let mut guest = with_an_interrupted_merge();
    guest.places.steps = Steps::ending_at(0);
    let settled = guest.settle("memfold.lay=db");
    assert!(settled.laid.is_empty() && !guest.is_laid());
    assert_eq!(settled.problems.len(), 2, "{:?}", settled.problems);
    let problem = &settled.problems[1];
    assert!(
        problem.contains("written to /opt are not merged"),
        "{problem}"
    );
    guest.places.steps = Steps::default();
    let settled = guest.settle("memfold.lay=db");
    assert!(settled.problems.is_empty(), "{:?}", settled.problems);
    assert_eq!((settled.merged, settled.laid.len()), (1, 1));
    let seen = fs::read_to_string(guest.opt().join("d/b")).unwrap();
    assert_eq!(seen, "older");
}

/// Mounts the segment, and returns the number of changes on disk that this took.
fn steps_of_lay(guest: &mut Guest) -> u64 {
    let mut steps = 0..;
    let is_enough = |step: &u64| {
        guest.places.steps = Steps::ending_at(*step);
        guest.lay().is_ok()
    };
    steps.find(is_enough).unwrap()
}

#[test]
fn a_file_open_for_writing_is_hidden_before_the_segment_is_mounted() {
    if !private_mounts() {
        return;
    }
    let without = steps_of_lay(&mut usual());
    let mut guest = usual();
    let mut open = fs::OpenOptions::new();
    let open = open.append(true).open(guest.opt().join("f/a")).unwrap();
    let with = steps_of_lay(&mut guest);
    drop(open);
    // Hiding the file takes one step. If the agent found the file only after the mount, it would
    // unmount the overlay and build all its layers once more.
    assert!(with <= without + 5, "{with} steps, {without} without it");
}
