"""The KV cache: rows of unequal length, the cache objects for mlx-lm's models, and their buffers."""
