#!/usr/bin/env sh
# Print the path to Chromium, which the browser tests use. On Debian, install Chromium if it is missing.
set -eu
find_browser() {
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" && return
    done
    return 1
}
find_browser && exit
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update && apt-get install --yes --no-install-recommends chromium; } > /dev/null
    find_browser && exit
fi
echo "browser.sh: Chromium not found; install it (Debian: apt-get install chromium)" >&2
echo "browser.sh: the browser tests will be skipped" >&2
