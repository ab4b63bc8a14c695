# shellcheck shell=bash
# What the dashboard's test needs: a real browser, node, and the packages that web/package-lock.json
# pins. Nothing of it is needed to build.

setup_web() {
    local -a missing=()
    command -v chromium >/dev/null || missing+=(chromium)
    command -v node >/dev/null || missing+=(nodejs)
    # Some builds of nodejs bring npm with them, and Debian's doesn't.
    command -v npm >/dev/null || missing+=(npm)
    if [[ ${#missing[@]} -ne 0 ]]; then
        [[ -n $(os_codename) ]] || cannot "packages are installed by this script on Debian 12 and 13 only. Install by hand: ${missing[*]}"
        need_root "packages to install: ${missing[*]}"
        apt_install "${missing[@]}"
    fi
    # npm keeps a copy of the lock beside what it installed.
    local web=$repo/web
    if [[ ! -e $web/node_modules/.package-lock.json || $web/package-lock.json -nt $web/node_modules/.package-lock.json ]]; then
        say "packages of the dashboard's test"
        local log
        log=$(cd "$web" && npm ci --ignore-scripts --no-progress 2>&1) || {
            printf '%s\n' "$log" | tail -n 20 >&2
            fail "npm could not install what web/package-lock.json pins"
        }
        touch "$web/node_modules/.package-lock.json"
    fi
    say "dashboard's test: browser and packages are there"
}
