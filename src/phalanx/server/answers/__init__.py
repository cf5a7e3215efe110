"""Turns tokens into an answer's deltas, the same for every dialect."""
