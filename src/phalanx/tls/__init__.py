"""TLS between the hosts of a cluster."""
