#!/bin/bash
# Stops the agent and kills it, now and then, until there is a file STOP. Usage: pest.sh SEED STOP;
# prints a line each time. What it finds goes to the console, too, where it can be read when no
# agent answers.
RANDOM=$1
tell() {
    echo "pest: $*" >/dev/console
}
until [ -e "$2" ]; do
    sleep $((RANDOM % 25 + 10))
    agent=$(systemctl show --property=MainPID --value memfold-agent)
    tell "agent ${agent:-unknown}: $(grep -s '^State' "/proc/$agent/status"), in $(cat "/proc/$agent/wchan" 2>&1)"
    # 0 while it is being started, and that would be this program's own group.
    [ "${agent:-0}" -gt 0 ] || continue
    if ((RANDOM % 3 == 0)); then
        kill -KILL "$agent" && echo killed
    else
        kill -STOP "$agent" && echo stopped
        sleep $((RANDOM % 8 + 1))
        kill -CONT "$agent"
    fi
done
tell ended
