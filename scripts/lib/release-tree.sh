# shellcheck shell=bash
# What a release consists of, from programs and packages that are built. Needs say.sh, signing.sh,
# apt-repository.sh.
#
#   apt/                               the apt repository
#   memfold-agent-VERSION.tar.gz       the static agent for guests without Debian packages, and its installer
#   memfold-VERSION.cdx.json           the software bill of materials
#   NOTES.md                           this version's part of CHANGELOG.md
#   SHA256SUMS, SHA256SUMS.asc         of all these files; signed

# release_tree DIRECTORY URL VERSION PACKAGES AGENT [AGENT-ARM64]: makes DIRECTORY. PACKAGES is a
# directory.
release_tree() {
    local directory=$1 url=$2 version=$3 packages=$4
    shift 4
    mkdir "$directory"
    apt_repository "$directory/apt" "$url/apt" "$packages"/*.deb
    agent_archive "$directory/memfold-agent-$version.tar.gz" "$version" "$@"
    "$repo/scripts/sbom" >"$directory/memfold-$version.cdx.json"
    release_notes "$version" >"$directory/NOTES.md"
    (cd "$directory" && find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum) >"$directory.sums"
    mv "$directory.sums" "$directory/SHA256SUMS"
    sign --detach-sign --output "$directory/SHA256SUMS.asc" "$directory/SHA256SUMS"
}

# replaceable DIRECTORY: stops here unless DIRECTORY is a release, is empty or does not exist.
replaceable() {
    [[ ! -e $1 || -d $1 ]] || cannot "$1 is a file. Name a directory"
    [[ ! -d $1 || -z $(ls -A "$1") || (-e $1/SHA256SUMS && -e $1/apt/memfold.sources) ]] ||
        cannot "$1 is not empty, and is no release of memfold (with SHA256SUMS and apt/memfold.sources), so it is not replaced. Name another directory"
}

# replace_release TREE DIRECTORY: copies TREE to DIRECTORY, perhaps on another file system. A
# release that is there stays whole until the copy is complete; two renames replace it.
replace_release() {
    local tree=$1 directory=$2 new old
    # Somebody may have written there since this began.
    replaceable "$directory"
    mkdir -p "${directory%/*}"
    new=$(mktemp -d "$directory.new-XXXXXX")
    cp -aT "$tree" "$new" || {
        rm -rf "$new"
        fail "the release could not be copied to ${directory%/*}"
    }
    if [[ -e $directory ]]; then
        old=$(mktemp -d "$directory.old-XXXXXX")
        mv -T "$directory" "$old"
        mv -T "$new" "$directory"
        rm -rf --one-file-system "$old"
    else
        mv -T "$new" "$directory"
    fi
}

# agent_archive FILE VERSION AGENT [AGENT-ARM64]
agent_archive() {
    local file=$1 version=$2 agent=$3 arm64=${4:-} work top
    work=$(mktemp -d)
    top=$work/memfold-agent-$version
    mkdir "$top"
    install -m 755 "$agent" "$top/memfold-agent.x86_64"
    strip "$top/memfold-agent.x86_64"
    # It is linked without symbols: strip(1) of this machine cannot read it.
    [[ -z $arm64 ]] || install -m 755 "$arm64" "$top/memfold-agent.aarch64"
    install -m 755 "$repo/packaging/agent/install.sh" "$top"
    install -m 644 "$repo/packaging/agent/README" "$repo/packaging/agent/memfold-agent.openrc" "$repo/packaging/agent/agent.toml" \
        "$repo/guest/memfold-agent.service" "$repo/guest/memfold-segments.service" "$repo/LICENSE" "$top"
    tar --create --sort=name --format=ustar --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
        --directory "$work" "${top##*/}" | gzip -9 --no-name >"$file"
    rm -r "$work"
}

# release_notes VERSION: on standard output. Fails if CHANGELOG.md has no such version.
release_notes() {
    local notes
    notes=$(awk -v heading="## [$1]" '
        /^## \[/ { inside = index($0, heading) == 1 }
        inside' "$repo/CHANGELOG.md")
    [[ -n $notes ]] || fail "CHANGELOG.md has no version $1"
    printf '# memfold %s\n\n%s\n' "$1" "$(tail -n +2 <<<"$notes" | sed '/./,$!d')"
}
