# shellcheck shell=bash
setup_rust() { :; }
