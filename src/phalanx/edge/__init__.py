"""What server and gateway do with strangers: listening, connections, deadlines, keys. Does not know routes."""
