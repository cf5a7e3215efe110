"""Requests that are computed: their slots, their tokens, their counters; streams that move between servers."""
