//! The agent in a real guest, held against the guest's memory and disk.
//!
//! Needs the guest images (`images.json` in memfold's cache directory), QEMU, debugfs, and the static agent at `MEMFOLD_AGENT`; says so and
//! does nothing without them. `MEMFOLD_IMAGE` chooses the image, `trixie-a` if not set.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memfold_wire::agent::{AgentCounters, FromAgent, PORT_NAME, ToAgent, VERSION};
use memfold_wire::{Decoder, encode};

const RAM_MIB: u64 = 512;

struct Image {
    disk: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
}

fn image() -> Option<Image> {
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

struct Guest {
    qemu: Child,
    stream: UnixStream,
    decoder: Decoder,
    directory: tempfile::TempDir,
    console: Arc<Mutex<Vec<u8>>>,
    /// File number to path and size.
    files: HashMap<u32, (Vec<u8>, u64)>,
    /// Page frame to file and page, as the hints say at this moment.
    frames: HashMap<u64, (u32, u64)>,
    dirty: BTreeSet<(u32, u64)>,
    ever_dirty: BTreeSet<(u32, u64)>,
    runs: u64,
    /// Pages offered again in the same place.
    repeated: u64,
    run_pages: u64,
    counters: AgentCounters,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Guest {
    fn boot(image: &Image, agent: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let extra = directory.path().join("extra");
        fs::create_dir(&extra).unwrap();
        fs::copy(agent, extra.join("memfold-agent")).unwrap();
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
                "root=/dev/vda rw console=ttyS0 quiet mitigations=off",
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
            assert!(start.elapsed() < Duration::from_secs(120), "no prompt");
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
        };
        guest
            .stream
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        guest.type_line("systemctl stop memfold-agent; mount /dev/vdb /mnt && (nice -n 10 /mnt/memfold-agent &)");
        guest
    }

    fn type_line(&mut self, line: &str) {
        let input = self.qemu.stdin.as_mut().unwrap();
        writeln!(input, "{line}").unwrap();
        input.flush().unwrap();
    }

    fn say(&mut self, message: &ToAgent) {
        self.stream.write_all(&encode(message).unwrap()).unwrap();
    }

    /// Takes messages until `done` says so of one, or the time is over (then false).
    fn until(&mut self, seconds: u64, mut done: impl FnMut(&FromAgent) -> bool) -> bool {
        let end = Instant::now() + Duration::from_secs(seconds);
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
            _ => {}
        }
    }

    fn run(&mut self, script: &str, seconds: u64) -> String {
        self.say(&ToAgent::Run {
            command: 1,
            script: script.into(),
        });
        let mut out = Vec::new();
        let ended = self.until(seconds, |m| match m {
            FromAgent::Output { bytes, .. } => {
                out.extend_from_slice(bytes);
                false
            }
            FromAgent::Exited { .. } => true,
            _ => false,
        });
        assert!(ended, "command did not end: {script}");
        String::from_utf8_lossy(&out).into_owned()
    }

    fn ping(&mut self) -> AgentCounters {
        self.until(2, |_| false);
        self.say(&ToAgent::Ping);
        assert!(self.until(10, |m| matches!(m, FromAgent::Counters(_))));
        self.counters
    }

    fn hello(&mut self) {
        assert!(
            self.until(30, |m| matches!(m, FromAgent::Hello { .. })),
            "no Hello: {}",
            String::from_utf8_lossy(&self.console.lock().unwrap())
        );
        self.say(&ToAgent::Welcome {
            version: VERSION,
            include: vec![],
            exclude: vec!["/mnt/**".into()],
        });
        self.say(&ToAgent::Inventory);
        let start = Instant::now();
        assert!(self.until(120, |m| matches!(m, FromAgent::InventoryEnd { .. })));
        println!(
            "inventory: {:.2} s, {} pages in {} runs, {} repeated, {} files",
            start.elapsed().as_secs_f64(),
            self.run_pages,
            self.runs,
            self.repeated,
            self.files.len()
        );
    }

    /// Reads 120 MiB of files in the guest and prints what that cost the agent.
    fn read_much(&mut self, what: &str) {
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

    /// Writes what `tests/ring.rs` reads: event formats and raw pages of this kernel.
    fn record_fixtures(&mut self, directory: &Path) {
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

    /// (right, all) pages of /usr whose bytes in the guest's RAM are those of the file on the disk.
    fn check(&self, disk: &Path) -> (u64, u64) {
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
        let mut of_file: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
        for (pfn, (file, page)) in &self.frames {
            of_file.entry(*file).or_default().push((*pfn, *page));
        }
        let wanted: Vec<_> = of_file
            .into_iter()
            .filter(|(f, _)| self.files[f].0.starts_with(b"/usr/"))
            .collect();
        let mut script = String::new();
        for (file, _) in &wanted {
            script += &format!(
                "dump \"{}\" {}/f{file}\n",
                String::from_utf8_lossy(&self.files[file].0),
                self.directory.path().display()
            );
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
        let (mut right, mut all) = (0, 0);
        for (file, pages) in wanted {
            let path = self.directory.path().join(format!("f{file}"));
            let bytes = fs::read(&path).unwrap_or_default();
            let _ = fs::remove_file(path);
            for (pfn, page) in pages {
                let start = usize::try_from(page * 4096).unwrap();
                let mut here = [0; 4096];
                all += 1;
                if start >= bytes.len() || pfn >= RAM_MIB << 8 {
                    continue;
                }
                memory.read_exact_at(&mut here, ram + pfn * 4096).unwrap();
                let there = &bytes[start..bytes.len().min(start + 4096)];
                right += u64::from(&here[..there.len()] == there);
            }
        }
        (right, all)
    }
}

#[test]
fn hints_of_a_real_guest_are_right() {
    let (Some(image), Ok(agent)) = (image(), std::env::var("MEMFOLD_AGENT")) else {
        println!("skipped: needs guest images and MEMFOLD_AGENT (the static agent)");
        return;
    };
    let mut guest = Guest::boot(&image, &agent);
    guest.hello();
    let (right, all) = guest.check(&image.disk);
    println!("inventory: {right} of {all} pages of /usr right");
    assert!(all > 5000 && right * 100 >= all * 99);

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

    // Dirty, then clean, by its final name.
    guest.run(
        "dd if=/dev/urandom of=/root/new bs=4096 count=300 2>/dev/null; mv /root/new /root/final",
        60,
    );
    guest.until(2, |_| false);
    let number = |g: &Guest, path: &[u8]| g.files.iter().find(|(_, f)| f.0 == path).map(|f| *f.0);
    let written = number(&guest, b"/root/new")
        .or(number(&guest, b"/root/final"))
        .expect("the new file");
    let dirty = guest.ever_dirty.iter().filter(|d| d.0 == written).count();
    guest.run("sync", 60);
    guest.until(2, |_| false);
    let left = guest.dirty.iter().filter(|d| d.0 == written).count();
    println!(
        "written file: {dirty} dirty pages, {left} after sync, now {:?}",
        String::from_utf8_lossy(&guest.files[&written].0)
    );
    assert_eq!((dirty, left), (300, 0));
    assert_eq!(guest.files[&written], (b"/root/final".to_vec(), 300 * 4096));

    let before = guest.ping();
    guest.until(20, |_| false);
    guest.say(&ToAgent::Ping);
    guest.until(5, |m| matches!(m, FromAgent::Counters(_)));
    println!(
        "idle 20 s: agent CPU {} us",
        guest.counters.cpu_us - before.cpu_us
    );
    assert!(guest.counters.cpu_us - before.cpu_us < 200_000);

    let cached = guest.frames.len();
    guest.run("echo 3 > /proc/sys/vm/drop_caches", 60);
    guest.until(3, |_| false);
    println!(
        "drop_caches: {cached} -> {} hinted frames",
        guest.frames.len()
    );
    assert!(guest.frames.len() * 2 < cached);

    guest.read_much("known files");

    // Another daemon.
    let socket = guest.directory.path().join("agent.sock");
    for quick in [false, true] {
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
        guest.hello();
        let (right, all) = guest.check(&image.disk);
        println!("new connection: {right} of {all} pages right");
        assert!(right * 100 >= all * 99);
    }
    let last = guest.ping();
    println!("in the end: {last:?}");
}
