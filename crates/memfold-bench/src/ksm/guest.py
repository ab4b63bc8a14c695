"""Holds memory in a guest, works with it when asked, and says what that took: seconds, minor and major faults."""

import mmap
import os
import resource
import sys
import time

PAGE = 4096
kind, pages = sys.argv[1], int(sys.argv[2]) << 8
held = mmap.mmap(-1, max(pages, 1) * PAGE)
for page in range(pages):
    # No page twice in one VM; the same in all VMs, or in none.
    held.write(b"%015d\n" % page * 256 if kind == "identical" else os.urandom(PAGE))


def read():
    view = memoryview(held)
    total = sum(view[::PAGE])
    view.release()
    return total


def write():
    # Another byte in every page; what was alike in all VMs is so again.
    for at in range(8, len(held), PAGE):
        held[at] = held[at] + 1 & 255


def primes(below):
    found = 0
    for number in range(3, below, 2):
        divisor = 3
        while divisor * divisor <= number and number % divisor:
            divisor += 2
        found += divisor * divisor > number
    return found


def work(what, times):
    if what == "primes":
        return primes(times)
    for _ in range(times):
        {"read": read, "write": write}[what]()


for fifo in ("/run/ask", "/run/answer"):
    os.mkfifo(fifo)
open("/run/held", "w").close()
while kind == "busy":
    primes(20000)
while True:
    with open("/run/ask") as ask:
        what, times = ask.readline().split()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    work(what, int(times))
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
    with open("/run/answer", "w") as answer:
        print(took, after.ru_minflt - before.ru_minflt, after.ru_majflt - before.ru_majflt, file=answer)
