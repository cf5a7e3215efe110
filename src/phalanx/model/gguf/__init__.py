"""GGUF files: read, and made a directory as mlx-lm has them. Runs without MLX."""
