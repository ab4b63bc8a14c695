# shellcheck shell=bash
# The initramfs: busybox, the modules that reach the root disk, and guest/initramfs-init. Not
# compressed: it is loaded by QEMU, and unpacking takes an emulated CPU longer than reading.

# Loaded in this order, dependencies first. The rest is for the root file systems of tests and
# segments. virtio_pmem finds the device, nd_pmem makes /dev/pmemN of it.
initramfs_modules=(virtio_pci virtio_blk virtio_pmem nd_pmem ext4 erofs overlay)

# make_initramfs ROOT KERNEL WORK OUT
make_initramfs() {
    local root=$1 kernel=$2 work=$3 out=$4 module line file
    mkdir -p "$work"/{bin,dev,proc,sys,mnt,root,lib/modules}
    cp "$root/bin/busybox" "$work/bin/busybox"
    install -m 755 "$guest/initramfs-init" "$work/init"
    for module in "${initramfs_modules[@]}"; do
        # "insmod FILE" for each dependency and the module itself; "builtin NAME" for what needs no
        # file.
        chroot "$root" modprobe --set-version "$kernel" --show-depends "$module" | while read -r line file _; do
            [[ $line == insmod ]] || continue
            line=$(basename "$file" | sed 's/\.ko.*/.ko/')
            [[ -e $work/lib/modules/$line ]] && continue
            case $file in
                *.xz) xz -dc "$root/$file" ;;
                *.zst) zstd -qdc "$root/$file" ;;
                *) cat "$root/$file" ;;
            esac >"$work/lib/modules/$line"
            printf '%s %s\n' "$module" "$line" >>"$work/lib/modules/order"
        done
    done
    (cd "$work" && find . -print0 | sort -z | cpio --quiet --null -o -H newc -R 0:0) >"$out"
}
