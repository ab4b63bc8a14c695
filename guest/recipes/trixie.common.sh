# shellcheck shell=bash disable=SC2034
# What both trixie images hold: one set of programs, so that two VMs from separately built images
# have the same files at other places. Read by guest/lib/base.sh before the recipe itself.
suite=trixie
packages=(
    "${base_packages[@]}"
    # programs that people run in VMs
    apache2 postgresql python3-minimal curl fio stress-ng openssh-server
    # a compiler, and what Debian's kernel wants for a tinyconfig build
    gcc libc6-dev make bison flex bc libelf-dev libssl-dev xz-utils bzip2
    # data disks of the file-system tests
    xfsprogs btrfs-progs
)
# A real C program to compile in the guest, small enough for --quick: unpacked in /usr/src/quick.
quick_source=lua5.4
