# What Rust files log as a warning or an error. Prints for each `warn!(...)` and `error!(...)` outside tests: level,
# file:line and message, with tabs between them. A part in braces is printed as {}, a message that is no literal as nothing.

FNR == 1 {
    scan()
    file = FILENAME
    code = ""
    tests = 0
}
/^ *mod tests \{/ { tests = 1 }
tests { next }
# A call in a comment is none.
/^ *\/\// { $0 = "" }
{ code = code $0 "\n" }
END { scan() }

function scan(    rest, before, line, level) {
    rest = code
    line = 1
    while (match(rest, /(warn|error)!\(/)) {
        before = substr(rest, 1, RSTART - 1)
        level = substr(rest, RSTART, RLENGTH - 2)
        rest = substr(rest, RSTART + RLENGTH)
        line += gsub(/\n/, "\n", before)
        # The end of another macro's name, as of compile_error!.
        if (before !~ /[A-Za-z0-9_]$/)
            printf "%s\t%s:%d\t%s\n", level, file, line, message(rest)
    }
}

# The argument that is a string by itself, of those that begin here.
function message(rest,    at, char, depth, begins, text) {
    depth = 1
    begins = 1
    for (at = 1; depth > 0 && at <= length(rest); at++) {
        char = substr(rest, at, 1)
        if (char == "\"") {
            text = ""
            for (at++; at <= length(rest) && (char = substr(rest, at, 1)) != "\""; at++) {
                if (char == "\\") {
                    char = substr(rest, ++at, 1)
                    if (char == "\n") {
                        while (substr(rest, at + 1, 1) ~ /[ \t\n]/)
                            at++
                        char = ""
                    }
                }
                text = text char
            }
            if (depth == 1 && begins) {
                gsub(/\{[^}]*\}/, "{}", text)
                return text
            }
        } else if (substr(rest, at, 2) == "//") {
            while (substr(rest, at + 1, 1) != "\n")
                at++
            continue
        } else if (char ~ /[([{]/) {
            depth++
        } else if (char ~ /[])}]/) {
            depth--
        }
        if (char !~ /[ \t\n]/)
            begins = depth == 1 && char == ","
    }
    return ""
}
