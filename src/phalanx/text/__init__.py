"""Between text and tokens: the tokenizer, stop strings, and text that arrives piece by piece. No MLX."""
