//! The virtio-serial port through which the agent in the guest talks to the daemon, and the queue
//! of messages that wait to be sent.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use memfold_wire::agent::{FromAgent, PORT_NAME, ToAgent};
use memfold_wire::{Decoder, FrameError, encode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

/// Size of the send queue in bytes. If a message does not fit, it is not added.
const LIMIT: usize = 1 << 20;
/// Number of bytes in the send queue above which messages about events are dropped.
const EVENTS_LIMIT: usize = LIMIT / 2;
/// Number of bytes in the send queue above which messages that can wait (inventory) are not added.
const QUIET_LIMIT: usize = 128 << 10;
/// Number of bytes after which received messages are carried out before more are read.
const RECEIVE_LIMIT: usize = 64 << 10;

/// Finds the device file of the agent's virtio-serial port, by udev's link or by the port names in
/// sysfs; `None` if there is no such port.
pub fn find() -> Option<PathBuf> {
    find_under(Path::new("/"))
}

fn find_under(root: &Path) -> Option<PathBuf> {
    let link = root.join("dev/virtio-ports").join(PORT_NAME);
    if link.exists() {
        return Some(link);
    }
    fs::read_dir(root.join("sys/class/virtio-ports"))
        .ok()?
        .filter_map(Result::ok)
        .find(|e| {
            fs::read_to_string(e.path().join("name")).is_ok_and(|n| n.trim_end() == PORT_NAME)
        })
        .map(|e| root.join("dev").join(e.file_name()))
}

/// The open virtio-serial port to the daemon, with its send queue.
#[derive(Debug)]
pub struct Port {
    file: File,
    decoder: Decoder,
    waiting: Vec<u8>,
    sent: usize,
    /// Number of bytes at the beginning of `waiting` up to the end of the last answer to a command.
    answered: usize,
}

impl Port {
    /// Opens the port's device file `path`.
    ///
    /// # Errors
    ///
    /// `EBUSY` if another process has opened the port.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        // If this fails, only a quick reconnect of the host side goes unnoticed.
        let _ = memfold_sys::guest::signal_changes(&file);
        Ok(Self {
            file,
            decoder: Decoder::new(),
            waiting: Vec::new(),
            sent: 0,
            answered: 0,
        })
    }

    /// Returns whether the host side of the port is open.
    pub fn host_is_there(&self) -> bool {
        let closed = PollFlags::HUP | PollFlags::ERR;
        self.events()
            .is_some_and(|events| !events.intersects(closed))
    }

    /// Returns whether data can be read from the port.
    pub fn has_input(&self) -> bool {
        let events = self.events();
        events.is_some_and(|events| events.contains(PollFlags::IN))
    }

    fn events(&self) -> Option<PollFlags> {
        let mut set = [PollFd::new(&self.file, PollFlags::IN | PollFlags::OUT)];
        poll(&mut set, Some(&Timespec::default())).ok()?;
        Some(set[0].revents())
    }

    /// Drops all data of an earlier connection, in the send queue and in the port.
    pub fn begin(&mut self) {
        self.decoder = Decoder::new();
        self.waiting = Vec::new();
        (self.sent, self.answered) = (0, 0);
        let mut scrap = [0; 4096];
        while self.file.read(&mut scrap).is_ok_and(|n| n > 0) {}
    }

    /// Reads data that the daemon has sent, at most 64 KiB. Returns the number of bytes; 0 if there
    /// was none.
    pub fn receive(&mut self) -> io::Result<usize> {
        let mut received = 0;
        // The kernel returns at most 4 KiB at once (`fill_readbuf` in virtio_console.c).
        let mut buffer = [0; 4096];
        while received < RECEIVE_LIMIT {
            match self.file.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    self.decoder.push(&buffer[..n]);
                    received += n;
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    break;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(received)
    }

    /// Returns the next complete message from the daemon; `None` if there is none.
    pub fn order(&mut self) -> Result<Option<ToAgent>, FrameError> {
        self.decoder.next()
    }

    /// Adds a message to the send queue. Returns false if the queue has no space for the message.
    pub fn push(&mut self, message: &FromAgent) -> bool {
        let event = matches!(
            message,
            FromAgent::Hints(_) | FromAgent::Gone(_) | FromAgent::Dirty(_) | FromAgent::Clean(_)
        );
        let limit = if event { EVENTS_LIMIT } else { LIMIT };
        if self.backlog() > limit {
            return false;
        }
        let Ok(frame) = encode(message) else {
            return false;
        };
        if self.sent > 0 {
            self.waiting.drain(..self.sent);
            self.answered = self.answered.saturating_sub(self.sent);
            self.sent = 0;
        }
        self.waiting.extend(frame);
        if matches!(message, FromAgent::Output { .. } | FromAgent::Exited { .. }) {
            self.answered = self.waiting.len();
        }
        true
    }

    /// Returns the number of bytes in the send queue.
    pub fn backlog(&self) -> usize {
        self.waiting.len() - self.sent
    }

    /// Returns whether the send queue has space for messages that can wait (inventory).
    pub fn has_room(&self) -> bool {
        self.backlog() < QUIET_LIMIT
    }

    /// Returns whether the send queue has space for answers to commands. However many events there
    /// are, one answer always has a place.
    pub fn has_room_for_answer(&self) -> bool {
        self.has_room() || (self.answered <= self.sent && self.backlog() < LIMIT)
    }

    /// Returns whether the send queue is so long that messages about page cache events are dropped.
    pub fn is_full(&self) -> bool {
        self.backlog() > EVENTS_LIMIT
    }

    /// Writes as much of the send queue as the port accepts without blocking.
    pub fn send(&mut self) -> io::Result<()> {
        while self.backlog() > 0 {
            match self.file.write(&self.waiting[self.sent..]) {
                Ok(0) => return Ok(()),
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        (self.sent, self.answered) = (0, 0);
        self.waiting.clear();
        self.waiting.shrink_to(QUIET_LIMIT);
        Ok(())
    }

    /// Returns the port's entry for `poll`: it waits for input and, if the send queue is not empty,
    /// for space to write.
    pub fn poll_fd(&self) -> PollFd<'_> {
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, self.backlog() > 0);
        PollFd::new(&self.file, flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_virtio_serial_port_of_the_agent_is_found_by_its_name_in_sysfs() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(find_under(root.path()), None);
        for (port, name) in [
            ("vport1p1", "org.qemu.guest_agent.0"),
            ("vport1p2", PORT_NAME),
        ] {
            let directory = root.path().join("sys/class/virtio-ports").join(port);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("name"), format!("{name}\n")).unwrap();
        }
        assert_eq!(
            find_under(root.path()),
            Some(root.path().join("dev/vport1p2"))
        );
    }

    #[test]
    fn the_send_queue_of_the_agent_stays_bounded_while_the_host_does_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut port = Port::open(file.path()).unwrap();
        let message = FromAgent::Gone(vec![
            memfold_wire::agent::PfnRun {
                pfn: 1 << 40,
                pages: 1
            };
            4096
        ]);
        let taken = (0..1000).filter(|_| port.push(&message)).count();
        assert!(taken > 10 && port.backlog() < LIMIT);
        assert!(port.push(&FromAgent::InventoryBegin));
        // One answer to a command has a place, and no more until it is sent.
        assert!(!port.has_room() && port.has_room_for_answer());
        let (command, code) = (1, 0);
        assert!(port.push(&FromAgent::Exited { command, code }));
        assert!(!port.has_room_for_answer());
        port.send().unwrap();
        assert_eq!(port.backlog(), 0);
        assert!(port.has_room_for_answer());
    }
}
