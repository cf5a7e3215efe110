#!/bin/sh
# Which MLX this machine gets: prints metal, cuda13, cuda12 or cpu. BACKEND=... chooses another.
#
#   sh tools/mlx_backend.sh           the name alone
#   sh tools/mlx_backend.sh locks     the files for `pip install -r`, one a line
#
# MLX for NVIDIA needs compute capability 7.5 and driver 550 (CUDA 12) or 580 (CUDA 13). Why a GPU is not used goes to
# stderr.
set -eu

choose() {
	[ "$(uname -s)" != Darwin ] || { echo metal; return; }
	command -v nvidia-smi >/dev/null 2>&1 || { echo cpu; return; }
	gpu=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || gpu=
	driver=${gpu%%.*}
	capability=$(printf '%s' "${gpu##*,}" | tr -d ' .')
	case "$driver$capability" in
	'' | *[!0-9]*)
		echo 'nvidia-smi is there, but shows no GPU: MLX gets the CPU' >&2
		echo cpu
		return
		;;
	esac
	if [ "$capability" -lt 75 ] || [ "$driver" -lt 550 ]; then
		echo "this GPU or its driver is too old for MLX ($gpu; it needs capability 7.5, driver 550): the CPU" >&2
		echo cpu
	elif [ "$driver" -lt 580 ]; then
		echo cuda12
	else
		echo cuda13
	fi
}

backend=${BACKEND:-$(choose)}
case "$backend" in
metal | cpu | cuda12 | cuda13) ;;
*)
	echo "BACKEND=$backend is not one of metal, cpu, cuda12, cuda13." >&2
	exit 2
	;;
esac
if [ "${1:-}" = locks ]; then
	echo requirements.lock
	[ "$backend" = metal ] || echo "requirements-$backend.lock"
else
	echo "$backend"
fi
