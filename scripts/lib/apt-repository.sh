# shellcheck shell=bash
# A signed apt repository in a directory, which any web server can serve. Needs say.sh, signing.sh.
#
#   dists/memfold/InRelease, Release, Release.gpg    signed lists of the files below
#   dists/memfold/main/binary-amd64/Packages*        the packages, with their SHA-256
#   pool/main/m/memfold/*.deb
#   memfold.asc                                     the public key
#   memfold.sources                                 for /etc/apt/sources.list.d, with address and key

# apt_repository DIRECTORY URL PACKAGE...: of these files. URL is the address of DIRECTORY.
apt_repository() {
    local directory=$1 url=$2 log
    local dist=$1/dists/memfold pool=$1/pool/main/m/memfold
    local lists=$1/dists/memfold/main/binary-amd64
    shift 2
    have dpkg-scanpackages xz || cannot "dpkg-dev or xz-utils is missing. Run: sudo scripts/setup tests"
    mkdir -p "$lists" "$pool"
    cp "$@" "$pool"
    log=$(mktemp)
    (cd "$directory" && dpkg-scanpackages --multiversion pool) >"$lists/Packages" 2>"$log" || {
        cat "$log" >&2
        rm "$log"
        fail "dpkg-scanpackages could not list the packages"
    }
    rm "$log"
    gzip -9 --no-name --keep "$lists/Packages"
    xz --threads=1 --keep "$lists/Packages"
    release_file "$dist" >"$directory/Release.new"
    mv "$directory/Release.new" "$dist/Release"
    sign --clearsign --output "$dist/InRelease" "$dist/Release"
    sign --detach-sign --output "$dist/Release.gpg" "$dist/Release"
    public_key >"$directory/memfold.asc"
    {
        printf 'Types: deb\nURIs: %s\nSuites: memfold\nComponents: main\nArchitectures: amd64\nSigned-By:\n' "$url"
        # An empty line would end the field.
        sed 's/^$/./; s/^/ /' "$directory/memfold.asc"
    } >"$directory/memfold.sources"
}

# release_file DIST: on standard output (https://wiki.debian.org/DebianRepository/Format).
release_file() {
    local dist=$1 file
    printf 'Origin: memfold\nLabel: memfold\nSuite: memfold\nCodename: memfold\n'
    printf 'Date: %s\n' "$(LC_ALL=C date --utc --date="@$SOURCE_DATE_EPOCH" '+%a, %d %b %Y %T +0000')"
    printf 'Architectures: amd64\nComponents: main\nDescription: memfold for Debian 12 and 13\nSHA256:\n'
    for file in "$dist"/main/binary-amd64/Packages*; do
        printf ' %s %d %s\n' "$(sha256sum <"$file" | cut -d ' ' -f 1)" "$(stat -c %s "$file")" "${file#"$dist/"}"
    done
}
