"""What answers at each path: completions, information, health."""
