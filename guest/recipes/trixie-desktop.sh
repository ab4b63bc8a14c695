# shellcheck shell=bash disable=SC2034
# Debian 13 with a browser and an office suite, for `memfold bench segments`. Not built by default:
# guest/build trixie-desktop
source "$recipes/trixie.common.sh"
late_packages=(apache2 postgresql postgresql-common)
packages+=(firefox-esr libreoffice-impress xvfb xdotool fonts-dejavu-core)
uuid=7d1f0a1c-0d4e-4c0e-9a51-6d656d666f64
mkfs_options=(-i 16384)
