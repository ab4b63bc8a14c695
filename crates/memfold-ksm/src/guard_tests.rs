use super::*;
use crate::pause;

/// Creates a directory with KSM's files as Linux 6.18 shows them, with `run` = 0.
fn tree() -> tempfile::TempDir {
    let tree = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("advisor_max_cpu", "70"),
        ("advisor_max_pages_to_scan", "30000"),
        ("advisor_min_pages_to_scan", "500"),
        ("advisor_mode", "[none] scan-time"),
        ("advisor_target_scan_time", "200"),
        ("max_page_sharing", "256"),
        ("merge_across_nodes", "1"),
        ("pages_shared", "0"),
        ("pages_sharing", "0"),
        ("pages_to_scan", "100"),
        ("run", "0"),
        ("sleep_millisecs", "20"),
        ("smart_scan", "1"),
        ("stable_node_chains_prune_millisecs", "2000"),
        ("use_zero_pages", "0"),
    ] {
        fs::write(tree.path().join(name), format!("{text}\n")).unwrap();
    }
    tree
}

fn fast() -> Settings {
    Settings {
        run: Some(1),
        pages_to_scan: Some(5000),
        sleep_millisecs: Some(1),
        ..Settings::default()
    }
}

#[test]
fn ksm_settings_read_from_an_unchanged_kernel_equal_the_kernel_defaults() {
    let tree = tree();
    let now = Controls::new(tree.path()).settings().unwrap();
    let expected = Settings {
        run: Some(0),
        advisor_max_cpu: Some(70),
        advisor_min_pages_to_scan: Some(500),
        advisor_max_pages_to_scan: Some(30000),
        advisor_target_scan_time: Some(200),
        ..Settings::kernel_default()
    };
    assert_eq!(now, expected);
}

#[test]
fn ksm_files_that_the_kernel_lacks_are_neither_read_nor_written() {
    let tree = tree();
    for name in ["smart_scan", "advisor_mode"] {
        fs::remove_file(tree.path().join(name)).unwrap();
    }
    let controls = Controls::new(tree.path());
    controls.apply(&Settings::kernel_default()).unwrap();
    assert_eq!(controls.settings().unwrap().smart_scan, None);
    assert_eq!(controls.settings().unwrap().run, Some(1));
    assert!(!tree.path().join("smart_scan").exists());
}

#[test]
fn a_kernel_without_ksm_is_reported_as_an_error() {
    let empty = tempfile::tempdir().unwrap();
    let error = Controls::new(empty.path()).settings().unwrap_err();
    assert!(matches!(error, KsmError::Missing(_)), "{error}");
}

#[test]
fn ksm_settings_are_restored_after_a_run_of_ksm_ends_or_panics() {
    let (tree, state) = (tree(), tempfile::tempdir().unwrap());
    let controls = Controls::new(tree.path());
    let before = controls.settings().unwrap();
    let panicked = std::panic::catch_unwind(|| {
        let _guard = Guard::take(&controls, state.path()).unwrap();
        controls.apply(&fast()).unwrap();
        assert_ne!(controls.settings().unwrap(), before);
        panic!("a bench that fails");
    });
    assert!(panicked.is_err());
    assert_eq!(controls.settings().unwrap(), before);
    assert!(!restore_leftover(state.path()).unwrap());
}

#[test]
fn during_a_pause_ksm_is_stopped_and_afterwards_it_runs_again_if_it_ran_before() {
    let (tree, state) = (tree(), tempfile::tempdir().unwrap());
    let controls = Controls::new(tree.path());
    let run = || controls.text("run").unwrap().unwrap();
    let written = || {
        fs::metadata(tree.path().join("run"))
            .unwrap()
            .modified()
            .unwrap()
    };
    // If KSM does not run, somebody else may start it during the pause, and then it continues to
    // run. But no other memfold starts it.
    let before = written();
    let paused = pause(&controls, state.path()).unwrap();
    assert_eq!(written(), before);
    assert!(matches!(
        pause(&controls, state.path()),
        Err(KsmError::Busy(_))
    ));
    controls.write("run", &1).unwrap();
    drop(paused);
    assert_eq!(run(), "1");
    let paused = pause(&controls, state.path()).unwrap();
    assert_eq!(run(), "0");
    drop(paused);
    assert_eq!(run(), "1");
    let missing = Controls::new(tree.path().join("nowhere"));
    drop(pause(&missing, state.path()).unwrap());
}

#[test]
fn ksm_settings_saved_by_a_killed_process_are_restored_by_the_next_process() {
    let (tree, state) = (tree(), tempfile::tempdir().unwrap());
    let controls = Controls::new(tree.path());
    let before = controls.settings().unwrap();
    let mut guard = Guard::take(&controls, state.path()).unwrap();
    controls.apply(&fast()).unwrap();
    assert!(matches!(
        restore_leftover(state.path()),
        Err(KsmError::Busy(_))
    ));
    // A kill leaves the note, but the process's lock ends.
    guard.restored = true;
    drop(guard);
    assert!(restore_leftover(state.path()).unwrap());
    assert_eq!(controls.settings().unwrap(), before);
}

#[test]
fn if_another_program_has_written_run_it_stays_when_the_other_settings_are_restored() {
    for (is_killed, leaves) in [(false, true), (false, false), (true, true), (true, false)] {
        let (tree, state) = (tree(), tempfile::tempdir().unwrap());
        let controls = Controls::new(tree.path());
        controls.write("run", &1).unwrap();
        let before = controls.settings().unwrap();
        let mut guard = Guard::take_as(&controls, state.path(), Merged::Stay).unwrap();
        controls.apply(&fast()).unwrap();
        controls.write("run", &2).unwrap();
        guard.leave_run(true).unwrap();
        guard.leave_run(leaves).unwrap();
        if is_killed {
            guard.restored = true;
            drop(guard);
            assert!(restore_leftover(state.path()).unwrap());
        } else {
            guard.restore().unwrap();
        }
        let run = Some(if leaves { 2 } else { 1 });
        let expected = Settings { run, ..before };
        assert_eq!(controls.settings().unwrap(), expected);
    }
}

#[test]
fn pages_that_may_stay_merged_are_not_unmerged_again_if_an_operator_had_unmerged_all_before() {
    let (tree, state) = (tree(), tempfile::tempdir().unwrap());
    let controls = Controls::new(tree.path());
    controls.write("run", &2).unwrap();
    let guard = Guard::take_as(&controls, state.path(), Merged::Stay).unwrap();
    controls.apply(&fast()).unwrap();
    drop(guard);
    assert_eq!(controls.settings().unwrap().run, Some(0));
}

#[test]
fn a_setting_that_ksmd_does_not_take_is_given_up_and_takes_effect_when_ksmd_goes_on() {
    let tree = tree();
    let controls = Controls::new(tree.path());
    let run = tree.path().join("run");
    // A FIFO without a reader holds up whoever opens it to write.
    fs::remove_file(&run).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &run,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    for _ in 0..2 {
        let error = controls.write("run", &0).unwrap_err();
        let KsmError::Write { source, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(source.kind(), io::ErrorKind::TimedOut);
    }
    // Other settings are not held up.
    controls.write("sleep_millisecs", &7).unwrap();
    assert_eq!(fs::read_to_string(&run).unwrap(), "0");
}

#[test]
fn ksm_settings_saved_in_another_boot_are_discarded() {
    let (tree, state) = (tree(), tempfile::tempdir().unwrap());
    let controls = Controls::new(tree.path());
    let mut guard = Guard::take(&controls, state.path()).unwrap();
    guard.note.boot_id = "another".to_owned();
    fs::write(&guard.note_path, serde_json::to_vec(&guard.note).unwrap()).unwrap();
    guard.restored = true;
    drop(guard);
    controls.apply(&fast()).unwrap();
    assert!(!restore_leftover(state.path()).unwrap());
    assert_eq!(controls.settings().unwrap().run, Some(1));
    assert!(!note_path(state.path()).exists());
}
