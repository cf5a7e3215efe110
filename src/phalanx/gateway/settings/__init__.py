"""What an operator sets: flags, keys and limits of clients, replicas, files that are watched."""
