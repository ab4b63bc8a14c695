# shellcheck shell=bash disable=SC2034
# Debian 13, kernel 6.12: one of the pair of separately built images.
source "$recipes/trixie.common.sh"
late_packages=(apache2 postgresql postgresql-common)
packages+=(file less)
uuid=5b0f0a1c-0d4e-4c0e-9a51-6d656d666f61
mkfs_options=(-i 16384)
