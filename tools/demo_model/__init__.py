"""Builds the bundled demo model: corpus generator, tokenizer, training, export, evaluation (development only)."""
