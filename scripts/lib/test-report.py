#!/usr/bin/env python3
"""Where the time of a test run went: phases, test programs, the slowest tests; guests; skips. Also as JSON, so that two runs can be compared.

Exits with 1 if a test skipped that the list of allowed skips does not name.
"""

import argparse
import fnmatch
import json
import sys
import xml.etree.ElementTree as tree
from collections import defaultdict
from pathlib import Path

SLOWEST = 20


def lines(path):
    return [line.split("\t") for line in Path(path).read_text().splitlines() if line.strip()]


def read_tests(path):
    """(program, test, seconds, passed) of each test that ran."""
    found = []
    for case in tree.parse(path).getroot().iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        found.append((case.get("classname"), case.get("name"), float(case.get("time")), not failed))
    return found


def read_flaky(path):
    """Tests that failed first and passed when they were run again."""
    cases = tree.parse(path).getroot().iter("testcase")
    return [case.get("name") for case in cases if case.find("flakyFailure") is not None]


def read_allowed(path):
    """Pattern of a test's name -> why it may skip. Each line is `PATTERN  REASON`."""
    allowed = {}
    for line in Path(path).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, reason = line.split(maxsplit=1)
            allowed[pattern] = reason
    return allowed


def table(title, rows):
    print(f"== {title}")
    for row in rows:
        print(row)


def main():
    parser = argparse.ArgumentParser()
    for name in ["junit", "phases", "guests", "skips", "allowed", "json"]:
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()

    tests = read_tests(options.junit)
    # A phase that ran twice (setup does, and finds all done) is told once.
    phases = defaultdict(int)
    for name, seconds in lines(options.phases):
        phases[name] += int(seconds)
    programs = defaultdict(lambda: [0, 0.0])
    for program, _, seconds, _ in tests:
        programs[program][0] += 1
        programs[program][1] += seconds
    slowest = sorted(tests, key=lambda test: -test[2])[:SLOWEST]
    guests = defaultdict(list)
    for how, _, seconds in lines(options.guests):
        guests[how].append(float(seconds))
    skips = [(test, reason) for test, reason in lines(options.skips)]
    allowed = read_allowed(options.allowed)
    listed = lambda test: any(fnmatch.fnmatchcase(test, pattern) for pattern in allowed)
    unlisted = [skip for skip in skips if not listed(skip[0])]

    table("phases", [f"{seconds:6} s  {name}" for name, seconds in phases.items()])
    ordered = sorted(programs.items(), key=lambda program: -program[1][1])
    table(
        "test programs: tests, and their seconds added up (tests run beside each other)",
        [f"{seconds:8.1f} s  {count:4}  {name}" for name, (count, seconds) in ordered],
    )
    table(
        f"the {len(slowest)} slowest tests",
        [f"{seconds:8.1f} s  {program}  {name}" for program, name, seconds, _ in slowest],
    )
    table(
        "guests",
        [
            f"{len(took):4} {how}, {min(took):.1f} / {sorted(took)[len(took) // 2]:.1f} / {max(took):.1f} s (min, median, max)"
            for how, took in sorted(guests.items())
        ],
    )
    table("skipped", [f"{test}: {reason}{'' if listed(test) else '  (NOT LISTED)'}" for test, reason in skips])
    flaky = read_flaky(options.junit)
    table("passed only when run again", flaky)
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(
        json.dumps(
            {
                "phases_s": phases,
                "programs": {name: {"tests": count, "seconds": round(s, 3)} for name, (count, s) in ordered},
                "tests_s": {f"{program} {name}": round(s, 3) for program, name, s, _ in sorted(tests)},
                "guests": {how: len(took) for how, took in guests.items()},
                "flaky": flaky,
                "skips": [{"test": test, "reason": reason, "listed": listed(test)} for test, reason in skips],
            },
            indent=1,
        )
        + "\n"
    )
    failed = sum(not passed for *_, passed in tests)
    print(f"[memfold] tests: {len(tests) - failed} passed, {failed} failed, {len(flaky)} flaky, {len(skips)} skips of which {len(skips) - len(unlisted)} are listed")
    if unlisted:
        sys.exit("[memfold] error: a test skipped that scripts/skips.txt does not list (MEMFOLD_REAL=1): " + "; ".join(t for t, _ in unlisted))
    if not tests:
        sys.exit("[memfold] error: no test ran")


if __name__ == "__main__":
    main()
