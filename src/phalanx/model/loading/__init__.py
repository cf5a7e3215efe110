"""One rank's part of a checkpoint: which bytes it owns, and how they reach MLX's memory."""
