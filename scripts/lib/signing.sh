# shellcheck shell=bash
# Signatures of a release: with a key of the user's, or with a key for a trial. Needs say.sh, gpg.

# signing_key [KEY]: sets signing_key, the fingerprint of KEY in the user's keyring. Without KEY: of
# a key for a trial, which is made in the directory trial_keyring unless it is there.
signing_key() {
    local wanted=${1:-}
    have gpg || cannot "gpg is missing. Run: apt install gnupg"
    if [[ -z $wanted ]]; then
        # gpg refuses a keyring that others can read.
        (umask 077 && mkdir -p "$trial_keyring")
        export GNUPGHOME=$trial_keyring
        wanted=trial@packages.invalid
        gpg --batch --list-secret-keys "$wanted" >/dev/null 2>&1 ||
            gpg --batch --quiet --passphrase '' --faked-system-time "$SOURCE_DATE_EPOCH" \
                --quick-generate-key "memfold, for a trial <$wanted>" ed25519 sign never 2>/dev/null ||
            fail "gpg could not make a key for a trial in $trial_keyring"
    fi
    local record
    record=$(gpg --batch --with-colons --list-secret-keys "$wanted" 2>/dev/null) ||
        cannot "GnuPG has no secret key '$wanted'. Pass the fingerprint of a key that 'gpg --list-secret-keys' shows"
    signing_key=$(awk -F : '$1 == "fpr" { print $10; exit }' <<<"$record")
    # A signature cannot be older than its key.
    signing_time=$(awk -F : -v epoch="$SOURCE_DATE_EPOCH" '$1 == "sec" { print ($6 > epoch ? $6 : epoch); exit }' <<<"$record")
}

# sign ARGUMENT...: gpg with that key, at the time of the commit, of which gpg warns.
sign() {
    local log
    log=$(gpg --batch --yes --armor --local-user "$signing_key" --faked-system-time "$signing_time!" --digest-algo SHA512 "$@" 2>&1) || {
        printf '%s\n' "$log" >&2
        fail "gpg could not sign with the key $signing_key"
    }
}

# public_key: on standard output.
public_key() { gpg --batch --armor --export-options export-minimal --export "$signing_key"; }

# end_signing: ends the agent of the trial keyring, if there is one yet. That it has ended already,
# or that it cannot be ended, changes nothing of the release.
end_signing() {
    [[ -z ${trial_keyring:-} || ${GNUPGHOME:-} != "$trial_keyring" ]] || gpgconf --kill gpg-agent 2>/dev/null || true
}
