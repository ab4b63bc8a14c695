# shellcheck shell=bash
# What only packages and their tests need. apparmor and checkpolicy have compilers; nothing
# loads a profile or policy on this machine.

packaging_packages=(apparmor checkpolicy debhelper dh-apparmor dpkg-dev gnupg lintian mmdebstrap systemd-container)

setup_packaging() {
    local -a missing
    if [[ -z $(os_codename) ]]; then
        say "packaging: packages are made on Debian only"
        return
    fi
    mapfile -t missing < <(packages_missing "${packaging_packages[@]}")
    if [[ ${#missing[@]} -eq 0 ]]; then
        say "packaging: all there"
        return
    fi
    need_root "packages to install: ${missing[*]}"
    apt_install "${missing[@]}"
    say "packaging: installed"
}
