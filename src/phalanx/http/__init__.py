"""HTTP for server and gateway: listening, connections, keys, errors, bodies."""
