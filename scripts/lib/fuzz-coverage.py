"""Prints which share of each parser's lines ran, for scripts/fuzz-coverage.

Arguments: [--missing] DIRECTORY SUBJECT... DIRECTORY has SUBJECT.lcov for each subject.
"""

import re
import sys
from pathlib import Path

CRATES = Path("crates")
TABLE = Path("crates/memfold-fuzz/src/subjects.rs").read_text()


def parser_of(subject: str) -> list[str]:
    """Returns the parts of a subject's parser: FILE or FILE:FUNCTION,... (or a type's name)."""
    found = re.search(rf"^    {subject}: [^;]*?\[([^\]]*)\];", TABLE, re.M)
    assert found, f"subjects.rs has no parser of {subject}"
    return re.findall(r'"([^"]+)"', found[1])


def lines_of(file: str, functions: set[str]) -> set[int]:
    """Returns the lines of functions and of types' impl blocks, or of a file before its tests."""
    text = (CRATES / file).read_text().split("\n")
    end = next((at for at, line in enumerate(text) if line.startswith("#[cfg(test)]")), len(text))
    if not functions:
        return set(range(1, end + 1))
    lines, found = set(), set()
    for at, line in enumerate(text[:end]):
        named = re.match(r"( *)(?:pub(?:\([a-z]+\))? )?(?:const )?(?:async )?fn (\w+)", line)
        named = named or re.match(r"( *)impl.* (\w+)(?:<.*>)? \{", line)
        if not named or named[2] not in functions:
            continue
        found.add(named[2])
        # As rustfmt writes it, a function ends at the first brace that is indented as it is.
        last = next(n for n in range(at, end) if text[n].rstrip() == named[1] + "}" or (n == at and text[n].endswith("}")))
        lines.update(range(at + 1, last + 2))
    assert found == functions, f"{file} has no function {functions - found}"
    return lines


def main() -> None:
    """Prints the table."""
    arguments = sys.argv[1:]
    missing = arguments[0] == "--missing"
    directory, subjects = Path(arguments[missing]), arguments[missing + 1 :]
    low = 0
    for subject in subjects:
        counts: dict[str, dict[int, int]] = {}
        file = ""
        for line in (directory / f"{subject}.lcov").read_text().split("\n"):
            if line.startswith("SF:"):
                file = line.rpartition("/crates/")[2]
            elif line.startswith("DA:"):
                number, count = line[3:].split(",")[:2]
                counts.setdefault(file, {})[int(number)] = int(count)
        ran = total = 0
        left = []
        for part in parser_of(subject):
            name, _, functions = part.partition(":")
            wanted = lines_of(name, set(functions.split(",")) if functions else set())
            for number, count in counts.get(name, {}).items():
                if number in wanted:
                    total += 1
                    ran += count > 0
                    if not count:
                        left.append(f"{name}:{number}")
        share = 100 * ran / total if total else 100
        low += share < 85
        said = (directory / f"{subject}.log").read_text()
        inputs = re.search(rf"{subject}: (\d+) inputs, (\d+)", said)
        print(f"{subject:18} {ran:5} of {total:5} lines {share:5.1f} %  {inputs[1] if inputs else '?':>9} inputs")
        if missing and left:
            print("    " + " ".join(left[:60]))
    print(f"{low} of {len(subjects)} subjects are below 85 %")


main()
