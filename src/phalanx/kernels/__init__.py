"""Native CPU kernels: whether they are there, and how they get into MLX. The C++ is in native/."""

from phalanx.mlx_lm_adapter import register

register()
