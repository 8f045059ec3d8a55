#!/usr/bin/env sh
# Print the path to a program that tests use. On Debian, install its package if it is missing.
#
#     scripts/find-program.sh PACKAGE [NAME...]
#
# The script looks for a program with any of the names. NAME defaults to PACKAGE.
set -eu
package=$1
[ $# = 1 ] || shift
find_program() {
    for name; do
        command -v "$name" && return
    done
    return 1
}
find_program "$@" && exit
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update && apt-get install --yes --no-install-recommends "$package"; } > /dev/null
    find_program "$@" && exit
fi
echo "find-program.sh: $package not found; install it (Debian: apt-get install $package)" >&2
echo "find-program.sh: the tests that need it will be skipped" >&2
