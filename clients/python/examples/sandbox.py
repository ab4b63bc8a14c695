#!/usr/bin/env python3
"""Runs untrusted Python programs, each in a clone of its own.

sandbox.py SNAPSHOT FILE...     prints a line for each program: exit code, seconds, output

The guest needs memfold's agent and python3. Whatever a program does to its guest is gone with it.
"""

import sys
import time
from pathlib import Path

import memfold

LIMIT_S = 30.0


def run_untrusted(client: memfold.Client, snapshot: str, program: str) -> tuple[int, str]:
    """Returns exit code and output of a program, which ran in a new clone."""
    with client.clone(snapshot) as vm:
        done = vm.exec(["python3", "-c", program], timeout_s=LIMIT_S)
    return done.code, done.stdout + done.stderr


def main(snapshot: str, *files: str) -> None:
    client = memfold.Client()
    for file in files:
        began = time.monotonic()
        code, output = run_untrusted(client, snapshot, Path(file).read_text())
        print(f"{file}: exit code {code} after {time.monotonic() - began:.1f} s: {output.strip()}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
