#!/bin/sh
# Fetches Chromium for the tests of pages: unpacks Debian's package, with the packages that it needs and this machine
# lacks, below a folder. Nothing is installed. Usage: get_chromium.sh FOLDER
set -eu
mkdir -p "$1/packages/partial"
cd "$1"
# apt-get marks packages that are to be read in vain where it may not lock its own folders.
fetch() {
  apt-get install -q -y --download-only --no-install-recommends -o Debug::NoLocking=1 \
    -o Dir::Cache::archives="$PWD/packages" chromium fonts-dejavu-core fontconfig-config >/dev/null
}
fetch 2>/dev/null || { apt-get update -q >/dev/null && fetch; }
for package in packages/*.deb; do dpkg -x "$package" .; done
rm -r packages
test -x usr/lib/chromium/chromium
