"""What server and gateway share towards clients: listening, connections, deadlines, keys. Does not know routes."""
