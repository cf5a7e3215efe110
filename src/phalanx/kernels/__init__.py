"""Native CPU kernels: whether they are there, and how they get into MLX. The C++ is in native/."""
