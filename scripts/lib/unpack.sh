# shellcheck shell=bash
# Servers that tests run by themselves: Debian's packages, unpacked into the cache and not
# installed, because installing them starts a service.

# unpack_server NAME PACKAGE PROGRAM...: the programs into the cache's directory NAME.
unpack_server() {
    local name=$1 package=$2 cache at work program
    shift 2
    cache=$(memfold_cache)
    at=$cache/$name
    for program; do
        [[ -x $at/$program ]] || break
    done
    if [[ -x $at/$program ]]; then
        say "$name: there ($at)"
        return
    fi
    if [[ -z $(os_codename) ]]; then
        say "$name: unpacked from Debian's package only; tests use what is in PATH of: $*"
        return
    fi
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/$name.new.XXXXXX")
    # The sandbox user of apt can't write into our directory.
    if ! (cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$package") >"$work/log" 2>&1; then
        need_root "the package lists of apt don't know $package"
        apt_update
        (cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$package") >"$work/log" 2>&1 ||
            { tail -n 5 "$work/log" >&2; rm -rf "$work"; fail "apt-get could not download $package"; }
    fi
    dpkg-deb -x "$work/$package"_*.deb "$work/files"
    rm -rf "$at"
    mkdir "$work/bin"
    for program; do
        mv "$work"/files/usr/*bin/"$program" "$work/bin"
    done
    mv "$work/bin" "$at"
    rm -rf "$work"
    give_back "$at"
    say "$name: unpacked ($at)"
}

# For GET /metrics and the alerts.
setup_prometheus() { unpack_server prometheus prometheus prometheus promtool; }

# For the registry of leases in a cluster.
setup_etcd() { unpack_server etcd etcd-server etcd; }

# For the dashboard behind a reverse proxy.
setup_proxies() {
    unpack_server nginx nginx nginx
    unpack_server caddy caddy caddy
}
