"""The pure scheduler: plain data in, plain data out. No MLX, no I/O, no clock."""
