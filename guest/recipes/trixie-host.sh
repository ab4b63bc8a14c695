# shellcheck shell=bash disable=SC2034
# Debian 13 as a host with LVM and an iSCSI initiator and nothing to run VMs with: tests of
# `memfold borrow --lvm`.
suite=trixie
packages=("${base_packages[@]}" lvm2 open-iscsi libssl3t64)
late_packages=()
quick_source=
uuid=2c4e9b70-6d1a-4f3e-8b57-6d656d666f65
mkfs_options=(-i 16384)
