"""What every dialect has: the seam, its answer format, log-probabilities."""
