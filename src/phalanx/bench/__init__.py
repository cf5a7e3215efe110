"""Measuring servers over HTTP: timed streams, load, percentiles. Works against any OpenAI-compatible server."""
