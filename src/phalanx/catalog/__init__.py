"""Models by name: short names, the models on this disk, downloads. Runs without MLX."""
