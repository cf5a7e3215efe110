"""Turns messages into tokens: chat template, earlier answers in their own tokens, tokenizer, grammars."""
