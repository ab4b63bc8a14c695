# shellcheck shell=bash
# Packages of the host: what builds memfold, runs its VMs, makes its guest images, and tests it.

# What `make demo` uses: builds memfold, makes guest images, boots them.
demo_packages=(
    gcc libc6-dev make pkg-config libssl-dev ca-certificates binutils
    mmdebstrap debian-archive-keyring e2fsprogs cpio xz-utils zstd util-linux
)
demo_qemu_packages=(qemu-system-x86 qemu-utils)
# What lint, tests and studies use besides.
developer_packages=(
    git shellcheck
    # data disks and segments
    xfsprogs btrfs-progs erofs-utils bubblewrap
    # lent memory
    nbdkit
    # the tests' own needs
    curl procps openssl iproute2 python3
    # the Python client: types, tests, wheel, example
    mypy python3-pytest python3-setuptools python3-wheel python3-pandas
)
developer_qemu_packages=(qemu-block-extra)
# Fold needs nothing newer, but device state, machine types and free page reporting are tested from
# here on.
qemu_oldest=10

# qemu_major: the major version of the installed QEMU, 0 if there is none.
qemu_major() {
    local line
    line=$(qemu-system-x86_64 --version 2>/dev/null | head -n 1) || true
    [[ $line =~ version\ ([0-9]+)\. ]] && printf '%s' "${BASH_REMATCH[1]}" || printf 0
}

# add_backports CODENAME: the host's own mirror, other suite, in a file of its own.
add_backports() {
    local suite=$1-backports mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    apt_has_suite "$suite" && return
    mirror=$(debian_mirror "$1")
    [[ -n $mirror ]] || cannot "no Debian archive for $1 in the apt sources. Add one to /etc/apt/sources.list.d"
    say "adding $suite to the apt sources"
    {
        printf '# Written by memfold (make setup), for QEMU >= %s. Nothing comes from here unless asked for.\n' "$qemu_oldest"
        printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "$mirror" "$suite"
        [[ -r $keyring ]] && printf 'Signed-By: %s\n' "$keyring"
        true
    } >/etc/apt/sources.list.d/memfold-backports.sources
    # Also when the lists were read a moment ago: the new suite's weren't.
    apt_update_done=no
    apt_update
}

# setup_host demo|all: the packages of `make demo`, or those of developers, too.
setup_host() {
    local codename major
    local -a host_packages=("${demo_packages[@]}") qemu_packages=("${demo_qemu_packages[@]}")
    if [[ $1 == all ]]; then
        host_packages+=("${developer_packages[@]}")
        qemu_packages+=("${developer_qemu_packages[@]}")
    fi
    codename=$(os_codename)
    major=$(qemu_major)
    if [[ -z $codename ]]; then
        [[ $major -ge $qemu_oldest ]] && have gcc make mmdebstrap mkfs.ext4 && return
        cannot "packages are installed by this script on Debian 12 and 13 only. Install by hand:" \
            "QEMU >= $qemu_oldest, ${host_packages[*]}"
    fi

    local -a missing qemu_missing=()
    mapfile -t missing < <(packages_missing "${host_packages[@]}")
    # A newer QEMU from anywhere (built by hand, in /usr/local) is as good as Debian's.
    if [[ $major -lt $qemu_oldest ]]; then
        qemu_missing=("${qemu_packages[@]}")
    elif [[ $(command -v qemu-system-x86_64) == /usr/bin/* ]]; then
        mapfile -t qemu_missing < <(packages_missing "${qemu_packages[@]}")
    fi
    if [[ ${#missing[@]} -eq 0 && ${#qemu_missing[@]} -eq 0 ]]; then
        say "packages: all there (QEMU $major)"
        return
    fi
    need_root "packages to install: ${missing[*]} ${qemu_missing[*]}"

    [[ ${#missing[@]} -eq 0 ]] || apt_install "${missing[@]}"
    if [[ ${#qemu_missing[@]} -ne 0 ]]; then
        if [[ $codename == bookworm ]]; then
            add_backports "$codename"
            apt_install -t "$codename-backports" "${qemu_missing[@]}"
        else
            apt_install "${qemu_missing[@]}"
        fi
    fi
    major=$(qemu_major)
    [[ $major -ge $qemu_oldest ]] || cannot "QEMU $major is installed, $qemu_oldest is needed. Install it from a newer release or backports"
    say "packages: installed (QEMU $major)"
}
