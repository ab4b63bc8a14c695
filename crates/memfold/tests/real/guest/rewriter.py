#!/usr/bin/python3
"""Takes memory, writes to it, checks it and frees it without end, in blocks whose bytes follow from their number; and reads a file
over and over. Usage: rewriter.py PAGES FILE; keeps "errors N rounds M" in /run/rewriter. When there is /run/verify, everything held is
checked, the outcome is in /run/verified, and /run/verify goes."""
import mmap
import os
import random
import sys

PAGE = 4096
SIZES = [1, 3, 16, 64, 300, 1024]
limit, path = int(sys.argv[1]), sys.argv[2]
blocks = []
errors = rounds = held = 0


def content(number, page):
    return (b"%016d%016d" % (number, page)) * (PAGE // 32)


def check(block):
    number, memory = block
    pages = range(len(memory) // PAGE)
    return sum(memory[page * PAGE:(page + 1) * PAGE] != content(number, page) for page in pages)


def check_file():
    with open(path, "rb") as file:
        return sum(file.read(PAGE) != content(0, page) for page in range(256))


def tell(where):
    with open(where + ".new", "w") as out:
        print("errors %d rounds %d" % (errors, rounds), file=out)
    os.rename(where + ".new", where)


with open(path, "wb") as out:
    for page in range(256):
        out.write(content(0, page))
    os.fsync(out.fileno())
while True:
    rounds += 1
    memory = mmap.mmap(-1, random.choice(SIZES) * PAGE)
    for page in range(len(memory) // PAGE):
        memory[page * PAGE:(page + 1) * PAGE] = content(rounds, page)
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
