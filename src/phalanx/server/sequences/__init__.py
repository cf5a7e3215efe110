"""Unfinished requests: their slots, their tokens, their metrics."""
