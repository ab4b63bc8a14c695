#!/usr/bin/python3
"""Writes every page of a file in shared memory by turns: as it was at first, and otherwise. Whoever runs from a snapshot that was
taken meanwhile has half of the pages as in the snapshot at any moment. Each page is looked at before it is written. Ends when
/run/turns.stop is there, with "errors N rounds M" in /run/turns.done."""
import mmap
import os
import struct
import time

PAGE, PAGES = 4096, 4096
file = os.open("/dev/shm/turns", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, PAGE * PAGES)
memory = mmap.mmap(file, PAGE * PAGES)
turns = [[struct.pack("<Q", 2 * page + turn) for page in range(PAGES)] for turn in (1, 2)]
for page in range(PAGES):
    memory[page * PAGE : (page + 1) * PAGE] = turns[0][page] * (PAGE // 8)
errors = rounds = 0
while not os.path.exists("/run/turns.stop"):
    now, then = turns[rounds % 2], turns[(rounds + 1) % 2]
    for page in range(PAGES):
        at = page * PAGE
        errors += memory[at : at + 8] != now[page]
        memory[at : at + 8] = then[page]
    rounds += 1
    open("/run/turns.ready", "w").close()
    time.sleep(0.5)
for page in range(PAGES):
    at = page * PAGE
    errors += memory[at + 8 : at + PAGE] != turns[0][page] * (PAGE // 8 - 1)
with open("/run/turns.new", "w") as done:
    print("errors", errors, "rounds", rounds, file=done)
os.rename("/run/turns.new", "/run/turns.done")
