#!/bin/sh
# The browser of tests/e2e/test_page.py, and axe-core, which looks for what keeps people out of a page.
#
#   browser.sh install   as root on Debian or Ubuntu, install chromium; with npm, fetch axe-core into .venv/axe
#
# Tests that lack either are skipped, and say so.
set -eu

AXE=axe-core@4.14.1
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

install_chromium() {
	for name in chromium chromium-browser google-chrome; do
		if command -v "$name" >/dev/null; then return 0; fi
	done
	if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
		echo 'There is no chromium, and it is not installed, which needs root on Debian or Ubuntu.'
		return 0
	fi
	echo 'Installing chromium for the tests of the page with apt-get ...'
	export DEBIAN_FRONTEND=noninteractive
	output=$({
		apt-get -qq update &&
			apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=120 install chromium fonts-dejavu-core
	} 2>&1 </dev/null) || {
		printf '%s\n' "$output" | tail -5 >&2
		echo 'apt-get failed, so the tests of the page will be skipped.' >&2
	}
}

fetch_axe() {
	folder=$(dirname "$0")/../.venv/axe
	if [ -e "$folder/axe.min.js" ] || ! command -v npm >/dev/null; then return 0; fi
	mkdir -p "$folder"
	if (cd "$folder" && npm pack --silent $AXE >/dev/null 2>&1 && tar -xzf axe-core-*.tgz --strip-components 1); then
		rm -f "$folder"/axe-core-*.tgz
	else
		echo 'npm has no axe-core, so the test that uses it will be skipped.' >&2
	fi
}

case ${1:-} in
install)
	install_chromium
	fetch_axe
	;;
*) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
