# shellcheck shell=bash
# How long each phase of a run takes: a line for each in the file that MEMFOLD_PHASES names, "NAME<TAB>SECONDS".

# begin_phases FILE: begins such a file, unless this script was called by one that has.
begin_phases() {
    [[ -z ${MEMFOLD_PHASES:-} ]] || return 0
    mkdir -p "$(dirname "$1")"
    MEMFOLD_PHASES=$(realpath "$1")
    export MEMFOLD_PHASES
    : >"$MEMFOLD_PHASES"
}

# phase NAME COMMAND...: runs it and notes how long it took. Where `set -e` holds, a command that fails ends the script here.
phase() {
    local name=$1 started=$SECONDS status
    shift
    printf '== %s\n' "$name"
    "$@"
    status=$?
    printf '%s\t%d\n' "$name" $((SECONDS - started)) >>"$MEMFOLD_PHASES"
    return "$status"
}

# show_phases: a table of them.
show_phases() {
    awk -F '\t' 'BEGIN { print "== phases" } { printf "%6d s  %s\n", $2, $1; all += $2 } END { printf "%6d s  in all\n", all }' "$MEMFOLD_PHASES"
}
