//! The file operations of a run, in their order, and the disks that a power failure could leave.
//!
//! Rules of the disks, which follow ext4 and XFS:
//!
//! - Changes of names and lengths (create, rename, link, remove, truncate, make a directory) go
//!   through a journal. After a power failure, they are there up to some point, and not beyond.
//! - A sync of a file or directory reaches the journal up to its own last change.
//! - All files belong to root, and nobody else can read them.
//! - Written bytes are there if their file was synced afterwards. All other writes are there, or
//!   their first half of whole sectors, or they are missing, each for itself.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::random::Random;

const SECTOR: usize = 512;

/// A file or directory. Numbers are not used again, unlike the kernel's.
type Id = usize;

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    File(Id),
    Directory(Id),
    Link(String),
}

/// A change of names.
#[derive(Debug)]
enum Naming {
    Put(PathBuf, Node),
    Rename(PathBuf, PathBuf),
    Exchange(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Remove(PathBuf),
}

/// A change of a file's bytes or length.
#[derive(Debug)]
enum Change {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Truncate(u64),
}

#[derive(Debug)]
enum Event {
    Name(Naming),
    File(Change),
    Sync,
    /// What the test has begun or seen done.
    Mark(Mark),
}

/// A promise about a thing with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A command was given that makes this of the thing; an empty text: it will be gone.
    Begun(String, String),
    /// The command has succeeded.
    Done(String),
}

/// Appends marks to a record, in order with the operations of other processes.
#[derive(Debug)]
pub struct Marks(File);

const BEGUN: u32 = 100;
const DONE: u32 = 101;

impl Marks {
    pub fn of(record: &Path) -> Self {
        Self(File::options().append(true).open(record).unwrap())
    }

    pub fn put(&self, mark: &Mark) {
        use std::io::Write as _;
        let (kind, first, second) = match mark {
            Mark::Begun(thing, becomes) => (BEGUN, thing.as_str(), becomes.as_str()),
            Mark::Done(thing) => (DONE, thing.as_str(), ""),
        };
        let number = |n: usize| u32::try_from(n).unwrap().to_le_bytes();
        let head = [
            kind.to_le_bytes(),
            number(first.len()),
            number(second.len()),
            [0; 4],
        ];
        let bytes = [
            &head.concat(),
            &[0; 24][..],
            first.as_bytes(),
            second.as_bytes(),
        ]
        .concat();
        (&self.0).write_all(&bytes).unwrap();
    }

    /// Makes a thing what it is to become, between two marks.
    pub fn around<T>(&self, thing: &str, becomes: &str, work: impl FnOnce() -> T) -> T {
        self.put(&Mark::Begun(thing.into(), becomes.into()));
        let done = work();
        self.put(&Mark::Done(thing.into()));
        done
    }
}

/// Names of a disk.
#[derive(Clone, Debug, Default)]
struct Names(BTreeMap<PathBuf, Node>);

impl Names {
    /// Returns what concerns a change: the things that it names, and the directories of the names.
    fn concerned(&self, naming: &Naming) -> Vec<Id> {
        let paths: &[&PathBuf] = match naming {
            Naming::Put(path, _) | Naming::Remove(path) => &[path],
            Naming::Rename(a, b) | Naming::Exchange(a, b) | Naming::Link(a, b) => &[a, b],
        };
        let parents = paths.iter().filter_map(|path| path.parent());
        let all = paths.iter().map(|path| path.as_path()).chain(parents);
        let known = all.filter_map(|path| self.0.get(path));
        let mut ids: Vec<Id> = known
            .filter_map(|node| match node {
                Node::File(id) | Node::Directory(id) => Some(*id),
                Node::Link(_) => None,
            })
            .collect();
        if let Naming::Put(_, Node::File(id) | Node::Directory(id)) = naming {
            ids.push(*id);
        }
        ids
    }

    /// Takes a name and all names below it.
    fn take(&mut self, path: &Path) -> Vec<(PathBuf, Node)> {
        let below = self.0.iter().filter(|(name, _)| name.starts_with(path));
        let names: Vec<PathBuf> = below.map(|(name, _)| name.clone()).collect();
        let take = |name: PathBuf| {
            let rest = name.strip_prefix(path).unwrap().to_owned();
            Some((rest, self.0.remove(&name)?))
        };
        names.into_iter().filter_map(take).collect()
    }

    fn put(&mut self, path: &Path, taken: Vec<(PathBuf, Node)>) {
        for (rest, node) in taken {
            let is_itself = rest.as_os_str().is_empty();
            let name = if is_itself {
                path.to_owned()
            } else {
                path.join(rest)
            };
            self.0.insert(name, node);
        }
    }

    fn apply(&mut self, naming: &Naming) {
        match naming {
            Naming::Put(path, node) => drop(self.0.insert(path.clone(), node.clone())),
            Naming::Remove(path) => drop(self.0.remove(path)),
            Naming::Rename(from, to) => {
                let taken = self.take(from);
                if !taken.is_empty() {
                    self.take(to);
                    self.put(to, taken);
                }
            }
            Naming::Exchange(a, b) => {
                let (of_a, of_b) = (self.take(a), self.take(b));
                self.put(a, of_b);
                self.put(b, of_a);
            }
            Naming::Link(from, to) => {
                if let Some(node) = self.0.get(from).cloned() {
                    self.0.insert(to.clone(), node);
                }
            }
        }
    }
}

/// All events of a run.
#[derive(Debug, Default)]
pub struct Run {
    events: Vec<Event>,
    /// Where each file or directory was synced.
    syncs: HashMap<Id, Vec<usize>>,
    /// For each sync: how many events the journal has at least afterwards, and where.
    reached: Vec<(usize, usize)>,
    /// Where each file was changed.
    changes: HashMap<Id, Vec<usize>>,
}

/// Reads a run from its record.
struct Reader<'a> {
    run: Run,
    names: Names,
    /// The things of the kernel's numbers, which are used again.
    inodes: HashMap<u64, Id>,
    next: Id,
    /// Number of events up to the last one of names or lengths that concerned a thing.
    last: HashMap<Id, usize>,
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.bytes.split_at(length);
        self.bytes = rest;
        taken
    }

    fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn text(&mut self, length: u32) -> String {
        let bytes = self.take(usize::try_from(length).unwrap());
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    fn named(&mut self, naming: Naming) {
        let mut concerned = self.names.concerned(&naming);
        self.names.apply(&naming);
        self.run.events.push(Event::Name(naming));
        concerned.sort_unstable();
        for id in concerned {
            self.last.insert(id, self.run.events.len());
        }
    }

    /// Gives a new thing a number.
    fn new_id(&mut self, inode: u64) -> Id {
        self.next += 1;
        self.inodes.insert(inode, self.next);
        self.next
    }

    fn changed(&mut self, inode: u64, change: Change) {
        // Files without a name are not on the disk after a power failure.
        let Some(&id) = self.inodes.get(&inode) else {
            return;
        };
        let is_length = matches!(change, Change::Truncate(_));
        self.run
            .changes
            .entry(id)
            .or_default()
            .push(self.run.events.len());
        self.run.events.push(Event::File(change));
        if is_length {
            self.last.insert(id, self.run.events.len());
        }
    }

    fn synced(&mut self, inode: u64) {
        let Some(&id) = self.inodes.get(&inode) else {
            return;
        };
        let at = self.run.events.len();
        let reached = self.last.get(&id).copied().unwrap_or(0);
        self.run.reached.push((reached, at));
        self.run.syncs.entry(id).or_default().push(at);
        self.run.events.push(Event::Sync);
    }

    fn synced_all(&mut self) {
        let at = self.run.events.len();
        self.run.reached.push((at, at));
        self.run.events.push(Event::Sync);
        for id in 0..=self.next {
            self.run.syncs.entry(id).or_default().push(at);
        }
    }

    fn event(&mut self) {
        let mut short = || u32::from_le_bytes(self.take(4).try_into().unwrap());
        let (kind, first, second, _) = (short(), short(), short(), short());
        let (inode, at, length) = (self.long(), self.long(), self.long());
        let (first, second) = (self.text(first), self.text(second));
        let (path, other) = (PathBuf::from(&first), PathBuf::from(&second));
        // The numbers are those of shim.c.
        match kind {
            1 => {
                let node = Node::File(self.new_id(inode));
                self.named(Naming::Put(path, node));
            }
            2 => {
                let bytes = self.take(usize::try_from(length).unwrap()).to_vec();
                self.changed(inode, Change::Write(at, bytes));
            }
            3 => self.changed(inode, Change::Zero(at, length)),
            4 => self.changed(inode, Change::Truncate(length)),
            5 => self.synced(inode),
            6 => self.named(Naming::Rename(path, other)),
            7 => self.named(Naming::Exchange(path, other)),
            8 => self.named(Naming::Link(path, other)),
            9 => self.named(Naming::Put(other, Node::Link(first))),
            10 => {
                let node = Node::Directory(self.new_id(inode));
                self.named(Naming::Put(path, node));
            }
            11 | 12 => self.named(Naming::Remove(path)),
            13 => self.synced_all(),
            BEGUN => self
                .run
                .events
                .push(Event::Mark(Mark::Begun(first, second))),
            DONE => self.run.events.push(Event::Mark(Mark::Done(first))),
            other => panic!("event {other}"),
        }
    }
}

/// What was promised about each thing up to a point of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promised {
    /// What was acknowledged last.
    pub done: Option<String>,
    /// What was begun since.
    pub begun: Vec<String>,
    /// What the thing was at any time.
    pub ever: Vec<String>,
}

impl Run {
    /// Reads the record that a library of an `Injector` has written.
    pub fn read(record: &Path) -> Self {
        let bytes = fs::read(record).unwrap();
        let mut reader = Reader {
            run: Self::default(),
            names: Names::default(),
            inodes: HashMap::new(),
            next: 0,
            last: HashMap::new(),
            bytes: &bytes,
        };
        while !reader.bytes.is_empty() {
            reader.event();
        }
        reader.run
    }

    /// Returns the number of points at which the power may fail.
    pub fn points(&self) -> usize {
        self.events.len() + 1
    }

    /// Describes the last events before a point, for the message of a failed test.
    pub fn last(&self, point: usize) -> String {
        let first = point.saturating_sub(25);
        let lines = self.events[first..point].iter().map(|event| match event {
            Event::File(Change::Write(at, bytes)) => format!("write {} at {at}\n", bytes.len()),
            other => format!("{other:?}\n"),
        });
        lines.collect()
    }

    /// Returns the number of syncs.
    pub fn syncs(&self) -> usize {
        self.reached.len()
    }

    /// Returns what was promised before a point, by the thing's name.
    pub fn promised(&self, point: usize) -> BTreeMap<String, Promised> {
        let mut all = BTreeMap::<String, Promised>::new();
        for event in &self.events[..point] {
            match event {
                Event::Mark(Mark::Begun(thing, becomes)) => {
                    let promised = all.entry(thing.clone()).or_default();
                    promised.begun.push(becomes.clone());
                    promised.ever.push(becomes.clone());
                }
                Event::Mark(Mark::Done(thing)) => {
                    let promised = all.get_mut(thing).expect("it was begun");
                    promised.done = promised.begun.pop();
                    promised.begun.clear();
                }
                _ => {}
            }
        }
        all
    }

    /// Builds a disk as it may be after a power failure at a point, below an empty directory.
    /// `lost`: the number of a sync that the disk has acknowledged, and not done.
    pub fn build(&self, place: &Path, point: usize, lost: Option<usize>, random: &mut Random) {
        let lost = lost.map(|number| self.reached[number].1);
        let is_done = |at: usize| at < point && Some(at) != lost;
        let reached = self.reached.iter().filter(|(_, at)| is_done(*at));
        let least = reached.map(|(reached, _)| *reached).max().unwrap_or(0);
        // As often all or nothing as something between.
        let journal = match random.below(4) {
            0 => least,
            1 => point,
            _ => least + random.below(point - least + 1),
        };
        let mut names = Names::default();
        for event in &self.events[..journal] {
            if let Event::Name(naming) = event {
                names.apply(naming);
            }
        }
        let mut written = HashMap::<Id, PathBuf>::new();
        for (name, node) in &names.0 {
            let path = place.join(name);
            // A directory that was there before the run is not in the record.
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match node {
                Node::Directory(_) => fs::create_dir_all(&path).unwrap(),
                Node::Link(text) => std::os::unix::fs::symlink(text, &path).unwrap(),
                Node::File(id) => {
                    if let Some(other) = written.get(id) {
                        fs::hard_link(other, &path).unwrap();
                    } else {
                        self.write(*id, &path, (point, journal), &is_done, random);
                        written.insert(*id, path);
                    }
                }
            }
        }
    }

    /// Writes the bytes of a file.
    fn write(
        &self,
        id: Id,
        path: &Path,
        (point, journal): (usize, usize),
        is_done: &dyn Fn(usize) -> bool,
        random: &mut Random,
    ) {
        let mut options = File::options();
        let file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .unwrap();
        let syncs = self.syncs.get(&id).map_or(&[][..], Vec::as_slice);
        let changes = self.changes.get(&id).map_or(&[][..], Vec::as_slice);
        let changes = changes.iter().filter(|at| **at < point);
        // Of the writes that were not synced: all, none, or each by chance.
        let all = random.below(3);
        for &at in changes {
            let Event::File(change) = &self.events[at] else {
                unreachable!("an event of a file");
            };
            let after = syncs.partition_point(|sync| *sync < at);
            let is_synced = syncs[after..].iter().any(|sync| is_done(*sync));
            let chance = match all {
                _ if is_synced => 0,
                2 => random.below(3),
                other => other,
            };
            match change {
                Change::Truncate(length) if at < journal => file.set_len(*length).unwrap(),
                Change::Write(to, bytes) if chance == 0 => file.write_all_at(bytes, *to).unwrap(),
                Change::Write(to, bytes) if chance == 2 => {
                    let half = bytes.len() / 2 / SECTOR * SECTOR;
                    file.write_all_at(&bytes[..half], *to).unwrap();
                }
                Change::Zero(from, length) if chance == 0 => zero(&file, *from, *length),
                Change::Truncate(_) | Change::Write(..) | Change::Zero(..) => {}
            }
        }
    }
}

fn zero(file: &File, from: u64, length: u64) {
    let end = file.metadata().unwrap().len().min(from + length);
    let bytes = usize::try_from(end.saturating_sub(from)).unwrap();
    file.write_all_at(&vec![0; bytes], from).unwrap();
}
