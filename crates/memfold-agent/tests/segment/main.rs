//! Tests of segments in the guest: they are mounted over directories, written to, and unmounted,
//! with the kernel's overlayfs. The tests run as root, in a private mount namespace.

mod boots;
mod fixture;
mod operations;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use fixture::{Guest, Times, file, picture, private_mounts, set_time};
use memfold_agent::segment::error::Error;
use memfold_agent::segment::lay::{Request, lay};
use memfold_agent::segment::list::list;
use memfold_agent::segment::state::Steps;
use proptest::prelude::*;
use rustix::fs::XattrFlags;

fn usual() -> Guest {
    Guest::new(
        |root| operations::fill(&root.join("opt")),
        |image| operations::change(&image.join("opt")),
    )
}

/// Creates a guest whose segment has files of equal size and time but other bytes, so that the
/// bytes show where a file comes from.
fn marked() -> Guest {
    Guest::new(
        |root| {
            for name in ["same", "newer", "size", "mode", "target", "type"] {
                file(&root.join("usr/bin").join(name), "own own", 1000);
            }
            symlink("own", root.join("usr/bin/link")).unwrap();
            set_time(&root.join("usr/bin/link"), 1000);
            set_time(&root.join("usr/bin"), 1000);
        },
        |image| {
            let bin = image.join("usr/bin");
            for name in ["same", "mode", "target"] {
                file(&bin.join(name), "segment", 1000);
            }
            file(&bin.join("newer"), "segment", 1001);
            file(&bin.join("size"), "segment+", 1000);
            fs::set_permissions(bin.join("mode"), fs::Permissions::from_mode(0o600)).unwrap();
            fs::remove_file(bin.join("type")).unwrap();
            file(&bin.join("type/below"), "segment", 1000);
            fs::remove_file(bin.join("link")).unwrap();
            symlink("seg", bin.join("link")).unwrap();
            set_time(&bin.join("link"), 1000);
            file(&bin.join("missing"), "segment", 1000);
            file(&image.join("usr/gone/deep/x"), "segment", 1000);
        },
    )
}

#[test]
fn only_files_equal_to_the_guest_files_are_read_from_the_segment() {
    if !private_mounts() {
        return;
    }
    let guest = marked();
    let before = picture(&guest.usr(""), Times::All);
    let report = guest.lay().unwrap();
    let read = |name: &str| fs::read_to_string(guest.usr("bin").join(name)).unwrap();
    assert_eq!(read("same"), "segment");
    assert_eq!(read("target"), "segment");
    for name in ["newer", "size", "mode", "type"] {
        assert_eq!(read(name), "own own", "{name}");
    }
    assert_eq!(
        fs::read_link(guest.usr("bin/link")).unwrap(),
        Path::new("own")
    );
    assert!(!guest.usr("bin/missing").exists() && !guest.usr("gone").exists());
    let mut seen = picture(&guest.usr(""), Times::All);
    for name in ["same", "target"] {
        // The bytes of the two files differ, unlike those of a real segment.
        let path = Path::new("bin").join(name);
        assert_eq!(
            seen.remove(&path)
                .unwrap()
                .replace(&format!("{:?}", b"segment"), ""),
            before[&path].replace(&format!("{:?}", b"own own"), "")
        );
        seen.insert(path.clone(), before[&path].clone());
    }
    assert_eq!(seen, before);

    let usr = &report["dirs"][0];
    assert_eq!(usr["dir"], "/usr");
    assert_eq!(
        (&usr["files"], &usr["same"], &usr["differing"]),
        (&9.into(), &2.into(), &7.into())
    );
    assert_eq!(report["skipped"][0]["dir"], "/none");
    let paths: Vec<_> = usr["first_differing"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["path"].as_str().unwrap())
        .collect();
    assert!(paths.contains(&"bin/newer") && paths.contains(&"gone/deep/x"));

    let again = guest.lay().unwrap();
    assert_eq!(again["already"], serde_json::json!(["/usr", "/opt"]));
    assert_eq!(guest.places.record("web").unwrap().lay.len(), 2);
    let listed: serde_json::Value = serde_json::from_str(&list(&guest.places).unwrap()).unwrap();
    assert_eq!(listed[0]["name"], "web");
    assert_eq!(listed[0]["layers"].as_array().unwrap().len(), 2);

    let report = guest.take_off().unwrap();
    assert_eq!(report["unmounted"].as_array().unwrap().len(), 1);
    assert!(guest.mounts().is_empty() && guest.is_clean());
    assert_eq!(picture(&guest.usr(""), Times::All), before);
}

#[test]
fn with_content_comparison_a_guest_file_with_other_bytes_is_not_read_from_the_segment() {
    if !private_mounts() {
        return;
    }
    let guest = marked();
    let request = Request {
        content: true,
        max_differing: 100,
        ..Request::new("web", 3)
    };
    lay(&guest.places, &request).unwrap();
    assert_eq!(
        fs::read_to_string(guest.usr("bin/same")).unwrap(),
        "own own"
    );
}

#[test]
fn writes_to_a_mounted_segment_are_kept_after_it_is_unmounted() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    guest.lay().unwrap();
    let mut open = fs::OpenOptions::new()
        .append(true)
        .open(guest.opt().join("a"))
        .unwrap();
    open.write_all(b", before").unwrap();
    fs::remove_dir_all(guest.opt().join("d/e")).unwrap();
    fs::create_dir(guest.opt().join("d/e")).unwrap();
    fs::write(guest.opt().join("d/e/new"), "in an opaque directory").unwrap();
    let seen = picture(&guest.opt(), Times::All);
    let report = guest.take_off().unwrap();
    assert!(report["dirs"][0]["moved"].as_u64().unwrap() >= 2);
    assert_eq!(picture(&guest.opt(), Times::All), seen);
    open.write_all(b", after").unwrap();
    assert_eq!(
        fs::read_to_string(guest.opt().join("a")).unwrap(),
        "first a, before, after"
    );
}

#[test]
fn a_guest_file_that_is_open_for_writing_is_not_replaced_by_the_file_of_a_segment() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    let mut open = fs::OpenOptions::new()
        .append(true)
        .open(guest.opt().join("f/a"))
        .unwrap();
    let report = guest.lay().unwrap();
    open.write_all(b", more").unwrap();
    assert_eq!(
        fs::read_to_string(guest.opt().join("f/a")).unwrap(),
        "first f/a, more"
    );
    let opt = &report["dirs"][1];
    assert_eq!(opt["dir"], "/opt");
    assert!(
        opt["first_differing"]
            .to_string()
            .contains("open for writing")
    );
    guest.take_off().unwrap();
    assert_eq!(
        fs::read_to_string(guest.opt().join("f/a")).unwrap(),
        "first f/a, more"
    );
}

fn refused(guest: &Guest, request: &Request, expected: &str) {
    let before = picture(&guest.places.root, Times::All);
    let mounts = guest.mounts();
    let Err(Error::Refused { why, hint }) = lay(&guest.places, request) else {
        panic!("not refused: {expected}");
    };
    assert!(why.contains(expected), "{why}");
    assert!(!hint.is_empty());
    assert_eq!(guest.mounts(), mounts);
    assert!(guest.is_clean());
    assert_eq!(picture(&guest.places.root, Times::All), before);
}

#[test]
fn if_a_segment_mount_is_refused_the_error_names_the_reason_and_the_guest_is_unchanged() {
    if !private_mounts() {
        return;
    }
    let request = Request::new("web", 3);
    refused(&marked(), &request, "7 of the segment's 9 files differ");
    refused(&marked(), &Request::new("web", 4), "no device holds");

    let guest = Guest::new(
        |root| file(&root.join("usr/x/y"), "own", 1),
        |image| {
            fs::remove_dir_all(image.join("usr/x")).unwrap();
            file(&image.join("usr/x"), "segment", 1);
        },
    );
    refused(&guest, &request, "x is a directory in the guest");

    let guest = Guest::new(
        |root| file(&root.join("usr/x/y"), "own", 1),
        |image| {
            rustix::fs::lsetxattr(
                image.join("usr/x"),
                "trusted.overlay.opaque",
                b"y",
                XattrFlags::empty(),
            )
            .unwrap();
        },
    );
    refused(&guest, &request, "trusted.overlay.opaque");

    let guest = usual();
    let below = guest.opt().join("f");
    rustix::mount::mount(
        "none",
        &below,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        None,
    )
    .unwrap();
    refused(&guest, &request, "below /opt");

    let guest = usual();
    rustix::mount::mount(
        "none",
        guest.opt(),
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        None,
    )
    .unwrap();
    refused(&guest, &request, "not on the same mount");

    let guest = usual();
    symlink("opt", guest.places.root.join("link")).unwrap();
    let through = |directory: &str| Request {
        only: vec![directory.into()],
        ..request.clone()
    };
    refused(&guest, &through("/link"), "symbolic link");
    refused(&guest, &through("/var/lib"), "cannot lay");

    let guest = usual();
    fs::write(
        guest.image().join(".memfold-segment"),
        "format 1\nname web\ngeneration 3\nlay /usr/../etc\n",
    )
    .unwrap();
    refused(&guest, &request, "not normalised");
}

#[test]
fn a_segment_with_another_mount_below_it_cannot_be_unmounted() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    guest.lay().unwrap();
    let below = guest.opt().join("f");
    rustix::mount::mount(
        "none",
        &below,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        None,
    )
    .unwrap();
    let error = guest.take_off().unwrap_err().to_string();
    assert!(error.contains("opt/f"), "{error}");
    assert!(guest.places.record("web").is_some() && guest.is_laid());
    rustix::mount::unmount(&below, rustix::mount::UnmountFlags::empty()).unwrap();
    guest.take_off().unwrap();
    assert!(guest.is_clean());
}

#[test]
fn an_open_segment_file_stays_readable_after_the_segment_is_unmounted() {
    if !private_mounts() {
        return;
    }
    let guest = usual();
    guest.lay().unwrap();
    let open = File::open(guest.opt().join("a")).unwrap();
    guest.take_off().unwrap();
    assert_eq!(std::io::read_to_string(open).unwrap(), "first a");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, ..ProptestConfig::default() })]

    /// The same operations on a mounted segment and on a plain directory give the same tree,
    /// through the overlay and after it was unmounted.
    #[test]
    fn file_operations_give_the_same_tree_on_a_mounted_segment_as_on_a_plain_directory(
        operations in proptest::collection::vec(operations::operation(), 1..40),
        crash in proptest::option::of(0..40_u64),
    ) {
        if !private_mounts() {
            return Ok(());
        }
        let mut guest = usual();
        let plain = tempfile::tempdir().unwrap();
        operations::fill(plain.path());
        guest.lay().unwrap();
        for (i, operation) in operations.iter().enumerate() {
            let time = 4_000_000 + i64::try_from(i).unwrap();
            let done = operation.run(&guest.opt(), time);
            let code = |r: &std::io::Result<()>| r.as_ref().err().map(std::io::Error::raw_os_error);
            // Directories of lower layers cannot be renamed; programs then copy them.
            if code(&done) == Some(Some(rustix::io::Errno::XDEV.raw_os_error())) {
                continue;
            }
            let expected = operation.run(plain.path(), time);
            prop_assert_eq!(code(&done), code(&expected), "{:?}", operation);
        }
        let times = Times::NotOfDirectories;
        let seen = picture(&guest.opt(), Times::All);
        prop_assert_eq!(picture(&guest.opt(), times), picture(plain.path(), times));
        if let Some(step) = crash {
            guest.places.steps = Steps::ending_at(step);
            let _ = guest.take_off();
            guest.cut_power();
            guest.places.steps = Steps::default();
            guest.settle("");
        }
        guest.take_off().unwrap();
        prop_assert_eq!(picture(&guest.opt(), Times::All), seen);
        prop_assert!(guest.is_clean());
    }
}
