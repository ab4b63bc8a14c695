#!/usr/bin/python3
"""Rewrites, truncates and appends to files whose every page is known, and reads them back: through the page cache, through a
mapping, and past it (O_DIRECT). Two guests with the same seed write the same bytes at about the same time, so the pages are
folded in between. Usage: rewrite.py DIRECTORY SECONDS SEED [STOP]; ends before if there is a file STOP; prints "rewrite errors N operations M"."""
import hashlib
import mmap
import os
import random
import sys
import time

PAGE = 4096
FILES, PAGES, MOST = 6, 512, 768
directory, seconds, seed = sys.argv[1], float(sys.argv[2]), sys.argv[3]
stop = sys.argv[4] if len(sys.argv) > 4 else None
choose = random.Random(seed)
errors = operations = 0


def content(name, page, generation):
    return hashlib.md5(b"%s %s %d %d" % (seed.encode(), name, page, generation)).digest() * (PAGE // 16)


class File:
    def __init__(self, number):
        self.name = b"%d" % number
        self.path = os.path.join(directory, "f%d" % number)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.generations = []
        self.grow(PAGES)

    def grow(self, pages):
        first = len(self.generations)
        self.generations += [0] * pages
        data = b"".join(content(self.name, p, 0) for p in range(first, first + pages))
        assert os.pwrite(self.fd, data, first * PAGE) == len(data)

    def operate(self):
        kind = choose.randrange(10)
        count = choose.randrange(1, 32)
        first = choose.randrange(len(self.generations))
        last = min(first + count, len(self.generations))
        if kind < 5:
            for page in range(first, last):
                self.generations[page] += 1
            data = b"".join(content(self.name, p, self.generations[p]) for p in range(first, last))
            if kind < 3:
                os.pwrite(self.fd, data, first * PAGE)
            else:
                with mmap.mmap(self.fd, len(self.generations) * PAGE) as view:
                    view[first * PAGE:last * PAGE] = data
        elif kind == 5:
            # In the middle of a page: the rest of it stays.
            os.pwrite(self.fd, content(self.name, first, self.generations[first])[100:300], first * PAGE + 100)
        elif kind == 6 and len(self.generations) > 64:
            self.generations = self.generations[:max(64, first)]
            os.ftruncate(self.fd, len(self.generations) * PAGE)
        elif kind == 7 and len(self.generations) < MOST:
            self.grow(count)
        elif kind == 8:
            os.fsync(self.fd)
        else:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self, how):
        global errors
        length = len(self.generations) * PAGE
        if how == "direct":
            os.fsync(self.fd)
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            found = mmap.mmap(-1, length)
            at = 0
            while at < length:
                view = memoryview(found)[at:at + (256 << 10)]
                n = os.preadv(fd, [view], at)
                view.release()
                if n <= 0:
                    break
                at += n
            os.close(fd)
        elif how == "mapped":
            found = mmap.mmap(self.fd, length, prot=mmap.PROT_READ)
        else:
            found = os.pread(self.fd, length, 0)
        if os.fstat(self.fd).st_size != length or len(found) != length:
            errors += 1
            return
        for page, generation in enumerate(self.generations):
            if found[page * PAGE:(page + 1) * PAGE] != content(self.name, page, generation):
                errors += 1
                print("page %d of %s differs (%s)" % (page, self.path, how), file=sys.stderr)
        if how != "read":
            found.close()


os.makedirs(directory, exist_ok=True)
files = [File(n) for n in range(FILES)]
end = time.monotonic() + seconds
while time.monotonic() < end and not (stop and os.path.exists(stop)):
    for _ in range(20):
        choose.choice(files).operate()
        operations += 1
    # Time to be written back and folded, and then to be written over.
    time.sleep(choose.uniform(0.2, 3.0))
    how = choose.choice(["read", "mapped", "direct"])
    for file in files:
        file.check(how)
for how in ("read", "mapped", "direct"):
    for file in files:
        file.check(how)
print("rewrite errors %d operations %d" % (errors, operations))
