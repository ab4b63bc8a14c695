# shellcheck shell=bash
# cargo and rustc. The distribution's are enough: Debian 13 has 1.85 as rustc, Debian 12 a newer one
# as rustc-web (the toolchain its browsers are built with; it takes the place of the old rustc).

# The workspace's rust-version, as major * 1000 + minor.
rust_oldest=1085
rust_oldest_name=1.85

# rust_version: of the cargo the user would run, as major * 1000 + minor; 0 if there is none that
# works.
rust_version() {
    local line
    line=$(as_user cargo --version 2>/dev/null) && as_user rustc --version >/dev/null 2>&1 || line=''
    if [[ $line =~ ^cargo\ ([0-9]+)\.([0-9]+) ]]; then
        printf '%d' $((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2]))
    else
        printf 0
    fi
}

setup_rust() {
    local version codename
    version=$(rust_version)
    if ((version >= rust_oldest)); then
        say "Rust: there ($(as_user cargo --version))"
        return
    fi
    # One of rustup's stands before the distribution's in PATH: installing packages would change
    # nothing.
    if [[ $version != 0 && $(command -v cargo) != /usr/bin/cargo ]]; then
        cannot "$(command -v cargo) is older than $rust_oldest_name. Run: rustup update stable"
    fi
    codename=$(os_codename)
    [[ -n $codename ]] || cannot "no Rust >= $rust_oldest_name. Install it from https://rustup.rs or your distribution"
    need_root "Rust >= $rust_oldest_name is missing"
    case $codename in
        bookworm)
            # No clippy comes with these: `make lint` needs rustup on Debian 12.
            apt_install rustc-web cargo-web rustfmt-web
            ;;
        *) apt_install rustc cargo rustfmt rust-clippy ;;
    esac
    hash -r
    version=$(rust_version)
    ((version >= rust_oldest)) ||
        cannot "Debian $codename offers no Rust >= $rust_oldest_name from the apt sources of this machine. Install it from https://rustup.rs"
    say "Rust: installed ($(as_user cargo --version))"
}
