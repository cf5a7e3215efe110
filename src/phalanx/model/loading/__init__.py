"""Loading: which bytes of a checkpoint one rank owns, and how they reach MLX's memory."""
