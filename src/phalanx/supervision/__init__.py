"""Starts, watches and restarts the engine's processes, here and on other hosts; holds the server's client. No MLX."""
