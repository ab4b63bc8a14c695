#!/bin/bash
# Stops the agent and kills it, now and then, until there is a file STOP. Usage: pest.sh SEED STOP; prints a line each time.
RANDOM=$1
until [ -e "$2" ]; do
    sleep $((RANDOM % 25 + 10))
    agent=$(systemctl show --property=MainPID --value memfold-agent)
    if ((RANDOM % 3 == 0)); then
        kill -KILL "$agent" && echo killed
    else
        kill -STOP "$agent" && echo stopped
        sleep $((RANDOM % 8 + 1))
        kill -CONT "$agent"
    fi
done
