#!/bin/sh
# Checks phalanx on this machine's GPU, beside mlx-lm, in less than ten minutes: tokens, an answer over HTTP, speed and
# memory.
#
#   sh tools/gpu_check.sh [MODEL_DIRECTORY ...] [--tokens N] [--json FILE]
#
# It needs Linux, Python 3.11 or newer and an NVIDIA driver. It makes an environment of its own, installs the extra that
# the driver allows (cuda13 or cuda12), and runs tools/gpu_check.py there on the bundled model and on the directories.
# The last line is a summary in JSON; the exit status is 0 if everything passed.
#
#   BACKEND=cpu|cuda12|cuda13   instead of what tools/mlx_backend.sh says; cpu tests the check itself
#   WHEELS=DIRECTORY            install from there, without a network. To fill it, on a machine with one, of the same
#                               system and Python: pip download '.[cuda13]' 'setuptools>=77' -d DIRECTORY
#   PYTHON=python3.12           the interpreter
#   VENV=DIRECTORY              the environment, which stays; else a temporary one
#   INSTALL=0                   install nothing: PYTHON has all that is needed
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
backend=$(sh "$root/tools/mlx_backend.sh")

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	echo 'gpu_check: needs Python 3.11 or newer; set PYTHON.' >&2
	exit 2
}
if [ "${INSTALL:-1}" != 0 ]; then
	if [ -z "${VENV:-}" ]; then
		VENV=$(mktemp -d)
		trap 'rm -rf "$VENV"' EXIT
	fi
	"$python" -m venv "$VENV"
	python=$VENV/bin/python
	# Not the native kernels, which are built from native/: for a check on the CPU, MLX's own will do.
	extra=$backend also=
	case "$backend" in
	metal) extra=engine ;;
	cpu) extra=engine also=$(sed -n 's/.*"\(mlx\[cpu\]==[^;"]*\).*/\1/p' "$root/pyproject.toml") ;;
	esac
	echo "installing phalanx[$extra] $also into $VENV ..."
	"$python" -m pip install -q --disable-pip-version-check ${WHEELS:+--no-index --find-links "$WHEELS"} \
		-e "$root[$extra]" ${also:+"$also"}
fi
PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} "$python" "$root/tools/gpu_check.py" --backend "$backend" "$@"
