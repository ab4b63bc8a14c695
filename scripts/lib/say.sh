# shellcheck shell=bash
# How the scripts speak: progress to stdout, reasons to stderr, and the exit codes of the memfold
# program.

say() { printf '[memfold] %s\n' "$*"; }

# fail MESSAGE...: something went wrong on the way (1).
fail() {
    printf '[memfold] error: %s\n' "$*" >&2
    exit 1
}

# cannot MESSAGE...: this host, or this user, can't do it (3). The message ends with what would
# change that.
cannot() {
    printf '[memfold] not possible here: %s\n' "$*" >&2
    exit 3
}

# have PROGRAM...: all of them are there ('command -v' is content with one).
have() {
    local program
    for program; do
        command -v "$program" >/dev/null || return
    done
}
