# shellcheck shell=bash
# The base image: Debian packages in a directory (mmdebstrap), set up as a guest, then an ext4 file
# system of it.

# Virtual size; the files are sparse.
disk_size=6G

# Every guest: boots with systemd from a virtio disk to a root shell on the serial port.
# shellcheck disable=SC2034
base_packages=(
    linux-image-cloud-amd64 systemd-sysv login udev acpid busybox-static kmod procps util-linux
    e2fsprogs zstd iproute2
)

# Units that cost boot time and do nothing for a guest without a network that lives for minutes.
masked_units=(
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer
    logrotate.timer man-db.timer systemd-tmpfiles-clean.timer
    systemd-networkd.service systemd-networkd.socket systemd-networkd-wait-online.service
    systemd-network-generator.service systemd-timesyncd.service systemd-resolved.service
    systemd-journal-flush.service systemd-journal-catalog-update.service systemd-update-done.service
    systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-hwdb-update.service ldconfig.service
    systemd-machine-id-commit.service systemd-firstboot.service systemd-binfmt.service systemd-pstore.service
    systemd-rfkill.service systemd-rfkill.socket systemd-hibernate-clear.service
    keyboard-setup.service console-setup.service getty@tty1.service networking.service
    proc-sys-fs-binfmt_misc.automount sys-kernel-config.mount sys-fs-fuse-connections.mount dev-hugepages.mount
    modprobe@configfs.service modprobe@fuse.service modprobe@drm.service modprobe@efi_pstore.service
    modprobe@dm_mod.service modprobe@loop.service
    systemd-modules-load.service systemd-remount-fs.service systemd-random-seed.service
    systemd-udev-load-credentials.service dev-mqueue.mount sys-kernel-debug.mount xfs_scrub_all.timer
    tmp.mount getty-static.service
)
# Programs systemd runs at each start to make units we don't have. fstab, getty and debug
# (systemd.mask=) stay.
masked_generators=(
    cryptsetup gpt-auto hibernate-resume integritysetup rc-local run ssh system-update tpm2 veritysetup sysv
    bless-boot import factory-reset
)
# Installed, off at boot: tests and studies start them.
disabled_units=(apache2.service postgresql.service apache-htcacheclean.service ssh.service ssh.socket)

# base_key_of NAME: 16 hex digits of all that goes into the base image but Debian's packages.
base_key_of() {
    local -a files=("$recipes/$1.sh" "$guest/lib/base.sh" "$guest/lib/initramfs.sh" "$guest/initramfs-init")
    [[ $1 == trixie* ]] && files+=("$recipes/trixie.common.sh")
    (cd "$guest" && cat "${files[@]}" && find tree -type f -print0 | sort -z | xargs -0 -r sha256sum) |
        sha256sum | cut -c1-16
}

# archives_for SUITE: sources.list lines from the machine's own mirrors.
archives_for() {
    local host_suite mirror security
    host_suite=$(os_codename)
    mirror=$(debian_mirror "${host_suite:-$1}")
    [[ -n $mirror ]] || cannot "no Debian archive in the apt sources of this machine; guest images are made from one"
    printf 'deb %s %s main\ndeb-src %s %s main\ndeb %s %s-updates main\n' "$mirror" "$1" "$mirror" "$1" "$mirror" "$1"
    security=$(apt_archives | awk '$2 ~ /-security$/ && $3 == "main" { print $1; exit }')
    [[ -z $security ]] || printf 'deb %s %s-security main\n' "$security" "$1"
}

# host_apt_options: the machine's way to reach its mirrors, as mmdebstrap arguments.
host_apt_options() {
    local key value
    for key in Acquire::Check-Valid-Until Acquire::http::Proxy Acquire::https::Proxy; do
        value=$(apt-config dump --format '%v%n' "$key" | head -n 1)
        [[ -z $value ]] || printf '%s\n' "--aptopt=$key \"$value\""
    done
}

# build_base NAME DIR: makes DIR unless it is there.
build_base() {
    local name=$1 out=$2
    [[ -d $out ]] && return
    need_root "building the guest image $name"
    have mmdebstrap mke2fs cpio || cannot "mmdebstrap, e2fsprogs or cpio is missing. Run: make setup"
    local suite quick_source uuid scatter
    local -a packages late_packages mkfs_options
    # shellcheck source=/dev/null
    source "$recipes/$name.sh"

    local work=$cache/tmp.$name started=$SECONDS
    mkdir "$work"
    say "building the guest image $name (Debian $suite; some minutes, once)"
    install_packages "$name" "$suite" "$work/root"
    set_up_guest "$name" "$work/root"

    mkdir "$work/out"
    local kernel
    kernel=$(kernel_of "$work/root")
    printf '%s\n' "$kernel" >"$work/out/kernel-version"
    cp "$work/root/boot/vmlinuz-$kernel" "$work/out/vmlinuz"
    make_initramfs "$work/root" "$kernel" "$work/initramfs" "$work/out/initrd"
    # mke2fs writes the directory without mounting anything, so this works in a container without
    # loop devices.
    mke2fs -q -t ext4 -L "$name" -U "$uuid" -E "hash_seed=$uuid,root_owner=0:0,lazy_itable_init=0" "${mkfs_options[@]}" \
        -d "$work/root" "$work/out/disk.img" "$disk_size" >/dev/null
    [[ ${scatter:-no} == no ]] || scatter_files "$work/root" "$work/out/disk.img"
    chroot "$work/root" dpkg-query -W >"$work/out/packages"
    mv "$work/out" "$out"
    rm -rf --one-file-system "$work"
    say "built $name: kernel $kernel, $(du -h "$out/disk.img" | cut -f1) on disk, $((SECONDS - started)) s"
}

# install_packages NAME SUITE ROOT
install_packages() {
    local name=$1 suite=$2 root=$3 log=$cache/build-$1.log
    local -a options early=() hooks=()
    mapfile -t options < <(host_apt_options)
    mapfile -t early < <(printf '%s\n' "${packages[@]}" | grep -vxF "$(printf '%s\n' "${late_packages[@]:-none}")")
    # $1 is mmdebstrap's, not ours.
    # shellcheck disable=SC2016
    [[ ${#late_packages[@]} -eq 0 ]] || hooks+=(--customize-hook='chroot "$1" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install '"${late_packages[*]}")
    # shellcheck disable=SC2016
    [[ -z $quick_source ]] || hooks+=(--customize-hook='cd "$1/usr/src" && chroot "$1" sh -c "cd /usr/src && apt-get -q source --download-only '"$quick_source"'"')
    # INITRD=No: the kernel package's hook would spend its time on an initramfs we don't use.
    if ! archives_for "$suite" | INITRD=No mmdebstrap --mode=root --variant=apt --format=directory "${options[@]}" \
        --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --include="$(IFS=,; printf '%s' "${early[*]}")" "${hooks[@]}" \
        "$suite" "$root" - >"$log" 2>&1; then
        tail -n 25 "$log" >&2
        fail "could not build $name (whole log: $log). If the archive can't be reached, check the network and /etc/apt"
    fi
    rm -f "$log"
}

# kernel_of ROOT: the version of its only kernel.
kernel_of() {
    local -a found=("$1"/lib/modules/*)
    [[ ${#found[@]} -eq 1 ]] || fail "expected one kernel in the guest, found: ${found[*]##*/}"
    printf '%s' "${found[0]##*/}"
}

# set_up_guest NAME ROOT: from a Debian to a guest that boots fast and asks nothing.
set_up_guest() {
    local name=$1 root=$2 unit tarball
    cp -rT --no-preserve=ownership,mode "$guest/tree" "$root"
    printf '%s\n' "$name" >"$root/etc/hostname"
    printf '127.0.0.1 localhost %s\n::1 localhost\n' "$name" >"$root/etc/hosts"
    : >"$root/etc/fstab"
    # Without one, every boot from a snapshot would be systemd's "first boot".
    sha256sum <<<"$uuid" | cut -c1-32 >"$root/etc/machine-id"
    # No mirror's name stays in the image.
    rm -f "$root"/etc/apt/sources.list.d/* "$root/etc/resolv.conf" "$root"/etc/apt/apt.conf.d/99mmdebstrap
    printf '# No archive: this guest has no network.\n' >"$root/etc/apt/sources.list"
    for unit in "${masked_units[@]}"; do ln -sfn /dev/null "$root/etc/systemd/system/$unit"; done
    mkdir -p "$root/etc/systemd/system-generators"
    for unit in "${masked_generators[@]}"; do ln -sfn /dev/null "$root/etc/systemd/system-generators/systemd-$unit-generator"; done
    for unit in "${disabled_units[@]}"; do rm -f "$root"/etc/systemd/system/*.wants/"$unit"; done
    # Others take an emulated guest long to make anew.
    rm -f "$root"/etc/ssh/ssh_host_{rsa,ecdsa}_key*
    rm -f "$root"/boot/initrd.img-* "$root"/var/cache/apt/*.bin "$root"/var/log/*.log "$root"/var/log/apt/*
    # Newer than /usr, so that no unit thinks the system was updated and needs its caches made
    # again.
    touch "$root/etc/.updated" "$root/var/.updated"
    if [[ -n $quick_source ]]; then
        tarball=$(find "$root/usr/src" -maxdepth 1 -name "*.orig.tar.*" ! -name '*.asc' | head -n 1)
        mkdir "$root/usr/src/quick"
        tar -xf "$tarball" -C "$root/usr/src/quick" --strip-components=1 --no-same-owner
        find "$root/usr/src" -maxdepth 1 -type f -delete
    fi
}

# scatter_files ROOT IMAGE: writes the larger files (programs, libraries, modules) again in a
# shuffled order. mke2fs fills every image in the order of the names, so that two images differ by
# little more than a shift; two machines that lived apart share neither inode numbers nor the order
# on disk.
scatter_files() {
    local root=$1 image=$2 script=$1.debugfs log
    # Plain root-owned files only: debugfs keeps the mode, not times (Python's caches need those),
    # links or owners.
    (cd "$root" && find usr -xdev -type f -links 1 -uid 0 -gid 0 -size +15k ! -perm /7000 ! -name '*.py' ! -name '*.pyc' -print) |
        grep -v '[^A-Za-z0-9/._+:@,=~-]' | LC_ALL=C sort | shuf --random-source=<(yes "$uuid") >"$script.names"
    {
        sed 's|^|rm /|' "$script.names"
        sed "s|.*|write $root/& /&|" "$script.names"
    } >"$script"
    log=$(debugfs -w -f "$script" "$image" 2>&1 >/dev/null | grep -v '^debugfs [0-9]') || true
    [[ -z $log ]] || fail "could not rewrite files of the image: $log"
    log=$(e2fsck -fn "$image" 2>&1) || fail "the image is damaged: $log"
}
