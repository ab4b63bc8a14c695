# shellcheck shell=bash
# What the scripts ask of apt. Mirrors are never written in this repository: their addresses come
# from the apt sources of the machine, parsed by apt itself (`apt-get indextargets` reads *.sources
# and *.list alike).

# os_codename: "bookworm", "trixie", ...; empty if this isn't Debian.
os_codename() {
    (
        ID='' VERSION_CODENAME=''
        # shellcheck source=/dev/null
        [[ -r /etc/os-release ]] && source /etc/os-release
        [[ $ID == debian ]] && printf '%s' "$VERSION_CODENAME"
        true
    )
}

# apt_archives: "URI SUITE COMPONENT ORIGIN", a line for each binary archive in the machine's apt
# sources. Without package lists there is no ORIGIN.
apt_archives() {
    # The $() are apt's, not the shell's.
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)' 'Created-By: Packages' 'Target-Of: deb' | sort -u
}

# apt_has_suite SUITE
apt_has_suite() { apt_archives | awk -v s="$1" '$2 == s { found = 1 } END { exit !found }'; }

# debian_mirror CODENAME: the URI this machine's main Debian archive comes from; empty if there is
# none. Archives of others may have the same suite.
debian_mirror() {
    apt_archives | awk -v c="$1" '
        $3 == "main" && ($2 == c || $2 ~ /^(old)*stable$/) && ($4 == "Debian" || $4 == "") {
            rank = 1 + ($2 == c) + 2 * ($4 == "Debian")
            if (rank > best) { best = rank; uri = $1 }
        }
        END { if (best) print uri }'
}

# packages_missing PACKAGE...: those that are not installed, one a line.
packages_missing() {
    local have
    have=$(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^ii  *//p') || true
    comm -23 <(printf '%s\n' "$@" | sort -u) <(sort -u <<<"$have")
}

# need_root WHAT...: stop here, with the command to run, unless we are root.
need_root() {
    local front='make setup'
    [[ $(id -u) == 0 ]] && return
    command -v make >/dev/null || front=scripts/setup
    cannot "$*: that needs root. Run: sudo $front"
}

apt_update_done=no
apt_update() {
    [[ $apt_update_done == yes ]] && return
    say "reading the package lists"
    local log
    if ! log=$(apt-get -q update -o APT::Update::Error-Mode=any 2>&1); then
        printf '%s\n' "$log" | grep -E '^(E|W|Err)' >&2 || true
        fail "apt-get update failed: can't reach the package archives in /etc/apt. Check the network and /etc/apt/sources.list*"
    fi
    apt_update_done=yes
}

# apt_install [-t SUITE] PACKAGE...: without recommended packages, lists read first only if apt
# doesn't know them.
apt_install() {
    local -a from=()
    if [[ $1 == -t ]]; then
        from=(-t "$2")
        shift 2
    fi
    say "installing: $*"
    # Nobody would see a question about a configuration file that the administrator changed.
    local -a run=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Options::=--force-confold
        --no-install-recommends "${from[@]}" install "$@")
    local log
    if [[ $apt_update_done == yes ]] || ! log=$("${run[@]}" -o Dpkg::Use-Pty=0 2>&1); then
        # Old lists name packages that the mirror no longer holds: read them and try once more.
        apt_update
        if ! log=$("${run[@]}" -o Dpkg::Use-Pty=0 2>&1); then
            printf '%s\n' "$log" | tail -n 20 >&2
            fail "apt-get could not install: $*"
        fi
    fi
}

# A line of the file that apt_install_unstarted writes.
apt_policy_marker="# Written by memfold's scripts while they install packages. Remove it if none of them runs."

# apt_install_unstarted PACKAGE...: the same, and services that packages bring are not started
# (invoke-rc.d(8)).
apt_install_unstarted() {
    local policy=/usr/sbin/policy-rc.d
    # The administrator's own one decides. With the marker, a run that was killed left it: no
    # service that is installed later would be started.
    if [[ -e $policy ]] && ! grep -qxF "$apt_policy_marker" "$policy"; then
        apt_install "$@"
        return
    fi
    (
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\n%s\nexit 101\n' "$apt_policy_marker" >"$policy"
        chmod +x "$policy"
        apt_install "$@"
    )
}
