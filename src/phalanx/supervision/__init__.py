"""The engine as processes: start, watch, restart, on this host or another; and the client they answer to. No MLX."""
