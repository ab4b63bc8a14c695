#!/usr/bin/python3
"""Plays an agent that lies: writes the cases of the disk /dev/vdb to the agent's port, each on a connection of its own, round and
round for SECONDS. The disk: for each case its length in bytes as 8 bytes, little-endian, then the bytes; a length of 0 ends.
Usage: lie.py SECONDS; prints the cases and bytes written to /run/lies."""
import os
import select
import struct
import sys
import time

PORT = "/dev/virtio-ports/org.memfold.agent.0"
end = time.monotonic() + float(sys.argv[1])
cases = []
with open("/dev/vdb", "rb") as disk:
    while True:
        (length,) = struct.unpack("<Q", disk.read(8))
        if length == 0:
            break
        cases.append(disk.read(length))
played = written = 0
while time.monotonic() < end:
    for case in cases:
        try:
            fd = os.open(PORT, os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.2)
            continue
        at, last = 0, time.monotonic()
        # Four seconds without progress: the host has closed its side, or won't read any more. Then
        # the next lie.
        while at < len(case) and time.monotonic() < last + 4:
            ready, room, _ = select.select([fd], [fd], [], 0.2)
            try:
                if ready:
                    os.read(fd, 65536)
                if room:
                    at += os.write(fd, case[at:at + 4096])
                    last = time.monotonic()
            except OSError:
                time.sleep(0.05)
        written += at
        played += 1
        time.sleep(0.3)
        os.close(fd)
        if time.monotonic() > end:
            break
with open("/run/lies", "w") as out:
    print("played", played, "of", len(cases), "kinds,", written, "bytes", file=out)
