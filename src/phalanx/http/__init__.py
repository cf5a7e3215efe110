"""What server and gateway share towards clients: listening, connections, keys, errors, bodies. Does not know routes."""
