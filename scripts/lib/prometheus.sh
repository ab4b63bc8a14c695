# shellcheck shell=bash
# Prometheus for the tests of `GET /metrics` and of the alerts: Debian's package, unpacked into the cache and not installed, because
# installing it starts a service on port 9090.

setup_prometheus() {
    local cache at work
    cache=$(memfold_cache)
    at=$cache/prometheus
    if [[ -x $at/prometheus && -x $at/promtool ]]; then
        say "Prometheus: there ($at)"
        return
    fi
    if [[ -z $(os_codename) ]]; then
        say "Prometheus: unpacked from Debian's package only; tests use the 'prometheus' and 'promtool' in PATH, if they are there"
        return
    fi
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/prometheus.new.XXXXXX")
    # The sandbox user of apt can't write into our directory.
    if ! (cd "$work" && apt-get -q -o APT::Sandbox::User=root download prometheus) >"$work/log" 2>&1; then
        need_root "the package lists of apt don't know prometheus"
        apt_update
        (cd "$work" && apt-get -q -o APT::Sandbox::User=root download prometheus) >"$work/log" 2>&1 ||
            { tail -n 5 "$work/log" >&2; rm -rf "$work"; fail "apt-get could not download prometheus"; }
    fi
    dpkg-deb -x "$work"/prometheus_*.deb "$work/root"
    rm -rf "$at"
    mkdir "$work/bin"
    mv "$work/root/usr/bin/prometheus" "$work/root/usr/bin/promtool" "$work/bin"
    mv "$work/bin" "$at"
    rm -rf "$work"
    give_back "$at"
    say "Prometheus: unpacked ($at)"
}
