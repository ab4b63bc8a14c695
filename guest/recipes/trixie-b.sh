# shellcheck shell=bash disable=SC2034
# Debian 13, kernel 6.12: the other one. Same programs, installed in another order among other
# packages, in a file system of another geometry: no file of trixie-a has the same inode number or
# place here but by accident.
source "$recipes/trixie.common.sh"
late_packages=(gcc libc6-dev make fio)
packages+=(nano tree rsync patch sqlite3)
uuid=c3d1b7e2-8a86-47c5-b1f3-6d656d666f62
scatter=yes
mkfs_options=(-i 12288 -G 4)
