#!/usr/bin/python3
"""Writes blocks of disks past the page cache and keeps in memory what each holds. Restored from memory and disks of one instant, it
finds every block as it wrote it. Usage: disk.py PAUSE DEVICE..., with the pause after each block in seconds; on /run/disk.check it reads
all blocks and leaves "errors N operations M" in /run/disk.checked."""
import mmap
import os
import random
import struct
import sys
import time

PAGE, BLOCKS, APART = 4096, 512, 20
devices = [os.open(path, os.O_RDWR | os.O_DIRECT) for path in sys.argv[2:]]
pause = float(sys.argv[1])
written = [[0] * BLOCKS for _ in devices]
buffer = mmap.mmap(-1, PAGE)
choose = random.Random(7)
errors = operations = 0


def content(device, block):
    generation = written[device][block]
    return struct.pack("<QQ", generation, block) * (PAGE // 16) if generation else bytes(PAGE)


def check(device, block):
    global errors
    os.preadv(devices[device], [buffer], block * APART * PAGE)
    errors += buffer[:] != content(device, block)


while True:
    operations += 1
    device, block = choose.randrange(len(devices)), choose.randrange(BLOCKS)
    if operations % 4 == 0:
        check(device, block)
    else:
        written[device][block] = operations
        buffer[:] = content(device, block)
        os.pwritev(devices[device], [buffer], block * APART * PAGE)
    if os.path.exists("/run/disk.check"):
        for device in range(len(devices)):
            for block in range(BLOCKS):
                check(device, block)
        with open("/run/disk.checked", "w") as out:
            print("errors", errors, "operations", operations, file=out)
        os.remove("/run/disk.check")
    time.sleep(pause)
