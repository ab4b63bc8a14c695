# shellcheck shell=bash
# Clean Debian roots, made once and kept as archives in the cache. Needs say.sh, apt.sh, user.sh and
# guest/lib/base.sh.

# clean_root SUITE NAME PACKAGE...: the archive of a root of SUITE with these packages. Another
# NAME, should what is in it change.
clean_root() {
    local suite=$1 name=$2 log cache root lock
    local -a options
    shift 2
    cache=$(memfold_cache)/roots
    mkdir -p "$cache"
    root=$cache/$name.tar
    # Two tests may need the root at once. The second one waits for the first.
    exec {lock}>"$cache/$name.lock"
    flock "$lock"
    if [[ ! -e $root ]]; then
        say "making a root: $name (a minute, once)" >&2
        log=$(mktemp)
        mapfile -t options < <(host_apt_options)
        if ! archives_for "$suite" | grep -v ^deb-src | mmdebstrap --mode=root --variant=minbase --format=tar "${options[@]}" \
            --keyring=/usr/share/keyrings/debian-archive-keyring.gpg --include="$(IFS=,; printf '%s' "$*")" \
            "$suite" "$cache/$name.new.tar" - >"$log" 2>&1; then
            tail -n 20 "$log" >&2
            rm "$log"
            fail "could not make a root of $suite"
        fi
        rm "$log"
        mv "$cache/$name.new.tar" "$root"
        give_back "$cache"
    fi
    exec {lock}>&-
    printf '%s' "$root"
}
