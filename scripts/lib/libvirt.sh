# shellcheck shell=bash
# libvirt for the tests, which start a libvirtd of their own. Nothing is started here.

libvirt_packages=(libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients)

setup_libvirt() {
    local -a missing
    if [[ -z $(os_codename) ]]; then
        say "libvirt: tests use the 'libvirtd' and 'virsh' in PATH, if they are there"
        return
    fi
    mapfile -t missing < <(packages_missing "${libvirt_packages[@]}")
    if [[ ${#missing[@]} -eq 0 ]]; then
        say "libvirt: all there"
        return
    fi
    need_root "packages to install: ${missing[*]}"
    apt_install_unstarted "${missing[@]}"
    say "libvirt: installed, and not started"
}
