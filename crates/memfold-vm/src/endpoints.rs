//! Finds the sockets of a running QEMU, through which the daemon talks to memfold's library in QEMU
//! and to memfold's agent in the guest. Another program than memfold may have started this QEMU.
//! The process's memory map and environment lead to the library's socket, QEMU's device tree to the
//! agent's.

use std::fs;
use std::io::{self, BufRead};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use memfold_host::files::LIBRARY;
use memfold_units::Hva;
use memfold_wire::agent::PORT_NAME;
use memfold_wire::library::{Advice, SOCKET_VARIABLE};
use rustix::process::Pid;

use super::foreign::View;
use super::layout::RamBlock;
use super::qmp::{Qmp, QmpError};

/// Whether a process has memfold's library, and where the library listens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibraryPlace {
    /// Whether memfold's library is mapped in the process.
    pub loaded: bool,
    /// Path of the library's socket, from the process's environment; `None`: the variable is not
    /// set.
    pub socket: Option<PathBuf>,
}

/// Looks for memfold's library, and for the path of its socket, in process `pid`.
pub fn library(pid: Pid) -> io::Result<LibraryPlace> {
    let root = format!("/proc/{}", pid.as_raw_nonzero());
    let view = View::of(pid).unwrap_or_default();
    let maps = fs::read_to_string(format!("{root}/maps"))?;
    let environment = fs::read(format!("{root}/environ"))?;
    Ok(LibraryPlace {
        loaded: maps.lines().any(|l| l.contains(LIBRARY)),
        socket: variable(&environment, SOCKET_VARIABLE).map(|path| view.on_host(&path)),
    })
}

fn variable(environment: &[u8], name: &str) -> Option<PathBuf> {
    environment.split(|b| *b == 0).find_map(|entry| {
        let value = entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(PathBuf::from(std::ffi::OsStr::from_bytes(value)))
    })
}

/// Returns the command line of process `pid`, split into arguments; empty arguments are left out.
pub fn command_line(pid: Pid) -> io::Result<Vec<String>> {
    let bytes = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()))?;
    let words = bytes.split(|b| *b == 0).filter(|w| !w.is_empty());
    let words = words.map(|w| String::from_utf8_lossy(w).into_owned());
    Ok(words.collect())
}

/// Returns the VM's name from QEMU's option `-name guest=NAME,...` or `-name NAME,...`; `None` if
/// the option is missing.
#[must_use]
pub fn guest_name(command_line: &[String]) -> Option<String> {
    let at = command_line.iter().position(|w| w == "-name")?;
    let value = command_line.get(at + 1)?;
    value
        .split(',')
        .find_map(|part| part.strip_prefix("guest="))
        .or_else(|| value.split(',').next().filter(|p| !p.contains('=')))
        .map(ToOwned::to_owned)
}

/// Returns the path of the Unix socket that leads to the agent's port in the QEMU with process ID
/// `pid`; `None` if the VM has no such port, or if the port's character device is no socket.
pub fn agent_socket(pid: Pid, qmp: &mut Qmp) -> Result<Option<PathBuf>, QmpError> {
    let tree = qmp.human("info qtree")?;
    let Some(chardev) = port_chardev(&tree) else {
        return Ok(None);
    };
    let chardevs = qmp.query("query-chardev")?;
    let mut chardevs = chardevs.as_array().into_iter().flatten();
    let found = chardevs.find(|c| c["label"] == chardev);
    let path = found.and_then(|c| socket_path(c["filename"].as_str()?));
    // A QEMU that a user started by hand may have a path relative to its working directory.
    Ok(path.and_then(|path| Some(View::of(pid).ok()?.on_host(&path))))
}

/// Returns the character device of the agent's port, from the output of `info qtree`. In it, a
/// device's properties follow the device's line and are indented deeper.
fn port_chardev(tree: &str) -> Option<String> {
    tree.split("dev: ").find_map(|device| {
        let property = |name: &str| {
            device.lines().find_map(|l| {
                let value = l.trim().strip_prefix(name)?.strip_prefix(" = ")?;
                Some(value.trim_matches('"').to_owned())
            })
        };
        (device.starts_with("virtserialport") && property("name")? == PORT_NAME)
            .then(|| property("chardev"))?
    })
}

/// Returns the path in a character device's file name: `/path` in
/// `disconnected:unix:/path,server=on`.
fn socket_path(filename: &str) -> Option<PathBuf> {
    let (_, rest) = filename.split_once("unix:")?;
    let path = rest.split(",server").next()?;
    (!path.is_empty()).then(|| Path::new(path).into())
}

/// Returns the `madvise` settings that QEMU gave a RAM block, from the flags of the block's
/// mappings in `smaps`. Folded parts map the page store, so an anonymous part is preferred; without
/// one, any part is used.
pub fn advice(pid: Pid, block: &RamBlock) -> io::Result<Advice> {
    // The kernel counts the pages of each mapping while the file is read (0.2 s with 60,000
    // mappings), so no more of it is read than needed.
    let smaps = fs::File::open(format!("/proc/{}/smaps", pid.as_raw_nonzero()))?;
    let end = block.hva.add_pages(block.pages);
    advice_in(io::BufReader::new(smaps), block.hva, end)?.ok_or_else(|| {
        let why = format!("no mapping of RAM block '{}' at {}", block.name, block.hva);
        io::Error::new(io::ErrorKind::NotFound, why)
    })
}

/// Returns the `madvise` settings of the memory from `start` to `end`, from the text of
/// `/proc/PID/smaps`; `None` if no mapping is there. Reads no further than needed.
pub fn advice_in(smaps: impl BufRead, start: Hva, end: Hva) -> io::Result<Option<Advice>> {
    let mut of_file = None;
    let mut inside = None;
    for line in smaps.lines() {
        let line = line?;
        if let Some((range, anonymous)) = mapping(&line) {
            if range.0 >= end.0 {
                break;
            }
            inside = (range.1 > start.0).then_some(anonymous);
        } else if let (Some(anonymous), Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
            let found = advice_of(flags);
            if anonymous {
                return Ok(Some(found));
            }
            of_file = of_file.or(Some(found));
        }
    }
    Ok(of_file)
}

/// Parses the first line of a mapping in `smaps` (`proc_pid_smaps(5)`): start, end, and whether the
/// mapping is anonymous.
fn mapping(line: &str) -> Option<((u64, u64), bool)> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let at = |text| u64::from_str_radix(text, 16).ok();
    Some(((at(start)?, at(end)?), fields.nth(3)? == "0"))
}

fn advice_of(flags: &str) -> Advice {
    let has = |name: &str| flags.split_whitespace().any(|f| f == name);
    Advice {
        mergeable: has("mg"),
        hugepage: has("hg"),
        nohugepage: has("nh"),
        dontfork: has("dc"),
        dontdump: has("dd"),
        noreserve: has("nr"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vm_name_is_parsed_from_a_qemu_command_line() {
        let line = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            guest_name(&line("q -name guest=a,debug-threads=on")).as_deref(),
            Some("a")
        );
        assert_eq!(
            guest_name(&line("q -name b,process=x -S")).as_deref(),
            Some("b")
        );
        assert_eq!(guest_name(&line("q -S")), None);
        assert_eq!(guest_name(&line("q -name")), None);
    }

    #[test]
    fn the_agent_port_is_found_in_the_qemu_device_tree() {
        let tree = "bus: virtio-serial-bus.0\n  type virtio-serial-bus\n  dev: virtserialport, id \"x\"\n    chardev = \"qga\"\n    name = \"org.qemu.guest_agent.0\"\n  dev: virtserialport, id \"agent0\"\n    chardev = \"agent\"\n    nr = 1 (0x1)\n    name = \"org.memfold.agent.0\"\n";
        assert_eq!(port_chardev(tree).as_deref(), Some("agent"));
        assert_eq!(port_chardev("nothing"), None);
        assert_eq!(
            socket_path("disconnected:unix:/run/a.sock,server=on"),
            Some("/run/a.sock".into())
        );
        assert_eq!(socket_path("pty:/dev/pts/3"), None);
    }

    #[test]
    fn the_madvise_flags_of_guest_ram_are_read_from_smaps() {
        let smaps = "7f0000000000-7f0000001000 r--p 00000000 00:01 77 /memfd:store\nVmFlags: rd mr mw me ac dc dd mg\n\
                     7f0000001000-7f0000003000 rw-p 00000000 00:00 0\nRss: 4 kB\nVmFlags: rd wr mr mw me ac dd hg mg\n";
        let (start, end) = (Hva(0x7f00_0000_0000), Hva(0x7f00_0000_3000));
        let of = |start, end| advice_in(smaps.as_bytes(), start, end).unwrap();
        let found = of(start, end).unwrap();
        assert!(found.hugepage && found.mergeable && found.dontdump && !found.dontfork);
        assert!(of(start, Hva(0x7f00_0000_1000)).unwrap().dontfork);
        assert_eq!(of(Hva(0x1000), Hva(0x2000)), None);
    }

    #[test]
    fn the_madvise_flags_are_found_without_reading_the_rest_of_smaps() {
        struct Rest;
        impl io::Read for Rest {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("read too far"))
            }
        }
        let begin =
            "7f0000001000-7f0000003000 rw-p 00000000 00:00 0\nVmFlags: rd wr mr mw me ac hg\n";
        let smaps = || io::BufReader::new(io::Read::chain(begin.as_bytes(), Rest));
        let found = advice_in(smaps(), Hva(0x7f00_0000_1000), Hva(0x7f00_0000_2000)).unwrap();
        assert!(found.unwrap().hugepage);
        let beyond = advice_in(smaps(), Hva(0x1000), Hva(0x2000)).unwrap();
        assert_eq!(beyond, None);
    }

    #[test]
    fn in_proc_pid_environ_a_variable_is_found_by_its_complete_name_only() {
        assert_eq!(
            variable(b"A=1\0MEMFOLD_QEMU_SOCKET=/run/l=x\0", SOCKET_VARIABLE),
            Some("/run/l=x".into())
        );
        assert_eq!(
            variable(b"XMEMFOLD_QEMU_SOCKET=/a\0", SOCKET_VARIABLE),
            None
        );
    }
}
