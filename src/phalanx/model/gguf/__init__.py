"""Reads GGUF files and converts them to directories in mlx-lm's format. Runs without MLX."""
