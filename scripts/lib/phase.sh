# shellcheck shell=bash
# How long each phase of a run takes: a line for each in the file that MEMFOLD_PHASES names,
# "NAME<TAB>SECONDS".

# begin_phases FILE: begins such a file, unless this script was called by one that has.
begin_phases() {
    [[ -z ${MEMFOLD_PHASES:-} ]] || return 0
    mkdir -p "$(dirname "$1")"
    MEMFOLD_PHASES=$(realpath "$1")
    export MEMFOLD_PHASES
    : >"$MEMFOLD_PHASES"
}

# phase NAME COMMAND...: runs it and notes how long it took. Where `set -e` holds, a command that
# fails ends the script here.
phase() {
    local name=$1 started=$SECONDS status
    shift
    printf '== %s\n' "$name"
    "$@"
    status=$?
    printf '%s\t%d\n' "$name" $((SECONDS - started)) >>"$MEMFOLD_PHASES"
    return "$status"
}

# show_phases: a table of them; what ran twice is added up.
show_phases() {
    awk -F '\t' '
        !($1 in seconds) { names[++count] = $1 }
        { seconds[$1] += $2; all += $2 }
        END {
            print "== phases"
            for (at = 1; at <= count; at++) printf "%6d s  %s\n", seconds[names[at]], names[at]
            printf "%6d s  in all\n", all
        }' "$MEMFOLD_PHASES"
}
