"""TLS between the hosts of a cluster. Does not know what is sent."""
