"""Reads and writes single pages of cached files, and prints what each kind of access takes in the middle, in microseconds.

guest.py fill FILE PAGES SEED    a file whose every page is another; the same for the same seed, random bytes without one
guest.py FILE:KIND... PAGES      a line for each slice of the file's pages: what each KIND (read, write) took in the middle
"""

import os
import random
import sys
import time

SLICES = 4


def fill(path, pages, seed):
    chance = random.Random(seed) if seed else None
    with open(path, "wb") as file:
        for _ in range(pages):
            file.write(chance.randbytes(4096) if chance else os.urandom(4096))
        file.flush()
        os.fsync(file.fileno())
    # What was written is read anew: its pages are clean, and their places in memory are reported.
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(1 << 20):
            pass


def touch(file, kind, pages):
    now, times = time.perf_counter_ns, []
    for page in pages:
        begun = now()
        if kind == "write":
            os.pwrite(file, b"x", page << 12)
        else:
            os.pread(file, 1, page << 12)
        times.append(now() - begun)
    return sorted(times)[len(times) // 2] / 1000


if sys.argv[1] == "fill":
    fill(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
else:
    kinds = [word.rsplit(":", 1) for word in sys.argv[1:-1]]
    files = [(os.open(path, os.O_RDWR), kind) for path, kind in kinds]
    part = int(sys.argv[-1]) // SLICES
    for number in range(SLICES):
        print(*(touch(file, kind, range(number * part, (number + 1) * part)) for file, kind in files))
