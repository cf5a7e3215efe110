#!/bin/sh
# System packages of the rig: the hosts made of namespaces on which tests/e2e/hosts runs.
#
#   rig_packages.sh install      as root on Debian or Ubuntu, install what is missing; elsewhere say what is
#   rig_packages.sh missing      print the tools that are missing
#   rig_packages.sh report XML   if pytest skipped tests for want of the rig, by its JUnit file: print how many, why,
#                                and the one command that runs them
#
# The machine's own sshd is not started: the rig starts one inside each namespace.
set -eu

TOOLS='sshd ssh ssh-keygen ip ss tc unshare nsenter setpriv mount ps curl bash hostname'
PACKAGES='openssh-server openssh-client iproute2 util-linux mount procps curl bash hostname'
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

missing() {
	found=
	for tool in $TOOLS; do
		command -v "$tool" >/dev/null || found="$found $tool"
	done
	echo "${found# }"
}

# dpkg asks /usr/sbin/policy-rc.d whether it may start a package's services; 101 means no.
forbid_services() {
	policy=/usr/sbin/policy-rc.d
	if [ ! -e $policy ]; then
		trap 'rm -f $policy' EXIT
		trap 'exit 1' HUP INT TERM
		printf '#!/bin/sh\nexit 101\n' >$policy
		chmod 755 $policy
	fi
}

apt_install() {
	export DEBIAN_FRONTEND=noninteractive
	apt-get -qq update &&
		apt-get -qq -y --no-install-recommends -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 install $PACKAGES
}

install() {
	missing=$(missing)
	if [ -z "$missing" ]; then
		return 0
	fi
	if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
		echo "Nothing is installed, which needs root on Debian or Ubuntu. The tests of several hosts lack: $missing"
		return 0
	fi
	echo "Installing $missing for the tests of several hosts with apt-get ..."
	had_sshd=$(command -v sshd || true)
	forbid_services
	output=$(apt_install 2>&1 </dev/null) || {
		printf '%s\n' "$output" | tail -5 >&2
		echo 'apt-get failed, so the tests of several hosts will be skipped.' >&2
		return 0
	}
	if [ -z "$had_sshd" ] && [ -d /run/systemd/system ]; then
		systemctl --quiet disable ssh.service ssh.socket 2>/dev/null || true # nor at the next boot
	fi
}

# One command that lets the rig run here; $1 is why it does not.
remedy() {
	sudo=
	[ "$(id -u)" = 0 ] || sudo='sudo '
	case $1 in
	*'needs Linux'*) echo 'make rig test-hosts as root in a Linux virtual machine' ;;
	*'not permitted'*) echo 'make test-hosts as root outside a container, or in one started with --privileged' ;;
	*) if [ -z "$(missing)" ] || command -v apt-get >/dev/null; then
		echo "${sudo}make rig test-hosts"
	elif command -v dnf >/dev/null; then
		echo "${sudo}dnf install -y openssh-server iproute util-linux procps-ng && ${sudo}make test-hosts"
	elif command -v pacman >/dev/null; then
		echo "${sudo}pacman -S --needed openssh iproute2 util-linux procps-ng && ${sudo}make test-hosts"
	else
		echo "${sudo}make test-hosts, after installing $(missing)"
	fi ;;
	esac
}

report() {
	skipped=$(grep -o 'message="the rig [^"]*"' "$1" | wc -l | tr -d ' ')
	if [ "$skipped" != 0 ]; then
		why=$(grep -o 'message="the rig [^"]*"' "$1" | head -1 | cut -d'"' -f2)
		echo "$skipped tests of several hosts were skipped, because $why. To run them: $(remedy "$why")"
	fi
}

case ${1:-} in
install | missing) "$1" ;;
report) report "$2" ;;
*) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
