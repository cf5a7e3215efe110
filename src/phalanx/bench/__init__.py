"""Measures OpenAI-compatible servers over HTTP: timed streams, load, percentiles."""
