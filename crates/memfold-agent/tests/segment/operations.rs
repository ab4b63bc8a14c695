//! File operations as programs do them. Tests of segments apply them to two equal directory trees,
//! one of them below a mounted segment, and compare the results.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use proptest::prelude::*;
use rustix::fs::XattrFlags;

use crate::fixture::{file, set_time};

pub const PATHS: [&str; 14] = [
    "a", "b", "new", "d", "d/a", "d/b", "d/e", "d/e/a", "d/e/new", "f", "f/a", "f/g", "f/g/a",
    "only-own",
];

#[derive(Clone, Debug)]
pub enum Operation {
    Write(usize, u8),
    Append(usize, u8),
    Remove(usize),
    MakeDirectory(usize),
    Rename(usize, usize),
    Symlink(usize, u8),
    Link(usize, usize),
    Mode(usize, u32),
    Owner(usize, u32),
    Attribute(usize, u8),
}

pub fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let path = 0..PATHS.len();
    prop_oneof![
        (path.clone(), any::<u8>()).prop_map(|(p, v)| Write(p, v)),
        (path.clone(), any::<u8>()).prop_map(|(p, v)| Append(p, v)),
        path.clone().prop_map(Remove),
        path.clone().prop_map(Remove),
        path.clone().prop_map(MakeDirectory),
        (path.clone(), path.clone()).prop_map(|(a, b)| Rename(a, b)),
        (path.clone(), any::<u8>()).prop_map(|(p, v)| Symlink(p, v)),
        (path.clone(), path.clone()).prop_map(|(a, b)| Link(a, b)),
        (path.clone(), 0..0o7777_u32).prop_map(|(p, m)| Mode(p, m | 0o700)),
        (path.clone(), 0..5_u32).prop_map(|(p, o)| Owner(p, o)),
        (path, any::<u8>()).prop_map(|(p, v)| Attribute(p, v)),
    ]
}

impl Operation {
    /// Runs the operation, and sets the modification time of the changed file.
    pub fn run(&self, top: &Path, time: i64) -> io::Result<()> {
        use Operation::*;
        let at = |path: usize| top.join(PATHS[path]);
        let changed = match *self {
            Write(path, value) => {
                refuse_symlink(&at(path))?;
                fs::write(at(path), vec![value; usize::from(value)])?;
                at(path)
            }
            Append(path, value) => {
                refuse_symlink(&at(path))?;
                let mut open = fs::OpenOptions::new().append(true).open(at(path))?;
                open.write_all(&[value])?;
                at(path)
            }
            Remove(path) => {
                let path = at(path);
                return if fs::symlink_metadata(&path)?.is_dir() {
                    fs::remove_dir_all(path)
                } else {
                    fs::remove_file(path)
                };
            }
            MakeDirectory(path) => return fs::create_dir(at(path)),
            Rename(from, to) => return fs::rename(at(from), at(to)),
            Symlink(path, value) => {
                symlink(format!("target-{value}"), at(path))?;
                at(path)
            }
            Link(from, to) => {
                fs::hard_link(at(from), at(to))?;
                at(to)
            }
            Mode(path, mode) => {
                refuse_symlink(&at(path))?;
                return fs::set_permissions(at(path), fs::Permissions::from_mode(mode));
            }
            Owner(path, owner) => {
                return std::os::unix::fs::lchown(at(path), Some(owner), Some(owner + 1));
            }
            Attribute(path, value) => {
                let (path, name) = (at(path), format!("trusted.test{}", value % 3));
                if value % 5 == 0 {
                    rustix::fs::lremovexattr(&path, &*name)?;
                } else {
                    rustix::fs::lsetxattr(&path, &*name, &[value], XattrFlags::empty())?;
                }
                return Ok(());
            }
        };
        set_time(&changed, time);
        Ok(())
    }
}

fn refuse_symlink(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => Err(io::ErrorKind::InvalidInput.into()),
        _ => Ok(()),
    }
}

/// Creates the tree with which the tests begin.
pub fn fill(top: &Path) {
    for (i, path) in ["a", "b", "d/a", "d/b", "d/e/a", "f/a", "f/g/a", "only-own"]
        .iter()
        .enumerate()
    {
        let seconds = 1_000_000 + i64::try_from(i).unwrap();
        file(&top.join(path), &format!("first {path}"), seconds);
    }
    fs::set_permissions(top.join("f"), fs::Permissions::from_mode(0o2775)).unwrap();
    rustix::fs::lsetxattr(top.join("d"), "trusted.test1", b"d", XattrFlags::empty()).unwrap();
    for (i, path) in ["f/g", "f", "d/e", "d", ""].iter().enumerate() {
        set_time(&top.join(path), 2_000_000 + i64::try_from(i).unwrap());
    }
}

/// Makes the segment differ: one file newer, one that the guest lacks, one missing, one directory
/// of another mode.
pub fn change(top: &Path) {
    file(&top.join("d/b"), "other d/b", 3_000_000);
    file(&top.join("extra/x"), "no such file in the guest", 3_000_000);
    fs::remove_file(top.join("only-own")).unwrap();
    fs::set_permissions(top.join("f/g"), fs::Permissions::from_mode(0o700)).unwrap();
}
