//! Test harness: boots a guest with memfold's agent, and collects the state that the agent reports.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memfold_testkit::patience;
use memfold_wire::agent::{AgentCounters, FromAgent, PORT_NAME, ToAgent, VERSION};
use memfold_wire::order::GuestOrder;
use memfold_wire::{Decoder, encode};

pub const RAM_MIB: u64 = 512;

/// Longest time until the guest shows its prompt.
const PROMPT: Duration = Duration::from_secs(300);

pub struct Image {
    pub disk: PathBuf,
    pub kernel: PathBuf,
    pub initrd: PathBuf,
}

pub fn image() -> Option<Image> {
    let home = std::env::var("HOME").ok()?;
    let cache = std::env::var("MEMFOLD_CACHE")
        .or_else(|_| std::env::var("XDG_CACHE_HOME").map(|d| d + "/memfold"))
        .unwrap_or(home + "/.cache/memfold");
    let name = std::env::var("MEMFOLD_IMAGE").unwrap_or("trixie-a".into());
    let text = fs::read_to_string(Path::new(&cache).join("images.json")).ok()?;
    let index: serde_json::Value = serde_json::from_str(&text).ok()?;
    let path = |key: &str| Some(Path::new(&cache).join(index.get(&name)?.get(key)?.as_str()?));
    Some(Image {
        disk: path("disk")?,
        kernel: path("kernel")?,
        initrd: path("initrd")?,
    })
}

pub struct Guest {
    pub qemu: Child,
    pub stream: UnixStream,
    pub decoder: Decoder,
    pub directory: tempfile::TempDir,
    pub console: Arc<Mutex<Vec<u8>>>,
    /// Path and size of each reported file, by file number.
    pub files: HashMap<u32, (Vec<u8>, u64)>,
    /// For each page frame, the file and the page in it that the frame holds, as hinted so far.
    pub frames: HashMap<u64, (u32, u64)>,
    pub dirty: BTreeSet<(u32, u64)>,
    pub ever_dirty: BTreeSet<(u32, u64)>,
    pub runs: u64,
    /// Number of pages that the agent hinted again in the same frame.
    pub repeated: u64,
    pub run_pages: u64,
    pub counters: AgentCounters,
    /// Whether the test answers no Hello, as a daemon that hangs.
    pub is_mute: bool,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Guest {
    /// Boots a guest whose owner allows everything.
    pub fn boot(image: &Image, agent: &str, disks: &[PathBuf]) -> Self {
        Self::boot_with(
            image,
            agent,
            disks,
            include_str!("../../../../guest/agent.toml"),
        )
    }

    /// Boots a guest with this configuration file of the agent.
    pub fn boot_with(image: &Image, agent: &str, disks: &[PathBuf], configuration: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let extra = directory.path().join("extra");
        fs::create_dir(&extra).unwrap();
        fs::copy(agent, extra.join("memfold-agent")).unwrap();
        fs::write(extra.join("agent.toml"), configuration).unwrap();
        let disk = directory.path().join("extra.img");
        let made = Command::new("mkfs.ext4")
            .args(["-q", "-d"])
            .arg(&extra)
            .arg(&disk)
            .arg("32M")
            .status()
            .unwrap();
        assert!(made.success());
        let socket = directory.path().join("agent.sock");
        let drive =
            |path: &Path| format!("file={},if=virtio,format=raw,snapshot=on", path.display());
        let mut qemu = Command::new("qemu-system-x86_64")
            .args([
                "-accel",
                "tcg,thread=multi",
                "-cpu",
                "max",
                "-smp",
                "1",
                "-nographic",
                "-no-reboot",
                "-nic",
                "none",
            ])
            .args([
                "-m",
                &RAM_MIB.to_string(),
                "-object",
                &format!("memory-backend-ram,id=ram,size={RAM_MIB}M"),
                "-machine",
                "q35,memory-backend=ram",
            ])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initrd)
            .args([
                "-append",
                "root=/dev/vda rw console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable",
            ])
            .args(["-drive", &drive(&image.disk), "-drive", &drive(&disk)])
            .args([
                "-device",
                "virtio-serial-pci",
                "-chardev",
                &format!("socket,id=a,path={},server=on,wait=off", socket.display()),
            ])
            .args([
                "-device",
                &format!("virtserialport,chardev=a,name={PORT_NAME}"),
            ])
            .args(disks.iter().flat_map(|d| ["-drive".into(), drive(d)]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let console = Arc::new(Mutex::new(Vec::new()));
        let mut output = qemu.stdout.take().unwrap();
        let copy = Arc::clone(&console);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut buffer) {
                copy.lock().unwrap().extend_from_slice(&buffer[..n]);
            }
        });
        let start = Instant::now();
        while !console.lock().unwrap().windows(3).any(|w| w == b":~#") {
            assert!(start.elapsed() < patience(PROMPT), "no prompt");
            std::thread::sleep(Duration::from_millis(100));
        }
        println!("booted in {:.1} s", start.elapsed().as_secs_f64());
        let mut guest = Self {
            stream: UnixStream::connect(&socket).unwrap(),
            qemu,
            decoder: Decoder::new(),
            directory,
            console,
            files: HashMap::new(),
            frames: HashMap::new(),
            dirty: BTreeSet::new(),
            ever_dirty: BTreeSet::new(),
            runs: 0,
            repeated: 0,
            run_pages: 0,
            counters: AgentCounters::default(),
            is_mute: false,
        };
        guest
            .stream
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        guest.type_line("systemctl stop memfold-agent; mount /dev/vdb /mnt && mkdir -p /etc/memfold && cp /mnt/agent.toml /etc/memfold && (nice -n 10 /mnt/memfold-agent &)");
        guest
    }

    /// Returns whether QEMU has ended, as it does after the guest has shut down.
    pub fn is_off(&mut self) -> bool {
        self.qemu.try_wait().unwrap().is_some()
    }

    pub fn type_line(&mut self, line: &str) {
        let input = self.qemu.stdin.as_mut().unwrap();
        writeln!(input, "{line}").unwrap();
        input.flush().unwrap();
    }

    pub fn say(&mut self, message: &ToAgent) {
        self.stream.write_all(&encode(message).unwrap()).unwrap();
    }

    /// Receives messages until `done` returns true. Returns false if the time, longer on a slow
    /// machine, is over before.
    pub fn until(&mut self, seconds: u64, done: impl FnMut(&FromAgent) -> bool) -> bool {
        self.within(patience(Duration::from_secs(seconds)), done)
    }

    /// Receives messages for a time.
    pub fn listen(&mut self, seconds: u64) {
        self.within(Duration::from_secs(seconds), |_| false);
    }

    fn within(&mut self, limit: Duration, mut done: impl FnMut(&FromAgent) -> bool) -> bool {
        let end = Instant::now() + limit;
        let mut buffer = vec![0; 64 << 10];
        while Instant::now() < end {
            while let Some(message) = self.decoder.next::<FromAgent>().unwrap() {
                self.note(&message);
                if done(&message) {
                    return true;
                }
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => panic!(
                    "QEMU closed the port: {}",
                    String::from_utf8_lossy(&self.console.lock().unwrap())
                ),
                Ok(n) => self.decoder.push(&buffer[..n]),
                Err(_) => {}
            }
        }
        false
    }

    /// Returns frames and file pages of the files with this path and size.
    pub fn pages_of(&self, path: &[u8], size: usize) -> Vec<(u64, u64)> {
        let named = |file: &u32| {
            let facts = self.files.get(file);
            facts.is_some_and(|f| f.0 == path && f.1 == size as u64)
        };
        let frames = self.frames.iter().filter(|(_, page)| named(&page.0));
        frames.map(|(&frame, page)| (frame, page.1)).collect()
    }

    /// Prints the files whose path is unknown or starts with `begin`, each with its number of known
    /// pages.
    pub fn print_files(&self, begin: &[u8]) {
        for (number, (path, size)) in &self.files {
            if path.is_empty() || path.starts_with(begin) {
                let pages = self.frames.values().filter(|f| f.0 == *number).count();
                let path = String::from_utf8_lossy(path);
                println!("file {number} {path:?} {size}: {pages} pages");
            }
        }
    }

    fn note(&mut self, message: &FromAgent) {
        match message {
            FromAgent::Files(list) => {
                for f in list {
                    self.files.insert(f.file, (f.path.clone(), f.size_bytes));
                }
            }
            FromAgent::Hints(list) => {
                for r in list {
                    if self.frames.get(&r.pfn) == Some(&(r.file, r.page)) {
                        self.repeated += u64::from(r.pages);
                    }
                    assert!(
                        self.files.contains_key(&r.file),
                        "a hint of a file not introduced"
                    );
                    (self.runs, self.run_pages) =
                        (self.runs + 1, self.run_pages + u64::from(r.pages));
                    for i in 0..u64::from(r.pages) {
                        self.frames.insert(r.pfn + i, (r.file, r.page + i));
                    }
                }
            }
            FromAgent::Gone(list) => {
                for r in list {
                    for i in 0..u64::from(r.pages) {
                        self.frames.remove(&(r.pfn + i));
                    }
                }
            }
            FromAgent::Dirty(list) => {
                self.ever_dirty.extend(
                    list.iter()
                        .flat_map(|r| (0..u64::from(r.pages)).map(|i| (r.file, r.page + i))),
                );
                self.dirty.extend(
                    list.iter()
                        .flat_map(|r| (0..u64::from(r.pages)).map(|i| (r.file, r.page + i))),
                );
            }
            FromAgent::Clean(list) => {
                for r in list {
                    self.dirty.retain(|(f, p)| {
                        *f != r.file || *p < r.page || *p >= r.page + u64::from(r.pages)
                    });
                }
            }
            FromAgent::InventoryBegin => self.frames.clear(),
            FromAgent::Counters(c) => self.counters = *c,
            // A Hello begins a new connection, whenever it comes.
            FromAgent::Hello { .. } => {
                (self.files, self.frames) = (HashMap::new(), HashMap::new());
                (self.runs, self.run_pages, self.repeated) = (0, 0, 0);
                if self.is_mute {
                    return;
                }
                self.say(&ToAgent::Welcome {
                    version: VERSION,
                    include: vec![],
                    exclude: vec!["/mnt/**".into()],
                });
                self.say(&ToAgent::Inventory);
            }
            _ => {}
        }
    }

    pub fn run(&mut self, script: &str, seconds: u64) -> String {
        self.say(&ToAgent::Run {
            command: 1,
            script: script.into(),
        });
        self.output(script, seconds).0
    }

    /// Has the agent carry out an order. Returns output and exit code; `None`: it is not allowed.
    pub fn order(&mut self, order: GuestOrder, seconds: u64) -> (String, Option<i32>) {
        let what = format!("{order:?}");
        self.say(&ToAgent::Order { command: 1, order });
        self.output(&what, seconds)
    }

    fn output(&mut self, what: &str, seconds: u64) -> (String, Option<i32>) {
        let (mut out, mut exit) = (Vec::new(), None);
        let ended = self.until(seconds, |m| match m {
            FromAgent::Output { bytes, .. } => {
                out.extend_from_slice(bytes);
                false
            }
            FromAgent::Exited { code, .. } => {
                exit = Some(*code);
                true
            }
            FromAgent::NotAllowed { .. } => true,
            _ => false,
        });
        assert!(ended, "command did not end: {what}");
        (String::from_utf8_lossy(&out).into_owned(), exit)
    }

    pub fn ping(&mut self) -> AgentCounters {
        self.listen(2);
        self.say(&ToAgent::Ping);
        assert!(self.until(10, |m| matches!(m, FromAgent::Counters(_))));
        self.counters
    }

    /// Waits for the agent and for its first inventory.
    pub fn hello(&mut self) {
        let start = Instant::now();
        self.expect(120, "InventoryEnd", |m| {
            matches!(m, FromAgent::InventoryEnd { .. })
        });
        println!(
            "first inventory: after {:.2} s, {} pages in {} runs, {} repeated, {} files",
            start.elapsed().as_secs_f64(),
            self.run_pages,
            self.runs,
            self.repeated,
            self.files.len()
        );
    }

    /// Receives messages until `done` returns true. On failure, prints all that is known about the
    /// agent.
    pub fn expect(&mut self, seconds: u64, what: &str, done: impl FnMut(&FromAgent) -> bool) {
        if !self.until(seconds, done) {
            self.type_line("cd /proc/$(pidof memfold-agent); for t in task/*; do cat $t/comm $t/wchan $t/syscall $t/stack; done");
            std::thread::sleep(Duration::from_secs(2));
            panic!(
                "no {what}: {}",
                String::from_utf8_lossy(&self.console.lock().unwrap())
            );
        }
    }

    /// Reads 120 MiB of files in the guest and prints what that cost the agent.
    pub fn read_much(&mut self, what: &str) {
        let before = self.ping();
        (self.runs, self.run_pages) = (0, 0);
        let start = Instant::now();
        self.run("cd /usr/lib; find . -type f -size +20k | sort | xargs cat 2> /dev/null | head -c 125829120 > /dev/null", 200);
        let wall = start.elapsed().as_secs_f64();
        let after = self.ping();
        println!(
            "120 MiB of {what} in {wall:.1} s: {} events, {} lost, {} pages in {} runs, agent CPU {} ms, rss {} KiB",
            after.events - before.events,
            after.events_lost - before.events_lost,
            self.run_pages,
            self.runs,
            (after.cpu_us - before.cpu_us) / 1000,
            after.rss_bytes >> 10,
        );
    }

    /// Writes the fixtures of `tests/ring.rs`: event formats and raw pages of this kernel.
    pub fn record_fixtures(&mut self, directory: &Path) {
        let events = "filemap/mm_filemap_add_to_page_cache filemap/mm_filemap_delete_from_page_cache writeback/writeback_dirty_folio writeback/writeback_single_inode";
        let kernel = self.run("uname -r | cut -d. -f 1,2", 20);
        let directory = directory.join(kernel.trim());
        fs::create_dir_all(&directory).unwrap();
        for event in events.split(' ') {
            let text = self.run(
                &format!("cat /sys/kernel/tracing/events/{event}/format"),
                20,
            );
            fs::write(directory.join(event.split('/').next_back().unwrap()), text).unwrap();
        }
        fs::write(
            directory.join("header_page"),
            self.run("cat /sys/kernel/tracing/events/header_page", 20),
        )
        .unwrap();
        let script = format!(
            "cd /sys/kernel/tracing/instances && mkdir x && cd x && for e in {events}; do echo 1 > events/$e/enable; done; \
            dd if=/dev/zero of=/root/fixture bs=4096 count=40 2>/dev/null; sync /root/fixture; sync; rm /root/fixture; for e in {events}; do echo 0 > events/$e/enable; done; \
            dd if=per_cpu/cpu0/trace_pipe_raw bs=4096 count=2 iflag=nonblock 2>/dev/null > /tmp/raw; cat trace > /dev/null; cd ..; rmdir x; base64 -w0 /tmp/raw"
        );
        fs::write(directory.join("pages.base64"), self.run(&script, 60)).unwrap();
    }

    /// Returns (right, all) pages of /usr. Right pages are those whose bytes in the guest's RAM
    /// equal the file on the disk.
    pub fn check(&self, disk: &Path) -> (u64, u64) {
        self.check_each(1, disk)
    }

    /// Returns the same of one in `step` files only, which takes less time.
    pub fn check_each(&self, step: u32, disk: &Path) -> (u64, u64) {
        let mut of_file: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
        for (pfn, (file, page)) in &self.frames {
            of_file.entry(*file).or_default().push((*pfn, *page));
        }
        let wanted: Vec<_> = of_file
            .into_iter()
            .filter(|(f, _)| f % step == 0 && self.files[f].0.starts_with(b"/usr/"))
            .collect();
        self.dump(
            disk,
            wanted.iter().map(|(file, _)| {
                let path = String::from_utf8_lossy(&self.files[file].0).into_owned();
                (*file, path)
            }),
        );
        let (mut right, mut all) = (0, 0);
        for (file, pages) in wanted {
            let bytes = self.take_dump(file);
            right += self.equal_pages(&pages, &bytes);
            all += pages.len() as u64;
        }
        (right, all)
    }

    /// Copies files of a disk image to files named by number.
    fn dump(&self, disk: &Path, files: impl Iterator<Item = (u32, String)>) {
        let mut script = Vec::new();
        for (number, path) in files {
            let to = self.directory.path().display();
            writeln!(script, "dump \"{path}\" {to}/f{number}").unwrap();
        }
        let commands = self.directory.path().join("commands");
        fs::write(&commands, script).unwrap();
        let done = Command::new("debugfs")
            .arg("-f")
            .arg(&commands)
            .arg(disk)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(done.success());
    }

    fn take_dump(&self, number: u32) -> Vec<u8> {
        let path = self.directory.path().join(format!("f{number}"));
        let bytes = fs::read(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        bytes
    }

    /// Returns (right, all) pages of files: all pages for which the agent reports a place on the
    /// disk, and those that are at this place.
    pub fn check_extents(&mut self, disk: &Path) -> (u64, u64) {
        let list = self.run(
            "find /usr/lib -type f -size +100k | sort | head -n 200",
            100,
        );
        // These two files have no place on a disk.
        let question =
            format!("/mnt/memfold-agent --extents <<'END'\n{list}/dev/null\n/proc/cpuinfo\nEND");
        let start = Instant::now();
        let told = self.run(&question, 60);
        println!(
            "200 files lie in {} runs, told in {:.2} s",
            told.lines().count(),
            start.elapsed().as_secs_f64()
        );
        let paths = (0..).zip(list.lines().map(str::to_owned));
        self.dump(disk, paths);
        let dumps: Vec<Vec<u8>> = (0..200).map(|number| self.take_dump(number)).collect();
        let disk = File::open(disk).unwrap();
        let (mut right, mut all) = (0, 0);
        for line in told.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| fields[at].parse::<u64>().unwrap();
            let (file, page, block) = (number(0), number(1), number(4));
            let bytes = &dumps[usize::try_from(file).unwrap()];
            for step in 0..number(2) {
                let from = usize::try_from((page + step) * 4096).unwrap();
                let wanted = &bytes[from..bytes.len().min(from + 4096)];
                let mut found = vec![0; wanted.len()];
                let at = (block + step) * 4096;
                right += u64::from(disk.read_exact_at(&mut found, at).is_ok() && found == wanted);
                all += 1;
            }
        }
        (right, all)
    }

    /// Returns how many of the pages (frame, page in the file) equal those of `bytes`.
    pub fn equal_pages(&self, pages: &[(u64, u64)], bytes: &[u8]) -> u64 {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.qemu.id())).unwrap();
        let ram = maps.lines().find_map(|l| {
            let (a, b) = l.split_whitespace().next()?.split_once('-')?;
            let (a, b) = (
                u64::from_str_radix(a, 16).ok()?,
                u64::from_str_radix(b, 16).ok()?,
            );
            (b - a == RAM_MIB << 20).then_some(a)
        });
        let ram = ram.expect("the guest's RAM in QEMU's maps");
        let memory = File::open(format!("/proc/{}/mem", self.qemu.id())).unwrap();
        let equal = |(pfn, page): &(u64, u64)| {
            let start = usize::try_from(page * 4096).unwrap();
            let mut here = [0; 4096];
            if start >= bytes.len() || *pfn >= RAM_MIB << 8 {
                return false;
            }
            memory.read_exact_at(&mut here, ram + pfn * 4096).unwrap();
            let there = &bytes[start..bytes.len().min(start + 4096)];
            &here[..there.len()] == there
        };
        pages.iter().filter(|p| equal(p)).count() as u64
    }
}
