"""Starts, stops, checks and connects the hosts of a cluster. Runs where MLX is not installed."""
