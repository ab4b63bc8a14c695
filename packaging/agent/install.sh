#!/bin/sh
# Installs the memfold agent in a guest, as a service of systemd or OpenRC. May be repeated: it
# changes only what differs.
#
#   install.sh              installs or upgrades the agent, and starts it
#   install.sh --uninstall  stops and removes it
#
# Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not possible here.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
program=/usr/local/sbin/memfold-agent
configuration=/etc/memfold/agent.toml
units=/etc/systemd/system
script=/etc/init.d/memfold-agent

say() { printf 'memfold-agent: %s\n' "$*"; }
cannot() {
    printf 'memfold-agent: not possible here: %s\n' "$*" >&2
    exit 3
}
have() { command -v "$1" >/dev/null 2>&1; }

# manager: which of the two runs this system, or will run it, if this is an image.
manager() {
    if [ -d /run/systemd/system ]; then
        echo systemd
    elif have rc-update && [ -x /sbin/openrc-run ]; then
        echo openrc
    elif have systemctl; then
        echo systemd
    else
        echo none
    fi
}

# put FILE PATH MODE: installs a file unless it is there. Sets changed.
changed=no
put() {
    if cmp -s "$1" "$2" && { [ "$3" = 644 ] || [ -x "$2" ]; }; then
        return
    fi
    mkdir -p "${2%/*}"
    # Renamed into place, because a program that runs cannot be written.
    cp "$1" "$2.new"
    chown 0:0 "$2.new"
    chmod "$3" "$2.new"
    mv "$2.new" "$2"
    changed=yes
}

install_agent() {
    built=$here/memfold-agent.$(uname -m)
    [ -e "$built" ] || cannot "this archive has no agent for $(uname -m)"
    "$built" --version >/dev/null || cannot "$built does not run here"
    if [ -e /usr/sbin/memfold-agent ]; then
        cannot "the package memfold-agent is installed. Upgrade it, or remove it first"
    fi
    # The owner of the guest may have written it before.
    if [ ! -e "$configuration" ]; then
        put "$here/agent.toml" "$configuration" 644
    fi
    put "$built" "$program" 755
    case $manager in
        systemd)
            put "$here/memfold-agent.service" "$units/memfold-agent.service" 644
            put "$here/memfold-segments.service" "$units/memfold-segments.service" 644
            systemctl --quiet enable memfold-agent.service memfold-segments.service
            if [ -d /run/systemd/system ]; then
                systemctl daemon-reload
                # systemd runs its ExecStop, which merges what was written, only if it was started.
                systemctl start memfold-segments.service
                if [ $changed = yes ]; then
                    systemctl restart memfold-agent.service
                else
                    systemctl start memfold-agent.service
                fi
            fi
            ;;
        openrc)
            put "$here/memfold-agent.openrc" "$script" 755
            rc-update --quiet add memfold-agent default
            # The file is there once OpenRC has booted this system.
            if [ -e /run/openrc/softlevel ]; then
                if [ $changed = yes ]; then
                    rc-service memfold-agent restart
                else
                    rc-service --ifstopped memfold-agent start
                fi
            fi
            ;;
    esac
    if [ $changed = yes ]; then
        say "installed, as a service of $manager ($("$program" --version))"
    else
        say "nothing to do: $("$program" --version) is installed"
    fi
}

# take_off_segments: merges what was written to laid directories, which would be lost without the
# agent. The program is called directly: systemd does not run the ExecStop of a unit that was never
# started, and 'systemctl stop' succeeds if ExecStop fails.
take_off_segments() {
    # A guest without the directory has had no segment.
    if [ ! -d /var/lib/memfold/segments ] || [ ! -x "$program" ]; then
        return
    fi
    # The host cannot lay a segment again meanwhile.
    if [ -d /run/systemd/system ] && [ -e "$units/memfold-agent.service" ]; then
        systemctl stop memfold-agent.service
    fi
    if ! "$program" --segment-shutdown >/dev/null; then
        if [ -d /run/systemd/system ] && [ -e "$units/memfold-agent.service" ]; then
            systemctl start memfold-agent.service
        fi
        echo "memfold-agent: not removed: what was written to laid directories cannot be merged yet, and would be lost. Fix the cause that the line above names, and run this again" >&2
        exit 1
    fi
}

# use_package: enables and starts the agent of the package memfold-agent, whose configuration stays.
use_package() {
    if have systemctl; then
        systemctl --quiet enable memfold-agent.service memfold-segments.service
        [ ! -d /run/systemd/system ] || systemctl start memfold-segments.service memfold-agent.service
    fi
    say "removed; the agent of the package memfold-agent stays, enabled"
}

uninstall_agent() {
    take_off_segments
    if [ -d /run/systemd/system ]; then
        for unit in memfold-agent memfold-segments; do
            [ ! -e "$units/$unit.service" ] || systemctl stop "$unit.service"
        done
    fi
    for unit in memfold-agent memfold-segments; do
        [ ! -e "$units/$unit.service" ] || systemctl --quiet disable "$unit.service"
        rm -f "$units/$unit.service"
    done
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
    if [ -e "$script" ]; then
        [ ! -e /run/openrc/softlevel ] || rc-service --ifstarted memfold-agent stop
        rc-update --quiet delete memfold-agent default
        rm -f "$script"
    fi
    rm -f "$program"
    # The package's units had the same names as the archive's, which hid them.
    if [ -e /usr/sbin/memfold-agent ]; then
        use_package
        return
    fi
    # A configuration that the owner has written stays.
    if cmp -s "$here/agent.toml" "$configuration"; then
        rm "$configuration"
        rmdir "${configuration%/*}" 2>/dev/null || true
    fi
    say "removed"
}

case ${1:-} in
    '' | --uninstall) [ $# -le 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; } ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
[ "$(id -u)" = 0 ] || cannot "this needs root. Run: sudo sh install.sh"
manager=$(manager)
[ "$manager" != none ] || cannot "neither systemd nor OpenRC is here. Start 'memfold-agent' as root at boot, by your init's own way"
if [ "${1:-}" = --uninstall ]; then
    uninstall_agent
else
    install_agent
fi
