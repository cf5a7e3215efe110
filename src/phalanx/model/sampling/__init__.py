"""Sampling: penalties, filters, keyed Gumbel noise, log-probabilities."""
