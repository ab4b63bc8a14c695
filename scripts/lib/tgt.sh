# shellcheck shell=bash
# tgt for the tests, which start a tgtd for each lease. Its service, which would listen for all
# hosts, is not started.

setup_tgt() {
    if [[ -z $(os_codename) ]]; then
        say "tgt: tests use the 'tgtd' in PATH, if it is there"
        return
    fi
    if [[ -z $(packages_missing tgt) ]]; then
        say "tgt: there"
        return
    fi
    need_root "package to install: tgt"
    apt_install_unstarted tgt
    say "tgt: installed, and not started"
}
