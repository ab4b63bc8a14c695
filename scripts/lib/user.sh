# shellcheck shell=bash
# `sudo make setup` works for the user who typed it: the cache lies in their home and belongs to
# them.

# user_home: of the person who runs this, sudo or not.
user_home() {
    if [[ $(id -u) == 0 && -n ${SUDO_USER:-} ]]; then
        getent passwd "$SUDO_USER" | cut -d: -f6
    else
        printf '%s' "$HOME"
    fi
}

# memfold_cache: where guest images are kept. The memfold program looks at the same place.
memfold_cache() { printf '%s' "${MEMFOLD_CACHE:-${XDG_CACHE_HOME:-$(user_home)/.cache}/memfold}"; }

# as_user COMMAND...: without sudo's rights where sudo gave them, so that cargo leaves no root-owned
# files.
as_user() {
    if [[ $(id -u) == 0 && -n ${SUDO_USER:-} && $SUDO_USER != root ]]; then
        runuser -u "$SUDO_USER" -- env HOME="$(user_home)" PATH="$PATH" "$@"
    else
        "$@"
    fi
}

# A toolchain of rustup's lies in the user's home, where sudo's PATH and HOME don't lead.
if [[ -x $(user_home)/.cargo/bin/cargo ]]; then
    PATH=$(user_home)/.cargo/bin:$PATH
    export CARGO_HOME=${CARGO_HOME:-$(user_home)/.cargo} RUSTUP_HOME=${RUSTUP_HOME:-$(user_home)/.rustup}
fi

# give_back PATH: what sudo made belongs to who ran sudo.
give_back() {
    [[ $(id -u) == 0 && -n ${SUDO_UID:-} && $SUDO_UID != 0 ]] || return 0
    chown -R --from=root "$SUDO_UID:${SUDO_GID:-$SUDO_UID}" "$1"
}
