"""A program in the place of a QEMU that its guest has taken over: it has QEMU's user, groups and
open files, and tries to reach what belongs to others. Unlike QEMU it is in no seccomp sandbox.
Reads a JSON object from standard input, and prints one JSON object for each attempt."""

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import sys

libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
PIDFD_OPEN, PIDFD_GETFD, PIDFD_SEND_SIGNAL = 434, 438, 424
FALLOC_PUNCH_HOLE = 0x03


def called(result):
    """Turns -1 of the C library into an exception."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def other_memory(function, pid, address):
    bytes_ = ctypes.create_string_buffer(4096)
    own, theirs = Vector(ctypes.addressof(bytes_), 4096), Vector(address, 4096)
    called(function(pid, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0))


def take_descriptors(pid):
    """Copies all descriptors of a process. Returns the numbers of the copies, by the originals'
    targets."""
    pidfd = called(libc.syscall(PIDFD_OPEN, pid, 0))
    copies = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        copies.setdefault(target, called(libc.syscall(PIDFD_GETFD, pidfd, int(name), 0)))
    os.close(pidfd)
    return copies


def facts(pid):
    lines = open(f"/proc/{pid}/status").read().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def become(status):
    """Takes the user and groups of a process."""
    os.setgroups([int(number) for number in status["Groups"].split()])
    os.setresgid(*[int(number) for number in status["Gid"].split()[:3]])
    os.setresuid(*[int(number) for number in status["Uid"].split()[:3]])


def attempt(what, on, work, allowed=False):
    try:
        work()
        result = "done"
    except OSError as error:
        result = errno.errorcode.get(error.errno, str(error.errno))
    print(json.dumps({"what": what, "on": on, "result": result, "allowed": allowed}), flush=True)


def opens(flags):
    return lambda path: lambda: os.close(os.open(path, flags))


def connects(path):
    def connect():
        with socket.socket(socket.AF_UNIX) as to:
            to.connect(path)

    return connect


def main():
    order = json.load(sys.stdin)
    taken, victim, daemon = order["taken"], order["victim"], order["daemon"]
    address = int(open(f"/proc/{victim}/maps").readline().split("-")[0], 16)
    victim_fds = [f"/proc/{victim}/fd/{name}" for name in os.listdir(f"/proc/{victim}/fd")]
    of_store = [path for path in victim_fds if "memfold:" in os.readlink(path)]
    victims_pidfd = called(libc.syscall(PIDFD_OPEN, victim, 0))
    status = facts(taken)
    copies = take_descriptors(taken)
    stores = [number for target, number in copies.items() if "memfold:" in target]
    # SIGCONT reaches every process of one's own session. QEMU leads a session.
    os.setsid()
    become(status)
    read, write, both = opens(os.O_RDONLY), opens(os.O_WRONLY), opens(os.O_RDWR)

    for store in stores:
        path = f"/proc/self/fd/{store}"
        size = os.fstat(store).st_size
        attempt("read through its descriptor", "page store", lambda: os.pread(store, 4096, 0), True)
        attempt("write through its descriptor", "page store", lambda: os.pwrite(store, b"x", 0))
        attempt("open again for writing", "page store", write(path))
        attempt("open again for reading and writing", "page store", both(path))
        attempt("truncate by path", "page store", lambda: os.truncate(path, 0))
        attempt("truncate through its descriptor", "page store", lambda: os.ftruncate(store, 0))
        attempt("punch a hole", "page store", lambda: called(libc.fallocate(store, FALLOC_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(4096))))
        attempt("map for writing", "page store", lambda: mmap.mmap(store, min(size, 4096), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
        attempt("change its mode", "page store", lambda: os.fchmod(store, 0o666))
    for path in of_store:
        attempt("open the victim's descriptor", "page store", write(path))
    for path in order["own"]:
        attempt("open for writing", "own overlay", both(path), True)
    for what, path in order["files"]:
        attempt("open for reading", what, read(path))
        attempt("open for writing", what, write(path))
    attempt("list", "state directory of VMs", lambda: os.listdir(order["vms"]))
    for what, path in order["sockets"]:
        attempt("connect", what, connects(path))
    attempt("open /proc/PID/mem", "victim's memory", both(f"/proc/{victim}/mem"))
    attempt("open /proc/PID/maps", "victim's memory", read(f"/proc/{victim}/maps"))
    attempt("list /proc/PID/fd", "victim's descriptors", lambda: os.listdir(f"/proc/{victim}/fd"))
    attempt("pidfd_getfd", "victim's descriptors", lambda: called(libc.syscall(PIDFD_GETFD, victims_pidfd, 0, 0)))
    attempt("process_vm_readv", "victim's memory", lambda: other_memory(libc.process_vm_readv, victim, address))
    attempt("process_vm_writev", "victim's memory", lambda: other_memory(libc.process_vm_writev, victim, address))
    for who, pid in [("victim", victim), ("daemon", daemon), ("own QEMU", taken)]:
        attempt("ptrace attach", who, lambda: called(libc.ptrace(PTRACE_ATTACH, pid, None, None)))
        attempt("ptrace seize", who, lambda: called(libc.ptrace(PTRACE_SEIZE, pid, None, None)))
    for who, pid in [("victim", victim), ("daemon", daemon)]:
        for name in ["SIGKILL", "SIGSTOP", "SIGCONT"]:
            number = getattr(signal, name)
            attempt(f"kill with {name}", who, lambda: os.kill(pid, number))
    attempt("pidfd_send_signal", "victim", lambda: called(libc.syscall(PIDFD_SEND_SIGNAL, victims_pidfd, 9, None, 0)))
    attempt("prlimit", "victim", lambda: called(libc.prlimit(victim, 7, ctypes.create_string_buffer(16), None)))
    attempt("become root", "host", lambda: os.setuid(0))
    attempt("join root's group", "host", lambda: os.setgroups([0]))
    attempt("open /proc/1/environ", "host", read("/proc/1/environ"))
    attempt("open /dev/userfaultfd", "host", both("/dev/userfaultfd"))
    attempt("switch KSM", "host", write("/sys/kernel/mm/ksm/run"))


main()
