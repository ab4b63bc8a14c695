# shellcheck shell=bash
# The data disk of the full `memfold bench hints`: Debian's kernel source, unpacked, as ext4.

linux_source_file=

linux_source_version() { sed -E 's/^linux-source-([0-9.]+)-.*/\1/' <<<"${linux_source_file##*/}"; }

# find_linux_source: sets linux_source_file to the newest disk there is, if any.
find_linux_source() {
    linux_source_file=$(find "$cache/images" -maxdepth 1 -name 'linux-source-*.img' -printf '%T@ %p\n' |
        sort -n | tail -n 1 | cut -d' ' -f2-)
}

build_linux_source() {
    find_linux_source
    [[ -z $linux_source_file ]] || return 0
    need_root "building the disk with the kernel's source"
    local work=$cache/tmp.linux-source log=$cache/build-linux-source.log tarball version
    local -a options
    mkdir "$work"
    mapfile -t options < <(host_apt_options)
    say "building the disk with Debian's kernel source (some minutes, once)"
    # "extract": unpacked, not configured; the tarball is all we want.
    if ! archives_for trixie | mmdebstrap --mode=root --variant=extract --format=directory "${options[@]}" \
        --keyring=/usr/share/keyrings/debian-archive-keyring.gpg --include=linux-source trixie "$work/root" - >"$log" 2>&1; then
        tail -n 25 "$log" >&2
        fail "could not fetch linux-source (whole log: $log)"
    fi
    rm -f "$log"
    tarball=$(find "$work/root/usr/src" -name 'linux-source-*.tar.xz' | head -n 1)
    [[ -n $tarball ]] || fail "linux-source holds no linux-source-*.tar.xz"
    version=$(basename "$tarball" .tar.xz)
    version=${version#linux-source-}
    mkdir "$work/disk"
    tar -xf "$tarball" -C "$work/disk" --no-same-owner
    mv "$work/disk"/linux-source-* "$work/disk/linux"
    mke2fs -q -t ext4 -L linux-source -d "$work/disk" "$work/linux-source.img" 6G >/dev/null
    mv "$work/linux-source.img" "$cache/images/linux-source-$version-$(date +%Y%m%d).img"
    rm -rf --one-file-system "$work"
}
