# shellcheck shell=bash
# `sudo make setup` works for the user who typed it: the cache lies in their home and belongs to them.

# memfold_cache: where guest images are kept. The memfold program looks at the same place.
memfold_cache() {
    local home=$HOME
    if [[ $(id -u) == 0 && -n ${SUDO_USER:-} ]]; then
        home=$(getent passwd "$SUDO_USER" | cut -d: -f6)
    fi
    printf '%s' "${MEMFOLD_CACHE:-${XDG_CACHE_HOME:-$home/.cache}/memfold}"
}

# as_user COMMAND...: without sudo's rights where sudo gave them, so that cargo leaves no root-owned files.
as_user() {
    if [[ $(id -u) == 0 && -n ${SUDO_USER:-} && $SUDO_USER != root ]]; then
        runuser -u "$SUDO_USER" -- env HOME="$(getent passwd "$SUDO_USER" | cut -d: -f6)" PATH="$PATH" "$@"
    else
        "$@"
    fi
}

# give_back PATH: what sudo made belongs to who ran sudo.
give_back() {
    [[ $(id -u) == 0 && -n ${SUDO_UID:-} && $SUDO_UID != 0 ]] || return 0
    chown -R --from=root "$SUDO_UID:${SUDO_GID:-$SUDO_UID}" "$1"
}
