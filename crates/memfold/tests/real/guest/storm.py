"""Holds memory of which every page is known, and rewrites all of it, at a steady rate, when it is told to.

storm.py MIB MIB_PER_SECOND: /run/held is there once it is held; /run/rewrite begins (at another rate, if it names one); /run/rewritten says how many pages were wrong.
"""
import os
import sys
import time

PAGE = 4096
pages = (int(sys.argv[1]) << 20) // PAGE
rate = (int(sys.argv[2]) << 20) // PAGE
tile = os.urandom(PAGE - 8)
held = bytearray(pages * PAGE)
for page in range(pages):
    held[page * PAGE:(page + 1) * PAGE] = page.to_bytes(8, "little") + tile
open("/run/held", "w").write("held")
while not os.path.exists("/run/rewrite"):
    time.sleep(0.1)
told = open("/run/rewrite").read().strip()
rate = (int(told) << 20) // PAGE if told else rate
began = time.monotonic()
for page in range(pages):
    at = page * PAGE
    held[at:at + 8] = (page + 1).to_bytes(8, "little")
    if page % 256 == 0:
        time.sleep(max(0.0, began + page / rate - time.monotonic()))
took = time.monotonic() - began
wrong = sum(
    held[page * PAGE:page * PAGE + 8] != (page + 1).to_bytes(8, "little")
    or held[page * PAGE + 8:(page + 1) * PAGE] != tile
    for page in range(pages)
)
open("/run/rewritten.new", "w").write(f"wrong {wrong} of {pages} in {took:.1f} s")
os.rename("/run/rewritten.new", "/run/rewritten")
while True:
    time.sleep(3600)
