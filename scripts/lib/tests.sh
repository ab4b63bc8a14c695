# shellcheck shell=bash
# What scripts/test and scripts/soak have in common: the environment of tests, their build, and the
# report.

# prepare_tests: checks that they can run, and sets what they read from the environment.
prepare_tests() {
    [[ $(id -u) == 0 ]] || cannot "the real-guest tests need root (userfaultfd, pagemap, KSM). Run: sudo make test"
    MEMFOLD_CACHE=$(memfold_cache)
    [[ -r $MEMFOLD_CACHE/images.json ]] || fail "no guest images in $MEMFOLD_CACHE. Run: make setup"
    NEXTEST=$(nextest_directory)/cargo-nextest
    [[ -x $NEXTEST ]] || fail "cargo-nextest is missing. Run: sudo scripts/setup tests"
    tests_work=$(mktemp -d "${TMPDIR:-/tmp}/memfold-tests.XXXXXX")
    # QEMUs without root's rights read their guests there.
    chmod 755 "$tests_work"
    trap 'rm -rf --one-file-system "$tests_work"' EXIT
    mkdir "$tests_work/warm"
    export MEMFOLD_CACHE
    export MEMFOLD_REAL=1
    # The agent that is in the images.
    export MEMFOLD_AGENT=$PWD/${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/release/memfold-agent
    # Guests of this run only: each shape boots once.
    export MEMFOLD_LAB_WARM=$tests_work/warm
    export MEMFOLD_LAB_GUESTS=$tests_work/guests
    export MEMFOLD_TEST_SKIPS=$tests_work/skips
    : >"$MEMFOLD_LAB_GUESTS"
    : >"$MEMFOLD_TEST_SKIPS"
}

# nextest COMMAND ARGUMENT...: of the whole workspace.
nextest() {
    local command=$1
    shift
    "$NEXTEST" nextest "$command" --workspace "$@"
}

build_tests() {
    # One call for program, library for QEMU and tests: a second one would resolve other features,
    # and compile what they change again.
    as_user cargo build --workspace --all-targets
    if [[ -z ${MEMFOLD_TEST_SLOW:-} ]]; then
        MEMFOLD_TEST_SLOW=$("${CARGO_TARGET_DIR:-target}/debug/slowness")
        export MEMFOLD_TEST_SLOW
    fi
    say "this machine is $MEMFOLD_TEST_SLOW times slower than usual (MEMFOLD_TEST_SLOW)"
}

# report_tests PROFILE: where the time went, guests, skips. Fails for a skip that is not listed.
report_tests() {
    python3 scripts/lib/test-report.py --junit "${CARGO_TARGET_DIR:-target}/nextest/$1/junit.xml" --phases "$MEMFOLD_PHASES" \
        --guests "$MEMFOLD_LAB_GUESTS" --skips "$MEMFOLD_TEST_SKIPS" --allowed scripts/skips.txt --json results/test-times.json
}
