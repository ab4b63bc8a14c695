# shellcheck shell=bash
# The image that VMs boot: the base image with the memfold agent, its configuration and its two
# units. Written with debugfs, so no mount and no root is needed, and a new agent costs seconds.

agent_binary=

# build_agent: sets agent_binary to a static program, or leaves it empty while there is no such
# crate.
build_agent() {
    [[ -r $repo/crates/memfold-agent/Cargo.toml ]] || return 0
    local triple=x86_64-unknown-linux-gnu
    command -v cargo >/dev/null || cannot "cargo is missing. Run: sudo make setup"
    # Static: it runs on any guest, whatever its libc. --target keeps the flag away from build
    # scripts.
    (cd "$repo" && as_user env RUSTFLAGS="-C target-feature=+crt-static" cargo build --quiet --release --target "$triple" -p memfold-agent) ||
        fail "could not build the agent"
    agent_binary=${CARGO_TARGET_DIR:-$repo/target}/$triple/release/memfold-agent
}

# final_key_of BASE-KEY
final_key_of() {
    { printf '%s\n' "$1" && cat ${agent_binary:+"$agent_binary"} "$guest"/memfold-{agent,segments}.service "$guest/agent.toml" "$guest/lib/agent.sh"; } |
        sha256sum | cut -c1-16
}

# build_final BASE OUT: makes OUT unless it is there.
build_final() {
    local base=$1 out=$2 temp=$cache/tmp.final.img
    if [[ -e $out ]]; then
        # drop_old counts from the last use.
        touch -c "$out" 2>/dev/null || true
        return
    fi
    cp --sparse=always --reflink=auto "$base" "$temp"
    if [[ -n $agent_binary ]]; then
        local log
        log=$(debugfs -w -f - "$temp" 2>&1 <<END
rm /usr/local/sbin/memfold-agent
write $agent_binary /usr/local/sbin/memfold-agent
sif /usr/local/sbin/memfold-agent mode 0100755
sif /usr/local/sbin/memfold-agent uid 0
sif /usr/local/sbin/memfold-agent gid 0
mkdir /etc/memfold
write $guest/agent.toml /etc/memfold/agent.toml
sif /etc/memfold/agent.toml mode 0100644
sif /etc/memfold/agent.toml uid 0
sif /etc/memfold/agent.toml gid 0
write $guest/memfold-agent.service /etc/systemd/system/memfold-agent.service
sif /etc/systemd/system/memfold-agent.service mode 0100644
sif /etc/systemd/system/memfold-agent.service uid 0
sif /etc/systemd/system/memfold-agent.service gid 0
symlink /etc/systemd/system/sysinit.target.wants/memfold-agent.service /etc/systemd/system/memfold-agent.service
write $guest/memfold-segments.service /etc/systemd/system/memfold-segments.service
sif /etc/systemd/system/memfold-segments.service mode 0100644
sif /etc/systemd/system/memfold-segments.service uid 0
sif /etc/systemd/system/memfold-segments.service gid 0
symlink /etc/systemd/system/sysinit.target.wants/memfold-segments.service /etc/systemd/system/memfold-segments.service
END
        )
        # debugfs exits 0 whatever happens: ask the file system itself.
        local got
        got=$(debugfs -R 'cat /usr/local/sbin/memfold-agent' "$temp" 2>/dev/null | sha256sum)
        [[ $got == "$(sha256sum <"$agent_binary")" ]] || fail "the agent could not be written into the image: $log"
        got=$(debugfs -R 'cat /etc/memfold/agent.toml' "$temp" 2>/dev/null)
        [[ $got == "$(<"$guest/agent.toml")" ]] || fail "the agent's configuration could not be written into the image: $log"
        log=$(e2fsck -fn "$temp" 2>&1) || fail "the image with the agent is damaged: $log"
    fi
    mv "$temp" "$out"
    say "wrote ${out##*/}${agent_binary:+, with the agent}"
}
