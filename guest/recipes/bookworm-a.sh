# shellcheck shell=bash disable=SC2034
# Debian 12, kernel 6.1: the oldest guest kernel memfold promises to work with.
suite=bookworm
packages=("${base_packages[@]}" python3-minimal curl xfsprogs btrfs-progs xz-utils bzip2)
late_packages=()
quick_source=
uuid=e9a6c3f4-52d7-4b1b-8c55-6d656d666f63
mkfs_options=(-i 16384)
