"""Text to tokens and back: the tokenizer, stop strings, incremental detokenisation. No MLX."""
