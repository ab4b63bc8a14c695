#!/usr/bin/python3
"""Takes memory, writes to it, checks it and frees it without end, in blocks whose bytes follow from their number; and reads a file
over and over. Usage: rewriter.py PAGES FILE [PAUSE in seconds after each block]; keeps "errors N rounds M" in /run/rewriter. When there is /run/verify, everything held is
checked, the outcome is in /run/verified, and /run/verify goes."""
import mmap
import os
import random
import sys
import time

PAGE = 4096
SIZES = [1, 16, 300, 2000, 4000]
limit, path = int(sys.argv[1]), sys.argv[2]
pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0
blocks = []
errors = rounds = held = 0


def content(number, pages):
    # The same in all pages of a block: as fast as memory goes, so that much is taken between any
    # two moments.
    return (b"%032d" % number) * (PAGE // 32) * pages


def check(block):
    number, memory = block
    if memory[:] == content(number, len(memory) // PAGE):
        return 0
    one = content(number, 1)
    return sum(memory[at:at + PAGE] != one for at in range(0, len(memory), PAGE))


def check_file():
    with open(path, "rb") as file:
        return sum(file.read(PAGE) != content(page, 1) for page in range(256))


def tell(where):
    with open(where + ".new", "w") as out:
        print("errors %d rounds %d" % (errors, rounds), file=out)
    os.rename(where + ".new", where)


with open(path, "wb") as out:
    for page in range(256):
        out.write(content(page, 1))
    os.fsync(out.fileno())
while True:
    rounds += 1
    memory = mmap.mmap(-1, random.choice(SIZES) * PAGE)
    memory[:] = content(rounds, len(memory) // PAGE)
    blocks.append((rounds, memory))
    held += len(memory) // PAGE
    while held > limit:
        block = blocks.pop(random.randrange(len(blocks)))
        errors += check(block)
        held -= len(block[1]) // PAGE
        block[1].close()
    if rounds % 16 == 0:
        errors += check_file()
        tell("/run/rewriter")
    if os.path.exists("/run/verify"):
        errors += sum(map(check, blocks)) + check_file()
        tell("/run/verified")
        os.unlink("/run/verify")
    if pause:
        time.sleep(pause)
