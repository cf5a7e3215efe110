"""Relays a request to a replica and its answer back: attempts, events, failover of streams."""
