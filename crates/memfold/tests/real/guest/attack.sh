#!/bin/bash
# Everything at once, for $1 seconds, with $2 MB of anonymous memory: files of /usr are hashed again
# and again, files are rewritten, memory runs short, O_DIRECT reads are in flight, caches are
# dropped. Needs /run/sums.before, and looks at what it names. Prints a line a part, each with
# "errors N", and ends with "all errors N".
cd /opt || exit 1
end=$((SECONDS + $1))
out=$(mktemp -d)

hashing() {
    local errors=0 rounds=0
    while ((rounds == 0 || SECONDS < end)); do
        cut -c 35- /run/sums.before | tr '\n' '\0' | xargs -0 md5sum >"$out/sums"
        differing=$(diff "$out/sums" /run/sums.before | grep -c '^[<>]')
        ((differing == 0)) || diff "$out/sums" /run/sums.before | head -n 20 >&2
        ((errors += differing, rounds += 1))
    done
    echo "hashing errors $errors rounds $rounds"
}

direct() {
    local errors=0 rounds=0
    mapfile -t large < <(cut -c 35- /run/sums.before | tr '\n' '\0' | xargs -0 stat -c '%s %n' | sort -rn | head -n 40 | cut -d ' ' -f 2-)
    while ((SECONDS < end)); do
        for file in "${large[@]}"; do
            ((SECONDS < end)) || break
            sum=$(dd if="$file" iflag=direct bs=512k 2>/dev/null | md5sum)
            if ! grep -qxF "${sum%% *}  $file" /run/sums.before; then
                echo "$file differs (direct)" >&2
                ((errors += 1))
            fi
            ((rounds += 1))
        done
    done
    echo "direct errors $errors files $rounds"
}

dropping() {
    local rounds=0
    while ((SECONDS < end)); do
        sleep 7
        echo 3 >/proc/sys/vm/drop_caches
        ((rounds += 1))
    done
    echo "dropping errors 0 rounds $rounds"
}

hashing >"$out/1" &
python3 rewrite.py /var/tmp/attack "$1" 7 >"$out/2" &
python3 pressure.py "$2" "$1" >"$out/3" &
direct >"$out/4" &
dropping >"$out/5" &
wait
cat "$out"/[1-5]
# Five parts must have come to their end.
cat "$out"/[1-5] | awk '{ for (i = 1; i < NF; i++) if ($i == "errors") { n += $(i + 1); parts += 1 } }
    END { print "all errors", n + (parts == 5 ? 0 : 1000000) }'
rm -r "$out"
