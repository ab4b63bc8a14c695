//! `memfold vm cp`: copies files and directories between this host and a guest.
//!
//! The guest's agent packs or unpacks an archive ([`memfold_copy`]), which a streamed command
//! carries. Whichever side writes makes the copy under a temporary name, and renames it when it is
//! complete.

use std::io::{self, Read, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, sync_channel};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use memfold_api::{Client, ExecEvent, ExecOrder, ExecStreamRequest, GuestCopy, GuestCopyKind};
use memfold_copy::{CopyError, Destination, Summary, pack, unpack};
use memfold_units::ByteSize;
use serde::Serialize;

use super::context::Context;
use super::streamed::{Input, Interrupt, Streamed};

/// Most bytes of the guest's messages that are shown.
const SHOWN: usize = 4096;
/// Number of pieces of an archive that wait for the disk.
const PIECES: usize = 16;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// What to copy: a path on this host, VM:PATH in a guest, or - for standard input
    source: String,
    /// Where to: VM:PATH in a guest, a path on this host, or - for standard output. An existing
    /// directory, or a path that ends with /, gets the copy under its old name
    destination: String,
}

/// What `vm cp --json` prints.
#[derive(Serialize)]
struct Copied {
    files: u64,
    directories: u64,
    links: u64,
    bytes: u64,
}

impl From<Summary> for Copied {
    fn from(summary: Summary) -> Self {
        Self {
            files: summary.files,
            directories: summary.directories,
            links: summary.links,
            bytes: summary.bytes,
        }
    }
}

/// One side of a copy.
#[derive(Debug, PartialEq)]
enum Side {
    Host(PathBuf),
    Guest {
        vm: String,
        path: String,
    },
    /// Standard input or output.
    Standard,
}

impl Side {
    /// Text with a colon names a guest, unless a slash stands before the colon.
    fn parse(text: &str) -> anyhow::Result<Self> {
        if text == "-" {
            return Ok(Self::Standard);
        }
        match text.split_once(':') {
            Some((vm, path)) if !vm.contains('/') => {
                if !path.starts_with('/') {
                    bail!(
                        "'{text}' has no absolute path in the guest; write VM:/PATH, or ./NAME for a file of this host"
                    );
                }
                let (vm, path) = (vm.to_owned(), path.to_owned());
                Ok(Self::Guest { vm, path })
            }
            _ => Ok(Self::Host(text.into())),
        }
    }
}

pub(super) fn run(
    context: &Context,
    client: &Client,
    arguments: &Arguments,
) -> anyhow::Result<ExitCode> {
    let source = Side::parse(&arguments.source)?;
    let destination = Side::parse(&arguments.destination)?;
    let copied = match (source, destination) {
        (Side::Guest { vm, path }, Side::Host(to)) => {
            shown(None, |bar| from_guest(client, &vm, &path, &to, bar))?
        }
        (Side::Guest { vm, path }, Side::Standard) => {
            if context.json {
                bail!("--json cannot be used with -, because both write to standard output");
            }
            return to_stdout(client, &vm, &path);
        }
        (Side::Host(from), Side::Guest { vm, path }) => {
            let name = name_of(&from)?;
            shown(size_of(&from), |bar| {
                to_guest(client, &from, &name, &vm, &path, bar)
            })?
        }
        (Side::Standard, Side::Guest { vm, path }) => stdin_to_guest(client, &vm, &path)?,
        _ => bail!("exactly one side of a copy is in a guest; write it as VM:/PATH"),
    };
    match copied {
        Outcome::Done(summary) => context.print(&Copied::from(summary), |copied| {
            let (files, bytes) = (copied.files, ByteSize(copied.bytes));
            format!("copied {files} files, {bytes}")
        }),
        Outcome::Signal(code) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
    }
}

/// How a copy ended.
enum Outcome {
    Done(Summary),
    /// This program got a signal; its exit code.
    Signal(i32),
}

/// Runs a copy. Meanwhile, shows on a terminal how far it is. `total`: bytes to copy, if known.
fn shown(
    total: Option<u64>,
    copy: impl FnOnce(&ProgressBar) -> anyhow::Result<Outcome>,
) -> anyhow::Result<Outcome> {
    let template = match total {
        Some(_) => "{wide_bar} {binary_bytes} of {binary_total_bytes}, {eta} left",
        None => "{spinner} {binary_bytes}, {binary_bytes_per_sec}",
    };
    let style = ProgressStyle::with_template(template)?;
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::new_spinner(),
    };
    let bar = bar.with_style(style);
    let result = copy(&bar);
    bar.finish_and_clear();
    result
}

/// Returns the number of bytes of a file, or of all files in a directory. `None`: what cannot be
/// read, which the copy then tells.
fn size_of(path: &Path) -> Option<u64> {
    let found = path.metadata().ok()?;
    if !found.is_dir() {
        return Some(found.len());
    }
    let mut sum = 0;
    for entry in path.read_dir().ok()? {
        let entry = entry.ok()?;
        let kind = entry.file_type().ok()?;
        // Links in a directory are copied as links.
        if !kind.is_symlink() {
            sum += size_of(&entry.path())?;
        }
    }
    Some(sum)
}

/// Returns the last component of a path of this host.
fn name_of(path: &Path) -> anyhow::Result<String> {
    let absolute = path.canonicalize();
    let absolute = absolute.with_context(|| format!("cannot find {}", path.display()))?;
    let name = path.file_name().or_else(|| absolute.file_name());
    let name = name.with_context(|| format!("{} has no name", path.display()))?;
    let name = name.to_str();
    let name = name.with_context(|| format!("the name of {} is not UTF-8", path.display()))?;
    Ok(name.to_owned())
}

fn start(client: &Client, vm: &str, copy: GuestCopy, input: bool) -> anyhow::Result<Streamed> {
    let request = ExecStreamRequest {
        script: String::new(),
        copy: Some(copy),
        input,
        terminal: None,
    };
    Streamed::start(client, vm, &request, Interrupt::Connection)
}

fn copy(kind: GuestCopyKind, path: &str) -> GuestCopy {
    GuestCopy {
        kind,
        path: path.to_owned(),
        name: None,
    }
}

/// What the guest wrote to its standard error.
#[derive(Default)]
struct Said(Vec<u8>);

impl Said {
    fn hear(&mut self, bytes: &[u8]) {
        let room = SHOWN.saturating_sub(self.0.len());
        self.0.extend(&bytes[..bytes.len().min(room)]);
    }

    /// Makes the error of a command in the guest that failed with `code`.
    fn error(&self, vm: &str, code: i32) -> anyhow::Error {
        let said = String::from_utf8_lossy(&self.0);
        let said: String = said.trim().chars().filter(|c| !c.is_control()).collect();
        if said.is_empty() {
            anyhow!("the copy in the guest of VM '{vm}' ended with code {code}")
        } else {
            anyhow!("VM '{vm}': {said}")
        }
    }
}

fn is_signal(code: i32) -> bool {
    (129..160).contains(&code)
}

/// Copies from a guest to this host.
fn from_guest(
    client: &Client,
    vm: &str,
    path: &str,
    to: &Path,
    bar: &ProgressBar,
) -> anyhow::Result<Outcome> {
    let name = Path::new(path).file_name();
    let name = name.with_context(|| format!("{path} has no last component"))?;
    // A destination that cannot be used is refused before anything is read.
    let destination = Destination::new(name, to)?;
    let streamed = start(client, vm, copy(GuestCopyKind::SendArchive, path), false)?;
    let mut said = Said::default();
    let (sender, receiver) = sync_channel(PIECES);
    let (code, unpacked) = std::thread::scope(|scope| {
        let unpacking = scope.spawn(|| unpack(bar.wrap_read(Pieces::new(receiver)), &destination));
        let code = streamed.finish(|event| {
            match event {
                ExecEvent::Stdout(bytes) => {
                    let passed_on = sender.send(bytes.clone());
                    passed_on.map_err(|_| io::ErrorKind::BrokenPipe)?;
                }
                ExecEvent::Stderr(bytes) => said.hear(bytes),
                _ => {}
            }
            Ok(())
        });
        drop(sender);
        (code, unpacking.join())
    });
    let unpacked = unpacked.map_err(|_| anyhow!("the thread that writes files panicked"))?;
    match (unpacked, code) {
        (Ok(summary), _) => Ok(Outcome::Done(summary)),
        // The archive was cut because the other side ended; its reason is the better one.
        (Err(CopyError::Cut | CopyError::Read(_)), Err(error)) => Err(error),
        (Err(CopyError::Cut | CopyError::Read(_)), Ok(code)) if is_signal(code) => {
            Ok(Outcome::Signal(code))
        }
        (Err(CopyError::Cut | CopyError::Read(_)), Ok(code)) if code != 0 => {
            Err(said.error(vm, code))
        }
        (Err(error), _) => Err(error.into()),
    }
}

/// Received pieces of an archive, as a reader.
struct Pieces {
    receiver: Receiver<Vec<u8>>,
    piece: io::Cursor<Vec<u8>>,
}

impl Pieces {
    fn new(receiver: Receiver<Vec<u8>>) -> Self {
        let piece = io::Cursor::default();
        Self { receiver, piece }
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.piece.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            match self.receiver.recv() {
                Ok(piece) => self.piece = io::Cursor::new(piece),
                Err(_) => return Ok(0),
            }
        }
    }
}

/// Writes a file of a guest to standard output.
fn to_stdout(client: &Client, vm: &str, path: &str) -> anyhow::Result<ExitCode> {
    let streamed = start(client, vm, copy(GuestCopyKind::SendFile, path), false)?;
    let mut said = Said::default();
    let mut out = io::stdout().lock();
    let code = streamed.finish(|event| match event {
        ExecEvent::Stdout(bytes) => out.write_all(bytes).and_then(|()| out.flush()),
        ExecEvent::Stderr(bytes) => {
            said.hear(bytes);
            Ok(())
        }
        _ => Ok(()),
    })?;
    if code == 0 || is_signal(code) {
        return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
    }
    Err(said.error(vm, code))
}

/// Copies from this host to a guest. `name`: name of the copy if the destination is a directory.
fn to_guest(
    client: &Client,
    from: &Path,
    name: &str,
    vm: &str,
    path: &str,
    bar: &ProgressBar,
) -> anyhow::Result<Outcome> {
    let copy = GuestCopy {
        name: Some(name.to_owned()),
        ..copy(GuestCopyKind::ReceiveArchive, path)
    };
    let streamed = start(client, vm, copy, true)?;
    let connection = streamed.connection.clone();
    let mut said = Said::default();
    let (code, packed) = std::thread::scope(|scope| {
        let packing = scope.spawn(|| {
            let input = bar.wrap_write(Input(connection.clone()));
            let out = io::BufWriter::with_capacity(1 << 16, input);
            let packed = pack(from, out);
            match &packed {
                Ok(_) => drop(connection.send(&ExecOrder::EndInput)),
                // The guest must not take what was sent for the whole.
                Err(_) => connection.close(),
            }
            packed
        });
        let code = streamed.finish(|event| {
            if let ExecEvent::Stderr(bytes) = event {
                said.hear(bytes);
            }
            Ok(())
        });
        (code, packing.join())
    });
    let packed = packed.map_err(|_| anyhow!("the thread that reads files panicked"))?;
    match (packed, code) {
        (Ok(summary), Ok(0)) => Ok(Outcome::Done(summary)),
        (Ok(_) | Err(CopyError::Write(_)), Err(error)) => Err(error),
        (Ok(_) | Err(CopyError::Write(_)), Ok(code)) if is_signal(code) => {
            Ok(Outcome::Signal(code))
        }
        (Ok(_) | Err(CopyError::Write(_)), Ok(code)) => Err(said.error(vm, code)),
        (Err(error), _) => Err(error.into()),
    }
}

/// Copies standard input to a file in a guest. The input is stored on this host first, so that a
/// part of it never becomes the file.
fn stdin_to_guest(client: &Client, vm: &str, path: &str) -> anyhow::Result<Outcome> {
    if Path::new(path).file_name().is_none() || path.ends_with('/') {
        bail!("standard input becomes a file in the guest; name the file: VM:/PATH");
    }
    let mut stored = tempfile::tempfile().context("cannot create a temporary file")?;
    let size = io::copy(&mut io::stdin().lock(), &mut stored);
    let size = size.context("cannot store standard input")?;
    stored.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    // The file has no name; opened by this path, it is read from its begin.
    let from = format!("/proc/self/fd/{}", stored.as_raw_fd());
    shown(Some(size), |bar| {
        to_guest(client, Path::new(&from), "", vm, path, bar)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_with_a_colon_names_a_guest_unless_a_slash_stands_before_the_colon() {
        let guest = Side::Guest {
            vm: "web".into(),
            path: "/a:b".into(),
        };
        assert_eq!(Side::parse("web:/a:b").unwrap(), guest);
        assert_eq!(Side::parse("./a:b").unwrap(), Side::Host("./a:b".into()));
        assert_eq!(Side::parse("-").unwrap(), Side::Standard);
        let error = Side::parse("web:a").unwrap_err().to_string();
        assert!(error.contains("VM:/PATH"), "{error}");
    }
}
