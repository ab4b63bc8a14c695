# shellcheck shell=bash
# Builds whose result depends only on the commit and the compiler, not on the directory or the time.

# reproducible_build TARGET-DIRECTORY: sets what cargo, cc and the packages' tools read. The paths
# of this checkout become /memfold in panics, debug information and __FILE__.
reproducible_build() {
    local cargo=${CARGO_HOME:-$(user_home)/.cargo} sysroot
    sysroot=$(rustc --print sysroot)
    SOURCE_DATE_EPOCH=$(git -C "$repo" log -1 --format=%ct)
    RUSTFLAGS="--remap-path-prefix=$repo=/memfold --remap-path-prefix=$1=/target --remap-path-prefix=$cargo=/cargo"
    RUSTFLAGS+=" --remap-path-prefix=$sysroot/lib/rustlib/src/rust=/rust"
    CFLAGS="-ffile-prefix-map=$repo=/memfold -ffile-prefix-map=$1=/target -ffile-prefix-map=$cargo=/cargo"
    CARGO_TARGET_DIR=$1
    # xz with several threads packs otherwise than with one.
    DPKG_DEB_THREADS_MAX=1
    CARGO_INCREMENTAL=0
    LC_ALL=C.UTF-8 TZ=UTC
    export SOURCE_DATE_EPOCH RUSTFLAGS CFLAGS CARGO_TARGET_DIR DPKG_DEB_THREADS_MAX CARGO_INCREMENTAL LC_ALL TZ
    umask 022
}

# build_arm64_agent: sets arm64_agent, the static agent for arm64 guests; empty if this machine has
# no compiler for it (rustup target add aarch64-unknown-linux-musl). Rust's own linker is enough:
# the agent has no C code.
arm64_agent=
build_arm64_agent() {
    local target=aarch64-unknown-linux-musl sysroot
    sysroot=$(rustc --print sysroot)
    local linker=$sysroot/lib/rustlib/x86_64-unknown-linux-gnu/bin/rust-lld
    if [[ ! -d $sysroot/lib/rustlib/$target ]]; then
        say "no agent for arm64 guests: this Rust has no target $target (rustup target add $target)"
        return
    fi
    [[ -x $linker ]] || linker=$(command -v rust-lld ld.lld | head -n 1)
    if [[ -z $linker ]]; then
        say "no agent for arm64 guests: neither rust-lld nor ld.lld is there"
        return
    fi
    as_user env CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER="$linker" \
        RUSTFLAGS="$RUSTFLAGS -C linker-flavor=ld.lld -C link-self-contained=yes -C strip=symbols" \
        cargo build --locked --release --target "$target" -p memfold-agent
    arm64_agent=$CARGO_TARGET_DIR/$target/release/memfold-agent
    say "agent for arm64 guests: built, and not tested"
}
