//! Tests userfaultfd's write protection in a process whose memory KSM may merge. The test is a
//! separate program, because that setting (`PR_SET_MEMORY_MERGE`) applies to all memory of its
//! process.

use memfold_sys::userfaultfd::Userfaultfd;

#[test]
fn if_ksm_may_merge_all_memory_of_a_process_its_write_protection_is_not_trusted() {
    let Ok(before) = Userfaultfd::open(None) else {
        memfold_testkit::skip!("no userfaultfd");
    };
    let merge = |on: libc::c_ulong| {
        let none: libc::c_ulong = 0;
        // SAFETY: the call takes no pointer.
        unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, on, none, none, none) }
    };
    if !before.protection_lasts() || merge(1) != 0 {
        memfold_testkit::skip!(
            "this kernel can't merge all memory of a process, or not protect it"
        );
    }
    assert!(!Userfaultfd::open(None).unwrap().protection_lasts());
    assert_eq!(merge(0), 0);
    assert!(Userfaultfd::open(None).unwrap().protection_lasts());
}
