"""Native CPU kernels: loads, checks and installs them into MLX. Their C++ source is in native/."""

from phalanx.mlx_lm_adapter import register

register()
