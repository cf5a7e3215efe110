"""The interfaces of every dialect and its answer format; log-probabilities."""
