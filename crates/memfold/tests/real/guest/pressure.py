#!/usr/bin/python3
"""Fills anonymous memory with a pattern, waits, checks it, frees it, again: pages that were page cache become something else and
page cache again. Usage: pressure.py MEGABYTES SECONDS; prints "pressure errors N rounds M"."""
import hashlib
import mmap
import sys
import time

PAGE = 4096
pages, seconds = int(sys.argv[1]) << 8, float(sys.argv[2])
errors = rounds = 0
end = time.monotonic() + seconds
while time.monotonic() < end:
    memory = mmap.mmap(-1, pages * PAGE)
    base = hashlib.md5(b"%d" % rounds).digest() * (PAGE // 16 - 1)
    for page in range(pages):
        memory[page * PAGE:(page + 1) * PAGE] = b"%016d" % page + base
    time.sleep(2)
    for page in range(pages):
        if memory[page * PAGE:(page + 1) * PAGE] != b"%016d" % page + base:
            errors += 1
    memory.close()
    rounds += 1
    time.sleep(2)
print("pressure errors %d rounds %d" % (errors, rounds))
